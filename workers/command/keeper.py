"""Starts one program and leaves nothing of it behind: a script of its own, for the standard library
alone.

Two processes, the guard and its child the keeper; the program is the keeper's child, in a session
of its own. Both adopt what loses its parent below them, so that a process of the program is found
whatever it does to its session. The keeper ends all of them when the program has ended, when it is
told to, and when the worker, a process that the worker depends on, or the guard is gone. The guard
ends all of them when the keeper is gone; the kernel ends the program itself with the keeper.

Neither is a child of the worker: Ray has a worker that is told to end kill its children first.
Where the guard and the keeper are killed at once, only the program itself ends with them; the
worker, or the job's next one, ends the rest (`engine.py`). Linux only.

Standard input: one line of JSON (`argv`, `env`, `cwd`, `log`, `watch`: ids of processes with their
start times, `grace_s`, `lease_s`), later lines `stop SECONDS`, and others that say that the head
still sends slices; its end means that the worker is gone. Standard output: lines of JSON,
`{"started": pid, "keeper": pid}` or `{"refused": text}`, then `{"ended": wait status, "left": n}`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import select
import signal
import subprocess
import sys
import time
from typing import Any

#: Of prctl(2) (linux/prctl.h).
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36

_PRCTL = ctypes.CDLL(None, use_errno=True).prctl

#: What `ps` calls the guard and the keeper; at most 15 bytes.
NAME = "job-keeper"

#: Between two looks at what is watched.
_POLL_S = 0.2

#: Between SIGTERM and SIGKILL, at most, where the worker is gone; and what a program leaves running
#: has so long to end after it.
_ALONE_GRACE_S = 5.0
_LEFT_GRACE_S = 2.0

#: Added to the log of a program whose worker was sent no slice for its lease.
_UNHEARD = "orchestrator: no word from the head for {:.0f} s, in which the job may have begun on "
_UNHEARD += "another PC: ended\n"

#: By guard and keeper; the program gets them as usual.
_IGNORED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE)

_STARTTIME_FIELD = 19  # 22nd of /proc/PID/stat (man 5 proc), counted from the third


def _stat(pid: int) -> list[str] | None:
    """Return the fields of a process from its state on; `None` if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def _is_alive(pid: int, started: str) -> bool:
    """Say whether an id still names the process that began then."""
    fields = _stat(pid)
    return fields is not None and fields[0] not in "ZX" and fields[_STARTTIME_FIELD] == started


def below(root: int) -> list[int]:
    """Return the live descendants of a process."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):  # noqa: PTH208
        fields = _stat(int(name)) if name.isdecimal() else None
        if fields is not None and fields[0] not in "ZX":
            children.setdefault(int(fields[1]), []).append(int(name))
    found, waiting = [], [root]
    while waiting:
        waiting.extend(more := children.get(waiting.pop(), []))
        found.extend(more)
    return found


def _send(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
            if number == signal.SIGTERM:
                os.kill(pid, signal.SIGCONT)  # a stopped process would not see it


def _reap() -> dict[int, int]:
    """Take the wait status of each child that has ended."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            ended[child[0]] = child[1]
    return ended


def _end_all(grace_s: float) -> int:
    """End whatever is below this process; return how many were there."""
    left, deadline_s = below(os.getpid()), time.monotonic() + grace_s
    count = len(left)
    _send(left, signal.SIGTERM)
    while left := below(os.getpid()):
        if time.monotonic() >= deadline_s:
            _send(left, signal.SIGKILL)
        time.sleep(0.02)
        _reap()
    return count


def _start(task: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start the program in a session of its own; it ends with this process."""
    if (why := _why_not(task)) is not None:
        raise OSError(errno.ENOEXEC, why)
    keeper = os.getpid()

    def prepare() -> None:
        for number in _IGNORED:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        _PRCTL(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != keeper:  # it ended before it was asked for
            os._exit(os.EX_UNAVAILABLE)

    log = os.open(task["log"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    return subprocess.Popen(  # noqa: S603 - what it is for
        task["argv"],
        env=task["env"],
        cwd=task["cwd"],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        start_new_session=True,
        preexec_fn=prepare,  # noqa: PLW1509 - this process has one thread
    )


def _with_sleep_s() -> float:
    """Return seconds that count while the PC is suspended, too."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _tell(**news: object) -> None:
    with contextlib.suppress(OSError):  # the worker is gone
        os.write(1, json.dumps(news).encode() + b"\n")


def _why_not(task: dict[str, Any]) -> str | None:
    """Say that a script has the line ends of Windows: the kernel, and `env`, do not say it."""
    program = task["argv"][0]
    for folder in [""] if "/" in program else os.get_exec_path(task["env"]):
        path = os.path.join(task["cwd"], folder, program)  # noqa: PTH118
        with contextlib.suppress(OSError), open(path, "rb") as file:  # noqa: PTH123
            first = file.readline(4096)
            if not (first.startswith(b"#!") and first.endswith(b"\r\n")):
                return None
            return (
                f"the line {first.strip().decode(errors='replace')} of {path} ends with a carriage "
                f"return, as on Windows; type: sed -i 's/\\r$//' {path}"
            )
    return None


def _keep(guard: int) -> None:
    """Be the keeper, from the first line of standard input to the end of all processes."""
    text = b""
    while b"\n" not in text:
        if not (more := os.read(0, 65536)):
            return
        text += more
    line, _, orders = text.partition(b"\n")
    task = json.loads(line)
    try:
        # Kept: it would take the program's status itself when it is dropped.
        process = _start(task)
    except OSError as error:
        where = "" if error.filename is None else f": {error.filename}"
        _tell(refused=f"{error.strerror}{where}"[:500])
        return
    except (ValueError, subprocess.SubprocessError) as error:
        _tell(refused=f"{type(error).__name__}: {error}"[:500])
        return
    program = process.pid
    _tell(started=program, keeper=os.getpid())
    status, is_open, is_alone, deadline_s = None, True, False, float("inf")
    heard_s, lease_s = _with_sleep_s(), task["lease_s"] or float("inf")
    while status is None:
        if select.select([0] if is_open else [], [], [], _POLL_S)[0]:
            more = os.read(0, 4096)
            is_open, orders, heard_s = bool(more), orders + more, _with_sleep_s()
        *lines, orders = orders.split(b"\n")
        status = _reap().get(program)
        is_unheard = _with_sleep_s() - heard_s > lease_s
        if is_unheard and not is_alone:
            with contextlib.suppress(OSError), open(task["log"], "a", encoding="utf-8") as log:  # noqa: PTH123
                log.write(_UNHEARD.format(lease_s))
        is_gone = (
            is_unheard
            or not is_open
            or os.getppid() != guard
            or not all(_is_alive(pid, began) for pid, began in task["watch"])
        )
        grace_s = None
        if is_gone and not is_alone:
            is_alone, grace_s = True, min(_ALONE_GRACE_S, float(task["grace_s"]))
        elif stops := [line for line in lines if line.startswith(b"stop ")]:
            grace_s = float(stops[-1][5:])
        if grace_s is not None and status is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(program, signal.SIGTERM)
                os.killpg(program, signal.SIGCONT)
            deadline_s = min(deadline_s, time.monotonic() + grace_s)
        if time.monotonic() >= deadline_s:
            _send(below(os.getpid()), signal.SIGKILL)
    _tell(ended=status, left=_end_all(min(_LEFT_GRACE_S, float(task["grace_s"]))))


def main() -> None:
    """Leave the worker's children, then be the guard of a keeper."""
    if os.fork():
        os._exit(0)
    os.setsid()
    _PRCTL(_PR_SET_NAME, NAME.encode(), 0, 0, 0)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    # A worker of Ray may ignore it, which its children inherit: how one ends would be lost.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _PRCTL(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    guard = os.getpid()
    keeper = os.fork()
    if keeper == 0:
        _PRCTL(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            _keep(guard)
        finally:
            _end_all(0.0)
            os._exit(0)
    os.close(0)
    os.close(1)
    while os.waitpid(-1, 0)[0] != keeper:
        pass
    _end_all(0.0)


if __name__ == "__main__":
    # A folder of the worker must not stay in use, nor may what it has imported matter.
    os.chdir("/")
    main()
    sys.exit(0)
