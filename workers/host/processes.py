"""Observes processes of this machine from outside: whether an id still names the same process, and
whether that process computes, waits for a CPU, or does nothing.

Reads Linux's /proc and queries NVML; never communicates with the process. Does not judge whether a
process hangs (`orchestrator/core/silence.py` does).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil
import pynvml

from workers.keeper.processes import below, name_of, start_time
from workers.messages import Quiet
from workers.nvml import queries

#: Name of the engine of a slot in `ps` and `doctor`; at most 15 bytes.
ENGINE_NAME: Final = "orch-engine"


def is_alive(pid: int, started: str | None) -> bool:
    """Return whether the process with this id is still the one with this start time."""
    return started is not None and start_time(pid) == started


def worker_and_raylet() -> list[tuple[int, str]]:
    """Return ids and start times of this process, and of its raylet if it has one.

    The raylet starts a worker and should end with it: a killed raylet leaves its workers alive for
    20 s and more (Ray 2.60).
    """
    watched, parent = [os.getpid()], os.getppid()
    watched += [parent] if name_of(parent) == "raylet" else []
    return [(pid, began) for pid in watched if (began := start_time(pid)) is not None]


def oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of RAM since it booted."""
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
        return int(next(line for line in lines if line.startswith("oom_kill ")).split()[1])
    return 0


#: The first measurement of a process needs two samples, at this interval.
_FIRST_INTERVAL_S: Final = 0.1

#: A thread that computes wants a CPU all the time; one that a timer wakes wants one for less than
#: this share of the time, even on a full machine.
_ACTIVE_SHARE: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """The activity of a process and its children between two samples."""

    interval_s: float
    wanted_s: float
    """Seconds in which its busiest thread ran, or was ready and waited for a CPU. On a full machine
    a thread that computes gets little CPU time, but wants all of it.
    """
    cpu_s: float
    """Seconds in which that thread ran."""
    on_card: bool = False
    """Whether a card computed for the process, or, if the driver does not report for which process,
    for any one.
    """


class SilenceMeter:
    """Measures repeatedly whether a process that sends no status is active."""

    def __init__(self, *, on_card: bool) -> None:
        """`on_card`: the process may compute on this machine's cards."""
        self._on_card = on_card
        self.reset()

    def reset(self) -> None:
        """Start again: the process has sent a status, or there is another process."""
        self._since_s = time.monotonic()
        self._active_at_s: float | None = None
        self._computed_s = 0.0
        self._before: tuple[float, Mapping[int, tuple[float, float]]] | None = None
        """The last sample, and its monotonic time."""
        self._card_samples_from_us = time.time_ns() // 1000

    def measure(self, pid: int | None, after_s: float) -> Quiet | None:
        """Return the activity of a process that has sent no status for `after_s`; without an id it
        counts as idle.
        """
        seconds = time.monotonic() - self._since_s
        if seconds < after_s:
            return None
        activity = None if pid is None else self.activity(pid)
        if activity is not None and (
            activity.on_card or activity.wanted_s > _ACTIVE_SHARE * activity.interval_s
        ):
            self._active_at_s = time.monotonic()
            self._computed_s += max(
                activity.cpu_s, activity.interval_s if activity.on_card else 0.0
            )
        now_s = time.monotonic()
        idle_s = seconds if self._active_at_s is None else now_s - self._active_at_s
        return Quiet(seconds=seconds, idle_s=idle_s, computed_s=self._computed_s)

    def activity(self, pid: int) -> Activity | None:
        """Return the activity since the last sample; `None` if the process is gone."""
        if self._before is None:
            self._before = time.monotonic(), _thread_times(pid)
            time.sleep(_FIRST_INTERVAL_S)
        before_s, before = self._before
        now_s, threads = self._before = time.monotonic(), _thread_times(pid)
        if not threads:
            return None
        used = []
        for thread, (ran_s, waited_s) in threads.items():
            ran_before_s, waited_before_s = before.get(thread, (0.0, 0.0))
            used.append((ran_s - ran_before_s, waited_s - waited_before_s))
        ran_s, waited_s = max(used, key=sum)
        return Activity(
            interval_s=now_s - before_s,
            wanted_s=ran_s + waited_s,
            cpu_s=ran_s,
            on_card=self._on_card and self._computes_on_card(pid),
        )

    def _computes_on_card(self, pid: int) -> bool:
        since_us, self._card_samples_from_us = self._card_samples_from_us, time.time_ns() // 1000
        with contextlib.suppress(pynvml.NVMLError), queries.opened():
            cards = map(str, range(pynvml.nvmlDeviceGetCount()))
            return any(_computes_on(queries.find_card(card), pid, since_us) for card in cards)
        return False


def _computes_on(card: queries.Card, pid: int, since_us: int) -> bool:
    samples = card.ask("nvmlDeviceGetProcessUtilization", since_us)
    if samples:
        return any(sample.pid == pid and sample.smUtil > 0 for sample in samples)
    # Containers and WSL2 do not report whose the work is, and an idle card has no samples.
    rates = card.ask("nvmlDeviceGetUtilizationRates")
    return rates is not None and rates.gpu > 0


def _thread_times(pid: int) -> dict[int, tuple[float, float]]:
    """Return for each thread of a process and of its children the seconds that it ran, and that it
    waited for a CPU.
    """
    found = {}
    for process in (pid, *below(pid)):
        with contextlib.suppress(psutil.Error):
            for thread in psutil.Process(process).threads():
                ran_s = thread.user_time + thread.system_time
                found[thread.id] = ran_s, _waited_s(process, thread.id)
    return found


def _waited_s(pid: int, tid: int) -> float:
    """Return the seconds that a thread waited for a CPU (Linux,
    Documentation/scheduler/sched-stats.rst); 0 if the kernel lacks CONFIG_SCHED_INFO.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/task/{tid}/schedstat").read_text(encoding="ascii").split()
        return int(fields[1]) / 1e9
    return 0.0
