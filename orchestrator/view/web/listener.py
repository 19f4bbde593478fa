"""Which address is served, who may log in, which connections are accepted, and when it ends.

A connection without a login may be of any program that can reach the port. There is a limit of
them, and the oldest one is closed for a new one, so that no number of idle connections keeps a
browser out. asyncio's own `create_server` has no limit, and where no file descriptor is left it
accepts again at once and prints a traceback for each try. Does not answer requests (`server.py`).
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import resource
import secrets
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import psutil
from aiohttp import http_exceptions, web

from orchestrator.errors import ArchiveError, UsageError, one_line
from orchestrator.view.web.guard import CODE_VALID_S, Access, Code
from orchestrator.view.web.page_data import TableView
from orchestrator.view.web.server import SILENT_MOST_S, Site
from workers.files import locked, read_small, replace_whole
from workers.learned_limits import default_path

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

PORT: Final = 8470
_TOKEN_MOST_BYTES: Final = 200
_PATIENCE_S: Final = 5.0
_CODES_KEPT: Final = 8


class WebConnection(web.RequestHandler):
    """A connection, which is a stranger's until one of its requests brings a login."""

    def __init__(self, door: _Acceptor, server: web.Server) -> None:
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


class _Acceptor:
    """Accepts connections at one listening socket."""

    def __init__(
        self, server: web.Server, listener: socket.socket, tls: ssl.SSLContext | None
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._server, self._listener, self._tls = server, listener, tls
        self._strangers: dict[WebConnection, asyncio.Task[Any]] = {}
        self._known: dict[WebConnection, asyncio.Task[Any]] = {}
        """The tasks make a transport, which with TLS takes until the handshake is over."""
        listener.setblocking(False)
        listener.listen(_BACKLOG)
        self._open()

    def close(self) -> None:
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for task in (self._strangers | self._known).values():
            task.cancel()

    def trust(self, connection: WebConnection) -> None:
        if len(self._known) < _KNOWN_MOST and connection in self._strangers:
            self._known[connection] = self._strangers.pop(connection)

    def forget(self, connection: WebConnection) -> None:
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
        connection = WebConnection(self, self._server)
        patience_s = None if self._tls is None else SILENT_MOST_S
        making = self._loop.connect_accepted_socket(
            lambda: connection, accepted, ssl=self._tls, ssl_handshake_timeout=patience_s
        )
        task = self._strangers[connection] = self._loop.create_task(making)
        task.add_done_callback(partial(self._made, connection))

    def _made(self, connection: WebConnection, task: asyncio.Task[Any]) -> None:
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
    door = _Acceptor(runner.server, listener, tls)
    try:
        yield
    finally:
        door.close()
        await runner.cleanup()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Where and how the page is served."""

    port: int = PORT
    bind: str = "127.0.0.1"
    control: bool = False
    certificate: Path | None = None
    key: Path | None = None
    without_tls: bool = False


def serve(folder: Path, options: ServeOptions, say: Callable[[str], None]) -> None:
    """Serve the page of a run until Ctrl-C or SIGTERM. `say` gets the lines for the terminal.

    Raises:
        UsageError: The address cannot be served as asked for.
    """
    tls = _tls(options)
    asyncio.run(_serve(folder, options, tls, say))


def tokens_dir() -> Path:
    """Return the folder with the tokens of this user."""
    return default_path().parent / "web"


async def _serve(
    folder: Path, options: ServeOptions, tls: ssl.SSLContext | None, say: Callable[[str], None]
) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    listener = _listening(options)
    port = listener.getsockname()[1]
    access = Access(
        hosts=_hosts(options.bind),
        port=port,
        read_token=_token("read"),
        control_token=_token("control"),
        with_control=options.control,
    )
    site = Site(folder=folder, access=access, is_secure=tls is not None)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, ended.set)

    def say_address() -> None:
        code = secrets.token_urlsafe(24)
        site.codes = [*site.codes[1 - _CODES_KEPT :], Code(code, site.unix_s())]
        say(
            f"{'http' if tls is None else 'https'}://{_shown_host(options.bind)}:{port}/#code={code}"
        )

    def another() -> None:
        if not sys.stdin.readline():
            loop.remove_reader(sys.stdin)
        say_address()

    async with accepting(site.application(), listener, tls):
        say_address()
        more = ""
        if sys.stdin is not None and sys.stdin.isatty():
            loop.add_reader(sys.stdin, another)
            more = "; Enter prints another"
        say(
            f"This address logs one browser in, within {CODE_VALID_S / 60:.0f} minutes{more}. "
            "Ctrl-C ends the page only."
        )
        kinds = "read.token or control.token" if options.control else "read.token"
        say(f"Programs send the text of {kinds} in {tokens_dir()} as Authorization: Bearer.")
        with suppress(ArchiveError):  # the first look takes longest; what is wrong, a page will say
            await site.hub.table(TableView())
        await ended.wait()


def _listening(options: ServeOptions) -> socket.socket:
    is_six = ":" in options.bind
    listener = socket.socket(socket.AF_INET6 if is_six else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((options.bind, options.port))
    except OSError as failure:
        listener.close()
        if failure.errno == errno.EADDRINUSE:
            raise UsageError(
                f"port {options.port} is in use, perhaps by the page of another run; `--port 0` "
                "takes any free one"
            ) from failure
        raise UsageError(
            f"--bind {options.bind} --port {options.port}: {failure.strerror}"
        ) from failure
    return listener


def _tls(options: ServeOptions) -> ssl.SSLContext | None:
    """Return how connections are encrypted; `None` where they need not be."""
    try:
        address = ipaddress.ip_address(options.bind)
    except ValueError:
        raise UsageError(
            one_line(f"--bind {options.bind[:80]}: valid is an IP address, such as 0.0.0.0")
        ) from None
    if options.certificate is None:
        if not (address.is_loopback or options.without_tls):
            raise UsageError(
                f"--bind {address}: other machines could read along; name --certificate and "
                "--key, or leave --bind out "
                f"and use `ssh -L {options.port}:127.0.0.1:{options.port}`; on a network that is "
                "safe, --without-tls"
            )
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(options.certificate, options.key)
    except (OSError, ValueError) as failure:
        raise UsageError(
            one_line(f"--certificate {options.certificate}: it cannot be used: {failure}")
        ) from failure
    return context


def _hosts(bind: str) -> frozenset[str]:
    """Return the names under which a browser may reach the server.

    A name of someone else may lead here, too.
    """
    address = ipaddress.ip_address(bind)
    names = {"127.0.0.1", "localhost", "[::1]"}
    if address.is_loopback:
        return frozenset(names)
    own = [
        card_address.address for kinds in psutil.net_if_addrs().values() for card_address in kinds
    ]
    texts = (
        {text.partition("%")[0].lower() for text in own}
        if address.is_unspecified
        else {str(address)}
    )
    return frozenset(
        names
        | {f"[{text}]" if ":" in text else text for text in texts}
        | {socket.gethostname().lower()}
    )


def _shown_host(bind: str) -> str:
    if ipaddress.ip_address(bind).is_unspecified:
        return socket.gethostname().lower()
    return f"[{bind}]" if ":" in bind else bind


def _token(name: str) -> str:
    """Return one of the user's tokens, which is made where there is none.

    `UsageError` if others can read it.
    """
    path = tokens_dir() / f"{name}.token"
    try:
        with locked(path.with_suffix(".lock"), _PATIENCE_S):
            if not path.exists():
                replace_whole(path, secrets.token_urlsafe(32) + "\n")
            text = read_small(path, _TOKEN_MOST_BYTES).strip()
            is_open = path.stat().st_mode & 0o077
    except (OSError, UnicodeDecodeError) as failure:
        raise UsageError(
            one_line(f"the token {path} cannot be read or made: {failure}")
        ) from failure
    if is_open or len(text) < 20:
        raise UsageError(
            f"others can read the token {path}, or it is too short: delete it; `web` makes another"
        )
    return text
