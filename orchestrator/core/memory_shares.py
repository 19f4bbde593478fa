"""Divides the memory of a card among the slots at work on it by one formula. Pure.

    share of each slot = (free + held by all - reserve) / slots

A share is bounded by the slot's cap, and by the slot's use while others can use more; the rest is
divided among the others. The lease is the most memory that the head lets a worker hold. It follows
the share once the two differ by more than 5 %. It falls once two statuses in a row of every slot
show the lack, and rises once three in a row of every slot allow it. Two rules have precedence:

1. The leases never add up to more than the observed memory of the card. If a lease falls, the old
   one counts until the worker reports the new one; the memory that it still holds always counts.
2. A process that has just started has a lease of 0: it opens the card and reports its memory before
   it gets any. Meanwhile its share is reserved.

A slot alone on its card, or on a card without any status, has no lease. Does not enforce leases
(the worker does), and does not decide when a process starts.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from orchestrator.core.placement import SlotPlan
from orchestrator.core.slot import Phase, Slot
from workers.messages import STARVED, Status
from workers.settings import ASSUMED_CONTEXT_BYTES, WorkerSpec

#: A lease changes only by more than this share of itself: each increase costs a change of size.
_WORTH_MOVING: Final = 0.05

#: Consecutive statuses that must allow a raise, and that must show a lack. Statuses are from
#: different times, so a neighbour that has just grown looks like a lack.
_TO_RAISE: Final = 3
_TO_LOWER: Final = 2

#: A slot that uses less than `_USED` of its lease in `_PATIENCE` statuses in a row leaves the rest
#: to others, except for `_ROOM` of its cap to grow into.
_USED: Final = 0.8
_PATIENCE: Final = 20
_ROOM: Final = 1 / 32

#: The slot is offered its whole share again once the share has grown by this factor, or after this
#: number of further statuses if it is starved: its needs may have changed.
_WORTH_OFFERING: Final = 1.5
_ASK_AGAIN: Final = 60

#: How long a share is reserved for a starting process, which loads torch and opens the card.
_EXPECTED_S: Final = 30.0


@dataclass(slots=True)
class _Worker:
    """The record of one process at work."""

    incarnation: int
    status: Status | None = None
    """The last status that was processed."""
    own_bytes: deque[int] = field(default_factory=lambda: deque(maxlen=_TO_RAISE))
    """For each of the last statuses: free memory of the card plus memory that the process holds."""
    held_bytes: int = 0
    """The most memory that it has held since the status before."""
    lease_bytes: int = 0
    sent_bytes: int = 0
    """The lease that was last sent to it."""
    may_hold_bytes: int = 0
    """The largest lease that was sent and that the process may still obey."""
    unused: int = 0
    """Consecutive statuses in which it did not use its lease."""
    used_bytes: int = 0
    """The most memory that it held in those."""
    left_bytes: int | None = None
    """The lease that it did not use; `None`: it is offered its whole share."""

    @property
    def promised_bytes(self) -> int:
        """The most memory that the process may come to hold."""
        return max(self.lease_bytes, self.may_hold_bytes, self.held_bytes)

    def wanted_bytes(self, cap_bytes: int) -> int:
        """Return the most memory that it should have while others could use the rest."""
        if self.left_bytes is None:
            return cap_bytes
        return min(cap_bytes, int(self.used_bytes / _USED + _ROOM * cap_bytes))

    def note_use(self, free_bytes: int, *, is_starving: bool) -> None:
        """Update from a status whether the process uses its lease, leaves it, or wants it back."""
        uses_it = self.held_bytes >= _USED * self.lease_bytes
        if self.left_bytes is None:  # a lease above the memory that is there cannot be used
            uses_it = uses_it or self.lease_bytes > self.held_bytes + free_bytes
        if uses_it or (is_starving and self.unused >= _PATIENCE + _ASK_AGAIN):
            self.offer()
            return
        self.unused += 1
        self.used_bytes = max(self.used_bytes, self.held_bytes)
        if self.unused == _PATIENCE:
            self.left_bytes = self.lease_bytes

    def offer(self) -> None:
        """Offer the process its whole share again."""
        self.left_bytes, self.unused, self.used_bytes = None, 0, 0


class MemoryShares:
    """The leases of one run."""

    def __init__(self, plans: Mapping[str, SlotPlan]) -> None:
        """Begin without a status of any slot."""
        self._specs: dict[str, WorkerSpec] = {}
        self._workers: dict[str, _Worker] = {}
        self._leases: dict[str, int | None] = {}
        self.replan(plans)

    def replan(self, plans: Mapping[str, SlotPlan]) -> None:
        """Replace the plans; slots whose spec is the same object keep their leases."""
        before = self._specs
        self._specs = {
            name: plan.spec
            for name, plan in plans.items()
            if plan.spec.device == "cuda"
            and plan.spec.follows_memory
            and plan.spec.card_budget_bytes > plan.spec.budget_bytes
        }
        for name in before:
            if self._specs.get(name) is not before[name]:
                self._workers.pop(name, None)
                self._leases.pop(name, None)

    def update(self, slots: Mapping[str, Slot], now_s: float) -> dict[str, int | None]:
        """Process new statuses of the slots, and return the leases that have changed, in bytes.

        A lease of `None` sets no limit beyond the cap. `now_s` are monotonic seconds. The caller
        does this after it has received statuses and before it sends orders.
        """
        leases: dict[str, int | None] = {}
        for card, sharing in self._by_card(slots, now_s).items():
            workers = {slot.slot: self._workers[slot.slot] for slot in sharing}
            has_news = self._process(sharing)
            is_shared = card is not None and len(sharing) > 1
            if not is_shared or not any(worker.own_bytes for worker in workers.values()):
                leases |= dict.fromkeys(workers)
                for slot in sharing:  # a later lease starts from this value
                    workers[slot.slot].lease_bytes = self._cap_bytes(slot) if slot.ready else 0
                continue
            if has_news:
                self._share(sharing)
            leases |= {name: worker.lease_bytes for name, worker in workers.items()}
        news = {name: lease for name, lease in leases.items() if self._leases.get(name) != lease}
        self._leases |= news
        return news

    def grant(self, slot: Slot) -> int | None:
        """Return the lease to send to a slot now, and record it as sent."""
        if slot.slot not in self._specs:
            return slot.orders.cap_bytes
        lease_bytes = self._leases.get(slot.slot) if slot.ready else 0
        lease_bytes = (
            slot.orders.cap_bytes if lease_bytes is None else slot.orders.within_cap(lease_bytes)
        )
        worker = self._workers.get(slot.slot)
        if worker is not None:
            worker.sent_bytes = self._cap_bytes(slot) if lease_bytes is None else lease_bytes
            worker.may_hold_bytes = max(worker.may_hold_bytes, worker.sent_bytes)
        return lease_bytes

    def _by_card(self, slots: Mapping[str, Slot], now_s: float) -> Mapping[str | None, list[Slot]]:
        """Return the slots that work, or will soon, keyed by card; other slots hold no memory.

        A process that has not opened its card yet counts for the card of its node, if only one is
        known there.
        """
        known: defaultdict[str, set[str | None]] = defaultdict(set)
        for name, spec in self._specs.items():
            if (device := slots[name].device) is not None:
                known[spec.node].add(device.uuid)
        by_card: defaultdict[str | None, list[Slot]] = defaultdict(list)
        for name, spec in self._specs.items():
            slot, worker = slots[name], self._workers.get(name)
            if not _is_expected(slot, now_s):
                self._workers.pop(name, None)
                continue
            if worker is None or worker.incarnation != slot.incarnation:
                self._workers[name] = _Worker(incarnation=slot.incarnation)
            (card,) = known[spec.node] if len(known[spec.node]) == 1 else (None,)
            if slot.device is not None:
                card = slot.device.uuid
            by_card[card].append(slot)
        return by_card

    def _process(self, sharing: Iterable[Slot]) -> bool:
        """Process the new statuses on a card; return whether there are any."""
        workers = [self._workers[slot.slot] for slot in sharing]
        reports: list[tuple[_Worker, Status, int, int]] = []
        for slot, worker in zip(sharing, workers, strict=True):
            status = slot.status
            if not slot.ready or status is None or status is worker.status:
                continue
            worker.status = status
            # The process may have sent this status before it received the newest lease.
            obeys_bytes = (
                self._cap_bytes(slot) if status.lease_bytes is None else status.lease_bytes
            )
            worker.may_hold_bytes = max(worker.sent_bytes, obeys_bytes)
            memory = status.memory
            if (
                memory is None
                or memory.device_total_bytes is None
                or memory.device_used_bytes is None
            ):
                continue
            worker.held_bytes = max(memory.reserved_bytes, memory.peak_bytes)
            free_bytes = memory.device_total_bytes - memory.device_used_bytes
            reports.append((worker, status, free_bytes, memory.reserved_bytes))
        for worker, status, free_bytes, reserved_bytes in reports:
            worker.own_bytes.append(free_bytes + reserved_bytes)
            worker.note_use(free_bytes, is_starving=status.state in STARVED)
        return bool(reports)

    def _share(self, sharing: list[Slot]) -> None:
        """Move the leases on a card towards the shares of its slots."""
        workers = {slot.slot: self._workers[slot.slot] for slot in sharing}
        ready = {slot.slot: workers[slot.slot] for slot in sharing if slot.ready}
        contexts = [slot.device.context_bytes for slot in sharing if slot.device is not None]
        context_bytes = max(contexts, default=ASSUMED_CONTEXT_BYTES)
        caps = {slot.slot: self._cap_bytes(slot, context_bytes) for slot in sharing}
        reserve_bytes = max(self._specs[name].memory.leave_free_bytes for name in workers)
        reserve_bytes += context_bytes * (len(sharing) - len(ready))
        held_bytes = sum(worker.held_bytes for worker in ready.values())
        there = [
            [own_bytes + held_bytes - worker.held_bytes for own_bytes in worker.own_bytes]
            for worker in ready.values()
        ]
        sure_bytes = min(min(each) for each in there if each)
        hoped_bytes = max(max(each[-_TO_LOWER:]) for each in there if each)
        sure_bytes, hoped_bytes = sure_bytes - reserve_bytes, hoped_bytes - reserve_bytes
        whole = fair_shares(sure_bytes, caps)
        for name, worker in ready.items():
            worker.lease_bytes = min(worker.lease_bytes, caps[name])
            if worker.left_bytes is not None and whole[name] > _WORTH_OFFERING * worker.left_bytes:
                worker.offer()
        wanted = {name: worker.wanted_bytes(caps[name]) for name, worker in workers.items()}
        goals, limits = (_shares(there, wanted, caps) for there in (sure_bytes, hoped_bytes))
        short = {
            name: goals[name] - worker.lease_bytes
            for name, worker in ready.items()
            if goals[name] > (1 + _WORTH_MOVING) * worker.lease_bytes
            or goals[name] == caps[name] > worker.lease_bytes
        }
        leased_bytes = sum(worker.lease_bytes for worker in ready.values())
        # If the memory is tight, one slot's lack is its neighbours' excess: all leases move.
        is_tight = leased_bytes + sum(short.values()) > hoped_bytes
        for name, worker in ready.items():
            least_bytes = worker.lease_bytes * (1 if is_tight else 1 - _WORTH_MOVING)
            if limits[name] < least_bytes:
                worker.lease_bytes = limits[name]
        room_bytes = sure_bytes - sum(worker.promised_bytes for worker in ready.values())
        for name, more_bytes in fair_shares(room_bytes, short).items():
            worker = ready[name]
            if more_bytes == short[name] or more_bytes > _WORTH_MOVING * worker.lease_bytes:
                worker.lease_bytes += more_bytes

    def _cap_bytes(self, slot: Slot, context_bytes: int = ASSUMED_CONTEXT_BYTES) -> int:
        """Return the most memory that a slot may ever hold, an estimate until it opens its card."""
        if slot.device is not None:
            return slot.orders.within_cap(slot.device.cap_bytes)
        budget_bytes = self._specs[slot.slot].budget_bytes
        return slot.orders.within_cap(max(0, budget_bytes - context_bytes))


def _is_expected(slot: Slot, now_s: float) -> bool:
    if slot.phase is not Phase.WORKING:
        return False
    begun_s = slot.working_since_s
    return slot.ready or (begun_s is not None and now_s < begun_s + _EXPECTED_S)


def _shares(pool_bytes: int, wanted: Mapping[str, int], caps: Mapping[str, int]) -> dict[str, int]:
    """Return the share of each slot, including its part of the memory that no slot wants."""
    shares = fair_shares(pool_bytes, wanted)
    left_bytes = pool_bytes - sum(shares.values())
    more = fair_shares(left_bytes, {name: caps[name] - shares[name] for name in shares})
    return {name: share + more[name] for name, share in shares.items()}


def fair_shares(pool_bytes: int, wanted: Mapping[str, int]) -> dict[str, int]:
    """Divide `pool_bytes` max-min fairly: no slot gets more than it wants, and the rest is divided
    among the others.
    """
    shares = dict.fromkeys(wanted, 0)
    left_bytes = max(0, pool_bytes)
    for place, name in enumerate(sorted(wanted, key=lambda name: (wanted[name], name))):
        shares[name] = min(wanted[name], left_bytes // (len(wanted) - place))
        left_bytes -= shares[name]
    return shares
