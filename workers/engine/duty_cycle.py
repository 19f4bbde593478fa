"""What a worker does between two steps: read sensors, check results, pause for the duty, and set its state.

Two things make it pause: the duty of its slot and the heat of its card. Does not run steps (`engine.py`) and decides
nothing: the governor and the schedule of the checks do.
"""

from __future__ import annotations

import os
import time
from typing import Final

from workers.engine.session import Session
from workers.engine.slice_stats import SliceStats
from workers.messages import WorkerState
from workers.policy.base import StepOk

#: A slice in which nothing may be done is over so soon, and not sooner: the head may need a while to change that.
GLANCE_S: Final = 0.1

#: Share of its cap below which a worker says why it has so little.
_WORTH_SAYING: Final = 0.9


def between_steps(session: Session, stats: SliceStats, step: StepOk) -> None:
    """Check the step's result and look at the sensors, as far as that is due; then rest as far as the slice allows."""
    session.heat.look(stats)
    checked_s = session.proof.after_step(session.device, session.workload, step, stats)
    if checked_s:
        stats.busy(checked_s)
    # Under MPS others compute while the memory is timed, and how much they do is not the memory's fault.
    if session.device.info.kind == "cuda" and "CUDA_MPS_PIPE_DIRECTORY" not in os.environ:
        session.heat.time_memory(session.bandwidth, stats)
    settle_working(session, stats)
    _owe_sleep(session, step.seconds + checked_s)
    pay_sleep(session, stats)


def cool_enough(session: Session, stats: SliceStats) -> bool:
    """Wait while the card is too hot; say whether it is cool enough before the slice is over."""
    while session.heat.duty <= 0.0:
        if session.proof.reason is None:
            stats.settle(WorkerState.PAUSED, session.heat.reason)
        else:
            stats.settle(WorkerState.CORRUPT, f"{session.proof.reason}; {session.heat.reason}")
        if stats.elapsed_s >= max(stats.directive.duration_s, GLANCE_S):
            return False
        time.sleep(GLANCE_S)
        session.owed_sleep_s = max(0.0, session.owed_sleep_s - GLANCE_S)
        session.heat.look(stats)
    return True


def settle_working(session: Session, stats: SliceStats, reason: str = "") -> None:
    """Say that the worker does its work, and what is the matter with it all the same."""
    if session.proof.reason is not None:
        stats.settle(WorkerState.CORRUPT, session.proof.reason)
    elif session.heat.slows:
        stats.settle(WorkerState.THROTTLED, session.heat.reason)
    else:
        stats.settle(
            WorkerState.RUNNING, reason or _squeeze(session) or (session.heat.reason if session.heat.alarmed else "")
        )


def pay_sleep(session: Session, stats: SliceStats) -> None:
    """Sleep off what is owed, as far as the slice allows; the rest is left to the next one."""
    pause_s = min(session.owed_sleep_s, stats.remaining_s)
    if pause_s > 0:
        time.sleep(pause_s)
        session.owed_sleep_s -= pause_s


def _owe_sleep(session: Session, busy_s: float) -> None:
    """A step of `busy_s` at duty d owes busy_s x (1/d - 1) of idleness.

    The heat takes its share of what the slot's own duty leaves: so the card's duty falls as much as the governor wants,
    whatever the slots were allowed before.
    """
    duty = (1.0 if session.spec.duty is None else session.spec.duty) * session.heat.duty
    if 0.0 < duty < 1.0:
        session.owed_sleep_s += busy_s * (1.0 / duty - 1.0)


def _squeeze(session: Session) -> str:
    """Say why a worker has much less than its cap, if it has; empty otherwise."""
    most_bytes = session.device.most_bytes
    if session.room is None or session.room >= _WORTH_SAYING * most_bytes:
        return ""
    leased = session.lease_bytes is not None and session.lease_bytes <= session.room
    why = "its share while the card is short" if leased else "all that others leave on the device"
    return f"{session.room / 2**20:.0f} of {most_bytes / 2**20:.0f} MiB: {why}"
