"""Accepts the connections of the server, and decides which one is closed for a new one.

A connection without a login may be of any program that can reach the port. There is a limit of
them, and the oldest one is closed for a new one, so that no number of idle connections keeps a
browser out. asyncio's own `create_server` has no limit, and where no file descriptor is left it
accepts again at once and prints a traceback for each try. Does not answer requests (`server.py`).
"""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

from aiohttp import http_exceptions, web

SILENT_MOST_S: Final = 10.0
"""So long a connection without a login may take for the headers of a request, and be idle between
two.
"""
STRANGERS_MOST: Final = 128
"""Connections without a login. One with TLS takes 256 KiB in asyncio, so that these take 32 MiB at
most.
"""
_KNOWN_MOST = 256
_KNOWN_SILENT_MOST_S = 150.0
"""More than the usual 60 s between two scrapes: a client whose connection is closed as it asks gets
an error.
"""
_AT_ONCE = 8
"""Accepted in one turn of the loop. A new connection is heard within a few turns, long before it is
the oldest.
"""
_AGAIN_S = 0.1
_BACKLOG = 1_024
_DESCRIPTORS = 4_096

_OF_THE_CLIENT = (
    http_exceptions.HttpProcessingError,
    web.RequestPayloadError,
    ConnectionError,
    TimeoutError,
)


class Connection(web.RequestHandler):
    """A connection, which is a stranger's until one of its requests brings a login."""

    def __init__(self, door: _Door, server: web.Server) -> None:
        loop = asyncio.get_running_loop()
        # aiohttp's timer runs from the beginning of a connection, or from the end of its last
        # response.
        super().__init__(
            server,
            loop=loop,
            access_log=None,  # type: ignore[arg-type]  # which aiohttp takes, and declares in `AppRunner`
            keepalive_timeout=SILENT_MOST_S,
            lingering_time=1.0,
        )
        self._door = door

    def trust(self) -> None:
        """Keep it when strangers come."""
        self._keepalive_timeout = _KNOWN_SILENT_MOST_S
        self._door.trust(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Make room for another one."""
        super().connection_lost(exc)
        self._door.forget(self)

    def log_exception(self, *args: Any, **kw: Any) -> None:  # noqa: ANN401 - as aiohttp declares it
        """Print a bug of this program; what is wrong with a request is told to its client alone."""
        if not isinstance(kw.get("exc_info"), _OF_THE_CLIENT):
            super().log_exception(*args, **kw)


class _Door:
    """Accepts connections at one listening socket."""

    def __init__(
        self, server: web.Server, listener: socket.socket, tls: ssl.SSLContext | None
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._server, self._listener, self._tls = server, listener, tls
        self._strangers: dict[Connection, asyncio.Task[Any]] = {}
        self._known: dict[Connection, asyncio.Task[Any]] = {}
        """The tasks make a transport, which with TLS takes until the handshake is over."""
        listener.setblocking(False)
        listener.listen(_BACKLOG)
        self._open()

    def close(self) -> None:
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for task in (self._strangers | self._known).values():
            task.cancel()

    def trust(self, connection: Connection) -> None:
        if len(self._known) < _KNOWN_MOST and connection in self._strangers:
            self._known[connection] = self._strangers.pop(connection)

    def forget(self, connection: Connection) -> None:
        self._strangers.pop(connection, None)
        self._known.pop(connection, None)

    def _open(self) -> None:
        if self._listener.fileno() >= 0:
            self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError:  # no descriptor, or no memory, is left
                self._loop.remove_reader(self._listener)
                self._loop.call_later(_AGAIN_S, self._open)
                return
            self._take(accepted)

    def _take(self, accepted: socket.socket) -> None:
        if len(self._strangers) >= STRANGERS_MOST:
            oldest, task = next(iter(self._strangers.items()))
            self.forget(oldest)
            task.cancel()
            if oldest.transport is not None:
                oldest.transport.abort()
        accepted.setblocking(False)
        connection = Connection(self, self._server)
        patience_s = None if self._tls is None else SILENT_MOST_S
        making = self._loop.connect_accepted_socket(
            lambda: connection, accepted, ssl=self._tls, ssl_handshake_timeout=patience_s
        )
        task = self._strangers[connection] = self._loop.create_task(making)
        task.add_done_callback(partial(self._made, connection))

    def _made(self, connection: Connection, task: asyncio.Task[Any]) -> None:
        if task.cancelled() or task.exception() is not None:  # a handshake that failed
            self.forget(connection)


@asynccontextmanager
async def accepting(
    application: web.Application, listener: socket.socket, tls: ssl.SSLContext | None = None
) -> AsyncIterator[None]:
    """Serve an application at a bound socket, which is closed in the end."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.5)
    await runner.setup()
    assert runner.server is not None  # noqa: S101 - made by `setup`
    door = _Door(runner.server, listener, tls)
    try:
        yield
    finally:
        door.close()
        await runner.cleanup()
