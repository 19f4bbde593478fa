"""What the end of a slice or of a process does to its slot. Pure; part of the lifecycle.

A slice ends with a report or with a failure. A process that ends is followed by another after a
pause, by none while the slot is held, or the slot is quarantined. `lifecycle.py` says in which
phase which function here is called; what is sent next is in `slices.py`.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from typing import Final

from orchestrator.core import slices
from orchestrator.core.fleet import DeathCause, SliceFailed, SliceFailure, SliceReported
from orchestrator.core.leak_detector import observe
from orchestrator.core.silence import NOT_SEEN
from orchestrator.core.slot import (
    Abandon,
    Command,
    EndRun,
    Flight,
    Forget,
    HeadState,
    Hold,
    Moment,
    Note,
    Phase,
    Place,
    Restart,
    Slot,
    SlotState,
    Transition,
    changed,
)
from orchestrator.core.training import follow
from workers.messages import STARVED, Report, Verdict, WorkerState
from workers.units import MIB

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
    """Count a report, then send more work, or replace or give up the process that sent it.

    A report was counted if the slot has another `report` afterwards.
    """
    report = event.report
    flight = slices.flight_of(slot, report.incarnation, report.sequence)
    if flight is None or report.slot != slot.slot:
        return refused(slot, event, moment)

    worked_before = slot.report is not None
    slot = _counted(slot, flight, report, moment)
    if report.verdict is Verdict.DONE:
        return done(slot)
    if report.verdict in {Verdict.INCOMPATIBLE, Verdict.BAD_INPUT}:
        end = EndRun(reason=report.reason, is_input=report.verdict is Verdict.BAD_INPUT)
        return impossible(slot, end, moment, worked_before=worked_before)
    if slot.errors_in_a_row >= moment.rules.max_workload_errors:
        return quarantine(slot, f"{slot.errors_in_a_row} times in a row: {report.reason}")
    if report.verdict is Verdict.CONTEXT_CORRUPTED:
        is_full = report.device is None and report.counts.oom_count > 0
        return (
            no_memory_for_context(slot, report.reason, moment)
            if is_full
            else died(slot, report.reason, moment, before=(Restart(),))
        )
    return _go_on(slot, moment)


def reported_when_done(slot: Slot, event: SliceReported, moment: Moment) -> Transition:
    """Count a report that was under way when the slot was found to be done; it stays that."""
    report = event.report
    flight = slices.flight_of(slot, report.incarnation, report.sequence)
    if flight is None or report.slot != slot.slot:
        return refused(slot, event, moment)
    counted = _counted(slot, flight, report, moment)
    return done(changed(counted, state=slot.state, reason=slot.reason, training=slot.training))


def failed_when_done(slot: Slot, event: SliceFailed, _: Moment) -> Transition:
    """Give up what a process did not come to that is no longer needed."""
    flight = slices.flight_of(slot, event.incarnation, event.sequence)
    if flight is None:
        return slot, ()
    if event.failure is SliceFailure.UNSENT:
        slot = changed(slot, in_flight=slices.others(slot, flight))
    return done(slices.all_lost(slot))


def _counted(slot: Slot, flight: Flight, report: Report, moment: Moment) -> Slot:
    report = slices.bounded(report, flight, moment.now_s)
    process_steps = report.counts.steps_ok + (slot.process_steps if slot.ready else 0)
    return changed(
        slot,
        in_flight=slices.others(slot, flight),
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
        deaths_at_s=recent(slot.deaths_at_s, moment),
        state=report.state,
        reason=report.reason,
        report=report,
        training=follow(slot.training, report),
        device=report.device if report.device is not None else slot.device,
        resume=report.resume if report.resume is not None else slot.resume,
        counts=slot.counts + report.counts,
        first_report_s=moment.now_s
        if slot.first_report_s is None and report.state is not WorkerState.WARMING
        else slot.first_report_s,
        worked_s=slot.worked_s
        + (
            0.0 if moment.ends_at_s is None else slices.worked_s(slot, flight, report, moment.now_s)
        ),
        errors_in_a_row=slot.errors_in_a_row + 1 if report.error is not None else 0,
        leak=observe(slot.leak, report),
    )


def _progressed(slot: Slot, report: Report, process_steps: int) -> bool:
    """Say whether the process got further than those before it: a newer checkpoint, or many times
    their good steps.

    What crashes in its tenth step, again and again, gets no further, although its last report may
    come after the first step or after the ninth.
    """
    if report.progress is not None and report.progress.train_step is not None:
        return (report.progress.saved_step or 0) > (slot.training.last.saved_step or 0)
    return process_steps > _TIMES_FURTHER * slot.most_steps


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
        reason = f"LEAK: {leak_words(told_bytes)}" if is_running else slot.reason
        slot = changed(slot, leak_told=True, reason=reason)
    rests = slot.draining or slot.orders.hold is not None
    if rests and not slot.in_flight and slices.is_to_save(slot):
        slot, commands = slices.last(slot, moment)
        return slot, (*notes, *commands)
    if slot.draining:
        return (
            slot if slot.in_flight else changed(slot, phase=Phase.STOPPED, wake_at_s=None)
        ), notes
    if slot.orders.hold is not None:
        slot, commands = (slot, ()) if slot.in_flight else at_rest(slot, moment)
    elif too_much_bytes is None:
        slot, commands = slices.fill(slot, moment)
    else:
        slot, commands = leaked(slot, too_much_bytes, moment)
    return slot, (*notes, *commands)


def failed(slot: Slot, event: SliceFailed, moment: Moment) -> Transition:
    """Distinguish a process that has ended from one that cannot be reached yet, and from code that
    cannot work.
    """
    flight = slices.flight_of(slot, event.incarnation, event.sequence)
    if flight is None:
        return (
            slot,
            (),
        )  # slices of one process fail together, and the first failure gave up the others
    if event.failure is SliceFailure.UNSENT:
        slot = changed(slot, in_flight=slices.others(slot, flight))
    if event.failure is SliceFailure.UNBUILDABLE:
        if slot.report is None:
            why = f"{slot.slot}: cannot be started: {event.text}"
            return impossible(slot, EndRun(reason=why), moment, worked_before=False)
        # It did work before: its process is in a bad way, not its code.
        why = f"its process failed outside a step: {event.text}"
        return died(slot, why, moment, before=(Restart(),))
    # What fails at once was sent to the process that has just ended: Ray had not noticed yet.
    now_s = moment.now_s
    too_soon = slot.ending or (
        slot.working_since_s is not None and now_s - slot.working_since_s < _REBIRTH_S
    )
    if slot.ready or (event.failure is SliceFailure.DIED and not too_soon):
        return died(slot, _ENDED[event.failure], moment)
    silent_since_s = (
        slot.silent_since_s if slot.silent_since_s is not None else slot.working_since_s
    )
    if silent_since_s is not None and now_s - silent_since_s > moment.rules.start_timeout_s:
        return quarantine(slot, f"no process came up in {moment.rules.start_timeout_s:.0f} s")
    waiting = changed(
        slices.all_lost(slot),
        phase=Phase.PAUSING,
        silent_since_s=silent_since_s,
        ending=False,
        wake_at_s=now_s + _RETRY_UNREACHABLE_S,
    )
    return without_process(waiting, moment, (Forget(),))


#: A process that keeps too much by its first reports is no better than one that dies.
_AT_ONCE_REPORTS: Final = 3

_HELD_WITH_PROCESS: Final = "it gets no work, and its process keeps its memory, until `unpause`"
_HELD_WITHOUT: Final = "it gets no work, and its process has ended, until `unpause`"


def died(slot: Slot, why: str, moment: Moment, *, before: tuple[Command, ...] = ()) -> Transition:
    """Start another process after a pause that grows with each death; give up after deaths without
    progress between.

    `before` are the commands that end the process, if it still lives.
    """
    now_s, rules = moment.now_s, moment.rules
    deaths = (*(recent(slot.deaths_at_s, moment) if slot.ready else slot.deaths_at_s), now_s)
    slot = replace(
        _restarted(slot),
        deaths_at_s=deaths,
        most_steps=max(slot.most_steps, slot.process_steps if slot.ready else 0),
        silent_since_s=None,
        ending=bool(before),
    )
    in_vain = without_progress(slot)
    if len(in_vain) >= rules.max_deaths:
        span_s = max(rules.death_window_s, now_s - in_vain[0])
        return quarantine(
            slot, f"{len(in_vain)} deaths in {span_s:.0f} s without progress; the last: {why}"
        )
    pausing = _pausing(slot, HeadState.RESTARTING, why, now_s + _pause_s(slot, moment))
    return without_process(pausing, moment, (Forget(), *before))


def no_memory_for_context(slot: Slot, why: str, moment: Moment) -> Transition:
    """Try a fresh process after the longest pause: the card has no memory left even for a context.

    Not a death.
    """
    slot = replace(_restarted(slot), ending=True)
    pause_s = _jittered(moment.rules.restart_backoff_max_s, slot, moment)
    pausing = _pausing(slot, WorkerState.EMERGENCY, why, moment.now_s + pause_s)
    return without_process(pausing, moment, (Forget(), Restart()))


def leaked(slot: Slot, unneeded_bytes: int, moment: Moment) -> Transition:
    """Replace a process that keeps more and more memory.

    Not a death, unless it did so at once: it did its work.
    """
    if slot.leak.reports <= _AT_ONCE_REPORTS:
        why = f"{leak_words(unneeded_bytes)}: drop every tensor in the workload's `release`"
        return died(slot, why, moment, before=(Restart(),))
    slot, why = (
        replace(_restarted(slot), ending=True),
        f"{leak_words(unneeded_bytes)}; its process was replaced",
    )
    return without_process(
        _pausing(slot, HeadState.RESTARTING, why, moment.now_s), moment, (Forget(), Restart())
    )


def leak_words(unneeded_bytes: int) -> str:
    """Say what a process keeps for nothing."""
    return f"its process keeps {unneeded_bytes / MIB:.0f} MiB that its work does not need"


def impossible(slot: Slot, end: EndRun, moment: Moment, *, worked_before: bool) -> Transition:
    """Refuse what can never work in this slot.

    Before the run counts, the plan is wrong and the run ends. Later it is this slot alone (a PC
    that joined late, another card that came back): the slot is given up and the others continue.
    """
    if worked_before or moment.rules.has_counted or moment.ends_at_s is not None:
        return quarantine(slot, end.reason)
    return slot, (end,)


def done(slot: Slot) -> Transition:
    """Send a slot whose work is finished nothing more.

    Its process is ended once all has come back that was sent.
    """
    slot = replace(slot, phase=Phase.DONE, wake_at_s=None)
    return slot, () if slot.in_flight else (Abandon(),)


def quarantine(slot: Slot, why: str) -> Transition:
    """Give the slot up until the user reinstates it, or starts a new run.

    It is held no more: it has ended.
    """
    slot = replace(
        slices.all_lost(slot),
        phase=Phase.QUARANTINED,
        state=HeadState.QUARANTINED,
        reason=why,
        wake_at_s=None,
        orders=replace(slot.orders, hold=None),
    )
    return slot, (Abandon(),)


def without_process(slot: Slot, moment: Moment, commands: tuple[Command, ...]) -> Transition:
    """Let a slot wait that has no process, unless its run is ending or the user holds it: it then
    stops, or is held.
    """
    if slot.draining:
        return replace(slot, phase=Phase.STOPPED, wake_at_s=None), commands
    if slot.orders.hold is None:
        return slot, commands
    held, more = at_rest(replace(slot, ready=False), moment)
    return held, (*commands, *more)


def at_rest(slot: Slot, moment: Moment) -> Transition:
    """Hold a slot on a node that is there, now that nothing is under way.

    End its process where that was asked.
    """
    ends = slot.orders.hold is Hold.DRAIN and slot.placed
    stays = slot.ready and not ends
    slot = replace(
        slot,
        phase=Phase.HELD,
        state=HeadState.HELD,
        reason=slot.orders.why or (_HELD_WITH_PROCESS if stays else _HELD_WITHOUT),
        ready=stays,
        wake_at_s=None,
        silent_since_s=None,
        held_since_s=moment.now_s if slot.held_since_s is None else slot.held_since_s,
    )
    # The next process is another actor's.
    return (
        (replace(slot, placed=False, incarnation=slot.incarnation + 1), (Abandon(),))
        if ends
        else (slot, ())
    )


def start(slot: Slot, moment: Moment) -> Transition:
    """Send the first slice to a process of a slot whose node is there.

    The actor may have to be made first.
    """
    place: tuple[Command, ...] = () if slot.placed else (Place(),)
    again = slot.placed
    slot = replace(
        slot,
        placed=True,
        state=HeadState.STARTING,
        reason="its process starts",
        deaths_at_s=recent(slot.deaths_at_s, moment),
    )
    slot, command = slices.begin(slot, moment, new_process=again)
    return slot, (*place, command)


def _pausing(slot: Slot, state: SlotState, why: str, wake_at_s: float) -> Slot:
    return replace(slot, phase=Phase.PAUSING, state=state, reason=why, wake_at_s=wake_at_s)


def recent(deaths_at_s: tuple[float, ...], moment: Moment) -> tuple[float, ...]:
    """Return the deaths of the window that ends now."""
    return deaths_at_s and tuple(
        at for at in deaths_at_s if at > moment.now_s - moment.rules.death_window_s
    )


def without_progress(slot: Slot) -> tuple[float, ...]:
    """Return the slot's recent deaths (monotonic seconds) after which it got no further."""
    since_s = slot.progressed_at_s
    return (
        slot.deaths_at_s
        if since_s is None
        else tuple(at for at in slot.deaths_at_s if at > since_s)
    )


def explained(slot: Slot, cause: DeathCause) -> Slot:
    """Say in the slot's reason that the PC's RAM was full.

    Other causes are only in the event log.
    """
    text = "Ray ended its process because the PC's RAM was nearly full"
    is_said = slot.reason.endswith(text) or slot.state not in {
        HeadState.RESTARTING,
        HeadState.QUARANTINED,
    }
    if not cause.host_memory or is_said:
        return slot
    return replace(
        slot, reason=text if slot.state is HeadState.RESTARTING else f"{slot.reason}; {text}"
    )


def _restarted(slot: Slot) -> Slot:
    slot = slices.all_lost(slot)
    return replace(slot, restarts=slot.restarts + 1)


def _pause_s(slot: Slot, moment: Moment) -> float:
    """Return how long to wait before the slot starts again.

    No pause after the first death of a window. Half of each later pause is jitter, so that workers
    that died together do not come back together.
    """
    if len(slot.deaths_at_s) == 1:
        return 0.0
    rules = moment.rules
    # 2.0**1024 would overflow.
    doubled_s = rules.restart_backoff_s * 2.0 ** min(len(slot.deaths_at_s) - 2, 1000)
    return _jittered(min(doubled_s, rules.restart_backoff_max_s), slot, moment)


def _jittered(pause_s: float, slot: Slot, moment: Moment) -> float:
    """Return between half of the pause and all of it (AWS Architecture Blog, "Exponential Backoff
    And Jitter").
    """
    seed = f"{moment.rules.seed}:{slot.slot}:{slot.restarts}"
    drawn = hashlib.blake2b(seed.encode(), digest_size=8)
    return pause_s * (0.5 + 0.5 * int.from_bytes(drawn.digest(), "big") / 2**64)
