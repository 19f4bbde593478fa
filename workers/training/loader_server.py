"""Imported first by the fork server of torch's loader processes: ends it with the training.

Python keeps a fork server while one of its forks lives, and torch keeps each fork while the server
lives: a killed training would leave them all. Does not import torch: that takes seconds, in which
the training may be killed, too. No other process may import this module.
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

#: How long (seconds) to wait for loader processes, which end some milliseconds after the training.
_REMOVE_TIMEOUT_S = 1.0


def _folder() -> Path | None:
    """Return the temporary folder with the socket of this fork server; `None`: it was not found."""
    for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
        with contextlib.suppress(OSError):  # the descriptor of `listdir` is closed already
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            with socket.socket(fileno=os.dup(number)) as found:
                folder = Path(os.fsdecode(found.getsockname() or "")).parent
            if folder.name.startswith("pymp-"):
                return folder
    return None


_FOLDER = _folder()


def _remove() -> None:
    """Remove the temporary folder of a killed training; loader processes may still write to it."""
    until_s = time.monotonic() + _REMOVE_TIMEOUT_S
    while _FOLDER is not None and _FOLDER.exists() and time.monotonic() < until_s:
        shutil.rmtree(_FOLDER, ignore_errors=True)


def _end_without_training(*_: object) -> None:
    """Exit if the training has ended. The kernel also sends this signal when one of its threads
    ends.
    """
    if os.getppid() != _TRAINING:
        _remove()
        os._exit(0)


atexit.register(_remove)
signal.signal(signal.SIGHUP, _end_without_training)
processes.prctl(processes.PR_SET_PDEATHSIG, signal.SIGHUP, 0, 0, 0)
