"""A card with memory for every worker: what must be looked at in a report while every lease is the cap. Pure.

Dividing a card costs a few hundred microseconds, and a head of a thousand workers hears a thousand reports a second. As
long as what is free and what is held allow every worker its cap, the division would change nothing. So reports are only
compared with the least that was seen, and kept. When that is not enough any more, those of the last seconds are handed
to `leases.py`, which divides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from orchestrator.core.memory_broker.free_memory import WINDOW_S
from orchestrator.core.memory_broker.leases import Books, CardBook, Claimant, taken_in, with_report
from orchestrator.core.slot import Phase, Slot
from workers.messages import Report, WorkerState


class _Card:
    """One card: what its workers may hold in all, and the least that was seen lately to be there for them."""

    def __init__(self, book: CardBook, sharing: Sequence[Claimant]) -> None:
        self._needed_bytes = sum(claimant.cap_bytes for claimant in sharing) + max(
            claimant.leave_free_bytes for claimant in sharing
        )
        looks = [look for look in book.looks.taken if look.free_bytes is not None]
        self._least_free_bytes = min((look.free_bytes or 0 for look in looks), default=0)
        self._least_held = {
            claimant.slot: min((look.held_bytes for look in looks if look.slot == claimant.slot), default=0)
            for claimant in sharing
        }
        self._least_held_bytes = sum(self._least_held.values())

    def has_enough(self) -> bool:
        """Whether every worker could hold its cap at each of the moments that were seen."""
        return self._least_free_bytes + self._least_held_bytes >= self._needed_bytes

    def see(self, slot: str, held_bytes: int, free_bytes: int) -> None:
        """Take a look of one worker into account."""
        self._least_free_bytes = min(self._least_free_bytes, free_bytes)
        less_bytes = self._least_held[slot] - held_bytes
        if less_bytes > 0:
            self._least_held[slot] = held_bytes
            self._least_held_bytes -= less_bytes


class AmpleCards:
    """The cards of one machine, each with enough for every cap, and the reports since they were divided."""

    def __init__(self, cards: Mapping[str, _Card], claimants: Sequence[Claimant]) -> None:
        self._cards = cards
        self._claimants = {claimant.slot: claimant for claimant in claimants}
        self._last = {claimant.slot: claimant.report for claimant in claimants}
        self._kept: deque[tuple[float, Report]] = deque()
        """Of the last seconds."""
        self._older: dict[str, tuple[float, Report]] = {}
        """Of each slot the last one that is not among them."""

    def have_enough(self, slots: Iterable[Slot], now_s: float) -> bool:
        """Take in slots that have changed; `False` if the cards must be divided anew."""
        kept = self._kept
        for slot in slots:
            report = slot.report
            if report is None or not self._is_as_before(slot, report):
                return False
            told = (report.incarnation, report.sequence)
            if told == self._last[slot.slot]:
                continue
            memory = report.memory
            if memory is None or memory.device_used_bytes is None or memory.device_total_bytes is None:
                return False
            self._last[slot.slot] = told
            card = self._cards[self._claimants[slot.slot].card or ""]
            card.see(slot.slot, memory.reserved_bytes, memory.device_total_bytes - memory.device_used_bytes)
            kept.append((now_s, report))
            if not card.has_enough():
                return False
        while kept and kept[0][0] <= now_s - WINDOW_S:
            at_s, old = kept.popleft()
            self._older.pop(old.slot, None)  # so that the others stay in the order of their arrival
            self._older[old.slot] = (at_s, old)
        return True

    def _is_as_before(self, slot: Slot, report: Report) -> bool:
        """Whether it is the same process at work on the same card, with the same cap, and it can run something."""
        claimant, device = self._claimants.get(slot.slot), slot.device
        return (
            claimant is not None
            and claimant.report is not None
            and device is not None
            and slot.phase is Phase.WORKING
            and slot.ready
            and report.incarnation == claimant.report[0]
            and device.uuid == claimant.card
            and device.cap_bytes == claimant.cap_bytes
            and report.state is not WorkerState.EMERGENCY
        )

    def caught_up(self, books: Books) -> Books:
        """Return the books with the reports of the last seconds in them."""
        for at_s, report in (*self._older.values(), *self._kept):
            before = self._claimants[report.slot]
            self._claimants[report.slot] = claimant = with_report(before, report)
            card = claimant.card or ""
            sharing = [other for other in self._claimants.values() if other.card == card]
            books = {**books, card: taken_in(books[card], sharing, at_s)}
        return books


def ample_cards(books: Books, claimants: Sequence[Claimant], leases: Mapping[str, int | None]) -> AmpleCards | None:
    """Return the cards as they were just divided, or `None` if one of them is short or not known well enough."""
    cards: dict[str, _Card] = {}
    for uuid, book in books.items():
        sharing = [claimant for claimant in claimants if claimant.card == uuid]
        if any(claimant.report is None or leases[claimant.slot] != claimant.cap_bytes for claimant in sharing):
            return None
        cards[uuid] = card = _Card(book, sharing)
        if not card.has_enough():
            return None
    if not cards or any(claimant.card is None for claimant in claimants):
        return None
    return AmpleCards(cards, claimants)
