"""Cleans up after a rehearsal whose head was killed. Runs as a process of its own; standard library only.

The kernel ends raylets and GCS with the head, and workers end with their raylet. Ray's agents do not: they spend a
minute on telling a GCS that is gone. So the head tells this process who they are, over a pipe, and when the pipe
closes without a farewell, they are ended by process id and the rehearsal's folder is removed.

    python janitor.py FOLDER        standard input: lines `PID STARTTIME`, and `bye` from a head that ends well
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path

#: The 22nd field of /proc/PID/stat (man 5 proc), the 20th behind the name in parentheses.
_STARTTIME_FIELD = 19


def start_time(pid: int) -> str | None:
    """Return when the process began, in the kernel's ticks; with the pid it names a process for ever."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[_STARTTIME_FIELD]


def main(folder: str) -> None:
    """Wait for the head to end, and clean up if it did not do so itself."""
    known: dict[int, str] = {}
    for line in sys.stdin:
        if line.strip() == "bye":
            return
        pid, _, began = line.strip().partition(" ")
        known[int(pid)] = began
    for pid, began in known.items():
        if start_time(pid) == began:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
