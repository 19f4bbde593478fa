"""What a status, or the end of a process, does to its slot. Pure; part of the lifecycle.

A process that ends is followed by another after a pause, by none while the slot is held, or the
slot is quarantined. `lifecycle.py` says in which phase which function here is called, and what is
then wanted of the process. When one hangs is in `silence.py`.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace
from typing import Any, Final

from orchestrator.core.fleet import Told, Unreached
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
from workers.messages import (
    STARVED,
    Cause,
    Ending,
    Quiet,
    Status,
    Verdict,
    WorkerState,
)
from workers.units import MIB

#: A poll may come to nothing for so long before the table says it.
_UNREACHED_S: Final = 3.0

#: So many times the good steps of any process before it, and a process without checkpoints got
#: further.
_TIMES_FURTHER: Final = 10

#: What a process keeps after a release is said, and is too much, from these shares of its cap on,
#: and from the last one on if nothing runs any more. Between two replacements a leak then costs a
#: sixth of the cap on average.
_FLAG_SHARE: Final = 1 / 6
_LIMIT_SHARE: Final = 1 / 3
_STARVED_SHARE: Final = 1 / 8

#: A process that keeps too much by its first statuses is no better than one that dies.
_AT_ONCE_STATUSES: Final = 3

#: A worker that rests for its duty is RUNNING, and for one whose card is too hot THROTTLED and
#: PAUSED say so: all of these are at work.
_AT_WORK: Final = frozenset(
    {WorkerState.RUNNING, WorkerState.THROTTLED, WorkerState.PAUSED, WorkerState.CORRUPT}
)

ACTOR_ENDED: Final = "its process ended: killed, or crashed"

_HELD_WITH_PROCESS: Final = "it gets no work, and its process keeps its memory, until `unpause`"
_HELD_WITHOUT: Final = "it gets no work, and its process has ended, until `unpause`"


def told(slot: Slot, event: Told, moment: Moment) -> Transition:
    """Take a status in; then the process goes on, comes to rest, is replaced or is given up."""
    status = event.status
    slot, is_same_actor = _heard(slot, status)
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
        return _judged(slot, status, moment, worked_before=worked_before)
    if status.died is not None:
        return _ended(slot, status.died, moment, worked_before=worked_before)
    if status.errors_in_a_row >= moment.run.max_workload_errors:
        why = f"{status.errors_in_a_row} times in a row: {status.reason}"
        return quarantine(slot, Cause.EXCEPTION, why)
    return _go_on(slot, status, moment) if status.is_up else (slot, ())


def _ended(slot: Slot, end: Ending, moment: Moment, *, worked_before: bool) -> Transition:
    """Follow the end of a process as its PC saw it."""
    if end.cause is Cause.NOT_STARTED and not worked_before:
        return _unbuildable(slot, end.text, moment)
    if end.cause is Cause.HOST_MEMORY:
        return died(slot, end.cause, f"{end.text}: the PC's RAM was nearly full", moment)
    failure = end.cause if end.cause is Cause.NOT_STARTED else Cause.DIED
    return died(slot, failure, end.text, moment)


def _judged(slot: Slot, status: Status, moment: Moment, *, worked_before: bool) -> Transition:
    """Follow the verdict of a process that does nothing more."""
    if status.verdict is Verdict.DONE:
        return done(slot)
    if status.verdict is Verdict.CONTEXT_CORRUPTED:
        if status.device is None and status.counts.oom_count > 0:
            return _no_memory_for_context(slot, status.reason, moment)
        return died(slot, status.verdict_cause or Cause.DRIVER, status.reason, moment)
    end = EndRun(reason=status.reason, is_input=status.verdict is Verdict.BAD_INPUT)
    failure = status.verdict_cause or Cause.EXCEPTION
    return impossible(slot, failure, end, moment, worked_before=worked_before)


def told_aside(slot: Slot, event: Told, moment: Moment) -> Transition:
    """Count what a process has done that is to end, or to rest, and see whether one that rests has
    ended.
    """
    status = event.status
    slot, is_same_actor = _heard(slot, status)
    has_ended = not is_same_actor
    if is_same_actor and status.incarnation == slot.incarnation:
        slot = _with_status(slot, status, moment)
        has_ended = status.died is not None or status.verdict is Verdict.CONTEXT_CORRUPTED
    if slot.phase is Phase.HELD and slot.runs and has_ended:
        slot = replace(slot, runs=False, reason=slot.orders.why or _HELD_WITHOUT)
    return slot, ()


def told_away(slot: Slot, event: Told, moment: Moment) -> Transition:
    """Count what a process has done on a node that has left: it is not gone with it at once."""
    if event.status.incarnation != slot.incarnation:
        return slot, ()
    counted = _with_status(slot, event.status, moment)
    return replace(counted, heard_at_s=slot.heard_at_s), ()


def unreached(slot: Slot, event: Unreached, moment: Moment) -> Transition:
    """Distinguish code that cannot work from an actor that cannot be reached yet."""
    if event.is_unbuildable:
        if slot.first_work_s is None:
            return _unbuildable(slot, event.text, moment)
        why = f"its process cannot be started: {event.text}"
        return died(slot, Cause.NOT_STARTED, why, moment)
    if slot.unreached_since_s is None:
        slot = replace(slot, unreached_since_s=moment.now_s)
    return still_unreached(slot, slot.unreached_since_s or 0.0, moment)


def still_unreached(slot: Slot, since_s: float, moment: Moment) -> Transition:
    """Say it once it lasts, and give up a slot whose actor does not come back."""
    unreached_s, timeout_s = moment.now_s - since_s, moment.run.start_timeout_s
    if unreached_s > timeout_s:
        why = f"no process came up in {timeout_s:.0f} s"
        return quarantine(slot, Cause.NOT_STARTED, why)
    if slot.ready and unreached_s > _UNREACHED_S:
        slot = replace(slot, state=HeadState.RESTARTING, reason="its process cannot be reached")
    return slot, ()


def _heard(slot: Slot, status: Status) -> tuple[Slot, bool]:
    """Return the slot after an answer of its actor, and whether that is still the same process."""
    is_same = slot.actor in {None, status.actor}
    heard = max(slot.heard, status.news) if slot.actor == status.actor else status.news
    return replace(slot, actor=status.actor, heard=heard, unreached_since_s=None), is_same


def _with_status(slot: Slot, status: Status, moment: Moment, **more: Quiet | None) -> Slot:
    """Return the slot with what the present process told, and with `more`; one that is not up has
    told nothing.
    """
    changes: dict[str, Any] = {"heard_at_s": moment.now_s, **more}
    if not status.is_up:
        return replace(slot, **changes)
    before = slot.status if slot.has_told else None
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
    # Once: to copy a slot takes longer than all of this.
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
    """Return the seconds that count as worked since the process told something before.

    All of them if it is at work: on a loaded PC a status comes late, and that is no fault of the
    worker. Without memory, what its good steps took.
    """
    if status.state in _AT_WORK and slot.news_at_s is not None:
        return moment.now_s - slot.news_at_s
    wall_s = status.wall_s - (0.0 if before is None else before.wall_s)
    busy_s = status.counts.busy_s - (0.0 if before is None else before.counts.busy_s)
    return max(0.0, wall_s if status.state in _AT_WORK else min(busy_s, wall_s))


def _progressed(slot: Slot, status: Status) -> bool:
    """Say whether the process got further than those before it: a newer checkpoint, or many times
    their good steps.

    What crashes in its tenth step, again and again, gets no further, although its last status may
    come after the first step or after the ninth.
    """
    if status.progress is not None and status.progress.train_step is not None:
        return (status.progress.saved_step or 0) > (slot.training.last.saved_step or 0)
    return status.counts.steps_ok > _TIMES_FURTHER * slot.most_steps


def _go_on(slot: Slot, status: Status, moment: Moment) -> Transition:
    """After a good status: the process works on, unless it is to rest or keeps too much memory.

    What it keeps is said in every reason, and once for each process in the event log.
    """
    run, cap_bytes = moment.run, math.inf if slot.device is None else slot.device.cap_bytes
    # Where nothing runs any more, less is enough: a fresh process has that much more to work with.
    share = _STARVED_SHARE if slot.state in STARVED else _LIMIT_SHARE
    too_much_bytes = slot.leak.unneeded_bytes(run.leak_limit_mib, share * cap_bytes)
    told_bytes = too_much_bytes or slot.leak.unneeded_bytes(
        run.leak_flag_mib, _FLAG_SHARE * cap_bytes
    )
    notes: tuple[Command, ...] = ()
    if told_bytes is not None:
        if not slot.leak_told:
            notes = (Note(name="leak", fields=(("growth_bytes", told_bytes),)),)
        is_running = slot.state is WorkerState.RUNNING
        reason = f"LEAK: {_leak_words(told_bytes)}" if is_running else slot.reason
        slot = replace(slot, leak_told=True, reason=reason)
    commands: tuple[Command, ...] = ()
    if slot.draining or slot.orders.hold is not None:
        if _rests(slot, status):
            slot, commands = _stopped_or_held(slot, moment)
    elif too_much_bytes is not None:
        slot, commands = _leaked(slot, too_much_bytes, moment)
    return slot, (*notes, *commands)


def _rests(slot: Slot, status: Status) -> bool:
    """Say whether the process does no steps, and has saved what it was asked to save, and could.

    One that lacks the memory for any step and has not saved is in the middle of an optimiser step
    that may never end.
    """
    has_saved = status.saves >= slot.saves and not status.save_due
    return status.is_held and (has_saved or status.state in STARVED)


def died(slot: Slot, failure: Cause, why: str, moment: Moment) -> Transition:
    """Start another process after a pause that grows with each death; give up after deaths without
    progress between.
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
    """Try a fresh process after the longest pause: the card has no memory left even for a context.

    Not a death.
    """
    slot = _restarted(slot)
    pause_s = _jittered(moment.run.restart_backoff_max_s, slot, moment)
    pausing = _pausing(slot, WorkerState.EMERGENCY, why, moment.now_s + pause_s)
    return _stopped_or_held(pausing, moment)


def _leaked(slot: Slot, unneeded_bytes: int, moment: Moment) -> Transition:
    """Replace a process that keeps more and more memory.

    Not a death, unless it did so at once: it did its work.
    """
    if slot.leak.statuses <= _AT_ONCE_STATUSES:
        why = f"{_leak_words(unneeded_bytes)}: drop every tensor in the workload's `release`"
        return died(slot, Cause.DIED, why, moment)
    why = f"{_leak_words(unneeded_bytes)}; its process was replaced"
    return _pausing(_restarted(slot), HeadState.RESTARTING, why, moment.now_s), ()


def _leak_words(unneeded_bytes: int) -> str:
    """Say what a process keeps for nothing."""
    return f"its process keeps {unneeded_bytes / MIB:.0f} MiB that its work does not need"


def _unbuildable(slot: Slot, text: str, moment: Moment) -> Transition:
    end = EndRun(reason=f"{slot.slot}: cannot be started: {text}")
    return impossible(slot, Cause.NOT_STARTED, end, moment, worked_before=False)


def impossible(
    slot: Slot, failure: Cause, end: EndRun, moment: Moment, *, worked_before: bool
) -> Transition:
    """Refuse what can never work in this slot.

    Before the run counts, the plan is wrong and the run ends. Later it is this slot alone (a PC
    that joined late, another card that came back): the slot is given up and the others continue.
    """
    if worked_before or moment.has_counted or moment.ends_at_s is not None:
        return quarantine(slot, failure, end.reason)
    return slot, (end,)


def done(slot: Slot) -> Transition:
    """End a slot whose work is finished, and its actor."""
    return replace(without_actor(slot), phase=Phase.DONE, wake_at_s=None), (Abandon(),)


def quarantine(slot: Slot, failure: Cause, why: str) -> Transition:
    """Give the slot up until the user reinstates it, or starts a new run.

    It is held no more: it has ended.
    """
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
    """Stop a slot that does no work if its run is ending, and hold it if the user has it wait; else
    it stays as it is.
    """
    if slot.draining:
        return replace(slot, phase=Phase.STOPPED, wake_at_s=None), ()
    if slot.orders.hold is None:
        return slot, ()
    return at_rest(slot, moment)


def at_rest(slot: Slot, moment: Moment) -> Transition:
    """Hold a slot on a node that is there, now that it does no work.

    End its process where that was asked.
    """
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
    """Start a process in a slot whose node is there.

    The actor may have to be made first.
    """
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
    """Count another process, of which nothing is known yet."""
    return replace(
        slot,
        incarnation=slot.incarnation + 1,
        counts_before=slot.counts,
        saves=0,
        leak=NO_WATCH,
        leak_told=False,
    )


def without_actor(slot: Slot) -> Slot:
    """Return the slot once its actor is ended: the next process is another actor's."""
    return replace(
        _next_process(slot), placed=False, runs=False, actor=None, heard=0, unreached_since_s=None
    )


def _restarted(slot: Slot) -> Slot:
    return replace(slot, runs=False, restarts=slot.restarts + 1)


def _pausing(slot: Slot, state: SlotState, why: str, wake_at_s: float) -> Slot:
    return replace(slot, phase=Phase.PAUSING, state=state, reason=why, wake_at_s=wake_at_s)


def recent(deaths_at_s: tuple[float, ...], moment: Moment) -> tuple[float, ...]:
    """Return the deaths of the window that ends now."""
    return tuple(at for at in deaths_at_s if at > moment.now_s - moment.run.death_window_s)


def without_progress(slot: Slot) -> tuple[float, ...]:
    """Return the slot's recent deaths (monotonic seconds) after which it got no further."""
    since_s = -math.inf if slot.progressed_at_s is None else slot.progressed_at_s
    return tuple(at for at in slot.deaths_at_s if at > since_s)


def _pause_s(slot: Slot, moment: Moment) -> float:
    """Return how long to wait before the slot starts again.

    No pause after the first death of a window. Half of each later pause is jitter, so that workers
    that died together do not come back together.
    """
    if len(slot.deaths_at_s) == 1:
        return 0.0
    run = moment.run
    # 2.0**1024 would overflow.
    doubled_s = run.restart_backoff_s * 2.0 ** min(len(slot.deaths_at_s) - 2, 1000)
    return _jittered(min(doubled_s, run.restart_backoff_max_s), slot, moment)


def _jittered(pause_s: float, slot: Slot, moment: Moment) -> float:
    """Return between half of the pause and all of it (AWS Architecture Blog, "Exponential Backoff
    And Jitter").
    """
    seed = f"{moment.seed}:{slot.slot}:{slot.restarts}"
    drawn = hashlib.blake2b(seed.encode(), digest_size=8)
    return pause_s * (0.5 + 0.5 * int.from_bytes(drawn.digest(), "big") / 2**64)
