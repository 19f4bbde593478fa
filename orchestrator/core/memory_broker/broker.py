"""Connects slots to leases: collects what reports say about each card, and what directives under way allow. Pure.

The supervisor calls `look` once a turn, and asks for the lease of each directive when it sends it. `leases.py` computes
the leases.

Leases also order the starts. Where several workers share a card, the first directive of a process lets it hold nothing:
it opens the card, one process at a time (`workers/devices/init_lock.py`), and reports what is there. So no worker
obtains memory before the head knows the card, and then each worker obtains bytes of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from orchestrator.core.memory_broker.leases import NO_BOOKS, Claimant, leased
from orchestrator.core.placement import SlotPlan
from orchestrator.core.slot import Phase, Slot
from workers.messages import WorkerState
from workers.settings import WorkerSpec

#: Assumed for a context until one on the card was measured, as in `workers/devices/cuda.py`.
_CONTEXT_BYTES: Final = 512 * 2**20

#: A share is kept free so long for a process that was sent for: loading torch and opening the card take some seconds.
_EXPECTED_S: Final = 30.0


class MemoryBroker:
    """The leases of one run."""

    def __init__(self, plans: Mapping[str, SlotPlan]) -> None:
        self._specs = {name: plan.spec for name, plan in plans.items() if _heeds_leases(plan.spec)}
        self._books = NO_BOOKS
        self._leases: dict[str, int | None] = {}
        self._granted: dict[str, dict[int, int | None]] = {name: {} for name in self._specs}
        """Of each slot: sequence of a directive that was sent -> its lease."""

    def look(self, slots: Mapping[str, Slot], now_s: float) -> dict[str, int | None]:
        """Take in what the slots' reports say, and return the leases that are not what they were.

        Args:
            slots: All of the run.
            now_s: Monotonic seconds.
        """
        sharing = {name: slots[name] for name in self._specs}
        cards = {name: self._card(sharing, name) for name in sharing}
        contexts: dict[str | None, int] = {}
        for name, slot in sharing.items():
            under_way = {flight.sequence for flight in slot.in_flight}
            self._granted[name] = {sent: lease for sent, lease in self._granted[name].items() if sent in under_way}
            if slot.device is not None:
                contexts[cards[name]] = max(contexts.get(cards[name], 0), slot.device.context_bytes)
        claimants = [
            self._claimant(slot, cards[name], contexts.get(cards[name], _CONTEXT_BYTES))
            for name, slot in sharing.items()
            if _is_expected(slot, now_s)
        ]
        before = self._leases
        self._books, self._leases = leased(self._books, claimants, now_s)
        return {name: lease for name, lease in self._leases.items() if before.get(name) != lease}

    def grant(self, slot: Slot, sequence: int) -> int | None:
        """Return the lease of a directive that is about to be sent, and remember it while that is under way."""
        if slot.slot not in self._specs:
            return None
        lease_bytes = self._leases.get(slot.slot) if slot.ready else 0
        self._granted[slot.slot][sequence] = lease_bytes
        return lease_bytes

    def _card(self, slots: Mapping[str, Slot], name: str) -> str | None:
        """Return what identifies the slot's card; before it was opened, the one that its neighbours have opened."""
        device = slots[name].device
        if device is not None:
            return device.uuid
        node = self._specs[name].node
        neighbours = [other for other_name, other in slots.items() if self._specs[other_name].node == node]
        seen = {other.device.uuid for other in neighbours if other.device is not None}
        # With two cards on its node it is unknown which one it will get.
        return seen.pop() if len(seen) == 1 else None

    def _claimant(self, slot: Slot, card: str | None, context_bytes: int) -> Claimant:
        spec = self._specs[slot.slot]
        report = slot.report if slot.ready else None
        memory = None if report is None else report.memory
        free_bytes = None
        if memory is not None and memory.device_total_bytes is not None and memory.device_used_bytes is not None:
            free_bytes = memory.device_total_bytes - memory.device_used_bytes
        unopened_bytes = context_bytes if report is None else 0
        cap_bytes = slot.device.cap_bytes if slot.device is not None else max(0, spec.budget_bytes - context_bytes)
        allowed = (cap_bytes if lease is None else lease for lease in self._granted[slot.slot].values())
        return Claimant(
            slot=slot.slot,
            card=card,
            cap_bytes=cap_bytes,
            granted_bytes=max(allowed, default=0),
            leave_free_bytes=spec.memory.leave_free_bytes,
            unopened_bytes=unopened_bytes,
            report=None if report is None else (report.incarnation, report.sequence),
            held_bytes=None if memory is None else memory.reserved_bytes,
            peak_bytes=None if memory is None else memory.peak_bytes,
            free_bytes=free_bytes,
            total_bytes=None if memory is None else memory.device_total_bytes,
            starving=report is not None and report.state is WorkerState.EMERGENCY,
        )


def _heeds_leases(spec: WorkerSpec) -> bool:
    """Whether the worker shares a card, and has a policy that looks at how much it may hold."""
    return spec.policy != "classic" and spec.device == "cuda" and spec.card_budget_bytes > spec.budget_bytes


def _is_expected(slot: Slot, now_s: float) -> bool:
    """Whether the slot has a process, or is about to have one."""
    if slot.phase is not Phase.WORKING:
        return False
    return slot.ready or (slot.working_since_s is not None and now_s < slot.working_since_s + _EXPECTED_S)
