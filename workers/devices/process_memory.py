"""What the kernel counts as the memory of this process, now and at its highest.

Linux only; decides nothing.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from workers.messages import IncompatibleError

_STATUS: Final = Path("/proc/self/status")
_CLEAR: Final = Path("/proc/self/clear_refs")

#: Makes the highest resident size the present one (man 5 proc, since Linux 4.0).
_RESET_HIGHEST: Final = "5"

#: In the order in which the kernel writes them (fs/proc/task_mmu.c, task_mem).
_LINES: Final = re.compile(
    r"VmHWM:\s*(\d+) kB\nVmRSS:\s*(\d+) kB\nRssAnon:.*\nRssFile:\s*(\d+) kB\nRssShmem:\s*(\d+) "
    r"kB\nVmData:\s*(\d+) kB"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """One look; bytes.

    Pages of files, such as a library's code, and shared memory are not counted: a cap does not hold
    them either.
    """

    data_bytes: int
    """Private writable memory, written or not, as RLIMIT_DATA counts it (VmData)."""
    resident_bytes: int
    """In RAM (VmRSS less RssFile and RssShmem)."""
    highest_bytes: int
    """The most that was in RAM at once since the process began or `reset_highest`.

    VmHWM, less what files and shared memory take now.
    """


def process_memory() -> ProcessMemory:
    """Look; takes some 20 microseconds.

    Raises:
        IncompatibleError: The kernel does not say.
    """
    try:
        status = _STATUS.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise IncompatibleError(
            f"the CPU device needs Linux's {_STATUS} to cap memory: {error}"
        ) from error
    found = _LINES.search(status)
    if found is None:
        raise IncompatibleError(
            f"the CPU device needs VmHWM to VmData in {_STATUS} (Linux 4.5) to cap memory"
        )
    highest, resident, file, shared, data = (1024 * int(kib) for kib in found.groups())
    other = file + shared
    return ProcessMemory(
        data_bytes=data, resident_bytes=resident - other, highest_bytes=highest - other
    )


def reset_highest() -> None:
    """Make the highest resident size the present one.

    An OSError where `can_reset_highest` said no.
    """
    _CLEAR.write_text(_RESET_HIGHEST, encoding="ascii")


def can_reset_highest() -> bool:
    """Say whether the kernel lets this process reset it: not every container's does."""
    try:
        reset_highest()
    except OSError:
        return False
    return True
