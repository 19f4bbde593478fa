"""Whether a recorded process id still names the same process.

Uses Linux's /proc; does not talk to the process.
"""

from __future__ import annotations

from pathlib import Path

#: The 22nd field of /proc/PID/stat (man 5 proc), the 20th behind the name in parentheses.
_STARTTIME_FIELD = 19


def start_time(pid: int) -> str | None:
    """Return when a process began, in the kernel's ticks; `None` if it is gone.

    Unique together with the pid.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in {"Z", "X"} else fields[_STARTTIME_FIELD - 1]


def is_alive(pid: int, started: str | None) -> bool:
    """Say whether the process with this id is still the one that began then."""
    return started is not None and start_time(pid) == started
