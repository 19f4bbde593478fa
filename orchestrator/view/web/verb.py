"""The verb `web`: which address is served, who may log in, and when it ends.

Makes and reads the two tokens of this user. Does not answer requests (`server.py`).
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import secrets
import signal
import socket
import ssl
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from orchestrator.errors import ArchiveError, UsageError, one_line
from orchestrator.view.web.connections import accepting
from orchestrator.view.web.guard import CODE_VALID_S, Code, Rules
from orchestrator.view.web.page_data import View
from orchestrator.view.web.server import Site
from workers.files import locked, read_small, replace_whole
from workers.learned_limits import default_path

PORT: Final = 8470
_TOKEN_MOST_BYTES: Final = 200
_PATIENCE_S: Final = 5.0
_CODES_KEPT: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Where and how the page is served."""

    port: int = PORT
    bind: str = "127.0.0.1"
    control: bool = False
    certificate: Path | None = None
    key: Path | None = None
    without_tls: bool = False


def serve(folder: Path, options: Options, say: Callable[[str], None]) -> None:
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
    folder: Path, options: Options, tls: ssl.SSLContext | None, say: Callable[[str], None]
) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    listener = _listening(options)
    port = listener.getsockname()[1]
    rules = Rules(
        hosts=_hosts(options.bind),
        port=port,
        read_token=_token("read"),
        control_token=_token("control"),
        with_control=options.control,
    )
    site = Site(folder=folder, rules=rules, is_secure=tls is not None)
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
            await site.hub.table(View())
        await ended.wait()


def _listening(options: Options) -> socket.socket:
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


def _tls(options: Options) -> ssl.SSLContext | None:
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
    found = {"127.0.0.1", "localhost", "[::1]"}
    if address.is_loopback:
        return frozenset(found)
    own = [each.address for kinds in psutil.net_if_addrs().values() for each in kinds]
    texts = (
        {text.partition("%")[0].lower() for text in own}
        if address.is_unspecified
        else {str(address)}
    )
    return frozenset(
        found
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
