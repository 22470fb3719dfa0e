"""What every request must satisfy before a page is made, and what every answer says to the browser."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any, Final, TypeAlias, final
from urllib.parse import urlsplit

__all__ = ["HOSTS", "MOST_BYTES", "PATIENCE", "Guard"]

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Scope]]
Send: TypeAlias = Callable[[Scope], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]

HOSTS: Final = frozenset({"127.0.0.1", "localhost"})
"""Accepted in the Host header. Another name is one of a page that was rebound to this address."""
MOST_BYTES: Final = 64 << 10
"""Largest body of a request."""
PATIENCE: Final = 15.0
"""Seconds for a client to send a request, and to accept what it is sent."""

_HEADERS: Final = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",  # with no-referrer, browsers send "Origin: null" with the forms of the page
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


@final
class Guard:
    """ASGI middleware. It reads the whole body before the application is called."""

    def __init__(self, app: App, *, policy: str, patience: float = PATIENCE) -> None:
        """Store the arguments; ``policy`` is the content security policy of the pages."""
        self._app = app
        self._patience = patience
        headers = {**_HEADERS, "content-security-policy": policy}
        self._headers = [(name.encode(), value.encode()) for name, value in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] != "http":
            return
        refused = _refusal(scope)
        if refused is not None:
            await self._refuse(send, *refused)
            return
        try:
            async with asyncio.timeout(self._patience):
                body = await _body(scope, receive)
        except TimeoutError:
            await self._refuse(send, HTTPStatus.REQUEST_TIMEOUT, "The request was not sent in time.")
            return
        if body is None:
            text = f"The request is larger than {MOST_BYTES} bytes."
            await self._refuse(send, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, text)
            return
        waiting = [{"type": "http.request", "body": body, "more_body": False}]

        async def held() -> Scope:
            return waiting.pop() if waiting else await receive()

        async def sent(message: Scope) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *self._headers]
            await send(message)

        await self._app(scope, held, sent)

    async def _refuse(self, send: Send, status: HTTPStatus, text: str) -> None:
        """Send a plain text and close the connection, so that nothing more is read."""
        content = f"{status.value} {status.phrase}: {text}\n".encode()
        headers = [
            (b"content-type", b"text/plain; charset=utf-8"),
            (b"content-length", str(len(content)).encode()),
            (b"connection", b"close"),
            *self._headers,
        ]
        await send({"type": "http.response.start", "status": status.value, "headers": headers})
        await send({"type": "http.response.body", "body": content})


def _refusal(scope: Scope) -> tuple[HTTPStatus, str] | None:
    """Return why a request is refused, ``None`` if it is not."""
    hosts = _values(scope, b"host")
    if len(hosts) != 1 or _host_name(hosts[0]) not in HOSTS:
        return HTTPStatus.MISDIRECTED_REQUEST, "This server answers only as 127.0.0.1 or localhost."
    if any(origin != f"http://{hosts[0]}" for origin in _values(scope, b"origin")):
        return HTTPStatus.FORBIDDEN, "The request comes from a page of another origin."
    # A link on another site may be followed; images, scripts and forms of another site may not.
    navigates = scope["method"] == "GET" and _values(scope, b"sec-fetch-mode") == ["navigate"]
    sites = set(_values(scope, b"sec-fetch-site"))
    if sites - {"same-origin", "none"} and not navigates:
        return HTTPStatus.FORBIDDEN, "The request comes from a page of another site."
    return None


async def _body(scope: Scope, receive: Receive) -> bytes | None:
    """Return the body of a request, ``None`` if it is too large."""
    if any(not size.isdecimal() or int(size) > MOST_BYTES for size in _values(scope, b"content-length")):
        return None
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return bytes(body)
        body += message.get("body", b"")
        if len(body) > MOST_BYTES:
            return None
        if not message.get("more_body", False):
            return bytes(body)


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]


def _host_name(host: str) -> str:
    """Return the name in a Host header without the port, or an empty text if it is malformed."""
    try:
        parts = urlsplit(f"//{host}")
        parts.port  # noqa: B018  # raises if the port is no number
    except ValueError:
        return ""
    return (parts.hostname or "") if parts.netloc == host and "@" not in host else ""
