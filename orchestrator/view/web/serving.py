"""Which addresses are served, with which tokens, and until when.

The page is served on loopback alone. Another address of this PC gives `/metrics` alone, to those
who have its token. Does not answer requests (`server.py`).
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import secrets
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from orchestrator.errors import UsageError, one_line
from orchestrator.record.folders import find_run
from orchestrator.view.web.guard import Access
from orchestrator.view.web.server import Site
from workers.files import locked, read_small, replace_whole
from workers.learned_limits import default_path

PORT: Final = 8470
SILENT_MOST_S: Final = 10.0
"""So long a connection may take for the headers of a request, and be idle between two."""

_BACKLOG: Final = 1_024
_LOOPBACK: Final = "127.0.0.1"
_TOKEN_MOST_BYTES: Final = 200
_TOKEN_LEAST_CHARS: Final = 20
_PATIENCE_S: Final = 5.0


def serve(
    runs_dir: Path,
    run_id: str,
    say: Callable[[str], None],
    *,
    port: int = PORT,
    bind: str | None = None,
    control: bool = False,
) -> None:
    """Serve the page until Ctrl-C or SIGTERM.

    Args:
        runs_dir: The folder of the runs.
        run_id: The run that is shown; `latest` is the newest one at any time.
        say: Gets the lines for the terminal.
        port: Of all addresses; 0 takes any free one.
        bind: An address of this PC at which others may ask for `/metrics`.
        control: Whether the page takes commands.

    Raises:
        UsageError: There is no such run, or an address cannot be served.
    """
    find_run(runs_dir, run_id)
    hosts = [_LOOPBACK] if bind is None else [_LOOPBACK, _reachable(bind)]
    page_token, metrics_token = secrets.token_urlsafe(32), _metrics_token()
    access = Access(token=page_token, metrics_token=metrics_token, with_control=control)
    asyncio.run(_serve(Site(runs_dir, access, run_id), hosts, port, say))


def metrics_token_path() -> Path:
    """Return the file with the token for `/metrics`; it stays when the page ends."""
    return default_path().parent / "web" / "metrics.token"


async def _serve(site: Site, hosts: list[str], port: int, say: Callable[[str], None]) -> None:
    """Serve the page at the first host, and `/metrics` alone at the others."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.set_exception_handler(_handle)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, ended.set)
    async with AsyncExitStack() as served:
        for host in hosts:
            is_page = host == _LOOPBACK
            app = site.page_application() if is_page else site.metrics_application()
            runner = await started(app, host, port)
            served.push_async_callback(runner.cleanup)
            port = port_of(runner)
        say(f"http://{_LOOPBACK}:{port}/?token={site.access.token}")
        say(
            f"From another PC: `ssh -L {port}:{_LOOPBACK}:{port}` to this one, then the same "
            "address. Ctrl-C ends the page only."
        )
        where = f"http://{hosts[-1]}:{port}/metrics"
        say(f"Prometheus: {where} with the token in {metrics_token_path()}")
        await ended.wait()


async def started(app: web.Application, host: str, port: int) -> web.AppRunner:
    """Serve an application at an address of this PC; `cleanup` of what is returned ends it.

    Raises:
        UsageError: The address cannot be served.
    """
    # aiohttp would print a traceback for each malformed request; the server tells its own faults.
    logger = logging.Logger("orchestrator.web")
    logger.addHandler(logging.NullHandler())
    runner = web.AppRunner(
        app,
        access_log=None,
        logger=logger,
        handler_cancellation=True,
        shutdown_timeout=0.5,
        keepalive_timeout=SILENT_MOST_S,
        lingering_time=1.0,
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port, backlog=_BACKLOG, reuse_address=True).start()
    except OSError as failure:
        await runner.cleanup()
        if failure.errno == errno.EADDRINUSE:
            raise UsageError(
                f"port {port} is in use, perhaps by another page; `--port 0` takes any free one"
            ) from failure
        raise UsageError(f"{host}:{port} cannot be served: {failure.strerror}") from failure
    return runner


def port_of(runner: web.AppRunner) -> int:
    """Return the port that is served."""
    return int(runner.addresses[0][1])


def _reachable(bind: str) -> str:
    """Return the address for other PCs; `UsageError` if none of them could reach it."""
    try:
        address = ipaddress.ip_address(bind)
    except ValueError:
        address = None
    if address is None or address.is_unspecified or address.is_loopback:
        raise UsageError(
            one_line(
                f"--bind {bind[:80]}: name the one IP address of this PC at which Prometheus may "
                "ask for /metrics, such as 192.168.1.10"
            )
        )
    return str(address)


def _handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Say nothing where no file descriptor is left: asyncio accepts again after a second."""
    if not isinstance(context.get("exception"), OSError):
        loop.default_exception_handler(context)


def _metrics_token() -> str:
    """Return the user's token for `/metrics`, which is made where there is none.

    `UsageError` if others can read it.
    """
    path = metrics_token_path()
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
    if is_open or len(text) < _TOKEN_LEAST_CHARS:
        raise UsageError(
            f"others can read the token {path}, or it is too short: delete it; `web` makes another"
        )
    return text
