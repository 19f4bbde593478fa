"""Which commands a user may give to which slots, and which events they mean. Pure.

A command names each slot that it is for. It changes all of them or none, with one sentence about
what to type instead.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from orchestrator.core.placement import SlotPlan
from orchestrator.core.slot import (
    Capped,
    Event,
    HeadState,
    Held,
    Hold,
    Phase,
    Reinstated,
    SaveAsked,
    Slot,
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

    @classmethod
    def _missing_(cls, value: object) -> Do | None:
        """Take the old word of UNPAUSE, which also means to go on with a run."""
        return cls.UNPAUSE if value == "resume" else None


#: What becomes of each slot, once the command was taken.
EFFECTS: Final[Mapping[Do, str]] = {
    Do.PAUSE: "held when its last slice ends; its process and its memory stay",
    Do.UNPAUSE: "gets work again",
    Do.DRAIN: "held when its last slice ends; then its process ends, and its memory is free",
    Do.REINSTATE: "starts again, with one step first; its failures are forgotten",
    Do.CAP: "capped from its next slice on",
    Do.SAVE: "saves its state in its next slice",
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


class RefusedError(ValueError):
    """A command that cannot be obeyed; its text says what to type instead."""


def events_of(
    command: Command,
    slots: Mapping[str, Slot],
    plans: Mapping[str, SlotPlan],
    nodes: Collection[str],
    *,
    is_ending: bool = False,
) -> tuple[tuple[str, Event], ...]:
    """Return what happens to which slot; `nodes` are those that are there now, `is_ending` says so
    of the run.

    Raises:
        RefusedError: One of the slots cannot be treated so; nothing happens to the others either.
    """
    if is_ending:
        raise RefusedError("the run is ending: nothing can be changed any more")
    unknown = [name for name in command.slots if name not in slots]
    if unknown:
        raise RefusedError(
            one_line(
                f"this run has no slot {unknown[0][:80]!r}; `python -m orchestrator top --once` "
                "lists its slots"
            )
        )
    for name in command.slots:
        why_not = _why_not(command, slots[name], plans[name])
        if why_not:
            raise RefusedError(f"{name} {why_not}; nothing was changed")
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
    return _why_no_save(slot) if command.do is Do.SAVE else ""


def _why_no_cap(amount_bytes: int, plan: SlotPlan) -> str:
    budget_mib = plan.spec.budget_bytes // MIB
    if plan.spec.policy == "classic":
        return "cannot be capped under the policy classic: run with --policy adaptive"
    if not 1 <= amount_bytes // MIB <= budget_mib:
        return f"has a budget of {budget_mib} MiB: type an amount from 1MiB to {budget_mib}MiB"
    return ""


def _why_no_save(slot: Slot) -> str:
    if slot.orders.hold is not None:
        return f"is held and gets no slice to save in: `unpause {slot.slot}` first"
    if slot.phase is not Phase.WORKING or isinstance(slot.state, HeadState):
        return f"has no process at work ({slot.state}): wait until it runs"
    if slot.report is None or slot.report.progress is None:
        return "keeps no state that could be saved: only a training does"
    return ""
