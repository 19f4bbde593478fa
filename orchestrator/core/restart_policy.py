"""How a slot's process ends, and what then becomes of the slot: another process after a pause, or none. Pure.

Part of the lifecycle (`lifecycle.py` says which event leads here, and holds the rules).
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TypeAlias

from orchestrator.core import step_accounting
from orchestrator.core.fleet import DeathCause
from orchestrator.core.slot import Abandon, Command, EndRun, Forget, Phase, Restart, Rules, Slot
from workers.messages import WorkerState
from workers.units import MIB

Result: TypeAlias = tuple[Slot, tuple[Command, ...]]


def died(slot: Slot, why: str, now_s: float, rules: Rules, *, before: tuple[Command, ...]) -> Result:
    """Wait, longer each time, and start again, because the process is gone or must go; or give up."""
    deaths = (*(recent(slot.deaths_at_s, now_s, rules) if slot.proven else slot.deaths_at_s), now_s)
    slot = step_accounting.all_lost(slot)
    slot = replace(
        slot,
        deaths_at_s=deaths,
        silent_since_s=None,
        ending=bool(before),
        counters=replace(slot.counters, restarts=slot.counters.restarts + 1),
    )
    if len(deaths) >= rules.max_deaths:
        span_s = max(rules.death_window_s, now_s - deaths[0])
        return quarantine(slot, f"{len(deaths)} deaths in {span_s:.0f} s; the last: {why}")
    wake_at_s = now_s + _pause_s(slot, rules)
    slot = replace(slot, phase=Phase.PAUSING, state=WorkerState.RESTARTING, reason=why, wake_at_s=wake_at_s)
    return stopped_if_draining(slot), (Forget(), *before)


def _pause_s(slot: Slot, rules: Rules) -> float:
    """Return how long to wait before the slot starts again.

    The first death of a window is met at once; waiting begins when it happens again. Half of each pause is jitter, so
    that workers that died together do not come back together.
    """
    if len(slot.deaths_at_s) == 1:
        return 0.0
    # 2.0**1024 would overflow.
    doubled_s = rules.restart_backoff_s * 2.0 ** min(len(slot.deaths_at_s) - 2, 1000)
    return _jittered(min(doubled_s, rules.restart_backoff_max_s), slot, rules)


def _jittered(pause_s: float, slot: Slot, rules: Rules) -> float:
    """Return between half of the pause and all of it (AWS Architecture Blog, "Exponential Backoff And Jitter")."""
    drawn = hashlib.blake2b(f"{rules.seed}:{slot.slot}:{slot.counters.restarts}".encode(), digest_size=8)
    return pause_s * (0.5 + 0.5 * int.from_bytes(drawn.digest(), "big") / 2**64)


def impossible(slot: Slot, why: str, *, counting: bool) -> Result:
    """What was asked for can never work here.

    Before the run counts it is the plan that is wrong; later it is this place in it (a PC that joined late, another
    card that came back), and the others' hours are not thrown away for it.
    """
    return quarantine(slot, why) if counting else (slot, (EndRun(reason=why),))


def poisoned(slot: Slot, why: str, now_s: float, rules: Rules) -> Result:
    """The process lives, but its device no longer answers it: end it and start another."""
    return died(slot, why, now_s, rules, before=(Restart(),))


def no_room(slot: Slot, why: str, now_s: float, rules: Rules) -> Result:
    """The card is full even for a context: no death of the slot's making. Wait long, then try a fresh process."""
    slot = step_accounting.all_lost(slot)
    slot = replace(
        slot,
        phase=Phase.PAUSING,
        state=WorkerState.EMERGENCY,
        reason=why,
        ending=True,
        wake_at_s=now_s + _jittered(rules.restart_backoff_max_s, slot, rules),
        counters=replace(slot.counters, restarts=slot.counters.restarts + 1),
    )
    return stopped_if_draining(slot), (Forget(), Restart())


def leaked(slot: Slot, growth_bytes: int, now_s: float) -> Result:
    """Replace a process that takes more and more memory. No death: it did its work, and may do so again."""
    slot = step_accounting.all_lost(slot)
    slot = replace(
        slot,
        phase=Phase.PAUSING,
        state=WorkerState.RESTARTING,
        reason=f"{leak_words(growth_bytes)}; its process was replaced",
        ending=True,
        wake_at_s=now_s,
        counters=replace(slot.counters, restarts=slot.counters.restarts + 1),
    )
    return slot, (Forget(), Restart())


def leak_words(growth_bytes: int) -> str:
    """Say what a leak looks like from here."""
    return f"its memory grew by {growth_bytes / MIB:.0f} MiB while its work stayed the same"


def quarantine(slot: Slot, why: str) -> Result:
    """Give the slot up until the user asks anew."""
    slot = replace(
        step_accounting.all_lost(slot),
        phase=Phase.QUARANTINED,
        state=WorkerState.QUARANTINED,
        reason=why,
        wake_at_s=None,
    )
    return slot, (Abandon(),)


def stopped_if_draining(slot: Slot) -> Slot:
    """Wait for nothing any more if the run is ending."""
    return replace(slot, phase=Phase.STOPPED, wake_at_s=None) if slot.draining else slot


def recent(deaths_at_s: tuple[float, ...], now_s: float, rules: Rules) -> tuple[float, ...]:
    """Return the deaths of the window that ends now."""
    return tuple(at for at in deaths_at_s if at > now_s - rules.death_window_s)


def explained(slot: Slot, cause: DeathCause) -> Slot:
    """Say what a person can do something about; the rest of what Ray tells is in the event log."""
    text = "Ray ended its process because the PC's RAM was nearly full"
    told = slot.reason.endswith(text) or slot.state not in {WorkerState.RESTARTING, WorkerState.QUARANTINED}
    if not cause.host_memory or told:
        return slot
    return replace(slot, reason=text if slot.state is WorkerState.RESTARTING else f"{slot.reason}; {text}")
