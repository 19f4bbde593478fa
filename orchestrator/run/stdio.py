"""Separates the product's own output from what its libraries print.

Ray writes multi-line warnings straight to file descriptors 1 and 2 of the driver, whatever its logging settings.
While a run lasts, both lead to a log file; what the product itself shows goes to copies of the real ones. Does not
format anything.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO


@dataclass(frozen=True, slots=True)
class Screen:
    """The user's real standard output and error."""

    out: TextIO
    err: TextIO


@contextlib.contextmanager
def shared_screen() -> Iterator[Screen]:
    """Leave standard output and error as they are, for a debugger that talks there."""
    yield Screen(out=sys.stdout, err=sys.stderr)


@contextlib.contextmanager
def own_screen(log_path: Path | None) -> Iterator[Screen]:
    """Send everything written to file descriptors 1 and 2 into `log_path`, and yield the real ones.

    Args:
        log_path: Appended to; `None` drops what would be logged.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    saved_out, saved_err = os.dup(1), os.dup(2)
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
    sink = os.open(os.devnull, os.O_WRONLY) if log_path is None else os.open(log_path, flags, 0o600)
    os.dup2(sink, 1)
    os.dup2(sink, 2)
    os.close(sink)
    out = os.fdopen(os.dup(saved_out), "w", encoding=sys.stdout.encoding or "utf-8", errors="replace", buffering=1)
    err = os.fdopen(os.dup(saved_err), "w", encoding=sys.stderr.encoding or "utf-8", errors="replace", buffering=1)
    try:
        yield Screen(out=out, err=err)
    finally:
        for stream in (out, err):
            with contextlib.suppress(OSError):  # the reader may be gone
                stream.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(saved_out, 1)
        os.dup2(saved_err, 2)
        os.close(saved_out)
        os.close(saved_err)
