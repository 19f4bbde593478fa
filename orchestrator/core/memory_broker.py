"""Connects slots to leases: collects what statuses say about each card, and what the workers were
told that they may hold. Pure.

The supervisor calls `look` once a turn, and `grant` when it orders something of a slot. `leases.py`
computes the leases. Where several workers share a card, a process that is not up yet may hold
nothing: it opens the card, and tells what is there. So no worker obtains memory before the head
knows the card, and then each worker obtains bytes of its own.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Final

from orchestrator.core.leases import NO_BOOKS, Books, Claimant, divide
from orchestrator.core.placement import SlotPlan
from orchestrator.core.slot import Phase, Slot
from workers.messages import STARVED
from workers.settings import ASSUMED_CONTEXT_BYTES

#: A share is kept free so long for a process that was sent for: loading torch and opening the card
#: take some seconds.
_EXPECTED_S: Final = 30.0


class MemoryBroker:
    """The books of one run's leases, by the machine that cards belong to."""

    def __init__(self, plans: Mapping[str, SlotPlan], before: MemoryBroker | None = None) -> None:
        """Begin; with the leases of the one `before` for slots whose plans are the same objects."""
        shared = (
            plan.spec
            for plan in plans.values()
            if plan.spec.card_budget_bytes > plan.spec.budget_bytes
        )
        self._specs = {
            spec.slot: spec for spec in shared if spec.follows_memory and spec.device == "cuda"
        }
        nodes = Counter(plan.spec.node for plan in plans.values())
        self._machines: defaultdict[str, list[str]] = defaultdict(list)
        self._machine_of: dict[str, str] = {}
        for name, spec in self._specs.items():
            # Raylets that stand for nodes share the cards of the one machine they are on.
            machine = spec.node if spec.workers_on_host <= nodes[spec.node] else ""
            self._machines[machine].append(name)
            self._machine_of[name] = machine
        self._books: dict[str, Books] = dict.fromkeys(self._machines, NO_BOOKS)
        self._leases: dict[str, int | None] = {}
        self._granted: dict[str, int | None] = {}
        """The lease that each slot was told last."""
        if before is not None:
            self._go_on_with(before)

    def _go_on_with(self, before: MemoryBroker) -> None:
        for name, machine in self._machine_of.items():
            if before._specs.get(name) is self._specs[name]:
                self._leases[name] = before._leases.get(name)
                if name in before._granted:
                    self._granted[name] = before._granted[name]
                known = before._books[before._machine_of[name]]
                self._books[machine] = {**known, **self._books[machine]}

    def look(self, slots: Mapping[str, Slot], now_s: float) -> dict[str, int | None]:
        """Take in what statuses say at `now_s` (monotonic seconds), and return the leases that are
        not what they were.
        """
        news: dict[str, int | None] = {}
        for machine in self._machines:
            news |= self._settle(machine, slots, now_s)
        return news

    def grant(self, slot: Slot) -> int | None:
        """Return the lease that the slot is about to be told, and remember it."""
        if slot.slot not in self._specs:
            return slot.orders.cap_bytes
        lease_bytes = self._leases.get(slot.slot) if slot.ready else 0
        lease_bytes = (
            slot.orders.cap_bytes if lease_bytes is None else slot.orders.within_cap(lease_bytes)
        )
        self._granted[slot.slot] = lease_bytes
        return lease_bytes

    def _settle(
        self, machine: str, slots: Mapping[str, Slot], now_s: float
    ) -> dict[str, int | None]:
        sharing = {name: slots[name] for name in self._machines[machine]}
        cards = self._cards(sharing)
        contexts: dict[str | None, int] = {}
        for name, slot in sharing.items():
            if slot.device is not None:
                contexts[cards[name]] = max(contexts.get(cards[name], 0), slot.device.context_bytes)
        claimants = [
            self._claimant(slot, cards[name], contexts.get(cards[name], ASSUMED_CONTEXT_BYTES))
            for name, slot in sharing.items()
            if _is_expected(slot, now_s)
        ]
        self._books[machine], leases = divide(self._books[machine], claimants, now_s)
        news = {name: lease for name, lease in leases.items() if self._leases.get(name) != lease}
        self._leases |= leases
        return news

    def _cards(self, sharing: Mapping[str, Slot]) -> dict[str, str | None]:
        """Return what identifies each slot's card.

        Before it was opened, the one that its neighbours have opened.
        """
        seen: defaultdict[str, set[str | None]] = defaultdict(set)
        for name, slot in sharing.items():
            if slot.device is not None:
                seen[self._specs[name].node].add(slot.device.uuid)
        # With two cards on its node it is unknown which one it will get.
        only = {node: next(iter(uuids)) for node, uuids in seen.items() if len(uuids) == 1}
        return {
            name: slot.device.uuid if slot.device is not None else only.get(self._specs[name].node)
            for name, slot in sharing.items()
        }

    def _claimant(self, slot: Slot, card: str | None, context_bytes: int) -> Claimant:
        spec = self._specs[slot.slot]
        status = slot.status if slot.ready else None
        unopened_bytes = context_bytes if status is None else 0
        cap_bytes = (
            slot.device.cap_bytes
            if slot.device is not None
            else max(0, spec.budget_bytes - context_bytes)
        )
        cap_bytes = slot.orders.within_cap(cap_bytes)
        allowed = [self._granted.get(slot.slot, 0)]
        if status is not None:
            allowed.append(status.lease_bytes)  # until it obeys what it was told since
        return Claimant(
            slot=slot.slot,
            card=card,
            cap_bytes=cap_bytes,
            granted_bytes=max(cap_bytes if lease is None else lease for lease in allowed),
            leave_free_bytes=spec.memory.leave_free_bytes,
            unopened_bytes=unopened_bytes,
            report=None if status is None else (slot.incarnation, slot.news_at_s or 0.0),
            memory=None if status is None else status.memory,
            starving=status is not None and status.state in STARVED,
        )


def _is_expected(slot: Slot, now_s: float) -> bool:
    if slot.phase is not Phase.WORKING:
        return False
    return slot.ready or (
        slot.working_since_s is not None and now_s < slot.working_since_s + _EXPECTED_S
    )
