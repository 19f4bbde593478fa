"""Handlers for statuses of a process and for its end. Pure; part of the lifecycle.

When a process ends, the next one starts after a pause, unless the slot is held or quarantined.
`lifecycle.py` chooses the handler for each phase and defines the orders for the process.
`silence.py` detects processes that hang.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from typing import Any, Final

from orchestrator.core.fleet import ActorUnreachable, StatusReceived
from orchestrator.core.leak_detector import NO_WATCH, observe
from orchestrator.core.slot import (
    Abandon,
    Command,
    EndRun,
    HeadState,
    Hold,
    Moment,
    Note,
    Phase,
    Place,
    Slot,
    SlotState,
    Transition,
)
from orchestrator.core.training import follow
from workers.messages import STARVED, Cause, Ending, Quiet, Status, Verdict, WorkerState
from workers.units import MIB

#: Time for which polls may fail before the table shows it.
_UNREACHED_S: Final = 3.0

#: A process without checkpoints has made progress once its good steps exceed those of every earlier
#: process of the slot by this factor.
_TIMES_FURTHER: Final = 10

#: Memory that a process keeps after a release, as shares of its cap: from `_FLAG_SHARE` on it is
#: reported, and from `_LIMIT_SHARE` on the process is replaced, or from `_STARVED_SHARE` on if no
#: step fits any more. A leak then costs a sixth of the cap on average between two replacements.
_FLAG_SHARE: Final = 1 / 6
_LIMIT_SHARE: Final = 1 / 3
_STARVED_SHARE: Final = 1 / 8

#: A process that keeps too much within this number of statuses counts as a death.
_AT_ONCE_STATUSES: Final = 3

#: States that count as work. A worker that pauses for its duty is RUNNING, and one whose card is
#: too hot is THROTTLED or PAUSED.
_AT_WORK: Final = frozenset(
    {WorkerState.RUNNING, WorkerState.THROTTLED, WorkerState.PAUSED, WorkerState.CORRUPT}
)

ACTOR_ENDED: Final = "its process ended: killed, or crashed"

_HELD_WITH_PROCESS: Final = "it gets no work, and its process keeps its memory, until `unpause`"
_HELD_WITHOUT: Final = "it gets no work, and its process has ended, until `unpause`"


def on_status(slot: Slot, event: StatusReceived, moment: Moment) -> Transition:
    """Apply a status: the process continues, rests or is replaced, or the slot is given up."""
    status = event.status
    slot, is_same_actor = _with_answer(slot, status)
    if not is_same_actor:
        return died(slot, Cause.DIED, ACTOR_ENDED, moment)
    if status.incarnation != slot.incarnation:
        return slot, ()
    worked_before = slot.first_work_s is not None
    slot = _with_status(slot, status, moment, quiet=status.quiet)
    if status.is_up and (slot.state, slot.reason) != (status.state, status.reason):
        slot = replace(slot, state=status.state, reason=status.reason)
    if status.verdict is not Verdict.OK and not (
        status.verdict is Verdict.DONE and status.save_due
    ):
        return _on_verdict(slot, status, moment, worked_before=worked_before)
    if status.died is not None:
        return _on_end(slot, status.died, moment, worked_before=worked_before)
    if status.errors_in_a_row >= moment.run.max_workload_errors:
        why = f"{status.errors_in_a_row} times in a row: {status.reason}"
        return quarantine(slot, Cause.EXCEPTION, why)
    return _continue(slot, status, moment) if status.is_up else (slot, ())


def _on_end(slot: Slot, end: Ending, moment: Moment, *, worked_before: bool) -> Transition:
    """Apply the end of a process as its PC observed it."""
    if end.cause is Cause.NOT_STARTED and not worked_before:
        return _unbuildable(slot, end.text, moment)
    if end.cause is Cause.HOST_MEMORY:
        return died(slot, end.cause, f"{end.text}: the PC's RAM was nearly full", moment)
    failure = end.cause if end.cause is Cause.NOT_STARTED else Cause.DIED
    return died(slot, failure, end.text, moment)


def _on_verdict(slot: Slot, status: Status, moment: Moment, *, worked_before: bool) -> Transition:
    """Apply the verdict of a process that does no more work."""
    if status.verdict is Verdict.DONE:
        return done(slot)
    if status.verdict is Verdict.CONTEXT_CORRUPTED:
        if status.device is None and status.counts.oom_count > 0:
            return _no_memory_for_context(slot, status.reason, moment)
        return died(slot, status.verdict_cause or Cause.DRIVER, status.reason, moment)
    end = EndRun(reason=status.reason, is_input=status.verdict is Verdict.BAD_INPUT)
    failure = status.verdict_cause or Cause.EXCEPTION
    return impossible(slot, failure, end, moment, worked_before=worked_before)


def on_status_at_rest(slot: Slot, event: StatusReceived, moment: Moment) -> Transition:
    """Count the work of a process that must rest or end; note if that of a held slot has ended."""
    status = event.status
    slot, is_same_actor = _with_answer(slot, status)
    has_ended = not is_same_actor
    if is_same_actor and status.incarnation == slot.incarnation:
        slot = _with_status(slot, status, moment)
        has_ended = status.died is not None or status.verdict is Verdict.CONTEXT_CORRUPTED
    if slot.phase is Phase.HELD and slot.runs and has_ended:
        slot = replace(slot, runs=False, reason=slot.orders.why or _HELD_WITHOUT)
    return slot, ()


def on_status_without_node(slot: Slot, event: StatusReceived, moment: Moment) -> Transition:
    """Count the work of a process whose node has left; the process may run a little longer."""
    if event.status.incarnation != slot.incarnation:
        return slot, ()
    counted = _with_status(slot, event.status, moment)
    return replace(counted, heard_at_s=slot.heard_at_s), ()


def on_unreachable(slot: Slot, event: ActorUnreachable, moment: Moment) -> Transition:
    """Handle a failed poll: the actor can never be created, or it cannot be reached for now."""
    if event.is_unbuildable:
        if slot.first_work_s is None:
            return _unbuildable(slot, event.text, moment)
        why = f"its process cannot be started: {event.text}"
        return died(slot, Cause.NOT_STARTED, why, moment)
    if slot.unreached_since_s is None:
        slot = replace(slot, unreached_since_s=moment.now_s)
    return while_unreachable(slot, slot.unreached_since_s or 0.0, moment)


def while_unreachable(slot: Slot, since_s: float, moment: Moment) -> Transition:
    """Show that the actor is unreachable; quarantine the slot after `run.start_timeout_s`."""
    unreached_s, timeout_s = moment.now_s - since_s, moment.run.start_timeout_s
    if unreached_s > timeout_s:
        why = f"no process came up in {timeout_s:.0f} s"
        return quarantine(slot, Cause.NOT_STARTED, why)
    if slot.ready and unreached_s > _UNREACHED_S:
        slot = replace(slot, state=HeadState.RESTARTING, reason="its process cannot be reached")
    return slot, ()


def _with_answer(slot: Slot, status: Status) -> tuple[Slot, bool]:
    """Return the slot after an answer of its actor, and whether the actor's process is the same."""
    is_same = slot.actor in {None, status.actor}
    heard = max(slot.heard, status.news) if slot.actor == status.actor else status.news
    return replace(slot, actor=status.actor, heard=heard, unreached_since_s=None), is_same


def _with_status(slot: Slot, status: Status, moment: Moment, **more: Quiet | None) -> Slot:
    """Return the slot with the status of its present process and with `more`. If the process is not
    up, the status has no content.
    """
    changes: dict[str, Any] = {"heard_at_s": moment.now_s, **more}
    if not status.is_up:
        return replace(slot, **changes)
    before = slot.status if slot.has_reported else None
    is_news = before is None or (status.wall_s, status.counts) != (before.wall_s, before.counts)
    if is_news:
        worked_s = 0.0 if moment.ends_at_s is None else _worked_s(slot, status, before, moment)
        changes |= {
            "news_at_s": moment.now_s,
            "worked_s": slot.worked_s + worked_s,
            "leak": observe(slot.leak, status),
        }
        if _progressed(slot, status):
            changes["progressed_at_s"] = moment.now_s
    if slot.first_work_s is None and status.state is not WorkerState.WARMING:
        changes["first_work_s"] = moment.now_s
    # One call for all changes: copying a slot costs more than computing them.
    return replace(
        slot,
        **changes,
        status=status,
        longest_step_s=max(slot.longest_step_s or 0.0, status.longest_step_s) or None,
        deaths_at_s=recent(slot.deaths_at_s, moment),
        training=follow(slot.training, status),
        device=status.device or slot.device,
        resume=status.resume if status.resume is not None else slot.resume,
    )


def _worked_s(slot: Slot, status: Status, before: Status | None, moment: Moment) -> float:
    """Return the seconds that count as worked since the last status with new content.

    All seconds count if the process is at work: a loaded PC may delay a status. In other states,
    such as without memory, only the time of good steps counts.
    """
    if status.state in _AT_WORK and slot.news_at_s is not None:
        return moment.now_s - slot.news_at_s
    wall_s = status.wall_s - (0.0 if before is None else before.wall_s)
    busy_s = status.counts.busy_s - (0.0 if before is None else before.counts.busy_s)
    return max(0.0, wall_s if status.state in _AT_WORK else min(busy_s, wall_s))


def _progressed(slot: Slot, status: Status) -> bool:
    """Return whether the process got further than earlier ones: a newer checkpoint, or a multiple
    of their good steps.

    The factor matters for a process that always crashes in its tenth step: its last status may come
    after any step from the first to the ninth, which is no progress.
    """
    if status.progress is not None and status.progress.train_step is not None:
        return (status.progress.saved_step or 0) > (slot.training.last.saved_step or 0)
    return status.counts.steps_ok > _TIMES_FURTHER * slot.most_steps


def _continue(slot: Slot, status: Status, moment: Moment) -> Transition:
    """Continue after a good status, unless the process must rest or keeps too much memory.

    The memory that it keeps is in each reason, and once per process in the event log.
    """
    run, cap_bytes = moment.run, math.inf if slot.device is None else slot.device.cap_bytes
    # A starved process is replaced earlier: the next one has that much more memory for its steps.
    share = _STARVED_SHARE if slot.state in STARVED else _LIMIT_SHARE
    too_much_bytes = slot.leak.unneeded_bytes(run.leak_limit_mib, share * cap_bytes)
    leak_bytes = too_much_bytes or slot.leak.unneeded_bytes(
        run.leak_flag_mib, _FLAG_SHARE * cap_bytes
    )
    notes: tuple[Command, ...] = ()
    if leak_bytes is not None:
        if not slot.leak_logged:
            notes = (Note(name="leak", fields=(("growth_bytes", leak_bytes),)),)
        is_running = slot.state is WorkerState.RUNNING
        reason = f"LEAK: {_leak_words(leak_bytes)}" if is_running else slot.reason
        slot = replace(slot, leak_logged=True, reason=reason)
    commands: tuple[Command, ...] = ()
    if slot.draining or slot.orders.hold is not None:
        if _rests(slot, status):
            slot, commands = _stopped_or_held(slot, moment)
    elif too_much_bytes is not None:
        slot, commands = _leaked(slot, too_much_bytes, moment)
    return slot, (*notes, *commands)


def _rests(slot: Slot, status: Status) -> bool:
    """Return whether the process does no steps and has saved its state as asked.

    A starved process need not have saved: it may be in an optimiser step that never ends.
    """
    has_saved = status.saves >= slot.saves and not status.save_due
    return status.is_held and (has_saved or status.state in STARVED)


def died(slot: Slot, failure: Cause, why: str, moment: Moment) -> Transition:
    """Start the next process after a pause that grows with each death. Quarantine the slot after
    `run.max_deaths` deaths without progress.
    """
    now_s, run, status = moment.now_s, moment.run, slot.status
    was_up = slot.ready
    deaths = (*(recent(slot.deaths_at_s, moment) if was_up else slot.deaths_at_s), now_s)
    did = status.counts.steps_ok if was_up and status is not None else 0
    slot = replace(
        _restarted(slot),
        deaths_at_s=deaths,
        most_steps=max(slot.most_steps, did),
        failure=failure,
    )
    in_vain = without_progress(slot)
    if len(in_vain) >= run.max_deaths:
        span_s = max(run.death_window_s, now_s - in_vain[0])
        why = f"{len(in_vain)} deaths in {span_s:.0f} s without progress; the last: {why}"
        return quarantine(slot, failure, why)
    pausing = _pausing(slot, HeadState.RESTARTING, why, now_s + _pause_s(slot, moment))
    return _stopped_or_held(pausing, moment)


def _no_memory_for_context(slot: Slot, why: str, moment: Moment) -> Transition:
    """Start the next process after the longest pause: the card has no memory even for a context.

    This does not count as a death.
    """
    slot = _restarted(slot)
    pause_s = _jittered(moment.run.restart_backoff_max_s, slot, moment)
    pausing = _pausing(slot, WorkerState.EMERGENCY, why, moment.now_s + pause_s)
    return _stopped_or_held(pausing, moment)


def _leaked(slot: Slot, unneeded_bytes: int, moment: Moment) -> Transition:
    """Replace a process that keeps too much memory.

    This counts as a death only if it happened within the first statuses.
    """
    if slot.leak.statuses <= _AT_ONCE_STATUSES:
        why = f"{_leak_words(unneeded_bytes)}: drop every tensor in the workload's `release`"
        return died(slot, Cause.DIED, why, moment)
    why = f"{_leak_words(unneeded_bytes)}; its process was replaced"
    return _pausing(_restarted(slot), HeadState.RESTARTING, why, moment.now_s), ()


def _leak_words(unneeded_bytes: int) -> str:
    """Return a clause with the memory that a process keeps without need."""
    return f"its process keeps {unneeded_bytes / MIB:.0f} MiB that its work does not need"


def _unbuildable(slot: Slot, text: str, moment: Moment) -> Transition:
    end = EndRun(reason=f"{slot.slot}: cannot be started: {text}")
    return impossible(slot, Cause.NOT_STARTED, end, moment, worked_before=False)


def impossible(
    slot: Slot, failure: Cause, end: EndRun, moment: Moment, *, worked_before: bool
) -> Transition:
    """Handle work that can never succeed in this slot.

    Before the run counts, the plan must be wrong, and the run ends. Later only this slot is wrong
    (a PC joined late, or came back with another card): it is quarantined and the others continue.
    """
    if worked_before or moment.has_counted or moment.ends_at_s is not None:
        return quarantine(slot, failure, end.reason)
    return slot, (end,)


def done(slot: Slot) -> Transition:
    """Finish a slot whose work is done, and end its actor."""
    return replace(without_actor(slot), phase=Phase.DONE, wake_at_s=None), (Abandon(),)


def quarantine(slot: Slot, failure: Cause, why: str) -> Transition:
    """Give the slot up, and end its hold, until the user reinstates it or starts a new run."""
    slot = replace(
        without_actor(slot),
        phase=Phase.QUARANTINED,
        state=HeadState.QUARANTINED,
        reason=why,
        failure=failure,
        wake_at_s=None,
        orders=replace(slot.orders, hold=None),
    )
    return slot, (Abandon(),)


def _stopped_or_held(slot: Slot, moment: Moment) -> Transition:
    """Stop a slot without work if the run is ending, or hold it if the user ordered that; else
    return it unchanged.
    """
    if slot.draining:
        return replace(slot, phase=Phase.STOPPED, wake_at_s=None), ()
    if slot.orders.hold is None:
        return slot, ()
    return at_rest(slot, moment)


def at_rest(slot: Slot, moment: Moment) -> Transition:
    """Hold a slot that does no work and whose node is there; with `Hold.DRAIN` end its process."""
    ends = slot.orders.hold is Hold.DRAIN and slot.placed
    stays = slot.ready and not ends
    slot = replace(
        slot,
        phase=Phase.HELD,
        state=HeadState.HELD,
        reason=slot.orders.why or (_HELD_WITH_PROCESS if stays else _HELD_WITHOUT),
        runs=stays,
        wake_at_s=None,
        held_since_s=moment.now_s if slot.held_since_s is None else slot.held_since_s,
    )
    return (without_actor(slot), (Abandon(),)) if ends else (slot, ())


def start(slot: Slot, moment: Moment) -> Transition:
    """Start a process in a slot whose node is there; create its actor first if it has none."""
    place: tuple[Command, ...] = () if slot.placed else (Place(),)
    slot = replace(
        begin(slot, moment) if slot.placed else _awaited(slot, moment),
        placed=True,
        state=HeadState.STARTING,
        reason="its process starts",
        deaths_at_s=recent(slot.deaths_at_s, moment),
    )
    return slot, place


def begin(slot: Slot, moment: Moment) -> Slot:
    """Start the next process of a slot that has an actor."""
    return _awaited(_next_process(slot), moment)


def _awaited(slot: Slot, moment: Moment) -> Slot:
    return replace(
        slot,
        phase=Phase.WORKING,
        runs=True,
        wake_at_s=None,
        working_since_s=moment.now_s,
        heard_at_s=None,
        news_at_s=None,
        quiet=None,
        unreached_since_s=None,
    )


def _next_process(slot: Slot) -> Slot:
    """Return the slot with the next incarnation and the per-process fields reset."""
    return replace(
        slot,
        incarnation=slot.incarnation + 1,
        counts_before=slot.counts,
        saves=0,
        leak=NO_WATCH,
        leak_logged=False,
    )


def without_actor(slot: Slot) -> Slot:
    """Return the slot after the end of its actor; the next process belongs to another actor."""
    return replace(
        _next_process(slot), placed=False, runs=False, actor=None, heard=0, unreached_since_s=None
    )


def _restarted(slot: Slot) -> Slot:
    return replace(slot, runs=False, restarts=slot.restarts + 1)


def _pausing(slot: Slot, state: SlotState, why: str, wake_at_s: float) -> Slot:
    return replace(slot, phase=Phase.PAUSING, state=state, reason=why, wake_at_s=wake_at_s)


def recent(deaths_at_s: tuple[float, ...], moment: Moment) -> tuple[float, ...]:
    """Return the deaths within `run.death_window_s` before now (monotonic seconds)."""
    return tuple(at for at in deaths_at_s if at > moment.now_s - moment.run.death_window_s)


def without_progress(slot: Slot) -> tuple[float, ...]:
    """Return the slot's recent deaths since its last progress (monotonic seconds)."""
    since_s = -math.inf if slot.progressed_at_s is None else slot.progressed_at_s
    return tuple(at for at in slot.deaths_at_s if at > since_s)


def _pause_s(slot: Slot, moment: Moment) -> float:
    """Return the pause in seconds before the next process starts.

    The first death of a window has no pause. Half of each later pause is jitter, so that workers
    that died together do not restart together.
    """
    if len(slot.deaths_at_s) == 1:
        return 0.0
    run = moment.run
    # 2.0**1024 would overflow.
    doubled_s = run.restart_backoff_s * 2.0 ** min(len(slot.deaths_at_s) - 2, 1000)
    return _jittered(min(doubled_s, run.restart_backoff_max_s), slot, moment)


def _jittered(pause_s: float, slot: Slot, moment: Moment) -> float:
    """Return a pause between half of `pause_s` and all of it, by a hash of the seed ("equal jitter"
    of the AWS Architecture Blog, "Exponential Backoff And Jitter").
    """
    seed = f"{moment.seed}:{slot.slot}:{slot.restarts}"
    drawn = hashlib.blake2b(seed.encode(), digest_size=8)
    return pause_s * (0.5 + 0.5 * int.from_bytes(drawn.digest(), "big") / 2**64)
