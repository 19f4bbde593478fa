"""Which slices a slot is sent next, and when the running one is overdue.

Pure; part of the lifecycle.
"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.core import step_accounting
from orchestrator.core.leak_detector import NO_WATCH
from orchestrator.core.silence import NOT_SEEN
from orchestrator.core.slot import Command, Flight, Moment, Phase, Rules, Slot, Transition, changed
from workers.messages import STARVED, Directive

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
            begins_at_s = moment.now_s + sum(flight.duration_s for flight in slot.in_flight)
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
    """Send one slice more, in which the slot saves what it trains, before it rests or ends."""
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
    heard_at_s = slot.heard_at_s
    began_s = running.submitted_at_s
    if heard_at_s is not None and heard_at_s > began_s:
        began_s = heard_at_s
    return began_s + running.duration_s


def _send(slot: Slot, duration_s: float, moment: Moment) -> tuple[Slot, Directive]:
    step_limit = step_accounting.step_limit(slot, duration_s)
    sequence = slot.next_sequence
    flight = Flight(
        sequence=sequence, duration_s=duration_s, submitted_at_s=moment.now_s, step_limit=step_limit
    )
    command = Directive(
        incarnation=slot.incarnation,
        sequence=sequence,
        duration_s=duration_s,
        step_limit=step_limit,
        resume=slot.resume,
        save=slot.orders.save,
    )
    slot = changed(slot, in_flight=(*slot.in_flight, flight), next_sequence=sequence + 1)
    return (
        changed(slot, orders=replace(slot.orders, save=False)) if command.save else slot
    ), command
