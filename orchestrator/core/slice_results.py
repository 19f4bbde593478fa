"""What the end of a slice does to its slot: a report, or a failure without one. Pure; part of the
lifecycle.

`lifecycle.py` says in which phase which function here is called. What is sent next is in
`dispatch.py`, whether the process is replaced in `restart_policy.py`.
"""

from __future__ import annotations

import math
from typing import Final

from orchestrator.core import dispatch, restart_policy, step_accounting
from orchestrator.core.fleet import SliceFailed, SliceFailure, SliceReported
from orchestrator.core.leak_detector import observed
from orchestrator.core.silence import NOT_SEEN
from orchestrator.core.slot import (
    Accept,
    Command,
    Flight,
    Forget,
    Moment,
    Note,
    Phase,
    Restart,
    Slot,
    Transition,
    changed,
)
from orchestrator.core.training import followed
from workers.messages import STARVED, Report, Verdict, WorkerState

#: After a restart the actor cannot be reached for a second or two; asking again this often costs
#: next to nothing.
_RETRY_UNREACHABLE_S = 0.2

#: No new process fails sooner than this after its first slice was sent: it has to load torch before
#: anything else.
_REBIRTH_S = 0.5

#: So many times the good steps of any process before it, and a process without checkpoints got
#: further.
_TIMES_FURTHER: Final = 10

#: What a process keeps after a release is said, and is too much, from these shares of its cap on,
#: and from the last one on if nothing runs any more. Between two replacements a leak then costs a
#: sixth of the cap on average.
_FLAG_SHARE: Final = 1 / 6
_LIMIT_SHARE: Final = 1 / 3
_STARVED_SHARE: Final = 1 / 8

#: What the user needs of Ray's long messages, which are in the event log.
_ENDED = {
    SliceFailure.DIED: "its process ended: killed, or crashed",
    SliceFailure.UNAVAILABLE: "its process ended: Ray lost the connection to it",
    SliceFailure.UNSENT: "its process ended: it can no longer be reached",
}


def refused(slot: Slot, event: SliceReported, _: Moment) -> Transition:
    """Note the report of a slice that is not under way, and count nothing of it."""
    report = event.report
    fields = (
        ("incarnation", report.incarnation),
        ("sequence", report.sequence),
        ("steps_ok", report.counts.steps_ok),
        ("expected_incarnation", slot.incarnation),
    )
    return slot, (Note(name="report_refused", fields=fields),)


def reported(slot: Slot, event: SliceReported, moment: Moment) -> Transition:
    """Count a report, then send more work, or replace or give up the process that sent it."""
    report = event.report
    flight = step_accounting.flight_of(slot, report.incarnation, report.sequence)
    if flight is None or report.slot != slot.slot:
        return refused(slot, event, moment)
    report = step_accounting.bounded(report, flight, moment.now_s)
    slot, commands = _accepted(slot, flight, report, moment)
    return slot, (Accept(report=report), *commands)


def reported_when_done(slot: Slot, event: SliceReported, moment: Moment) -> Transition:
    """Count a report that was under way when the slot was found to be done; it stays that."""
    report = event.report
    flight = step_accounting.flight_of(slot, report.incarnation, report.sequence)
    if flight is None or report.slot != slot.slot:
        return refused(slot, event, moment)
    report = step_accounting.bounded(report, flight, moment.now_s)
    counted = _counted(slot, flight, report, moment)
    slot, commands = restart_policy.done(
        changed(counted, state=slot.state, reason=slot.reason, training=slot.training)
    )
    return slot, (Accept(report=report), *commands)


def failed_when_done(slot: Slot, event: SliceFailed, _: Moment) -> Transition:
    """Give up what a process did not come to that is no longer needed."""
    flight = step_accounting.flight_of(slot, event.incarnation, event.sequence)
    if flight is None:
        return slot, ()
    if event.failure is SliceFailure.UNSENT:
        slot = changed(slot, in_flight=step_accounting.others(slot, flight))
    return restart_policy.done(step_accounting.all_lost(slot))


def _counted(slot: Slot, flight: Flight, report: Report, moment: Moment) -> Slot:
    process_steps = report.counts.steps_ok + (slot.process_steps if slot.ready else 0)
    return changed(
        slot,
        in_flight=step_accounting.others(slot, flight),
        ready=True,
        ending=False,
        heard_at_s=moment.now_s,
        silent_since_s=None,
        silence=NOT_SEEN,
        longest_step_s=max(slot.longest_step_s or 0.0, report.longest_step_s) or None,
        progressed_at_s=moment.now_s
        if _progressed(slot, report, process_steps)
        else slot.progressed_at_s,
        process_steps=process_steps,
        deaths_at_s=restart_policy.recent(slot.deaths_at_s, moment),
        state=report.state,
        reason=report.reason,
        report=report,
        training=followed(slot.training, report),
        device=report.device if report.device is not None else slot.device,
        resume=report.resume if report.resume is not None else slot.resume,
        counts=slot.counts + report.counts,
        first_report_s=moment.now_s
        if slot.first_report_s is None and report.state is not WorkerState.WARMING
        else slot.first_report_s,
        worked_s=slot.worked_s
        + (0.0 if moment.ends_at_s is None else step_accounting.worked_s(report)),
        errors_in_a_row=slot.errors_in_a_row + 1 if report.error is not None else 0,
        leak=observed(slot.leak, report),
    )


def _progressed(slot: Slot, report: Report, process_steps: int) -> bool:
    """Say whether the process got further than those before it: a newer checkpoint, or many times
    their good steps.

    What crashes in its tenth step, again and again, gets no further, although its last report may
    come after the first step or after the ninth.
    """
    if report.progress is not None and report.progress.train_step is not None:
        return (report.progress.saved_step or 0) > (slot.training.told.saved_step or 0)
    return process_steps > _TIMES_FURTHER * slot.most_steps


def _accepted(slot: Slot, flight: Flight, report: Report, moment: Moment) -> Transition:
    worked_before = slot.report is not None
    slot = _counted(slot, flight, report, moment)
    if report.verdict is Verdict.DONE:
        return restart_policy.done(slot)
    if report.verdict is Verdict.INCOMPATIBLE:
        return restart_policy.impossible(slot, report.reason, moment, worked_before=worked_before)
    if slot.errors_in_a_row >= moment.rules.max_workload_errors:
        why = f"{slot.errors_in_a_row} times in a row: {report.reason}"
        return restart_policy.quarantine(slot, why)
    if report.verdict is Verdict.CONTEXT_CORRUPTED:
        if report.device is None and report.counts.oom_count > 0:
            return restart_policy.no_memory_for_context(slot, report.reason, moment)
        return restart_policy.died(slot, report.reason, moment, before=(Restart(),))
    return _go_on(slot, moment)


def _go_on(slot: Slot, moment: Moment) -> Transition:
    """After a good report: more work, unless the run is ending or the process keeps too much
    memory.

    What it keeps is said in every reason, and once for each process in the event log.
    """
    rules, cap_bytes = moment.rules, math.inf if slot.device is None else slot.device.cap_bytes
    # Where nothing runs any more, less is enough: a fresh process has that much more to work with.
    share = _STARVED_SHARE if slot.state in STARVED else _LIMIT_SHARE
    too_much_bytes = slot.leak.unneeded_bytes(rules.leak_limit_bytes, share * cap_bytes)
    told_bytes = too_much_bytes or slot.leak.unneeded_bytes(
        rules.leak_flag_bytes, _FLAG_SHARE * cap_bytes
    )
    notes: tuple[Command, ...] = ()
    if told_bytes is not None:
        notes = (
            () if slot.leak_told else (Note(name="leak", fields=(("growth_bytes", told_bytes),)),)
        )
        is_running = slot.state is WorkerState.RUNNING
        reason = f"LEAK: {restart_policy.leak_words(told_bytes)}" if is_running else slot.reason
        slot = changed(slot, leak_told=True, reason=reason)
    rests = slot.draining or slot.orders.hold is not None
    if rests and not slot.in_flight and dispatch.is_to_save(slot):
        slot, commands = dispatch.last(slot, moment)
        return slot, (*notes, *commands)
    if slot.draining:
        return (
            slot if slot.in_flight else changed(slot, phase=Phase.STOPPED, wake_at_s=None)
        ), notes
    if slot.orders.hold is not None:
        slot, commands = (slot, ()) if slot.in_flight else restart_policy.at_rest(slot, moment)
    elif too_much_bytes is None:
        slot, commands = dispatch.fill(slot, moment)
    else:
        slot, commands = restart_policy.leaked(slot, too_much_bytes, moment)
    return slot, (*notes, *commands)


def failed(slot: Slot, event: SliceFailed, moment: Moment) -> Transition:
    """Distinguish a process that has ended from one that cannot be reached yet, and from code that
    cannot work.
    """
    flight = step_accounting.flight_of(slot, event.incarnation, event.sequence)
    if flight is None:
        return (
            slot,
            (),
        )  # slices of one process fail together, and the first failure gave up the others
    if event.failure is SliceFailure.UNSENT:
        slot = changed(slot, in_flight=step_accounting.others(slot, flight))
    if event.failure is SliceFailure.UNBUILDABLE:
        if slot.report is None:
            why = f"{slot.slot}: cannot be started: {event.text}"
            return restart_policy.impossible(slot, why, moment, worked_before=False)
        # It did work before: its process is in a bad way, not its code.
        why = f"its process failed outside a step: {event.text}"
        return restart_policy.died(slot, why, moment, before=(Restart(),))
    # What fails at once was sent to the process that has just ended: Ray had not noticed yet.
    now_s = moment.now_s
    too_soon = slot.ending or (
        slot.working_since_s is not None and now_s - slot.working_since_s < _REBIRTH_S
    )
    if slot.ready or (event.failure is SliceFailure.DIED and not too_soon):
        return restart_policy.died(slot, _ENDED[event.failure], moment)
    silent_since_s = (
        slot.silent_since_s if slot.silent_since_s is not None else slot.working_since_s
    )
    if silent_since_s is not None and now_s - silent_since_s > moment.rules.start_timeout_s:
        return restart_policy.quarantine(
            slot, f"no process came up in {moment.rules.start_timeout_s:.0f} s"
        )
    waiting = changed(
        step_accounting.all_lost(slot),
        phase=Phase.PAUSING,
        silent_since_s=silent_since_s,
        ending=False,
        wake_at_s=now_s + _RETRY_UNREACHABLE_S,
    )
    return restart_policy.without_process(waiting, moment, (Forget(),))
