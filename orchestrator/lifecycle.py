"""What becomes of a slot: events in, a new state and commands out.

Rules:

1. A slot is its own identity. Processes come and go in it (incarnations); its counters only grow, and its policy
   state is that of the last report, whichever process sent it.
2. Two slices are under way in a working slot, one running and one queued, so that a card never waits for the head.
3. A slice counts when its report arrives, once. A report of another incarnation, or of a slice not under way, is
   refused: the slot has given that slice up, and its work was perhaps done again.
4. A slot that is neither working, quarantined nor stopped either waits for its node or has a time to wake up.
5. Quarantine is final for the run.

Theory of operation. `phase` says what the slot waits for:

    ABSENT ──NodeJoined──> WORKING <──Tick at wake_at── PAUSING
       ^                    │   │                         ^
       └──────NodeLeft──────┘   ├──slice failed, hung─────┘   (too often: QUARANTINED)
                                └──Drain, last report──> STOPPED

Pure: no clock (every event comes with `now_s`, a monotonic second), no I/O, no randomness. Does not place slots
(`placement.py`) and does not perform commands (`supervisor.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias

from orchestrator.cluster.base import SliceFailure
from orchestrator.slots import (
    Abandon,
    Cancel,
    Command,
    Counters,
    Drain,
    EndRun,
    Event,
    Flight,
    Forget,
    NodeJoined,
    NodeLeft,
    Note,
    Phase,
    Place,
    Restart,
    Rules,
    SliceFailed,
    SliceReported,
    Slot,
    Submit,
    Tick,
)
from workers.messages import Report, Verdict, WorkerState

#: Slices under way in a working slot.
_PIPELINE = 2

#: After a restart the actor cannot be reached for a second or two; asking again this often costs nothing.
_RETRY_UNREACHABLE_S = 0.5

#: Deaths this shortly before a node is seen to have left are the node's, not the slot's. Ray tells of a dead raylet
#: seconds after its actors have failed (seen: 3 to 10 s; its health check allows 5 x 3 s and more).
_NODE_BLAME_S = 60.0


#: What a person needs to know of Ray's paragraphs, which are in the event log.
_ENDED = {
    SliceFailure.DIED: "its process ended: killed, or crashed",
    SliceFailure.UNAVAILABLE: "its process ended: Ray lost the connection to it",
}

Result: TypeAlias = tuple[Slot, tuple[Command, ...]]


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
    if slot.phase in {Phase.QUARANTINED, Phase.STOPPED}:
        return slot, _refusal(event, slot)
    match event:
        case NodeJoined():
            result = _node_joined(slot, now_s, rules, ends_at_s)
        case NodeLeft():
            result = _node_left(slot, now_s)
        case SliceReported(report=report):
            result = _reported(slot, report, now_s, rules, ends_at_s)
        case SliceFailed():
            result = _failed(slot, event, now_s, rules, ends_at_s)
        case Tick():
            result = _ticked(slot, now_s, rules, ends_at_s)
        case Drain():
            result = _drain(slot)
    return result


def _node_joined(slot: Slot, now_s: float, rules: Rules, ends_at_s: float | None) -> Result:
    if slot.phase is not Phase.ABSENT:
        return slot, ()
    place: tuple[Command, ...] = () if slot.placed else (Place(),)
    again = slot.placed
    slot = replace(
        slot,
        placed=True,
        state=WorkerState.STARTING,
        reason="its process is starting",
        deaths_at_s=_recent(slot.deaths_at_s, now_s, rules),
    )
    slot, commands = _begin(slot, now_s, rules, ends_at_s, new_process=again)
    return slot, (*place, *commands)


def _node_left(slot: Slot, now_s: float) -> Result:
    if slot.phase is Phase.ABSENT:
        return slot, ()
    lost = replace(
        _drop_flights(slot),
        phase=Phase.ABSENT,
        state=WorkerState.LOST,
        reason="its node has left the cluster",
        wake_at_s=None,
        working_since_s=None,
        silent_since_s=None,
        deaths_at_s=tuple(at for at in slot.deaths_at_s if at < now_s - _NODE_BLAME_S),
    )
    return _stopped_if_draining(lost), (Forget(),)


def _reported(slot: Slot, report: Report, now_s: float, rules: Rules, ends_at_s: float | None) -> Result:
    flight = _flight(slot, report.incarnation, report.sequence)
    if flight is None or report.slot != slot.slot:
        return slot, _refusal(SliceReported(report=report), slot)
    worked_before = slot.report is not None
    slot = replace(
        slot,
        in_flight=tuple(other for other in slot.in_flight if other is not flight),
        proven=True,
        heard_at_s=now_s,
        silent_since_s=None,
        deaths_at_s=_recent(slot.deaths_at_s, now_s, rules),
        state=report.state,
        reason=report.reason,
        report=report,
        resume=report.resume if report.resume is not None else slot.resume,
        counters=_counted(slot.counters, report),
        errors_in_a_row=slot.errors_in_a_row + 1 if report.error is not None else 0,
    )
    if report.verdict is Verdict.MISFIT:
        return _impossible(slot, report.reason, counting=worked_before or ends_at_s is not None)
    if slot.errors_in_a_row >= rules.max_workload_errors:
        return _quarantine(slot, f"the workload failed {slot.errors_in_a_row} times in a row: {report.reason}")
    if report.verdict is Verdict.POISONED:
        no_room = report.device is None and report.oom_count > 0
        settle = _no_room if no_room else _poisoned
        return settle(slot, report.reason, now_s, rules)
    if slot.draining:
        return (slot if slot.in_flight else replace(slot, phase=Phase.STOPPED)), ()
    return _fill(slot, now_s, rules, ends_at_s)


def _failed(slot: Slot, event: SliceFailed, now_s: float, rules: Rules, ends_at_s: float | None) -> Result:
    if _flight(slot, event.incarnation, event.sequence) is None:
        return slot, ()  # the second of two slices that failed together: the first has said it all
    if event.failure is SliceFailure.UNBUILDABLE:
        if slot.report is None:
            return _impossible(slot, f"{slot.slot}: cannot be started: {event.text}", counting=ends_at_s is not None)
        # It did work before: its process is in a bad way, not its code.
        return _died(slot, f"its process failed outside a step: {event.text}", now_s, rules, before=(Restart(),))
    if slot.proven or event.failure is SliceFailure.DIED:
        return _died(slot, _ENDED[event.failure], now_s, rules, before=())
    silent_since_s = slot.silent_since_s if slot.silent_since_s is not None else slot.working_since_s
    if silent_since_s is not None and now_s - silent_since_s > rules.start_timeout_s:
        return _quarantine(slot, f"no process came up in {rules.start_timeout_s:.0f} s")
    waiting = replace(
        _drop_flights(slot), phase=Phase.PAUSING, silent_since_s=silent_since_s, wake_at_s=now_s + _RETRY_UNREACHABLE_S
    )
    return _stopped_if_draining(waiting), (Forget(),)


def _ticked(slot: Slot, now_s: float, rules: Rules, ends_at_s: float | None) -> Result:
    if slot.phase is Phase.PAUSING and slot.wake_at_s is not None and now_s >= slot.wake_at_s:
        if slot.draining:
            return replace(slot, phase=Phase.STOPPED, wake_at_s=None), ()
        return _begin(slot, now_s, rules, ends_at_s, new_process=True)
    if slot.phase is not Phase.WORKING:
        return slot, ()
    overdue_s = _overdue_s(slot, now_s)
    patience_s = rules.hang_timeout_s if slot.proven else rules.start_timeout_s
    if overdue_s > patience_s:
        what = "no report" if slot.proven else "its process did not come up"
        return _died(slot, f"{what} for {overdue_s:.0f} s; its process was ended", now_s, rules, before=(Restart(),))
    if slot.proven and overdue_s > rules.stale_after_s:
        return replace(slot, reason=f"STALE: its slice is {overdue_s:.0f} s overdue"), ()
    return slot, ()


def _drain(slot: Slot) -> Result:
    queued = slot.in_flight[1:]
    slot = replace(slot, draining=True, in_flight=slot.in_flight[:1])
    if not slot.in_flight or not slot.proven:
        # Nothing runs, or nobody knows whether it does: there is nothing to wait for.
        return replace(_drop_flights(slot), phase=Phase.STOPPED, wake_at_s=None), (Forget(),)
    return slot, tuple(Cancel(sequence=flight.sequence) for flight in queued)


def _begin(slot: Slot, now_s: float, rules: Rules, ends_at_s: float | None, *, new_process: bool) -> Result:
    """Send the first slices of an incarnation: one that proves the worker, and a full one behind it."""
    slot = replace(
        slot,
        phase=Phase.WORKING,
        incarnation=slot.incarnation + (1 if new_process else 0),
        proven=False,
        wake_at_s=None,
        working_since_s=now_s,
        heard_at_s=None,
    )
    slot, proof = _send(slot, 0.0, now_s)
    slot, rest = _fill(slot, now_s, rules, ends_at_s)
    return slot, (proof, *rest)


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
    flight = Flight(sequence=slot.next_sequence, duration_s=duration_s, submitted_at_s=now_s)
    command = Submit(incarnation=slot.incarnation, sequence=flight.sequence, duration_s=duration_s, resume=slot.resume)
    return replace(slot, in_flight=(*slot.in_flight, flight), next_sequence=slot.next_sequence + 1), command


def _died(slot: Slot, why: str, now_s: float, rules: Rules, *, before: tuple[Command, ...]) -> Result:
    """Wait, longer each time, and start again, because the process is gone or must go; or give up."""
    deaths = (*(_recent(slot.deaths_at_s, now_s, rules) if slot.proven else slot.deaths_at_s), now_s)
    slot = _drop_flights(slot)
    slot = replace(
        slot,
        deaths_at_s=deaths,
        silent_since_s=None,
        counters=replace(slot.counters, restarts=slot.counters.restarts + 1),
    )
    if len(deaths) >= rules.max_deaths:
        span_s = max(rules.death_window_s, now_s - deaths[0])
        return _quarantine(slot, f"{len(deaths)} deaths in {span_s:.0f} s; the last: {why}")
    # The first death of a window is met at once; waiting begins when it happens again. 2.0**1024 would overflow.
    wait_s = 0.0 if len(deaths) == 1 else rules.restart_backoff_s * 2.0 ** min(len(deaths) - 2, 1000)
    wait_s = min(wait_s, rules.restart_backoff_max_s)
    slot = replace(slot, phase=Phase.PAUSING, state=WorkerState.RESTARTING, reason=why, wake_at_s=now_s + wait_s)
    return _stopped_if_draining(slot), (Forget(), *before)


def _impossible(slot: Slot, why: str, *, counting: bool) -> Result:
    """What was asked for can never work here.

    Before the run counts it is the plan that is wrong; later it is this place in it (a PC that joined late, another
    card that came back), and the others' hours are not thrown away for it.
    """
    return _quarantine(slot, why) if counting else (slot, (EndRun(reason=why),))


def _poisoned(slot: Slot, why: str, now_s: float, rules: Rules) -> Result:
    return _died(slot, why, now_s, rules, before=(Restart(),))


def _no_room(slot: Slot, why: str, now_s: float, rules: Rules) -> Result:
    """The card is full even for a context: no death of the slot's making. Wait long, then try a fresh process."""
    slot = replace(
        _drop_flights(slot),
        phase=Phase.PAUSING,
        state=WorkerState.EMERGENCY,
        reason=why,
        wake_at_s=now_s + rules.restart_backoff_max_s,
    )
    return _stopped_if_draining(slot), (Forget(), Restart())


def _quarantine(slot: Slot, why: str) -> Result:
    slot = replace(
        _drop_flights(slot), phase=Phase.QUARANTINED, state=WorkerState.QUARANTINED, reason=why, wake_at_s=None
    )
    return slot, (Abandon(),)


def _stopped_if_draining(slot: Slot) -> Slot:
    return replace(slot, phase=Phase.STOPPED, wake_at_s=None) if slot.draining else slot


def _recent(deaths_at_s: tuple[float, ...], now_s: float, rules: Rules) -> tuple[float, ...]:
    return tuple(at for at in deaths_at_s if at > now_s - rules.death_window_s)


def _drop_flights(slot: Slot) -> Slot:
    lost = len(slot.in_flight)
    counters = replace(slot.counters, slices_lost=slot.counters.slices_lost + lost)
    return replace(slot, in_flight=(), counters=counters)


def _flight(slot: Slot, incarnation: int, sequence: int) -> Flight | None:
    if incarnation != slot.incarnation:
        return None
    return next((flight for flight in slot.in_flight if flight.sequence == sequence), None)


def _overdue_s(slot: Slot, now_s: float) -> float:
    """Seconds since the running slice should have ended; negative while it need not have."""
    if not slot.in_flight:
        return 0.0
    running = slot.in_flight[0]
    began_s = max(running.submitted_at_s, slot.heard_at_s if slot.heard_at_s is not None else 0.0)
    return now_s - began_s - running.duration_s


def _counted(counters: Counters, report: Report) -> Counters:
    return replace(
        counters,
        steps_ok=counters.steps_ok + report.steps_ok,
        steps_oom=counters.steps_oom + report.steps_oom,
        steps_error=counters.steps_error + report.steps_error,
        oom_count=counters.oom_count + report.oom_count,
        emergency_count=counters.emergency_count + report.emergency_count,
        verify_checks=counters.verify_checks + report.verify_checks,
        verify_errors=counters.verify_errors + report.verify_errors,
        work_flop=counters.work_flop + report.work_flop,
        busy_s=counters.busy_s + report.busy_s,
    )


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
