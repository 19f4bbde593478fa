"""Counts the steps of a slot: what was sent, what was reported, what was lost. Pure.

A slice is named by (slot, incarnation, sequence) and is in exactly one of three states: under way,
counted, or lost. Every step of a report is counted once. A lost slice counts for nothing, and adds
the most good steps it may have done, its `step_limit`, to `steps_lost_upper_bound`: the worker ends
a slice there, so the bound is one. Decides nothing about the slot (`lifecycle.py`).
"""

from __future__ import annotations

import math
from dataclasses import replace

from orchestrator.core.slot import Flight, Slot, changed
from workers.messages import Report, WorkerState

#: A slice may do this many times the steps that the last report makes likely: enough to notice that
#: steps got faster, and small enough for a bound on what was lost that says something.
_HEADROOM = 2.0

#: A slice too short to be measured makes any number likely.
_MOST_LIKELY = 2.0**57

#: And this many more, so that a slot that has done next to nothing yet is not slowed down by it.
_LEAST_LIMIT = 4

#: A slice's time is believed to be longer than the head waited by so much: the two clocks are read
#: at two places.
_TOLERANCE_S = 0.5

#: A slice that ends in one of these was worked in from its beginning to its end: a worker that
#: rests for its duty is RUNNING, and for one whose card is too hot THROTTLED and PAUSED say so.
_AT_WORK = frozenset(
    {WorkerState.RUNNING, WorkerState.THROTTLED, WorkerState.PAUSED, WorkerState.CORRUPT}
)


def step_limit(slot: Slot, duration_s: float) -> int:
    """Return the most good steps that the next slice of this length may do.

    A slice of no duration ends with its first good step.
    """
    if duration_s <= 0:
        return 1
    report = slot.report
    if report is None or report.wall_s <= 0:
        return _LEAST_LIMIT
    likely = duration_s * report.counts.steps_ok / report.wall_s
    return _LEAST_LIMIT + math.ceil(min(_HEADROOM * likely, _MOST_LIKELY))


def steps_at_risk(slot: Slot) -> int:
    """Return the most good steps that may have been done in slices without a report so far."""
    return sum(flight.step_limit for flight in slot.in_flight)


def flight_of(slot: Slot, incarnation: int, sequence: int) -> Flight | None:
    """Return the slice under way with this name, or `None`: never sent, counted already, or given
    up.
    """
    if incarnation != slot.incarnation:
        return None
    for flight in slot.in_flight:
        if flight.sequence == sequence:
            return flight
    return None


def others(slot: Slot, flight: Flight) -> tuple[Flight, ...]:
    """Return the slices under way besides this one."""
    return tuple([other for other in slot.in_flight if other is not flight])


def all_lost(slot: Slot) -> Slot:
    """Give up every slice under way."""
    if not slot.in_flight:
        return slot
    lost = slot.steps_lost_upper_bound + steps_at_risk(slot)
    return changed(slot, in_flight=(), steps_lost_upper_bound=lost)


def bounded(report: Report, flight: Flight, now_s: float) -> Report:
    """Return a report whose seconds are possible: what a step did to the worker's clock must not
    count as work.

    A slice lasted at most since it was sent, at `now_s` (monotonic seconds).
    """
    most_s = now_s - flight.submitted_at_s + _TOLERANCE_S
    counts = report.counts
    if 0 <= report.wall_s <= most_s and 0 <= counts.busy_s <= most_s:
        return report
    wall_s, busy_s = (
        min(most_s, told_s) if told_s > 0 else 0.0 for told_s in (report.wall_s, counts.busy_s)
    )
    return replace(report, wall_s=wall_s, counts=replace(counts, busy_s=busy_s))


def worked_s(report: Report) -> float:
    """Return the seconds of a slice that count as worked.

    In a slice without memory, what its good steps took.
    """
    return report.wall_s if report.state in _AT_WORK else min(report.counts.busy_s, report.wall_s)
