"""The server: one process that listens on 127.0.0.1 and closes the connections of slow clients."""

from __future__ import annotations

import asyncio
import math
import socket
from functools import partial
from typing import Any, Final, final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from trak_lite.cli.serve.app import PATIENCE
from trak_lite.cli.serve.pages import policy
from trak_lite.errors import InvalidInputError

ADDRESS: Final = "127.0.0.1"
_HEADERS: Final = [
    ("x-content-type-options", "nosniff"),
    # with no-referrer, browsers send "Origin: null" with the forms of the page
    ("referrer-policy", "same-origin"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
    ("cache-control", "no-store"),
]
"""What every answer says to the browser, beside the policy of the pages."""
_MOST_CONNECTIONS: Final = 64
_HEADER_BYTES: Final = 64 << 10  # a text in a URL takes up to three times its bytes


def listener(port: int) -> socket.socket:
    """Return a socket that listens on a port of 127.0.0.1; 0 takes a free one."""
    try:
        return socket.create_server((ADDRESS, port))
    except (OSError, OverflowError) as error:
        raise InvalidInputError(
            f"Port {port} of {ADDRESS} cannot be used ({error}). Pass another one: --port PORT, 0 for a free one."
        ) from error


def server(application: Any, *, patience: float = PATIENCE) -> uvicorn.Server:
    """Return a server of an ASGI application; ``run(sockets=[...])`` runs it until SIGINT or SIGTERM.

    A client has ``patience`` seconds to send a request, and to accept what it is sent.
    """
    protocol: Any = partial(_Impatient, patience=patience)
    config = uvicorn.Config(
        application,
        http=protocol,
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        headers=[*_HEADERS, ("content-security-policy", policy())],
        limit_concurrency=_MOST_CONNECTIONS,
        h11_max_incomplete_event_size=_HEADER_BYTES,
        timeout_graceful_shutdown=5,
    )
    return uvicorn.Server(config)


@final
class _Impatient(H11Protocol):
    """uvicorn's protocol with time limits, which it lacks, for the headers of a request and for slow readers."""

    def __init__(self, *args: Any, patience: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._patience = patience
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        # Linux, which else sends a closed connection's rest for minutes
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            milliseconds = math.ceil(1000 * self._patience)
            connection = transport.get_extra_info("socket")
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        self._wait_for_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in self._timers.values():
            timer.cancel()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._wait_for_headers()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait_for_headers()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait("the client accepts what it was sent", True)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._wait("the client accepts what it was sent", False)

    def _wait_for_headers(self) -> None:
        """Wait for the headers of a request unless one is being answered, whose body the application waits for."""
        self._wait("the headers are complete", self.cycle is None or self.cycle.response_complete)

    def _wait(self, until: str, waits: bool) -> None:
        """Close the connection if this takes too long; a timer that runs already goes on."""
        if waits and until not in self._timers:
            self._timers[until] = self.loop.call_later(self._patience, self.transport.abort)
        elif not waits and until in self._timers:
            self._timers.pop(until).cancel()
