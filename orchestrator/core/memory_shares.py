"""Memory of a card, shared by one formula among the jobs at work on it. Pure.

    share of each = (free + held by all - reserve) / jobs

A share is bounded by the job's cap, and by what it uses while others can use the rest; what it
leaves is divided among them. Its lease, the most that it is told to hold, follows its share once
the two differ by more than 5 %. It is lowered once two statuses of every job show the lack, and
raised when three in a row of every job allow it. Two rules come before the formula:

1. The leases never add up to more than the card was seen to have. Until a job that was told to
   shrink has reported again, the larger lease that it was told before counts; and what it still
   holds always counts.
2. A process that has just started has a lease of 0. It opens the card and tells what is there
   before it gets memory of its own. Meanwhile its share is kept for it.

A job alone on its card, or on a card that no status tells of, has no lease. Does not enforce a
lease (the worker keeps to it), and does not say when to start a process.
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

#: A lease moves only by more than this share of itself: each increase costs a change of size.
_WORTH_MOVING: Final = 0.05

#: Statuses in a row that must allow a raise, and that must show a lack: statuses are of different
#: moments, and a neighbour that grew in between looks like a lack.
_TO_RAISE: Final = 3
_TO_LOWER: Final = 2

#: A job that uses less than this share of its lease in so many statuses in a row leaves the rest to
#: others, beside a little room to grow in: a share of its cap.
_USED: Final = 0.8
_PATIENCE: Final = 20
_ROOM: Final = 1 / 32

#: It is offered its whole share again once that is larger by this factor; or after so many statuses
#: in which it could run nothing: what it needs may have changed.
_WORTH_OFFERING: Final = 1.5
_ASK_AGAIN: Final = 60

#: A share is kept so long for a process that was sent for: it loads torch and opens the card.
_EXPECTED_S: Final = 30.0


@dataclass(slots=True)
class _Worker:
    """What is remembered of one process at work."""

    incarnation: int
    status: Status | None = None
    """The last one that was taken in."""
    own_bytes: deque[int] = field(default_factory=lambda: deque(maxlen=_TO_RAISE))
    """By each of the last statuses what is free of the card, or held by the job itself."""
    held_bytes: int = 0
    """The most since the status before."""
    lease_bytes: int = 0
    told_bytes: int = 0
    may_hold_bytes: int = 0
    """The most that it was told and may still obey."""
    unused: int = 0
    """Statuses in a row in which it did not use its lease."""
    used_bytes: int = 0
    """The most that it held in those."""
    left_bytes: int | None = None
    """The lease that it left to others; `None` while it is offered a whole share."""

    @property
    def promised_bytes(self) -> int:
        """The most that it may come to hold."""
        return max(self.lease_bytes, self.may_hold_bytes, self.held_bytes)

    def wanted_bytes(self, cap_bytes: int) -> int:
        """Return the most that it should have while others could use the rest."""
        if self.left_bytes is None:
            return cap_bytes
        return min(cap_bytes, int(self.used_bytes / _USED + _ROOM * cap_bytes))

    def note_use(self, free_bytes: int, *, is_starving: bool) -> None:
        """Learn from a status whether it leaves its lease, or has left it and wants it back."""
        uses_it = self.held_bytes >= _USED * self.lease_bytes
        if self.left_bytes is None:
            uses_it = uses_it or self.lease_bytes > self.held_bytes + free_bytes  # not there to use
        if uses_it or (is_starving and self.unused >= _PATIENCE + _ASK_AGAIN):
            self.offer()
            return
        self.unused += 1
        self.used_bytes = max(self.used_bytes, self.held_bytes)
        if self.unused == _PATIENCE:
            self.left_bytes = self.lease_bytes

    def offer(self) -> None:
        """Take it to want its whole share."""
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
        """Go on with other plans; slots whose spec is the same object keep their leases."""
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

    def look(self, slots: Mapping[str, Slot], now_s: float) -> dict[str, int | None]:
        """Take in what slots have reported, and return the leases that are not what they were.

        In bytes; `None` sets no limit beyond the cap. `now_s` are monotonic seconds. To be called
        once what has come in is known, before anything is sent.
        """
        leases: dict[str, int | None] = {}
        for card, sharing in self._by_card(slots, now_s).items():
            workers = {slot.slot: self._workers[slot.slot] for slot in sharing}
            has_news = self._take(sharing)
            is_shared = card is not None and len(sharing) > 1
            if not is_shared or not any(worker.own_bytes for worker in workers.values()):
                leases |= dict.fromkeys(workers)
                for slot in sharing:  # where it gets a lease, that comes down from here
                    workers[slot.slot].lease_bytes = self._cap_bytes(slot) if slot.ready else 0
                continue
            if has_news:
                self._share(sharing)
            leases |= {name: worker.lease_bytes for name, worker in workers.items()}
        news = {name: lease for name, lease in leases.items() if self._leases.get(name) != lease}
        self._leases |= news
        return news

    def grant(self, slot: Slot) -> int | None:
        """Return the lease to send to a slot now, and remember it as told."""
        if slot.slot not in self._specs:
            return slot.orders.cap_bytes
        lease_bytes = self._leases.get(slot.slot) if slot.ready else 0
        lease_bytes = (
            slot.orders.cap_bytes if lease_bytes is None else slot.orders.within_cap(lease_bytes)
        )
        worker = self._workers.get(slot.slot)
        if worker is not None:
            worker.told_bytes = self._cap_bytes(slot) if lease_bytes is None else lease_bytes
            worker.may_hold_bytes = max(worker.may_hold_bytes, worker.told_bytes)
        return lease_bytes

    def _by_card(self, slots: Mapping[str, Slot], now_s: float) -> Mapping[str | None, list[Slot]]:
        """Return the slots at work, or about to be, by their cards; the others hold nothing.

        A process that has not opened its card yet is expected on the only one known of its node.
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

    def _take(self, sharing: Iterable[Slot]) -> bool:
        """Take in the statuses that are new on a card; return whether there is one."""
        workers = [self._workers[slot.slot] for slot in sharing]
        seen: list[tuple[_Worker, Status, int, int]] = []
        for slot, worker in zip(sharing, workers, strict=True):
            status = slot.status
            if not slot.ready or status is None or status is worker.status:
                continue
            worker.status = status
            # The process may have told this before it heard of the newest lease.
            obeys_bytes = (
                self._cap_bytes(slot) if status.lease_bytes is None else status.lease_bytes
            )
            worker.may_hold_bytes = max(worker.told_bytes, obeys_bytes)
            memory = status.memory
            if (
                memory is None
                or memory.device_total_bytes is None
                or memory.device_used_bytes is None
            ):
                continue
            worker.held_bytes = max(memory.reserved_bytes, memory.peak_bytes)
            free_bytes = memory.device_total_bytes - memory.device_used_bytes
            seen.append((worker, status, free_bytes, memory.reserved_bytes))
        for worker, status, free_bytes, reserved_bytes in seen:
            worker.own_bytes.append(free_bytes + reserved_bytes)
            worker.note_use(free_bytes, is_starving=status.state in STARVED)
        return bool(seen)

    def _share(self, sharing: list[Slot]) -> None:
        """Move the leases of a card's jobs towards their shares."""
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
        # What one job is short of, its neighbours have: all of them move then.
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
        """Return the most that a slot may ever hold; an estimate before it has opened its card."""
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
    """Return the share of each job, with its part of what no job wants."""
    shares = fair_shares(pool_bytes, wanted)
    left_bytes = pool_bytes - sum(shares.values())
    more = fair_shares(left_bytes, {name: caps[name] - shares[name] for name in shares})
    return {name: share + more[name] for name, share in shares.items()}


def fair_shares(pool_bytes: int, wanted: Mapping[str, int]) -> dict[str, int]:
    """Divide max-min fairly: no job gets more than it wants, and what it does not want is divided
    among the others.
    """
    shares = dict.fromkeys(wanted, 0)
    left_bytes = max(0, pool_bytes)
    for place, name in enumerate(sorted(wanted, key=lambda name: (wanted[name], name))):
        shares[name] = min(wanted[name], left_bytes // (len(wanted) - place))
        left_bytes -= shares[name]
    return shares
