"""What a worker does between two steps: look at its card and its results, rest as it should, and say how it is.

Two things make it rest: the duty of its slot and the heat of its card. Does not run steps (`engine.py`) and decides
nothing: the governor and the schedule of the checks do.
"""

from __future__ import annotations

import os
import time
from typing import Final

from workers.engine.session import Life
from workers.engine.slice_stats import Tally
from workers.messages import WorkerState
from workers.policy.base import StepOk

#: A slice in which nothing may be done is over so soon, and not sooner: the head may need a while to change that.
GLANCE_S: Final = 0.1

#: Share of its cap below which a worker says why it has so little.
_WORTH_SAYING: Final = 0.9


def between_steps(life: Life, tally: Tally, step: StepOk) -> None:
    """Check the step's result and look at the sensors, as far as that is due; then rest as far as the slice allows."""
    life.heat.look(tally)
    checked_s = life.proof.after_step(life.device, life.workload, step, tally)
    tally.busy_s += checked_s
    # Under MPS others compute while the memory is timed, and how much they do is not the memory's fault.
    if life.device.info.kind == "cuda" and "CUDA_MPS_PIPE_DIRECTORY" not in os.environ:
        life.heat.time_memory(life.bandwidth, tally)
    settle_working(life, tally)
    _owe_sleep(life, step.seconds + checked_s)
    pay_sleep(life, tally)


def cool_enough(life: Life, tally: Tally) -> bool:
    """Wait while the card is too hot; say whether it is cool enough before the slice is over."""
    while life.heat.duty <= 0.0:
        if life.proof.reason is None:
            tally.settle(WorkerState.PAUSED, life.heat.reason)
        else:
            tally.settle(WorkerState.CORRUPT, f"{life.proof.reason}; {life.heat.reason}")
        if tally.elapsed_s >= max(tally.directive.duration_s, GLANCE_S):
            return False
        time.sleep(GLANCE_S)
        life.owed_sleep_s = max(0.0, life.owed_sleep_s - GLANCE_S)
        life.heat.look(tally)
    return True


def settle_working(life: Life, tally: Tally, reason: str = "") -> None:
    """Say that the worker does its work, and what is the matter with it all the same."""
    if life.proof.reason is not None:
        tally.settle(WorkerState.CORRUPT, life.proof.reason)
    elif life.heat.slows:
        tally.settle(WorkerState.THROTTLED, life.heat.reason)
    else:
        tally.settle(WorkerState.RUNNING, reason or _squeeze(life) or (life.heat.reason if life.heat.alarmed else ""))


def pay_sleep(life: Life, tally: Tally) -> None:
    """Sleep off what is owed, as far as the slice allows; the rest is left to the next one."""
    pause_s = min(life.owed_sleep_s, tally.remaining_s)
    if pause_s > 0:
        time.sleep(pause_s)
        life.owed_sleep_s -= pause_s


def _owe_sleep(life: Life, busy_s: float) -> None:
    """A step of `busy_s` at duty d owes busy_s x (1/d - 1) of idleness.

    The heat takes its share of what the slot's own duty leaves: so the card's duty falls as much as the governor wants,
    whatever the slots were allowed before.
    """
    duty = (1.0 if life.spec.duty is None else life.spec.duty) * life.heat.duty
    if 0.0 < duty < 1.0:
        life.owed_sleep_s += busy_s * (1.0 / duty - 1.0)


def _squeeze(life: Life) -> str:
    """Say why a worker has much less than its cap, if it has; empty otherwise."""
    most_bytes = life.device.most_bytes
    if life.room is None or life.room >= _WORTH_SAYING * most_bytes:
        return ""
    leased = life.lease_bytes is not None and life.lease_bytes <= life.room
    why = "its share while the card is short" if leased else "all that others leave on the device"
    return f"{life.room / 2**20:.0f} of {most_bytes / 2**20:.0f} MiB: {why}"
