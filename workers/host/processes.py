"""Processes of this machine, seen from outside: whether an id still names the same process, and
whether that computes, waits for a CPU, or does nothing.

Reads Linux's /proc and asks NVML; never talks to the process. Does not judge whether a process
hangs (`orchestrator/core/silence.py` does).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pynvml

from workers.keeper.processes import below, start_time
from workers.nvml import queries

#: What `ps` and `doctor` call the engine of a slot; at most 15 bytes.
ENGINE_NAME: Final = "orch-engine"


def is_alive(pid: int, started: str | None) -> bool:
    """Say whether the process with this id is still the one that began then."""
    return started is not None and start_time(pid) == started


#: What starts a worker and should end with it: a raylet that is killed leaves its workers for 20 s
#: and more (Ray 2.60).
_PARENTS: Final = frozenset({"raylet"})


def worker_and_raylet() -> list[tuple[int, str]]:
    """Return this process, and its raylet if it has one, by ids and start times."""
    watched, parent = [os.getpid()], os.getppid()
    with contextlib.suppress(OSError):
        name = Path(f"/proc/{parent}/comm").read_text(encoding="utf-8").strip()
        watched += [parent] if name in _PARENTS else []
    return [(pid, began) for pid in watched if (began := start_time(pid)) is not None]


def oom_kills() -> int:
    """Return how many processes the kernel has killed for want of RAM since it booted."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
        return int(next(line for line in lines if line.startswith("oom_kill ")).split()[1])
    return 0


#: A process that is seen for the first time is looked at twice, so long apart.
_FIRST_LOOK_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """What a process and its children did between two looks at it."""

    interval_s: float
    wanted_s: float
    """Seconds in which its busiest thread ran, or was ready and waited for a CPU: on a full machine
    a thread that computes gets little time and wants all of it."""
    cpu_s: float
    """Seconds in which that thread ran."""
    on_card: bool = False
    """Whether a card computed for it, or, where the driver does not tell for whom, for any process.
    """


@dataclass(frozen=True, slots=True)
class _Look:
    at_s: float
    threads: Mapping[int, tuple[float, float]]
    """Of each thread the seconds that it ran, and that it waited for a CPU."""


@dataclass(slots=True)
class ActivityMeter:
    """Looks at processes again and again, and remembers the look before."""

    _before: dict[int, _Look] = field(default_factory=dict)
    _card_samples_from_us: int = 0

    def look(self, pids: Mapping[int, bool]) -> dict[int, Activity]:
        """Return what the processes did since the look before; those that are gone are left out.

        A process whose value in `pids` is true is also looked for on this machine's cards.
        """
        fresh = {pid: _look(pid) for pid in pids if pid not in self._before}
        if fresh:
            time.sleep(_FIRST_LOOK_S)
        before = {**self._before, **fresh}
        now = {pid: _look(pid) for pid in pids}
        self._before = now
        on_cards = self._on_cards([pid for pid, has_card in pids.items() if has_card])
        return {
            pid: _between(before[pid], look, on_card=pid in on_cards)
            for pid, look in now.items()
            if look.threads
        }

    def _on_cards(self, pids: list[int]) -> set[int]:
        """Return for which of the processes a card computed since the last call."""
        if not pids:
            return set()
        computed: set[int] = set()
        since_us, self._card_samples_from_us = self._card_samples_from_us, time.time_ns() // 1000
        with contextlib.suppress(pynvml.NVMLError), queries.opened():
            for index in range(pynvml.nvmlDeviceGetCount()):
                computed |= _on_card(queries.find_card(str(index)), pids, since_us)
        return computed


def _on_card(card: queries.Card, pids: list[int], since_us: int) -> set[int]:
    samples = card.ask("nvmlDeviceGetProcessUtilization", since_us)
    if samples:
        return {sample.pid for sample in samples if sample.smUtil > 0} & set(pids)
    # Containers and WSL2 hide whose the work is, and a card that idles has no samples.
    rates = card.ask("nvmlDeviceGetUtilizationRates")
    return set(pids) if rates is not None and rates.gpu > 0 else set()


def _look(pid: int) -> _Look:
    threads = {
        tid: times
        for process in (pid, *below(pid))
        for tid in _numbers(f"/proc/{process}/task")
        if (times := _times(process, tid))
    }
    return _Look(time.monotonic(), threads)


def _between(before: _Look, now: _Look, *, on_card: bool) -> Activity:
    used = [
        (
            ran_s - before.threads.get(tid, (0.0, 0.0))[0],
            waited_s - before.threads.get(tid, (0.0, 0.0))[1],
        )
        for tid, (ran_s, waited_s) in now.threads.items()
    ]
    ran_s, waited_s = max(used, key=sum)
    return Activity(
        interval_s=now.at_s - before.at_s, wanted_s=ran_s + waited_s, cpu_s=ran_s, on_card=on_card
    )


def _times(pid: int, tid: int) -> tuple[float, float] | None:
    """Return the seconds that a thread ran and waited for a CPU (Linux,
    Documentation/scheduler/sched-stats.rst).
    """
    with contextlib.suppress(OSError, ValueError):
        ran_ns, waited_ns, _ = (
            Path(f"/proc/{pid}/task/{tid}/schedstat").read_text(encoding="ascii").split()
        )
        return int(ran_ns) / 1e9, int(waited_ns) / 1e9
    with contextlib.suppress(OSError, ValueError, IndexError):
        # A kernel without CONFIG_SCHED_INFO: what it ran is known, what it waited is not.
        fields = (
            Path(f"/proc/{pid}/task/{tid}/stat")
            .read_text(encoding="utf-8", errors="replace")
            .rpartition(")")[2]
        )
        user_ticks, system_ticks = fields.split()[11:13]
        return (int(user_ticks) + int(system_ticks)) / os.sysconf("SC_CLK_TCK"), 0.0
    return None


def _numbers(folder: str) -> list[int]:
    with contextlib.suppress(OSError):
        # A Path for each thread costs more than the look.
        return [int(name) for name in os.listdir(folder)]  # noqa: PTH208
    return []
