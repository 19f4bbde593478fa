"""The outcome of a run that has ended: a sentence for each slot that fell short and for a success
rate below its limit. Pure.

One sentence makes the run degraded. Does not cover a run that ended in an error (`run/runner.py`).
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
    """Return the sentences that say why a run is degraded; none for a good run.

    A slot must have worked for `LEAST_WORKED` of its time. That time is from its first work, or
    from `began_s`, when the run counts, if that is later, to `ended_s`, when the run begins to end
    (monotonic seconds). Its start, and its waiting for other slots at the end, do not count.
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
        return  # a finished or held slot may have worked for any share of the time
    if not counts.steps_ok:
        yield "no good step"
    elif slot.worked_s < LEAST_WORKED * time_s:
        why = (
            f"restarts {slot.restarts}, OOM {counts.oom_count}, emergencies "
            f"{counts.emergency_count}"
        )
        yield f"worked {slot.worked_s:.1f} of {time_s:.1f} s, less than {LEAST_WORKED:.0%} ({why})"
