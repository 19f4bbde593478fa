"""What is wanted of a slot's process, as the slot stands: the `Orders` of the next polls. Pure.

Orders say the whole of it, so that orders that come twice, or not at all, change nothing. Decides
nothing about the slot (`lifecycle.py`).
"""

from __future__ import annotations

from orchestrator.core.slot import Slot
from workers.messages import Begin, KeptBytes, Orders


def orders_of(
    slot: Slot, lease_bytes: int | None, begin: Begin | None, kept: KeptBytes | None = None
) -> Orders:
    """Return what is wanted of the process of a slot that has an actor.

    `begin` is what the process is told when it starts; `kept` is how much of the file that it sends
    has reached the head.
    """
    return Orders(
        actor=slot.actor,
        incarnation=slot.incarnation,
        begin=begin if needs_begin(slot) else None,
        runs=slot.runs,
        holds=slot.draining or slot.orders.hold is not None,
        saves=slot.saves,
        lease_bytes=lease_bytes,
        heard=slot.heard,
        kept=kept,
    )


def needs_begin(slot: Slot) -> bool:
    """Say whether a process is to start, and the actor that starts it is known."""
    return slot.runs and not slot.begun and slot.actor is not None
