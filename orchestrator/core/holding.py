"""What the user's commands do to a slot: hold it, let it go on, reinstate it, cap it, save its
state. Pure.

Part of the lifecycle: `lifecycle.py` says in which phase which function here is called, and
`user_commands.py` which command may be given when.
"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.core import dispatch, restart_policy
from orchestrator.core.slot import (
    Capped,
    HeadState,
    Held,
    Moment,
    NodeLeft,
    Phase,
    Reinstated,
    SaveAsked,
    Slot,
    Transition,
    Unheld,
    changed,
)


def held_without_node(slot: Slot, event: Held, moment: Moment) -> Transition:
    """Hold a slot whose node is away; nothing is begun when that returns."""
    return shown_without_node(_ordered(slot, event), moment), ()


def held_at_work(slot: Slot, event: Held, moment: Moment) -> Transition:
    """Send nothing more; the slot is held once what was sent has ended."""
    slot = _ordered(slot, event)
    return (saved_before_rest(slot), ()) if slot.in_flight else restart_policy.at_rest(slot, moment)


def held_at_once(slot: Slot, event: Held, moment: Moment) -> Transition:
    """Hold a slot that waits for a time, or is held already, perhaps in the other way."""
    slot = _ordered(slot, event)
    has_process = slot.ready and slot.phase is Phase.HELD
    return restart_policy.at_rest(slot if has_process else replace(slot, ready=False), moment)


def shown_without_node(slot: Slot, moment: Moment) -> Slot:
    """Show a slot whose node is away as held, if it is."""
    if slot.orders.hold is None or slot.phase is not Phase.ABSENT:
        return slot
    since_s = moment.now_s if slot.held_since_s is None else slot.held_since_s
    reason = f"it gets no work until `unpause`; {slot.reason}"
    return replace(slot, state=HeadState.HELD, reason=reason, held_since_s=since_s)


def unheld_without_node(slot: Slot, _: Unheld, moment: Moment) -> Transition:
    """Let a slot wait for its node again."""
    slot = _let_go(slot, moment)
    if slot.placed:
        return replace(slot, state=HeadState.LOST, reason=NodeLeft().reason), ()
    return replace(slot, state=HeadState.STARTING, reason=Slot(slot=slot.slot).reason), ()


def unheld_at_work(slot: Slot, _: Unheld, moment: Moment) -> Transition:
    """Go on sending, if the slot was to be held."""
    slot = _let_go(slot, moment)
    return dispatch.fill(slot, moment) if slot.ready and not slot.draining else (slot, ())


def unheld(slot: Slot, _: Unheld, moment: Moment) -> Transition:
    """Send work to the process that the slot has kept, or start one."""
    slot = _let_go(slot, moment)
    if not slot.ready or slot.report is None:
        return restart_policy.start(slot, moment)
    again = replace(slot, phase=Phase.WORKING, state=slot.report.state, reason=slot.report.reason)
    return dispatch.fill(again, moment)


def reinstated(slot: Slot, event: Reinstated, moment: Moment) -> Transition:
    """Forget what the slot was given up for, and start it like one that was never placed: its actor
    has ended.
    """
    slot = replace(
        slot,
        phase=Phase.ABSENT,
        state=HeadState.STARTING,
        reason=Slot(slot=slot.slot).reason,
        placed=False,
        incarnation=slot.incarnation + 1,
        deaths_at_s=(),
        errors_in_a_row=0,
        ending=False,
        silent_since_s=None,
    )
    return restart_policy.start(slot, moment) if event.node_is_there else (slot, ())


def capped(slot: Slot, event: Capped, _: Moment) -> Transition:
    """Bound what the next slices may hold."""
    return changed(slot, orders=replace(slot.orders, cap_bytes=event.cap_bytes)), ()


def save_asked(slot: Slot, _: SaveAsked, __: Moment) -> Transition:
    """Have the next slice save what the slot trains."""
    return _to_save(slot), ()


def saved_before_rest(slot: Slot) -> Slot:
    """Have a slot that trains anything save it before it rests or ends."""
    trains = slot.report is not None and slot.report.progress is not None
    return _to_save(slot) if trains else slot


def _to_save(slot: Slot) -> Slot:
    return changed(slot, orders=replace(slot.orders, save=True))


def _ordered(slot: Slot, event: Held) -> Slot:
    return replace(slot, orders=replace(slot.orders, hold=event.hold))


def _let_go(slot: Slot, moment: Moment) -> Slot:
    """Undo the hold. Its time counts as worked, as rests that the duty asks for do."""
    since_s, worked_s = slot.held_since_s, slot.worked_s
    if since_s is not None and slot.first_report_s is not None and moment.ends_at_s is not None:
        worked_s += moment.now_s - since_s
    return replace(
        slot, orders=replace(slot.orders, hold=None), held_since_s=None, worked_s=worked_s
    )
