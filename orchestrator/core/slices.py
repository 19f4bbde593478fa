"""The slices of a slot: which are sent, when one is overdue, and how their steps are counted. Pure.

A slice is named by (slot, incarnation, sequence) and is in exactly one of three states: under way,
counted, or lost. Every step of a report is counted once. A lost slice counts for nothing, and adds
the most good steps it may have done, its `step_limit`, to `steps_lost_upper_bound`: the worker ends
a slice there, so the bound is one. Decides nothing about the slot (`lifecycle.py`).
"""

from __future__ import annotations

import math
from dataclasses import replace

from orchestrator.core.leak_detector import NO_WATCH
from orchestrator.core.silence import NOT_SEEN
from orchestrator.core.slot import Command, Flight, Moment, Phase, Rules, Slot, Transition, changed
from workers.messages import STARVED, Directive, Report, WorkerState

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


def worked_s(slot: Slot, flight: Flight, report: Report, now_s: float) -> float:
    """Return the seconds of a slice that count as worked, when its report comes at `now_s`.

    All since the report before it: on a loaded PC the next slice of a full pipeline begins late,
    and that is no fault of the worker. In a slice without memory, what its good steps took.
    """
    if report.state in _AT_WORK:
        return now_s - _began_at_s(slot, flight)
    return min(report.counts.busy_s, report.wall_s)


#: Slices under way in a working slot.
_PIPELINE = 2

#: A slice shorter than this share of the usual one is not worth sending.
_SHORTEST = 0.1


def begin(slot: Slot, moment: Moment, *, new_process: bool) -> tuple[Slot, Directive]:
    """Send the first slice of a process: one step. `new_process` counts another incarnation."""
    slot = changed(
        slot,
        phase=Phase.WORKING,
        incarnation=slot.incarnation + (1 if new_process else 0),
        ready=False,
        wake_at_s=None,
        working_since_s=moment.now_s,
        heard_at_s=None,
        silence=NOT_SEEN,
        leak=NO_WATCH,
        leak_told=False,
    )
    return _send(slot, 0.0, moment)


def fill(slot: Slot, moment: Moment) -> Transition:
    """Keep the pipeline full, with slices that end when the run does."""
    commands: list[Command] = []
    slice_s, ends_at_s = moment.rules.slice_s, moment.ends_at_s
    while len(slot.in_flight) < _PIPELINE:
        duration_s = slice_s
        if ends_at_s is not None:
            begins_at_s = moment.now_s + sum([flight.duration_s for flight in slot.in_flight])
            duration_s = min(duration_s, ends_at_s - begins_at_s)
        if duration_s < _SHORTEST * slice_s:
            break
        slot, command = _send(slot, duration_s, moment)
        commands.append(command)
    return slot, tuple(commands)


def is_to_save(slot: Slot) -> bool:
    """Say whether a slot that is to rest or to end has to save first what it trains, and can.

    One that lacks the memory for any step and has not saved is in the middle of an optimiser step
    that may never end.
    """
    report = slot.report
    is_due = report is not None and report.save_due and report.state not in STARVED
    return slot.orders.save or is_due


def last(slot: Slot, moment: Moment) -> Transition:
    """Send one slice more, in which the slot saves what it trains, before it rests or ends.

    Where the head keeps a copy, it takes a slice for each piece of that.
    """
    slot = changed(slot, orders=replace(slot.orders, save=True))
    slot, command = _send(slot, moment.rules.slice_s, moment)
    return slot, (command,)


def overdue_s(slot: Slot, now_s: float) -> float:
    """Return the seconds since the running slice should have ended.

    Negative while it need not have.
    """
    should_end_s = _should_end_s(slot)
    return 0.0 if should_end_s is None else now_s - should_end_s


def due_at_s(slot: Slot, rules: Rules) -> float | None:
    """Return when (monotonic seconds) a `Tick` may first change the slot; `None` while none can.

    A report moves the moment to later and never to earlier, except the first report of a process.
    """
    if slot.phase is Phase.PAUSING:
        return slot.wake_at_s
    should_end_s = _should_end_s(slot) if slot.phase is Phase.WORKING else None
    if should_end_s is None:
        return None
    patience_s = silence_s(slot, rules)
    return should_end_s + (min(rules.stale_after_s, patience_s) if slot.ready else patience_s)


def silence_s(slot: Slot, rules: Rules) -> float:
    """Return how long (seconds) the running slice may be overdue while its process does nothing."""
    return max(rules.slow_step_s, rules.hang_timeout_s if slot.ready else rules.start_timeout_s)


def _should_end_s(slot: Slot) -> float | None:
    if not slot.in_flight:
        return None
    running = slot.in_flight[0]
    return _began_at_s(slot, running) + running.duration_s


def _began_at_s(slot: Slot, running: Flight) -> float:
    """Return when the oldest slice under way was its worker's turn, by the head's clock."""
    heard_at_s, sent_at_s = slot.heard_at_s, running.submitted_at_s
    return heard_at_s if heard_at_s is not None and heard_at_s > sent_at_s else sent_at_s


def _send(slot: Slot, duration_s: float, moment: Moment) -> tuple[Slot, Directive]:
    limit, sequence = step_limit(slot, duration_s), slot.next_sequence
    flight = Flight(
        sequence=sequence, duration_s=duration_s, submitted_at_s=moment.now_s, step_limit=limit
    )
    command = Directive(
        incarnation=slot.incarnation,
        sequence=sequence,
        duration_s=duration_s,
        step_limit=limit,
        resume=slot.resume,
        save=slot.orders.save,
    )
    slot = changed(slot, in_flight=(*slot.in_flight, flight), next_sequence=sequence + 1)
    return (
        changed(slot, orders=replace(slot.orders, save=False)) if command.save else slot
    ), command
