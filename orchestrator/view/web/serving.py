"""Which addresses are served, with which tokens, and until when.

The page is served on loopback alone. Another address of this PC gives `/metrics` alone, to those
who have its token. Does not answer requests (`server.py`).
"""

from __future__ import annotations

import errno
import logging
import secrets
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from orchestrator.errors import UsageError, one_line
from orchestrator.record.folders import find_run
from orchestrator.view.web.guard import LOOPBACK, Access
from orchestrator.view.web.server import Site
from workers.files import read_small, replace_whole
from workers.learned_limits import default_path

PORT: Final = 8470

# aiohttp would print a traceback for each malformed request; the server tells its own faults.
_SILENT: Final = logging.Logger("orchestrator.web")
_SILENT.addHandler(logging.NullHandler())

#: How aiohttp serves. A connection may take `keepalive_timeout` for the headers of a request, and
#: be idle for as long between two.
SERVED: Final[dict[str, Any]] = {
    "access_log": None,
    "logger": _SILENT,
    "handler_cancellation": True,
    "shutdown_timeout": 0.5,
    "keepalive_timeout": 10.0,
    "lingering_time": 1.0,
}
_BACKLOG: Final = 1_024
_TOKEN_MOST_BYTES: Final = 200
_TOKEN_LEAST_CHARS: Final = 20


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
    page_token, metrics_token = secrets.token_urlsafe(32), _metrics_token()
    access = Access(token=page_token, metrics_token=metrics_token, with_control=control)
    with ExitStack() as opened:
        listening = [opened.enter_context(_listening(LOOPBACK, port))]
        port = listening[0].getsockname()[1]
        if bind is not None:
            listening.append(opened.enter_context(_listening(bind, port)))
        say(f"http://{LOOPBACK}:{port}/?token={page_token}")
        say(
            f"From another PC: `ssh -L {port}:{LOOPBACK}:{port}` to this one, then the same "
            "address. Ctrl-C ends the page only."
        )
        where = f"http://{bind or LOOPBACK}:{port}/metrics"
        say(f"Prometheus: {where} with the token in {metrics_token_path()}")
        app = Site(runs_dir, access, run_id).application()
        web.run_app(app, sock=listening, backlog=_BACKLOG, print=None, **SERVED)


def metrics_token_path() -> Path:
    """Return the file with the token for `/metrics`; it stays when the page ends."""
    return default_path().parent / "web" / "metrics.token"


def _listening(host: str, port: int) -> socket.socket:
    """Return a socket that takes connections; `UsageError` where the address cannot be served."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as failure:
        reason, *_ = str(failure.strerror).split(" (")
        why = f"{host[:80]}, port {port}, cannot be served: {reason}"
        if failure.errno == errno.EADDRINUSE:
            why += ", perhaps by another page; `--port 0` takes any free one"
        raise UsageError(one_line(why)) from failure


def _metrics_token() -> str:
    """Return the user's token for `/metrics`, which is made where there is none.

    `UsageError` if others can read it.
    """
    path = metrics_token_path()
    try:
        if not path.exists():
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
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
