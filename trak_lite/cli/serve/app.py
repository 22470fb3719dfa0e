"""The routes, what every request must satisfy before its page is made, and the application that a server runs."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any, Final, TypeAlias
from urllib.parse import parse_qsl

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from trak_lite.cli.serve.pages import Pages
from trak_lite.cli.serve.urls import WHERE, Params
from trak_lite.errors import InvalidInputError, TrakLiteError

PATIENCE: Final = 15.0
"""Seconds for a client to send a request, and to accept what it is sent."""
_ANY_WHERE: Final = f"{WHERE}COLUMN"
_HOSTS: Final = re.compile(r"(127\.0\.0\.1|localhost)(:\d{1,5})?", re.IGNORECASE | re.ASCII)
"""Accepted in the Host header. Another name is one of a page that was rebound to this address."""
_MOST_BYTES: Final = 64 << 10
"""Largest body of a request."""
_MOST_FIELDS: Final = 64
_FORM: Final = "application/x-www-form-urlencoded"

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]
Application: TypeAlias = Callable[[MutableMapping[str, Any], Any, Any], Awaitable[None]]


def application(pages: Pages, *, patience: float = PATIENCE) -> Application:
    """Return the ASGI application of some pages, which are made in worker threads.

    No part of a path is used: what a page shows is in the parameters of its URL. A client has ``patience`` seconds to
    send the body of a request.
    """

    async def table(request: Request) -> Response:
        headers = {"content-disposition": 'attachment; filename="relabelling.csv"'}
        return Response(await run_in_threadpool(pages.table), media_type="text/csv", headers=headers)

    routes = [
        Route("/", _page(pages.start, "set", "target", "k", "from", "text", "tokens", _ANY_WHERE)),
        Route("/review", _page(pages.review, "set", "show", "from", "done", _ANY_WHERE)),
        Route("/effects", _page(pages.effects, "set", "show", "from", _ANY_WHERE)),
        Route("/marks.csv", table),
        Route("/ask", _post(pages, pages.ask, patience), methods=["POST"]),
        Route("/mark", _post(pages, pages.mark, patience), methods=["POST"]),
    ]

    async def failed(request: Request, error: Exception) -> Response:
        status, page = pages.problem(error)
        return HTMLResponse(page, status)

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        page = pages.message(
            f"{error.status_code} {error.detail}", "No page of this server answers this request."
        )
        return HTMLResponse(page, error.status_code, error.headers)

    handlers: Any = {TrakLiteError: failed, HTTPException: refused, Exception: failed}
    made: Any = Starlette(routes=routes, exception_handlers=handlers)

    async def guarded(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        refusal = _refusal(scope["method"], Headers(scope=scope))
        if refusal is None:
            await made(scope, receive, send)
            return
        status, said = refusal
        close = {"connection": "close"}  # nothing more is read
        answer = PlainTextResponse(f"{status.value} {status.phrase}: {said}\n", status, close)
        await answer(scope, receive, send)

    return guarded


def _refusal(method: str, headers: Headers) -> tuple[HTTPStatus, str] | None:
    """Return why a request is refused, ``None`` if it is not."""
    hosts = headers.getlist("host")
    if len(hosts) != 1 or not _HOSTS.fullmatch(hosts[0]):
        return HTTPStatus.MISDIRECTED_REQUEST, "This server answers only as 127.0.0.1 or localhost."
    if any(origin != f"http://{hosts[0]}" for origin in headers.getlist("origin")):
        return HTTPStatus.FORBIDDEN, "The request comes from a page of another origin."
    # A link on another site may be followed; images, scripts and forms of another site may not.
    navigates = method == "GET" and headers.getlist("sec-fetch-mode") == ["navigate"]
    if {*headers.getlist("sec-fetch-site")} - {"same-origin", "none"} and not navigates:
        return HTTPStatus.FORBIDDEN, "The request comes from a page of another site."
    if any(not size.isdecimal() or int(size) > _MOST_BYTES for size in headers.getlist("content-length")):
        return HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"The request is larger than {_MOST_BYTES} bytes."
    return None


def _page(make: Callable[[Params], str], *allowed: str) -> Handler:
    """Return the handler of a page that only reads, and has some parameters."""

    async def answer(request: Request) -> Response:
        params = _params(request.query_params.multi_items())
        for name in params:
            if (_ANY_WHERE if name.startswith(WHERE) else name) not in allowed:
                raise InvalidInputError(f"Unknown parameter {name!r:.40}. Known: {', '.join(allowed)}.")
        return HTMLResponse(await run_in_threadpool(make, params))

    return answer


def _params(pairs: list[tuple[str, str]]) -> dict[str, str]:
    """Return parameters by name; raise :class:`InvalidInputError` if one is given twice."""
    params: dict[str, str] = {}
    for name, value in pairs:
        if name in params:
            raise InvalidInputError(f"The parameter {name!r:.40} is given more than once. Give it once.")
        params[name] = value
    return params


def _post(pages: Pages, change: Callable[[Params], str], patience: float) -> Handler:
    """Return the handler of a form; it changes something and leads to a page."""

    def refused(status: HTTPStatus, said: str) -> Response:
        page = pages.message(f"{status.value} {status.phrase}", said)
        return HTMLResponse(page, status, {"connection": "close"})

    async def answer(request: Request) -> Response:
        body = bytearray()
        try:
            async with asyncio.timeout(patience):
                async for part in request.stream():
                    body += part
                    if len(body) > _MOST_BYTES:
                        said = f"The request is larger than {_MOST_BYTES} bytes."
                        return refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, said)
            fields = parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=_MOST_FIELDS)
        except TimeoutError:
            return refused(HTTPStatus.REQUEST_TIMEOUT, "The request was not sent in time.")
        except (ValueError, ClientDisconnect):
            return refused(HTTPStatus.BAD_REQUEST, "The form cannot be read.")
        if request.headers.get("content-type", "").partition(";")[0].strip() != _FORM:
            return refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"Expected {_FORM}.")
        params = _params(fields)
        if not secrets.compare_digest(params.pop("token", "").encode(), pages.token.encode()):
            said = "The form is not of this server, or of one that was restarted. Load the page again."
            return refused(HTTPStatus.FORBIDDEN, said)
        return RedirectResponse(await run_in_threadpool(change, params), 303)

    return answer
