"""Starts what watches a run from outside: verbs of this program in processes of their own, which
outlive the head.

The run ends none: each ends by itself after the run. If one fails, the run goes on. Only for the
report does the head wait, once the run is over.
"""

from __future__ import annotations

import os
import subprocess
import sys
import webbrowser
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from orchestrator.config.notify_urls import URLS_VARIABLE

REPORT_NAME = "report.html"
#: A report of 1,000 slots takes a third of it.
_REPORT_MOST_S = 60.0
#: Set where windows can be shown: without one, `webbrowser` would start a browser for terminals.
_DESKTOPS = ("DISPLAY", "WAYLAND_DISPLAY")


def addresses_taken() -> dict[str, str]:
    """Take the addresses of notifications out of the environment, so that no worker gets them."""
    typed = os.environ.pop(URLS_VARIABLE, None)
    return {} if typed is None else {URLS_VARIABLE: typed}


def start(
    verb: str, folder: Path, tell: Callable[[str], None], environment: Mapping[str, str], *more: str
) -> subprocess.Popen[bytes] | None:
    """Start a verb on a run folder, with the configuration and the log in it.

    `None` if that fails.
    """
    command = [
        *(sys.executable, "-m", "orchestrator", verb, folder.name),
        *("--config", str(folder / "config.yaml"), "--run-dir", str(folder.parent), *more),
    ]
    try:
        with (folder / f"{verb}.log").open("ab") as log:
            return subprocess.Popen(  # noqa: S603 - this very program
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **environment},
                start_new_session=True,  # a Ctrl-C in the terminal is for the run
            )
    except OSError as failure:
        tell(f"`{verb}` cannot be started: {failure}")
        return None


def report(folder: Path, tell: Callable[[str], None]) -> None:
    """Write the report of a run that has ended, open it where there is a desktop, and tell where it
    is.

    If it cannot be written, what is told is where the reason is.
    """
    path = folder / REPORT_NAME
    child = start("report", folder, tell, {}, "--html", str(path))
    if child is None:
        return
    try:
        is_written = child.wait(_REPORT_MOST_S) == 0
    except (subprocess.TimeoutExpired, KeyboardInterrupt):  # the run is over, and has its summary
        child.kill()
        child.wait()
        is_written = False
    if is_written and any(os.environ.get(name) for name in _DESKTOPS):
        with suppress(webbrowser.Error, OSError):
            webbrowser.open(path.resolve().as_uri())
    tell(f"Report: {path}" if is_written else f"Report: not written, see {folder / 'report.log'}")
