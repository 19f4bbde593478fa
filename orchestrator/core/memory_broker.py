"""Connects slots to leases: collects what reports say about each card, and what directives under
way allow. Pure.

The supervisor calls `look` once a turn, and asks for the lease of each directive when it sends it.
`leases.py` computes the leases. As long as a card has memory for the cap of every worker, the
division would change nothing: then reports are only compared with the least that was seen
(`AmpleCards`), because dividing costs a few hundred microseconds for each report.

Leases also order the starts. Where several workers share a card, the first directive of a process
lets it hold nothing: it opens the card, one process at a time, and reports what is there. So no
worker obtains memory before the head knows the card, and then each worker obtains bytes of its own.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final, TypeAlias

from orchestrator.core.leases import NO_BOOKS, WINDOW_S, Books, Claimant, divide, take_in
from orchestrator.core.placement import SlotPlan
from orchestrator.core.slot import Phase, Slot
from workers.messages import STARVED, MemoryInfo, Report
from workers.settings import ASSUMED_CONTEXT_BYTES

#: A share is kept free so long for a process that was sent for: loading torch and opening the card
#: take some seconds.
_EXPECTED_S: Final = 30.0

#: Directives of a slot that are remembered before those that have ended are dropped.
_UNDER_WAY: Final = 4


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
        self._ample: dict[str, AmpleCards] = {}
        """Machines on whose cards every lease is the cap."""
        self._leases: dict[str, int | None] = {}
        self._granted: dict[str, dict[int, int | None]] = {name: {} for name in self._specs}
        """Of each slot: sequence of a directive that was sent -> its lease."""
        if before is not None:
            self._go_on_with(before)

    def _go_on_with(self, before: MemoryBroker) -> None:
        for name, machine in self._machine_of.items():
            if before._specs.get(name) is self._specs[name]:
                self._leases[name] = before._leases.get(name)
                self._granted[name] = before._granted[name]
                known = before._known(before._machine_of[name])
                self._books[machine] = {**known, **self._books[machine]}

    def look(
        self, slots: Mapping[str, Slot], now_s: float, changed: Iterable[str] | None = None
    ) -> dict[str, int | None]:
        """Take in what reports say at `now_s` (monotonic seconds), and return the leases that are
        not what they were.

        `changed` are those of the slots that are not as they were at the last call; `None` for all
        of them.
        """
        touched: defaultdict[str, list[str]] = defaultdict(list)
        for name in self._specs if changed is None else changed:
            machine = self._machine_of.get(name)
            if machine is not None:
                touched[machine].append(name)
        news: dict[str, int | None] = {}
        for machine, names in touched.items():
            ample = self._ample.get(machine)
            if ample is None or not ample.have_enough((slots[name] for name in names), now_s):
                news |= self._settle(machine, slots, now_s)
        return news

    def grant(self, slot: Slot, sequence: int) -> int | None:
        """Return the lease of a directive that is about to be sent, and remember it while that is
        under way.
        """
        if slot.slot not in self._specs:
            return slot.orders.cap_bytes
        lease_bytes = self._leases.get(slot.slot) if slot.ready else 0
        lease_bytes = (
            slot.orders.cap_bytes if lease_bytes is None else slot.orders.within_cap(lease_bytes)
        )
        granted = self._granted[slot.slot]
        granted[sequence] = lease_bytes
        if len(granted) > _UNDER_WAY:
            self._drop_ended(slot)
        return lease_bytes

    def _settle(
        self, machine: str, slots: Mapping[str, Slot], now_s: float
    ) -> dict[str, int | None]:
        sharing = {name: slots[name] for name in self._machines[machine]}
        cards = self._cards(sharing)
        contexts: dict[str | None, int] = {}
        for name, slot in sharing.items():
            self._drop_ended(slot)
            if slot.device is not None:
                contexts[cards[name]] = max(contexts.get(cards[name], 0), slot.device.context_bytes)
        claimants = [
            self._claimant(slot, cards[name], contexts.get(cards[name], ASSUMED_CONTEXT_BYTES))
            for name, slot in sharing.items()
            if _is_expected(slot, now_s)
        ]
        books = self._known(machine)
        self._ample.pop(machine, None)
        self._books[machine], leases = divide(books, claimants, now_s)
        ample = ample_cards(self._books[machine], claimants, leases)
        if ample is not None:
            self._ample[machine] = ample
        news = {name: lease for name, lease in leases.items() if self._leases.get(name) != lease}
        self._leases |= leases
        return news

    def _known(self, machine: str) -> Books:
        ample, books = self._ample.get(machine), self._books[machine]
        return books if ample is None else ample.catch_up(books)

    def _drop_ended(self, slot: Slot) -> None:
        under_way = {flight.sequence for flight in slot.in_flight}
        granted = self._granted[slot.slot]
        self._granted[slot.slot] = {
            sent: lease for sent, lease in granted.items() if sent in under_way
        }

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
        report = slot.report if slot.ready else None
        unopened_bytes = context_bytes if report is None else 0
        cap_bytes = (
            slot.device.cap_bytes
            if slot.device is not None
            else max(0, spec.budget_bytes - context_bytes)
        )
        cap_bytes = slot.orders.within_cap(cap_bytes)
        allowed = (
            cap_bytes if lease is None else lease for lease in self._granted[slot.slot].values()
        )
        return Claimant(
            slot=slot.slot,
            card=card,
            cap_bytes=cap_bytes,
            granted_bytes=max(allowed, default=0),
            leave_free_bytes=spec.memory.leave_free_bytes,
            unopened_bytes=unopened_bytes,
            report=None if report is None else (report.incarnation, report.sequence),
            memory=None if report is None else report.memory,
            starving=report is not None and report.state in STARVED,
        )


def _is_expected(slot: Slot, now_s: float) -> bool:
    if slot.phase is not Phase.WORKING:
        return False
    return slot.ready or (
        slot.working_since_s is not None and now_s < slot.working_since_s + _EXPECTED_S
    )


#: When a report came, its slot, its incarnation and sequence, and what it said. The rest of it need
#: not be kept.
_Look: TypeAlias = tuple[float, str, tuple[int, int], MemoryInfo]


class AmpleCards:
    """The cards of one machine, each with enough for every cap, and the reports since they were
    divided.
    """

    def __init__(self, books: Books, claimants: Sequence[Claimant]) -> None:
        self._claimants = {claimant.slot: claimant for claimant in claimants}
        self._last = {claimant.slot: claimant.report for claimant in claimants}
        self._kept: deque[_Look] = deque()
        """Of the last seconds."""
        self._older: dict[str, _Look] = {}
        """Of each slot the last one that is not among them."""
        self._least_free: dict[str, int] = {}
        """Of each card the least bytes that were seen to be free."""
        self._least_held: dict[str, int] = {}
        self.spare: dict[str, int] = {}
        """Of each card, how much more that is, with what its workers held at least, than all of
        them may hold.
        """
        for card, book in books.items():
            sharing = self._sharing(card)
            looks = [look for look in book.looks.taken if look.free_bytes is not None]
            held = {
                claimant.slot: min(
                    (look.held_bytes for look in looks if look.slot == claimant.slot), default=0
                )
                for claimant in sharing
            }
            free_bytes = min((look.free_bytes or 0 for look in looks), default=0)
            leave_free_bytes = max(claimant.leave_free_bytes for claimant in sharing)
            caps_bytes = sum(claimant.cap_bytes for claimant in sharing)
            self._least_free[card] = free_bytes
            self._least_held |= held
            self.spare[card] = free_bytes + sum(held.values()) - caps_bytes - leave_free_bytes

    def have_enough(self, slots: Iterable[Slot], now_s: float) -> bool:
        """Take in slots that have changed; `False` if the cards must be divided anew."""
        recent = self._kept
        for slot in slots:
            report, claimant = slot.report, self._claimants.get(slot.slot)
            if report is None or claimant is None or not _is_as_before(slot, report, claimant):
                return False
            report_id = (report.incarnation, report.sequence)
            if report_id == self._last[slot.slot]:
                continue
            memory = report.memory
            if (
                memory is None
                or memory.device_used_bytes is None
                or memory.device_total_bytes is None
            ):
                return False
            self._last[slot.slot] = report_id
            recent.append((now_s, slot.slot, report_id, memory))
            free_bytes = memory.device_total_bytes - memory.device_used_bytes
            if not self._still_enough(claimant, memory.reserved_bytes, free_bytes):
                return False
        while recent and recent[0][0] <= now_s - WINDOW_S:
            old = recent.popleft()
            self._older.pop(old[1], None)  # so that the others stay in the order of their arrival
            self._older[old[1]] = old
        return True

    def _still_enough(self, claimant: Claimant, held_bytes: int, free_bytes: int) -> bool:
        card, slot = claimant.card or "", claimant.slot
        if (less_free_bytes := self._least_free[card] - free_bytes) > 0:
            self._least_free[card] = free_bytes
            self.spare[card] -= less_free_bytes
        if (less_held_bytes := self._least_held[slot] - held_bytes) > 0:
            self._least_held[slot] = held_bytes
            self.spare[card] -= less_held_bytes
        return self.spare[card] >= 0

    def catch_up(self, books: Books) -> Books:
        """Return the books with the reports of the last seconds in them."""
        for at_s, slot, report_id, memory in (*self._older.values(), *self._kept):
            self._claimants[slot] = claimant = replace(
                self._claimants[slot], report=report_id, memory=memory
            )
            card = claimant.card or ""
            books = {**books, card: take_in(books[card], self._sharing(card), at_s)}
        return books

    def _sharing(self, card: str) -> list[Claimant]:
        return [claimant for claimant in self._claimants.values() if claimant.card == card]


def _is_as_before(slot: Slot, report: Report, claimant: Claimant) -> bool:
    """Whether it is the same process at work on the same card, with the same cap, and it can run
    something.
    """
    device = slot.device
    return (
        claimant.report is not None
        and device is not None
        and slot.phase is Phase.WORKING
        and slot.ready
        and report.incarnation == claimant.report[0]
        and device.uuid == claimant.card
        and slot.orders.within_cap(device.cap_bytes) == claimant.cap_bytes
        and report.state not in STARVED
    )


def ample_cards(
    books: Books, claimants: Sequence[Claimant], leases: Mapping[str, int | None]
) -> AmpleCards | None:
    """Return the cards as they were just divided, or `None` if one of them is short or not known
    well enough.
    """
    are_known = all(
        claimant.card is not None and claimant.report is not None for claimant in claimants
    )
    if (
        not books
        or not are_known
        or any(leases[claimant.slot] != claimant.cap_bytes for claimant in claimants)
    ):
        return None
    cards = AmpleCards(books, claimants)
    return cards if min(cards.spare.values()) >= 0 else None
