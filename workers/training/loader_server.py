"""Imported first by the process from which torch's loader processes are forked: it ends with the
training.

Python has it stay while one of its forks lives, and torch has each fork stay while it lives: a
training that was killed would leave them all. Imports no torch: that takes seconds, in which the
training may be killed, too. Not to be imported by any other process.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import signal
import socket
import stat
import time
from pathlib import Path

from workers.keeper import processes

_TRAINING = os.getppid()

#: Loader processes end some milliseconds after the training.
_REMOVE_S = 1.0


def _folder() -> Path | None:
    """Return the folder of the socket on which this process is asked for forks."""
    for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
        with contextlib.suppress(OSError):  # the one of the listing itself is closed by now
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as found:
                folder = Path(os.fsdecode(found.getsockname() or "")).parent
            if folder.name.startswith("pymp-"):
                return folder
    return None


_FOLDER = _folder()


def _remove() -> None:
    """Remove what a training that was killed has left; its loader processes may still add to it."""
    until_s = time.monotonic() + _REMOVE_S
    while _FOLDER is not None and _FOLDER.exists() and time.monotonic() < until_s:
        shutil.rmtree(_FOLDER, ignore_errors=True)


def _look(*_: object) -> None:
    """End where the training has ended. The kernel also tells the end of one of its threads."""
    if os.getppid() != _TRAINING:
        _remove()
        os._exit(0)


atexit.register(_remove)
signal.signal(signal.SIGHUP, _look)
processes.prctl(processes.PR_SET_PDEATHSIG, signal.SIGHUP, 0, 0, 0)
