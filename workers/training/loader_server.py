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
import signal
import socket
import stat
import time
from pathlib import Path

from workers.keeper import processes

_TRAINING = os.getppid()

#: Loader processes end some milliseconds after the training.
_REMOVE_S = 1.0
_LOOK_S = 0.05


def _asked_at() -> Path | None:
    """Return the socket on which this process is asked for forks."""
    for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
        with contextlib.suppress(OSError):  # the one of the listing itself is closed by now
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as found:
                path = Path(os.fsdecode(found.getsockname() or ""))
            if path.parent.name.startswith("pymp-"):
                return path
    return None


_ASKED_AT = _asked_at()


def _remove() -> None:
    """Remove what a training that was killed has left; its loader processes may still add to it.

    A training that is itself a fork, such as one of `tune`, shares the folder with the process that
    forked it. What that one listens at stays.
    """
    if _ASKED_AT is None:
        return
    folder, until_s = _ASKED_AT.parent, time.monotonic() + _REMOVE_S
    while folder.exists() and time.monotonic() < until_s:
        for path in _left_in(folder):
            with contextlib.suppress(OSError):
                path.unlink()
        with contextlib.suppress(OSError):
            folder.rmdir()
            return
        time.sleep(_LOOK_S)


def _left_in(folder: Path) -> list[Path]:
    """Return the files of a folder at which no other process listens."""
    # A socket with a name is a line that ends with it.
    lines = Path("/proc/net/unix").read_text(encoding="utf-8", errors="replace").splitlines()
    used = {line.rpartition(" ")[2] for line in lines} - {str(_ASKED_AT)}
    with contextlib.suppress(FileNotFoundError):
        return [path for path in folder.iterdir() if str(path) not in used]
    return []


def _look(*_: object) -> None:
    """End where the training has ended. The kernel also tells the end of one of its threads."""
    if os.getppid() != _TRAINING:
        _remove()
        os._exit(0)


atexit.register(_remove)
signal.signal(signal.SIGHUP, _look)
processes.prctl(processes.PR_SET_PDEATHSIG, signal.SIGHUP, 0, 0, 0)
