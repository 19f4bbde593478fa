"""What becomes of a slot when its process ends: another process after a pause, none while held, or
quarantine. Pure.

Part of the lifecycle: `lifecycle.py` and `slice_results.py` say which event leads here.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Final

from orchestrator.core import dispatch, step_accounting
from orchestrator.core.fleet import DeathCause
from orchestrator.core.slot import (
    Abandon,
    Command,
    EndRun,
    Forget,
    HeadState,
    Hold,
    Moment,
    Phase,
    Place,
    Restart,
    Slot,
    SlotState,
    Transition,
)
from workers.messages import WorkerState
from workers.units import MIB

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


def impossible(slot: Slot, why: str, moment: Moment, *, worked_before: bool) -> Transition:
    """Refuse what can never work in this slot.

    Before the run counts, the plan is wrong and the run ends. Later it is this slot alone (a PC
    that joined late, another card that came back): the slot is given up and the others continue.
    """
    if worked_before or moment.rules.has_counted or moment.ends_at_s is not None:
        return quarantine(slot, why)
    return slot, (EndRun(reason=why),)


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
        step_accounting.all_lost(slot),
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
        reason=_HELD_WITH_PROCESS if stays else _HELD_WITHOUT,
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
        reason="its process starts and loads torch",
        deaths_at_s=recent(slot.deaths_at_s, moment),
    )
    slot, command = dispatch.begin(slot, moment, new_process=again)
    return slot, (*place, command)


def _pausing(slot: Slot, state: SlotState, why: str, wake_at_s: float) -> Slot:
    return replace(slot, phase=Phase.PAUSING, state=state, reason=why, wake_at_s=wake_at_s)


def recent(deaths_at_s: tuple[float, ...], moment: Moment) -> tuple[float, ...]:
    """Return the deaths of the window that ends now."""
    return deaths_at_s and tuple(
        at for at in deaths_at_s if at > moment.now_s - moment.rules.death_window_s
    )


def without_progress(slot: Slot) -> tuple[float, ...]:
    """Return the slot's recent deaths (monotonic seconds) after which it has not got any further."""
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
    told = slot.reason.endswith(text) or slot.state not in {
        HeadState.RESTARTING,
        HeadState.QUARANTINED,
    }
    if not cause.host_memory or told:
        return slot
    return replace(
        slot, reason=text if slot.state is HeadState.RESTARTING else f"{slot.reason}; {text}"
    )


def _restarted(slot: Slot) -> Slot:
    slot = step_accounting.all_lost(slot)
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
