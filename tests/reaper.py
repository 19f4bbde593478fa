"""Ends all processes of a test session after the session has ended in any way.

pytest-timeout ends the process of the tests at once, so no fixture cleans up after a test that
hangs. A separate process waits for the end of the session, and finds every process of the tests by
a mark in its environment.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

MARK = "ORCH_TEST_SESSION"

#: Time for processes to clean up before they are killed. Resource trackers get the same time again,
#: to remove the semaphores of the killed processes.
PATIENCE_S = 15.0

_DEV_SHM = b"/dev/shm/"


class Reaper:
    """The session's side: names the folders that the other process must remove."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def remove_at_the_end(self, folder: Path) -> None:
        """Name a folder that must not outlive the session."""
        assert self._process.stdin is not None
        self._process.stdin.write(os.fsencode(folder) + b"\n")
        self._process.stdin.flush()


@contextlib.contextmanager
def reaper(patience_s: float = PATIENCE_S) -> Iterator[Reaper]:
    """Mark all processes that this process starts from now on. They are ended with this process or
    with the context.
    """
    mark = f"{os.getpid()}-{time.time_ns()}"
    before = os.environ.pop(MARK, None)
    command = [sys.executable, "-I", "-S", __file__, mark, str(patience_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True) as process:
        os.environ[MARK] = mark
        try:
            yield Reaper(process)
        finally:
            os.environ.pop(MARK)
            if before is not None:
                os.environ[MARK] = before


def _shared_files(pid: int) -> set[bytes]:
    """Return the files in /dev/shm that a process has mapped."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_bytes().splitlines()
        paths = {_DEV_SHM + line.partition(_DEV_SHM)[2] for line in lines if _DEV_SHM in line}
        return {path for path in paths if not path.endswith(b"(deleted)")}
    return set()


def _reap(mark: str, patience_s: float) -> None:
    """End every process with the mark: topmost processes get SIGTERM, and all that remain after
    `patience_s` are killed.
    """
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from workers.keeper import processes  # needs only the standard library

    shared: set[bytes] = set()
    members = processes.marked(MARK, mark)
    parents = {pid: (processes.stat_fields(pid) or ["", "0"])[1] for pid in members}
    on_top = (pid for pid, parent in parents.items() if int(parent) not in members)
    processes.send(on_top, signal.SIGTERM)
    deadline_s = time.monotonic() + patience_s
    while members := processes.marked(MARK, mark):
        shared = shared.union(*map(_shared_files, members))
        if (late_s := time.monotonic() - deadline_s) >= 0:
            late = [it for it in members if late_s > patience_s or not processes.tidies(it)]
            processes.send(late, signal.SIGKILL)
        time.sleep(0.1)
    for path in shared:
        with contextlib.suppress(OSError):
            Path(os.fsdecode(path)).unlink()


def main() -> None:
    """Wait for the end of standard input, which is the end of the session."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    folders = [line.rstrip(b"\n") for line in sys.stdin.buffer]
    _reap(sys.argv[1], float(sys.argv[2]))
    for folder in folders:
        shutil.rmtree(os.fsdecode(folder), ignore_errors=True)


if __name__ == "__main__":
    main()
