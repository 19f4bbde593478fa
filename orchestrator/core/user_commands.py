"""The user's commands: which may be given to which slots, which events they mean, and what these
events do to a slot. Pure.

A command names each slot that it is for. It changes all of them or none, with one sentence about
what to type instead. `lifecycle.py` says in which phase which transition here is called.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from orchestrator.core import processes
from orchestrator.core.placement import SlotPlan
from orchestrator.core.slot import (
    NOTHING_ASKED,
    Abandon,
    Assigned,
    Capped,
    Event,
    HeadState,
    Held,
    Hold,
    Moment,
    NodeLeft,
    Phase,
    Reinstated,
    SaveAsked,
    Slot,
    Transition,
    Unheld,
)
from orchestrator.errors import one_line
from workers.units import MIB


class Do(StrEnum):
    """What a command asks for."""

    PAUSE = "pause"
    UNPAUSE = "unpause"
    DRAIN = "drain"
    REINSTATE = "reinstate"
    CAP = "cap"
    SAVE = "save"


#: What becomes of each slot, once the command was taken.
EFFECTS: Final[Mapping[Do, str]] = {
    Do.PAUSE: "held when its step ends; its process and its memory stay",
    Do.UNPAUSE: "gets work again",
    Do.DRAIN: "held when its step ends; then its process ends, and its memory is free",
    Do.REINSTATE: "starts again; its failures are forgotten",
    Do.CAP: "capped from its next step on",
    Do.SAVE: "saves its state as soon as it can",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What a user asks of some slots of a running run."""

    id: str
    """Made by the sender: a command that comes twice is obeyed once."""
    do: Do
    slots: tuple[str, ...]
    by: str
    """With what it was typed, such as `top`."""
    amount_bytes: int | None = None
    """Of CAP."""


class CommandRefusedError(ValueError):
    """A command that cannot be obeyed; its text says what to type instead."""


def events_of(
    command: Command,
    slots: Mapping[str, Slot],
    plans: Mapping[str, SlotPlan],
    nodes: Collection[str],
    *,
    is_ending: bool = False,
    queued: Collection[str] = (),
) -> tuple[tuple[str, Event], ...]:
    """Return what happens to which slot; `nodes` are those that are there now, `is_ending` says so
    of the run. Of jobs that are `queued` the queue alone says when they work.

    Raises:
        CommandRefusedError: One of the slots cannot be treated so; then nothing happens to any.
    """
    if is_ending:
        raise CommandRefusedError("the run is ending: nothing can be changed any more")
    unknown = [name for name in command.slots if name not in slots]
    if unknown:
        raise CommandRefusedError(
            one_line(
                f"this run has no slot {unknown[0][:80]!r}; `python -m orchestrator top --once` "
                "lists its slots"
            )
        )
    for name in command.slots:
        if name in queued:
            raise CommandRefusedError(
                f"{name} is a job without a place on a card: `python -m orchestrator jobs show "
                f"{name}` says why, and `jobs release` or `jobs retry` sends it on"
            )
        why_not = _why_not(command, slots[name], plans[name])
        if why_not:
            raise CommandRefusedError(f"{name} {why_not}; nothing was changed")
    return tuple(
        (name, _event(command, plans[name], nodes)) for name in dict.fromkeys(command.slots)
    )


def _event(command: Command, plan: SlotPlan, nodes: Collection[str]) -> Event:
    match command.do:
        case Do.PAUSE:
            return Held(hold=Hold.PAUSE)
        case Do.DRAIN:
            return Held(hold=Hold.DRAIN)
        case Do.UNPAUSE:
            return Unheld()
        case Do.REINSTATE:
            return Reinstated(node_is_there=plan.spec.node in nodes)
        case Do.CAP:
            # At the budget, which is seldom a whole number of MiB, there is nothing left to bound.
            is_budget = (command.amount_bytes or 0) // MIB == plan.spec.budget_bytes // MIB
            return Capped(cap_bytes=None if is_budget else command.amount_bytes)
        case Do.SAVE:
            return SaveAsked()


def _why_not(command: Command, slot: Slot, plan: SlotPlan) -> str:
    """Return why a command cannot be obeyed; empty if it can."""
    name, is_held = slot.slot, slot.orders.hold is not None
    if slot.phase is Phase.DONE:
        return "has finished its work, and gets no more"
    if command.do is Do.CAP:
        return _why_no_cap(command.amount_bytes or 0, plan)
    if (command.do is Do.REINSTATE) != (slot.phase is Phase.QUARANTINED):
        what_then = f"`unpause {name}` sends it work" if is_held else "it needs no reinstating"
        is_given_up = f"is QUARANTINED: `reinstate {name}` starts it again"
        return (
            is_given_up
            if slot.phase is Phase.QUARANTINED
            else f"is {slot.state}, not QUARANTINED: {what_then}"
        )
    if command.do is Do.UNPAUSE and not is_held:
        return f"is {slot.state}, and not held: it gets work as it is"
    if command.do is Do.SAVE and plan.spec.command is not None:
        return f"runs a program that saves when it ends: `drain {name}` has it do that"
    return _why_no_save(slot) if command.do is Do.SAVE else ""


def _why_no_cap(amount_bytes: int, plan: SlotPlan) -> str:
    budget_mib = plan.spec.budget_bytes // MIB
    if not plan.spec.follows_memory:
        policy = plan.spec.policy
        return f"cannot be capped under the policy {policy}: run with --set memory.policy=adaptive"
    if not 1 <= amount_bytes // MIB <= budget_mib:
        return f"has a budget of {budget_mib} MiB: type an amount from 1MiB to {budget_mib}MiB"
    return ""


def _why_no_save(slot: Slot) -> str:
    if slot.orders.hold is not None:
        return f"is held and does no work that it could save: `unpause {slot.slot}` first"
    if slot.phase is not Phase.WORKING or isinstance(slot.state, HeadState):
        return f"has no process at work ({slot.state}): wait until it runs"
    if slot.status is None or slot.status.progress is None:
        return "keeps no state that could be saved: only a training does"
    return ""


def held_without_node(slot: Slot, event: Held, moment: Moment) -> Transition:
    """Hold a slot whose node is away; nothing is begun when that returns."""
    return shown_without_node(_ordered(slot, event), moment), ()


def held_at_work(slot: Slot, event: Held, _: Moment) -> Transition:
    """Have the process come to rest; the slot is held once it tells that it does."""
    return saved_before_rest(_ordered(slot, event)), ()


def held_at_once(slot: Slot, event: Held, moment: Moment) -> Transition:
    """Hold a slot that waits for a time, or is held already, perhaps in the other way."""
    return processes.at_rest(_ordered(slot, event), moment)


def shown_without_node(slot: Slot, moment: Moment) -> Slot:
    """Show a slot whose node is away as held, if it is."""
    if slot.orders.hold is None or slot.phase is not Phase.ABSENT:
        return slot
    since_s = moment.now_s if slot.held_since_s is None else slot.held_since_s
    reason = slot.orders.why or f"it gets no work until `unpause`; {slot.reason}"
    return replace(slot, state=HeadState.HELD, reason=reason, held_since_s=since_s)


def unheld_without_node(slot: Slot, _: Unheld, moment: Moment) -> Transition:
    """Let a slot wait for its node again."""
    slot = _let_go(slot, moment)
    if slot.placed:
        return replace(slot, state=HeadState.LOST, reason=NodeLeft().reason), ()
    return replace(slot, state=HeadState.STARTING, reason=Slot(slot=slot.slot).reason), ()


def unheld_at_work(slot: Slot, _: Unheld, moment: Moment) -> Transition:
    """Let the process work on, if the slot was to be held."""
    return _let_go(slot, moment), ()


def unheld(slot: Slot, _: Unheld, moment: Moment) -> Transition:
    """Let the process work that the slot has kept, or start one."""
    slot = _let_go(slot, moment)
    if not slot.ready or slot.status is None:
        return processes.start(slot, moment)
    again = replace(slot, phase=Phase.WORKING, state=slot.status.state, reason=slot.status.reason)
    return replace(again, heard_at_s=moment.now_s, news_at_s=moment.now_s, quiet=None), ()


def reinstated(slot: Slot, event: Reinstated, moment: Moment) -> Transition:
    """Forget what the slot was given up for, and start it like one that was never placed: its actor
    has ended.
    """
    return _anew(slot, moment, node_is_there=event.node_is_there)


def assigned(slot: Slot, event: Assigned, moment: Moment) -> Transition:
    """Begin another attempt at the work of a slot without a process. It is held no more."""
    # Of a node that was lost, the actor would come back with it.
    commands: tuple[Abandon, ...] = (Abandon(),) if slot.placed else ()
    slot = processes.without_actor(slot) if slot.placed else slot
    slot = replace(slot, orders=NOTHING_ASKED, held_since_s=None, status=None)
    slot, more = _anew(slot, moment, node_is_there=event.node_is_there)
    return slot, (*commands, *more)


def _anew(slot: Slot, moment: Moment, *, node_is_there: bool) -> Transition:
    slot = replace(
        slot,
        phase=Phase.ABSENT,
        state=HeadState.STARTING,
        reason=Slot(slot=slot.slot).reason,
        wake_at_s=None,
        failure=None,
        deaths_at_s=(),
    )
    return processes.start(slot, moment) if node_is_there else (slot, ())


def capped(slot: Slot, event: Capped, _: Moment) -> Transition:
    """Bound what the worker may hold."""
    return replace(slot, orders=replace(slot.orders, cap_bytes=event.cap_bytes)), ()


def save_asked(slot: Slot, _: SaveAsked, __: Moment) -> Transition:
    """Have the process save what the slot trains."""
    return _to_save(slot), ()


def saved_before_rest(slot: Slot) -> Slot:
    """Have a slot that trains anything save it before it rests or ends.

    One that runs a program always tells a progress, if only an empty one: to save means to end.
    """
    trains = slot.ready and slot.status is not None and slot.status.progress is not None
    return _to_save(slot) if trains else slot


def _to_save(slot: Slot) -> Slot:
    """Ask once more, unless the process has not yet taken in that it was asked."""
    taken = 0 if slot.status is None or not slot.has_told else slot.status.saves
    return replace(slot, saves=taken + 1)


def _ordered(slot: Slot, event: Held) -> Slot:
    return replace(slot, orders=replace(slot.orders, hold=event.hold, why=event.why))


def _let_go(slot: Slot, moment: Moment) -> Slot:
    """Undo the hold. Its time counts as worked, as rests that the duty asks for do."""
    since_s, worked_s = slot.held_since_s, slot.worked_s
    if since_s is not None and slot.first_work_s is not None and moment.ends_at_s is not None:
        worked_s += moment.now_s - since_s
    return replace(
        slot, orders=replace(slot.orders, hold=None, why=None), held_since_s=None, worked_s=worked_s
    )
