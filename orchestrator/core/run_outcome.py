"""The outcome of a run that has ended: what fell short in it, a sentence for each slot and for each
missed limit. Pure.

A run is degraded as soon as there is one sentence. Does not cover a run that ended in an error
(`run/runner.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from orchestrator.core.slot import HeadState, Slot
from workers.messages import STARVED, StepCounts, WorkerState

#: A slot that worked for less than this share of its time degrades the run.
LEAST_WORKED: Final = 0.5


def shortfalls(
    slots: Iterable[Slot], began_s: float | None, ended_s: float, min_success_rate: float
) -> tuple[str, ...]:
    """Return why a run is degraded, a sentence for each slot and one for the success rate; none of
    a good run.

    The time of a slot begins with its first work, but not before the run counts at `began_s`, and
    ends when the run begins to end, at `ended_s` (monotonic seconds): neither its start nor the
    waiting for others is its fault.
    """
    sentences, counts = [], []
    for slot in slots:
        counts.append(slot.counts)
        since_s = max(ended_s if at_s is None else at_s for at_s in (began_s, slot.first_work_s))
        if words := "; ".join(_of_slot(slot, ended_s - since_s)):
            sentences.append(f"{slot.slot}: {words}")
    rate = StepCounts.total(counts).success_rate
    if rate is not None and rate < min_success_rate:
        # Rounded down: 0.9499 is not 0.950.
        sentences.append(
            f"success rate {math.floor(rate * 1000) / 1000:.3f} < run.min_success_rate "
            f"{min_success_rate:g}"
        )
    return tuple(sentences)


def outcome_of(missed: Sequence[str], *, interrupted: bool) -> tuple[str, int]:
    """Return the outcome of a run that ended without an error, and its exit code."""
    if interrupted:
        return "interrupted", 130
    return ("degraded", 1) if missed else ("good", 0)


def _of_slot(slot: Slot, time_s: float) -> Iterator[str]:
    is_held = slot.state is HeadState.HELD
    if (isinstance(slot.state, HeadState) and not is_held) or slot.state in STARVED:
        yield f"ended in {slot.state}: {slot.reason}"
    elif slot.ended_stale:
        yield f"ended {slot.reason}"
    counts = slot.counts
    if counts.verify_errors:
        yield f"{counts.verify_errors} wrong of {counts.verify_checks} results checked"
    if is_held or slot.state is WorkerState.DONE:
        return  # however long it took, or was to wait
    if not counts.steps_ok:
        yield "no good step"
    elif slot.worked_s < LEAST_WORKED * time_s:
        why = (
            f"restarts {slot.restarts}, OOM {counts.oom_count}, emergencies "
            f"{counts.emergency_count}"
        )
        yield f"worked {slot.worked_s:.1f} of {time_s:.1f} s, less than {LEAST_WORKED:.0%} ({why})"
