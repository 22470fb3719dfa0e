"""The server: one process that listens on 127.0.0.1 and closes the connections of slow clients."""

from __future__ import annotations

import asyncio
import math
import socket
from functools import partial
from typing import Any, Final, final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from trak_lite.errors import InvalidInputError
from trak_lite.serve.guard import PATIENCE

__all__ = ["ADDRESS", "listener", "server"]

ADDRESS: Final = "127.0.0.1"
_MOST_CONNECTIONS: Final = 64
_HEADER_BYTES: Final = 64 << 10  # a text in a URL takes up to three times its bytes


def listener(port: int) -> socket.socket:
    """Return a socket that listens on 127.0.0.1.

    Args:
        port: The port; 0 takes a free one.

    Raises:
        InvalidInputError: If the port is taken or does not exist.
    """
    try:
        return socket.create_server((ADDRESS, port))
    except (OSError, OverflowError) as error:
        raise InvalidInputError(
            f"Port {port} of {ADDRESS} cannot be used ({error}). Pass another one: --port PORT, 0 for a free one."
        ) from error


def server(application: Any, *, patience: float = PATIENCE) -> uvicorn.Server:
    """Return a server of an ASGI application; ``run(sockets=[...])`` runs it until SIGINT or SIGTERM.

    Args:
        application: The application.
        patience: Seconds for a client to send a request, and to accept what it is sent.
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
        limit_concurrency=_MOST_CONNECTIONS,
        h11_max_incomplete_event_size=_HEADER_BYTES,
        timeout_graceful_shutdown=5,
    )
    return uvicorn.Server(config)


@final
class _Impatient(H11Protocol):
    """uvicorn's protocol with time limits, which it lacks, for the headers of a request and for slow readers."""

    _sending: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, patience: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._patience = patience

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        if hasattr(
            socket, "TCP_USER_TIMEOUT"
        ):  # Linux, which else sends a closed connection's rest for minutes
            milliseconds = math.ceil(1000 * self._patience)
            connection = transport.get_extra_info("socket")
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        _stop(self._sending)
        _stop(self._reading)

    def data_received(self, data: bytes) -> None:
        """Stop waiting once the headers are complete; the application limits the time of the body."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        """Wait for the client to accept what it was sent."""
        super().pause_writing()
        _stop(self._reading)
        self._reading = self.loop.call_later(self._patience, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        _stop(self._reading)

    def _watch(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            _stop(self._sending)
            self._sending = None
        elif self._sending is None:
            self._sending = self.loop.call_later(self._patience, self.transport.abort)


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
