"""Finds processes of this PC in /proc, signals and ends them. Standard library, Linux only.

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

#: Options of prctl(2) (linux/prctl.h).
PR_SET_PDEATHSIG: Final = 1
PR_SET_NAME: Final = 15
PR_SET_CHILD_SUBREAPER: Final = 36

_libc: Final = ctypes.CDLL(None, use_errno=True)
prctl: Final = _libc.prctl

#: Index of the 22nd field of /proc/PID/stat (man 5 proc), counted from the state.
_STARTTIME_FIELD: Final = 19

#: Pause between two checks of processes that are being ended.
_POLL_S: Final = 0.01

#: Python's processes that clean up after others have ended, and the time they get. If killed, the
#: first leaves semaphores and shared memory in /dev/shm, and the second the folder of its sockets
#: (`workers/training/loader_server.py`). With a load of 12 on two cores 1 s was too short.
_TIDIERS: Final = (b"multiprocessing.resource_tracker", b"multiprocessing.forkserver")
_TIDYING_S: Final = 4.0


def stat_fields(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state on; `None` if the process is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123
        return file.read().rpartition(b")")[2].decode("ascii").split()
    return None


def start_time(pid: int) -> str | None:
    """Return the start time of a process in kernel ticks; `None` if it is gone or a zombie."""
    fields = stat_fields(pid)
    return None if fields is None or fields[0] in "ZX" else fields[_STARTTIME_FIELD]


def name_of(pid: int) -> str:
    """Return the name of a process, cut to 15 characters; "" if it is gone."""
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
    """Send a signal to each live process; with SIGTERM also continue stopped ones."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
            if number == signal.SIGTERM:
                os.kill(pid, signal.SIGCONT)


def send_to_main_thread(pid: int, number: int) -> None:
    """Send a signal to the main thread of a process. Raise `OSError` if it is gone.

    In a stopped process, a signal to the whole process is handled by the first thread that wakes
    up. That may be a thread of a library, which has no Python stack to print.
    """
    if (tgkill := getattr(_libc, "tgkill", None)) is None:  # glibc before 2.30
        os.kill(pid, number)
    elif tgkill(pid, pid, number) != 0:
        raise ProcessLookupError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def tidies(pid: int) -> bool:
    """Return whether a process only cleans up after others, and ends by itself after them."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:  # noqa: PTH123
        words = file.read()
        return any(tidier in words for tidier in _TIDIERS)
    return False


def end_all(find: Callable[[], Iterable[int]], grace_s: float) -> int:
    """End the processes that `find` returns until there are none: SIGTERM, then SIGKILL after
    `grace_s`.

    Processes that only clean up get 4 s more. Reaps the children of this process. Returns how many
    processes there were at first.
    """
    left, deadline_s = list(find()), time.monotonic() + grace_s
    count = len(left)
    if grace_s > 0:
        send(left, signal.SIGTERM)
    while left:
        late_s = time.monotonic() - deadline_s
        if late_s >= 0:
            send([pid for pid in left if late_s > _TIDYING_S or not tidies(pid)], signal.SIGKILL)
        time.sleep(_POLL_S)
        reap()
        left = list(find())
    return count


def reap() -> dict[int, int]:
    """Reap all children that have ended; return their wait statuses by process id."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            ended[child[0]] = child[1]
    return ended


def _all() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())  # noqa: PTH208
