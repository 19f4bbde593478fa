"""What becomes of a slot: events in, a new state and commands out.

Rules:

1. A slot is its own identity. Processes come and go in it (incarnations); its counters only grow, and its policy
   state is that of the last report, whichever process sent it.
2. Two slices are under way in a working slot, one running and one queued, so that a card never waits for the head.
3. A slice counts when its report arrives, once. A report of another incarnation, or of a slice not under way, is
   refused: the slot has given that slice up, and its work was perhaps done again (`step_accounting.py` counts them).
4. A slot that is neither working, quarantined nor stopped either waits for its node or has a time to wake up.
5. Quarantine is final until the user asks anew: a new run, or `run --resume`.
6. A process is proven by a slice of one step; only then are more sent, so that a process that does not come up has
   next to nothing to lose.

Theory of operation. `phase` says what the slot waits for:

    ABSENT ──NodeJoined──> WORKING <──Tick at wake_at── PAUSING
       ^                    │   │                         ^
       └──────NodeLeft──────┘   ├──slice failed, hung─────┘   (too often: QUARANTINED)
                                └──Drain, last report──> STOPPED

Pure: no clock (every event comes with `now_s`, a monotonic second), no I/O, no randomness but a hash of a seed. Does
not place slots (`placement.py`) and does not perform commands (`supervisor.py`).
"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.core import restart_policy, step_accounting
from orchestrator.core.fleet import SliceFailed, SliceFailure, SliceReported
from orchestrator.core.leak_detector import NO_WATCH, watched
from orchestrator.core.restart_policy import Result
from orchestrator.core.slot import (
    Accept,
    CardQuarantined,
    Close,
    Command,
    DeathExplained,
    Drain,
    Event,
    Flight,
    Forget,
    NodeJoined,
    NodeLeft,
    NodeRefused,
    Note,
    Phase,
    Place,
    Restart,
    Rules,
    Slot,
    Submit,
    Tick,
)
from workers.messages import Report, Verdict, WorkerState

#: Slices under way in a working slot.
_PIPELINE = 2

#: After a restart the actor cannot be reached for a second or two; asking again this often costs next to nothing.
_RETRY_UNREACHABLE_S = 0.2

#: No new process fails sooner than this after its first slice was sent: it has to load torch before anything else.
_REBIRTH_S = 0.5

#: Deaths this shortly before a node is seen to have left are the node's, not the slot's. Ray tells of a dead raylet
#: seconds after its actors have failed (seen: 3 to 10 s; its health check allows 5 x 3 s and more).
_NODE_BLAME_S = 60.0


#: What a person needs to know of Ray's paragraphs, which are in the event log.
_ENDED = {
    SliceFailure.DIED: "its process ended: killed, or crashed",
    SliceFailure.UNAVAILABLE: "its process ended: Ray lost the connection to it",
    SliceFailure.UNSENT: "its process ended: it can no longer be reached",
}


def advance(slot: Slot, event: Event, now_s: float, rules: Rules, ends_at_s: float | None) -> Result:
    """Return the slot after `event`, and what to do about it in this order.

    Args:
        slot: As it was.
        event: What happened.
        now_s: When, in monotonic seconds.
        rules: Of this run.
        ends_at_s: When the run shall end, once that is known; slices are cut to fit.
    """
    after, commands = _react(slot, event, now_s, rules, ends_at_s)
    if after.state is not slot.state:
        commands = (*commands, _state_note(slot, after))
    return after, commands


def _react(slot: Slot, event: Event, now_s: float, rules: Rules, ends_at_s: float | None) -> Result:
    if isinstance(event, DeathExplained):
        return (slot if slot.phase is Phase.STOPPED else restart_policy.explained(slot, event.cause)), ()
    if slot.phase in {Phase.QUARANTINED, Phase.STOPPED}:
        return slot, _refusal(event, slot)
    match event:
        case NodeJoined():
            result = _node_joined(slot, now_s, rules)
        case NodeLeft(reason=reason):
            result = _node_left(slot, reason, now_s)
        case NodeRefused(reason=reason):
            result = (replace(slot, reason=reason) if slot.phase is Phase.ABSENT else slot), ()
        case CardQuarantined(reason=reason):
            result = restart_policy.quarantine(slot, reason)
        case SliceReported(report=report):
            result = _reported(slot, report, now_s, rules, ends_at_s)
        case SliceFailed():
            result = _failed(slot, event, now_s, rules, ends_at_s)
        case Tick():
            result = _ticked(slot, now_s, rules)
        case Drain():
            result = _drain(slot)
        case Close():
            result = replace(step_accounting.all_lost(slot), phase=Phase.STOPPED, wake_at_s=None), (Forget(),)
    return result


def _node_joined(slot: Slot, now_s: float, rules: Rules) -> Result:
    if slot.phase is not Phase.ABSENT:
        return slot, ()
    place: tuple[Command, ...] = () if slot.placed else (Place(),)
    again = slot.placed
    slot = replace(
        slot,
        placed=True,
        state=WorkerState.STARTING,
        reason="its process is starting",
        deaths_at_s=restart_policy.recent(slot.deaths_at_s, now_s, rules),
    )
    slot, command = _begin(slot, now_s, new_process=again)
    return slot, (*place, command)


def _node_left(slot: Slot, reason: str, now_s: float) -> Result:
    if slot.phase is Phase.ABSENT:
        return slot, ()
    lost = replace(
        step_accounting.all_lost(slot),
        phase=Phase.ABSENT,
        state=WorkerState.LOST,
        reason=reason,
        wake_at_s=None,
        working_since_s=None,
        silent_since_s=None,
        deaths_at_s=tuple(at for at in slot.deaths_at_s if at < now_s - _NODE_BLAME_S),
    )
    return restart_policy.stopped_if_draining(lost), (Forget(),)


def _reported(slot: Slot, report: Report, now_s: float, rules: Rules, ends_at_s: float | None) -> Result:
    flight = step_accounting.flight_of(slot, report.incarnation, report.sequence)
    if flight is None or report.slot != slot.slot:
        return slot, _refusal(SliceReported(report=report), slot)
    slot, commands = _accepted(slot, flight, report, now_s, rules, ends_at_s)
    return slot, (Accept(report=report), *commands)


def _accepted(
    slot: Slot, flight: Flight, report: Report, now_s: float, rules: Rules, ends_at_s: float | None
) -> Result:
    worked_before = slot.report is not None
    slot = replace(
        step_accounting.without(slot, flight),
        proven=True,
        ending=False,
        heard_at_s=now_s,
        silent_since_s=None,
        deaths_at_s=restart_policy.recent(slot.deaths_at_s, now_s, rules),
        state=report.state,
        reason=report.reason,
        report=report,
        device=report.device if report.device is not None else slot.device,
        resume=report.resume if report.resume is not None else slot.resume,
        counters=step_accounting.counted(slot.counters, report),
        errors_in_a_row=slot.errors_in_a_row + 1 if report.error is not None else 0,
        leak=watched(slot.leak, report),
    )
    if report.verdict is Verdict.INCOMPATIBLE:
        return restart_policy.impossible(
            slot, report.reason, counting=worked_before or rules.has_counted or ends_at_s is not None
        )
    if slot.errors_in_a_row >= rules.max_workload_errors:
        return restart_policy.quarantine(
            slot, f"the workload failed {slot.errors_in_a_row} times in a row: {report.reason}"
        )
    if report.verdict is Verdict.CONTEXT_CORRUPTED:
        no_room = report.device is None and report.oom_count > 0
        settle = restart_policy.no_room if no_room else restart_policy.poisoned
        return settle(slot, report.reason, now_s, rules)
    return _go_on(slot, now_s, rules, ends_at_s)


def _go_on(slot: Slot, now_s: float, rules: Rules, ends_at_s: float | None) -> Result:
    """After a good report: more work, unless the run is ending or the process has taken too much memory."""
    slot, notes = _leak_told(slot, rules)
    if slot.draining:
        return (slot if slot.in_flight else replace(slot, phase=Phase.STOPPED, wake_at_s=None)), notes
    growth_bytes = slot.leak.growth_bytes or 0
    if rules.leak_limit_bytes is not None and growth_bytes >= rules.leak_limit_bytes:
        return restart_policy.leaked(slot, growth_bytes, now_s)
    slot, commands = _fill(slot, now_s, rules, ends_at_s)
    return slot, (*notes, *commands)


def _leak_told(slot: Slot, rules: Rules) -> Result:
    """Say that memory grows: in every reason, and once for each process in the event log."""
    growth_bytes = slot.leak.growth_bytes or 0
    if rules.leak_flag_bytes is None or growth_bytes < rules.leak_flag_bytes:
        return slot, ()
    notes = () if slot.leak_told else (Note(name="leak", fields=(("growth_bytes", growth_bytes),)),)
    reason = f"LEAK: {restart_policy.leak_words(growth_bytes)}" if slot.state is WorkerState.RUNNING else slot.reason
    return replace(slot, leak_told=True, reason=reason), notes


def _failed(slot: Slot, event: SliceFailed, now_s: float, rules: Rules, ends_at_s: float | None) -> Result:
    flight = step_accounting.flight_of(slot, event.incarnation, event.sequence)
    if flight is None:
        return slot, ()  # the second of two slices that failed together: the first has said it all
    if event.failure is SliceFailure.UNSENT:
        slot = step_accounting.without(slot, flight)
    if event.failure is SliceFailure.UNBUILDABLE:
        if slot.report is None:
            return restart_policy.impossible(
                slot,
                f"{slot.slot}: cannot be started: {event.text}",
                counting=rules.has_counted or ends_at_s is not None,
            )
        # It did work before: its process is in a bad way, not its code.
        return restart_policy.died(
            slot, f"its process failed outside a step: {event.text}", now_s, rules, before=(Restart(),)
        )
    # What fails at once was sent to the process that has just ended: Ray had not noticed yet.
    too_soon = slot.ending or (slot.working_since_s is not None and now_s - slot.working_since_s < _REBIRTH_S)
    if slot.proven or (event.failure is SliceFailure.DIED and not too_soon):
        return restart_policy.died(slot, _ENDED[event.failure], now_s, rules, before=())
    silent_since_s = slot.silent_since_s if slot.silent_since_s is not None else slot.working_since_s
    if silent_since_s is not None and now_s - silent_since_s > rules.start_timeout_s:
        return restart_policy.quarantine(slot, f"no process came up in {rules.start_timeout_s:.0f} s")
    waiting = replace(
        step_accounting.all_lost(slot),
        phase=Phase.PAUSING,
        silent_since_s=silent_since_s,
        ending=False,
        wake_at_s=now_s + _RETRY_UNREACHABLE_S,
    )
    return restart_policy.stopped_if_draining(waiting), (Forget(),)


def _ticked(slot: Slot, now_s: float, rules: Rules) -> Result:
    if slot.phase is Phase.PAUSING and slot.wake_at_s is not None and now_s >= slot.wake_at_s:
        if slot.draining:
            return replace(slot, phase=Phase.STOPPED, wake_at_s=None), ()
        # Silent: the same process is still awaited.
        slot, command = _begin(slot, now_s, new_process=slot.silent_since_s is None)
        return slot, (command,)
    if slot.phase is not Phase.WORKING:
        return slot, ()
    overdue_s = _overdue_s(slot, now_s)
    patience_s = rules.hang_timeout_s if slot.proven else rules.start_timeout_s
    if overdue_s > patience_s:
        what = "no report" if slot.proven else "its process did not come up"
        return restart_policy.died(
            slot, f"{what} for {overdue_s:.0f} s; its process was ended", now_s, rules, before=(Restart(),)
        )
    if slot.proven and overdue_s > rules.stale_after_s:
        return replace(slot, reason=f"STALE: its slice is {overdue_s:.0f} s overdue"), ()
    return slot, ()


def _drain(slot: Slot) -> Result:
    slot = replace(slot, draining=True)
    if not slot.in_flight or not slot.proven:
        # Nothing runs, or nobody knows whether it does: there is nothing to wait for.
        return replace(step_accounting.all_lost(slot), phase=Phase.STOPPED, wake_at_s=None), (Forget(),)
    # The queued one runs too: Ray cannot take it back. It would run all the same, and its report be thrown away.
    return slot, ()


def _begin(slot: Slot, now_s: float, *, new_process: bool) -> tuple[Slot, Submit]:
    """Send the slice that proves an incarnation."""
    slot = replace(
        slot,
        phase=Phase.WORKING,
        incarnation=slot.incarnation + (1 if new_process else 0),
        proven=False,
        wake_at_s=None,
        working_since_s=now_s,
        heard_at_s=None,
        leak=NO_WATCH,
        leak_told=False,
    )
    return _send(slot, 0.0, now_s)


def _fill(slot: Slot, now_s: float, rules: Rules, ends_at_s: float | None) -> Result:
    """Keep the pipeline full, with slices that end when the run does."""
    commands: list[Command] = []
    while len(slot.in_flight) < _PIPELINE:
        duration_s = rules.slice_s
        if ends_at_s is not None:
            begins_at_s = now_s + sum(flight.duration_s for flight in slot.in_flight)
            duration_s = min(duration_s, ends_at_s - begins_at_s)
        if duration_s < rules.slice_s / 10:
            break
        slot, command = _send(slot, duration_s, now_s)
        commands.append(command)
    return slot, tuple(commands)


def _send(slot: Slot, duration_s: float, now_s: float) -> tuple[Slot, Submit]:
    step_limit = step_accounting.step_limit(slot, duration_s)
    sequence = slot.next_sequence
    flight = Flight(sequence=sequence, duration_s=duration_s, submitted_at_s=now_s, step_limit=step_limit)
    command = Submit(
        incarnation=slot.incarnation,
        sequence=sequence,
        duration_s=duration_s,
        step_limit=step_limit,
        resume=slot.resume,
    )
    return replace(slot, in_flight=(*slot.in_flight, flight), next_sequence=slot.next_sequence + 1), command


def _overdue_s(slot: Slot, now_s: float) -> float:
    """Seconds since the running slice should have ended; negative while it need not have."""
    if not slot.in_flight:
        return 0.0
    running = slot.in_flight[0]
    began_s = max(running.submitted_at_s, slot.heard_at_s if slot.heard_at_s is not None else 0.0)
    return now_s - began_s - running.duration_s


def _refusal(event: Event, slot: Slot) -> tuple[Command, ...]:
    if not isinstance(event, SliceReported):
        return ()
    report = event.report
    fields = (("incarnation", report.incarnation), ("sequence", report.sequence), ("steps_ok", report.steps_ok))
    return (Note(name="report_refused", fields=(*fields, ("expected_incarnation", slot.incarnation))),)


def _state_note(before: Slot, after: Slot) -> Note:
    return Note(
        name="state",
        fields=(
            ("from_state", before.state.value),
            ("to_state", after.state.value),
            ("cause", after.reason),
            ("incarnation", after.incarnation),
        ),
    )
