"""The user's terminal; the process that sends notifications; and the report.

Ctrl-C asks the run to end. Ray writes multi-line warnings to file descriptors 1 and 2 of the
driver, whatever its logging settings. While a run lasts, both lead to a log file, and the product's
own output goes to copies of the real ones.

`notify` watches a run from outside, in a process of its own that outlives the head and ends by
itself. If it fails, the run continues. The head writes the report once the run is over.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import webbrowser
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TextIO

from orchestrator.errors import OrchestratorError
from orchestrator.view.html_report import write_report


@dataclass(frozen=True, slots=True)
class Screen:
    """The user's real standard output and error."""

    out: TextIO
    err: TextIO


@contextlib.contextmanager
def own_screen(log_path: Path | None) -> Iterator[Screen]:
    """Append what is written to file descriptors 1 and 2 to `log_path` (`None` drops it), and yield
    copies of the real ones.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    sink = os.open(os.devnull, os.O_WRONLY) if log_path is None else os.open(log_path, flags, 0o600)
    saved = os.dup(1), os.dup(2)
    for number in (1, 2):
        os.dup2(sink, number)
    os.close(sink)
    out, err = (
        os.fdopen(
            os.dup(real), "w", encoding=usual.encoding or "utf-8", errors="replace", buffering=1
        )
        for real, usual in zip(saved, (sys.stdout, sys.stderr), strict=True)
    )
    try:
        yield Screen(out=out, err=err)
    finally:
        for stream in (out, err):
            with contextlib.suppress(OSError):  # the reader may be gone
                stream.close()
        sys.stdout.flush()
        sys.stderr.flush()
        for number, real in enumerate(saved, start=1):
            os.dup2(real, number)
            os.close(real)


class Interrupts:
    """Records the first Ctrl-C (or SIGTERM, or a closed terminal) for the run to read; the second
    raises `KeyboardInterrupt`.

    Any further one is ignored, even after `restore`: the command ends anyway, and must not be
    killed while it says how.
    """

    _NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.asked = self._has_raised = False
        self._before = {number: signal.getsignal(number) for number in self._NUMBERS}

    def install(self) -> None:
        """Install the handlers. Call this again after Ray has connected, which replaces that of
        SIGTERM.
        """
        for number in self._NUMBERS:
            # `nohup` ignores SIGHUP, so that the run outlives the terminal.
            if self._before[number] is not signal.SIG_IGN:
                signal.signal(number, self._ask)

    def restore(self) -> None:
        """Restore the previous handlers; if the command is ending, ignore the signals instead."""
        if self.asked:
            for number in self._NUMBERS:
                signal.signal(number, signal.SIG_IGN)
            return
        for number, handler in self._before.items():
            if handler is not None:  # set by code that is not Python, and cannot be restored
                signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        if self._has_raised:
            return
        if self.asked:
            self._has_raised = True
            raise KeyboardInterrupt
        self.asked = True


REPORT_NAME = "report.html"
#: Set where windows can be shown: elsewhere `webbrowser` would start a text browser.
_DESKTOPS = ("DISPLAY", "WAYLAND_DISPLAY")


def start_notify(
    folder: Path, tell: Callable[[str], None], environment: Mapping[str, str]
) -> subprocess.Popen[bytes] | None:
    """Start `notify` on a run folder, with the configuration and the log in that folder.

    `None` if that fails.
    """
    command = [
        *(sys.executable, "-m", "orchestrator", "notify", folder.name),
        *("--config", str(folder / "config.yaml"), "--run-dir", str(folder.parent)),
    ]
    try:
        with (folder / "notify.log").open("ab") as log:
            return subprocess.Popen(  # noqa: S603 - this very program
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # a Ctrl-C in the terminal is for the run
            )
    except OSError as failure:
        tell(f"`notify` cannot be started: {failure}")
        return None


def show_report(folder: Path, tell: Callable[[str], None]) -> None:
    """Write the report of a run that has ended, open it if there is a desktop, and tell the user
    where it is, or why there is none.
    """
    path = folder / REPORT_NAME
    try:
        write_report(path, folder)
    except (OrchestratorError, KeyboardInterrupt) as failure:  # the run is over, with its summary
        tell(f"Report: not written: {failure or 'interrupted'}")
        return
    if any(os.environ.get(name) for name in _DESKTOPS):
        with suppress(webbrowser.Error, OSError):
            webbrowser.open(path.resolve().as_uri())
    tell(f"Report: {path}")
