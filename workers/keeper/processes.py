"""Processes of this PC, found in /proc and ended. Standard library alone, and Linux only.

Does not start processes, and does not judge whether one hangs.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

#: Of prctl(2) (linux/prctl.h).
PR_SET_PDEATHSIG: Final = 1
PR_SET_NAME: Final = 15
PR_SET_CHILD_SUBREAPER: Final = 36

_libc: Final = ctypes.CDLL(None, use_errno=True)
prctl: Final = _libc.prctl

#: The 22nd field of /proc/PID/stat (man 5 proc), counted from the state on.
_STARTTIME_FIELD: Final = 19

#: Between two looks at what was told to end.
_LOOK_S: Final = 0.01

#: Python's processes that remove what others leave when they have ended, and how long they may
#: take. Killed with them, one would leave semaphores and shared memory in /dev/shm, and the other
#: the folder of its sockets (`workers/training/loader_server.py`). With a load of 12 on two cores
#: 1 s was too short.
_TIDIERS: Final = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")
_TIDYING_S: Final = 4.0


def stat_fields(pid: int) -> list[str] | None:
    """Return the fields of a process from its state on; `None` if it is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
        return file.read().rpartition(b")")[2].decode("ascii").split()
    return None


def start_time(pid: int) -> str | None:
    """Return when a process began, in the kernel's ticks; `None` if it is gone or a zombie."""
    fields = stat_fields(pid)
    return None if fields is None or fields[0] in "ZX" else fields[_STARTTIME_FIELD]


def name_of(pid: int) -> str:
    """Return what a process is called, cut to 15 characters; nothing once it is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/comm", "rb") as file:  # noqa: PTH123
        return os.fsdecode(file.read()).rstrip("\n")
    return ""


def below(root: int) -> list[int]:
    """Return the live descendants of a process."""
    children: dict[int, list[int]] = {}
    for pid in _all():
        fields = stat_fields(pid)
        if fields is not None and fields[0] not in "ZX":
            children.setdefault(int(fields[1]), []).append(pid)
    found, waiting = [], [root]
    while waiting:
        waiting.extend(more := children.get(waiting.pop(), []))
        found.extend(more)
    return found


def children(parent: int) -> list[int]:
    """Return the children of the main thread of a process, zombies too."""
    with contextlib.suppress(OSError), open(f"/proc/{parent}/task/{parent}/children") as file:  # noqa: PTH123
        return [int(word) for word in file.read().split()]
    return []


def marked(name: str, value: str) -> list[int]:
    """Return the other live processes whose environment has `name` with this value."""
    wanted, found = os.fsencode(f"{name}={value}"), []
    for pid in _all():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123
            if pid != os.getpid() and wanted in file.read().split(b"\0"):
                found.append(pid)
    return [pid for pid in found if start_time(pid) is not None]


def send(pids: Iterable[int], number: int) -> None:
    """Send a signal to each process that is still there; a stopped one is continued by SIGTERM."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
            if number == signal.SIGTERM:
                os.kill(pid, signal.SIGCONT)


def send_to_main_thread(pid: int, number: int) -> None:
    """Send a signal to the thread of a process that runs Python. `OSError` if it is gone.

    What is sent to all of a process that is stopped is taken by the first of its threads that wakes
    up, and one of a library has nothing to tell.
    """
    if (tgkill := getattr(_libc, "tgkill", None)) is None:  # glibc before 2.30
        os.kill(pid, number)
    elif tgkill(pid, pid, number) != 0:
        raise ProcessLookupError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def tidies(pid: int) -> bool:
    """Say whether a process only removes what others leave, and ends by itself after them."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123
        words = file.read()
        return any(tidier in words for tidier in _TIDIERS)
    return False


def end_all(find: Callable[[], Iterable[int]], grace_s: float) -> int:
    """End what `find` returns until it returns nothing, by SIGTERM and after `grace_s` by SIGKILL.

    What tidies up has some seconds more. Return how many there were at first. Reaps the children of
    this process.
    """
    left, deadline_s = list(find()), time.monotonic() + grace_s
    count = len(left)
    if grace_s > 0:
        send(left, signal.SIGTERM)
    while left:
        late_s = time.monotonic() - deadline_s
        if late_s >= 0:
            send([pid for pid in left if late_s > _TIDYING_S or not tidies(pid)], signal.SIGKILL)
        time.sleep(_LOOK_S)
        reap()
        left = list(find())
    return count


def reap() -> dict[int, int]:
    """Take the wait status of each child that has ended."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            ended[child[0]] = child[1]
    return ended


def _all() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())  # noqa: PTH208
