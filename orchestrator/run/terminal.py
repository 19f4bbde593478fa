"""The user's terminal: Ctrl-C as a question, and the product's own output apart from what its
libraries print.

Ray writes multi-line warnings straight to file descriptors 1 and 2 of the driver, whatever its
logging settings. While a run lasts, both lead to a log file; what the product itself shows goes to
copies of the real ones. Does not stop or format anything.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TextIO


@dataclass(frozen=True, slots=True)
class Screen:
    """The user's real standard output and error."""

    out: TextIO
    err: TextIO


@contextlib.contextmanager
def own_screen(log_path: Path | None) -> Iterator[Screen]:
    """Append what is written to file descriptors 1 and 2 to `log_path` (`None` drops it), and yield
    the real ones.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    sink = os.open(os.devnull, os.O_WRONLY) if log_path is None else os.open(log_path, flags, 0o600)
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
    """Turns the first Ctrl-C (or SIGTERM, or a closed terminal) into a question the run asks; the
    second raises.

    Any further one is ignored, also after `restore`: the command ends anyway, and must not be
    killed while it says how.
    """

    _NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.asked = self._has_raised = False
        self._before = {number: signal.getsignal(number) for number in self._NUMBERS}

    def install(self) -> None:
        """Take the signals.

        To be called again after Ray has connected, which takes SIGTERM for itself.
        """
        for number in self._NUMBERS:
            # `nohup` has this ignored, and means that the run outlives the terminal.
            if self._before[number] is not signal.SIG_IGN:
                signal.signal(number, self._ask)

    def restore(self) -> None:
        """Restore the previous handlers, unless the command is to end."""
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
