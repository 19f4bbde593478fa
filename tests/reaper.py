"""Ends what a test session has started when the session itself has ended, however it ended.

pytest-timeout ends the process of the tests on the spot, so no fixture cleans up after a test that
hangs. A process of its own waits for that end: every process below the tests carries a mark in its
environment, and is found by it.
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

#: How long processes have to clean up after themselves before they are killed.
PATIENCE_S = 15.0

_DEV_SHM = b"/dev/shm/"


class Reaper:
    """The session's end: tells the process which folders go with it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def remove_at_the_end(self, folder: Path) -> None:
        """Name a folder that must not outlive the session."""
        assert self._process.stdin is not None
        self._process.stdin.write(os.fsencode(folder) + b"\n")
        self._process.stdin.flush()


@contextlib.contextmanager
def reaper(patience_s: float = PATIENCE_S) -> Iterator[Reaper]:
    """Mark what this process starts from now on, and have it ended with this process or with the
    context.
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


def _members(mark: bytes) -> dict[int, int]:
    """Return the processes with this mark, each with its parent."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"\0" + mark + b"\0" in b"\0" + (folder / "environ").read_bytes():
                found[int(folder.name)] = int(
                    (folder / "stat").read_text().rpartition(")")[2].split()[1]
                )
    return found


def _shared_files(pid: int) -> set[bytes]:
    """Return the files in /dev/shm that a process has mapped."""
    with contextlib.suppress(OSError):
        lines = Path(f"/proc/{pid}/maps").read_bytes().splitlines()
        paths = {_DEV_SHM + line.partition(_DEV_SHM)[2] for line in lines if _DEV_SHM in line}
        return {path for path in paths if not path.endswith(b"(deleted)")}
    return set()


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _reap(mark: bytes, patience_s: float) -> None:
    """End every process with the mark: those on top are asked, and what is left after a while is
    killed.
    """
    shared: set[bytes] = set()
    members = _members(mark)
    for pid, parent in members.items():
        if parent not in members:
            _send(pid, signal.SIGTERM)
            _send(pid, signal.SIGCONT)
    deadline_s = time.monotonic() + patience_s
    while members := _members(mark):
        for pid in members:
            shared |= _shared_files(pid)
            if time.monotonic() >= deadline_s:
                _send(pid, signal.SIGKILL)
        time.sleep(0.1)
    for path in shared:
        with contextlib.suppress(OSError):
            Path(os.fsdecode(path)).unlink()


def main() -> None:
    """Wait for the end of standard input, which is the end of the session."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    folders = [line.rstrip(b"\n") for line in sys.stdin.buffer]
    _reap(f"{MARK}={sys.argv[1]}".encode(), float(sys.argv[2]))
    for folder in folders:
        shutil.rmtree(os.fsdecode(folder), ignore_errors=True)


if __name__ == "__main__":
    main()
