"""A card with memory for every worker: what must be looked at in a report while every lease is the
cap. Pure.

Dividing a card costs a few hundred microseconds, and a head of a thousand workers hears a thousand
reports a second. As long as what is free and what is held allow every worker its cap, the division
would change nothing. So reports are only compared with the least that was seen, and kept. When that
is not enough any more, those of the last seconds are handed to `leases.py`, which divides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from orchestrator.core.memory_broker.free_memory import WINDOW_S
from orchestrator.core.memory_broker.leases import Books, Claimant, taken_in
from orchestrator.core.slot import Phase, Slot
from workers.messages import STARVED, MemoryInfo, Report

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
        kept = self._kept
        for slot in slots:
            report, claimant = slot.report, self._claimants.get(slot.slot)
            if report is None or claimant is None or not _is_as_before(slot, report, claimant):
                return False
            told = (report.incarnation, report.sequence)
            if told == self._last[slot.slot]:
                continue
            memory = report.memory
            if (
                memory is None
                or memory.device_used_bytes is None
                or memory.device_total_bytes is None
            ):
                return False
            self._last[slot.slot] = told
            kept.append((now_s, slot.slot, told, memory))
            free_bytes = memory.device_total_bytes - memory.device_used_bytes
            if not self._still_enough(claimant, memory.reserved_bytes, free_bytes):
                return False
        while kept and kept[0][0] <= now_s - WINDOW_S:
            old = kept.popleft()
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

    def caught_up(self, books: Books) -> Books:
        """Return the books with the reports of the last seconds in them."""
        for at_s, slot, told, memory in (*self._older.values(), *self._kept):
            self._claimants[slot] = claimant = replace(
                self._claimants[slot], report=told, memory=memory
            )
            card = claimant.card or ""
            books = {**books, card: taken_in(books[card], self._sharing(card), at_s)}
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
    known = all(claimant.card is not None and claimant.report is not None for claimant in claimants)
    if (
        not books
        or not known
        or any(leases[claimant.slot] != claimant.cap_bytes for claimant in claimants)
    ):
        return None
    cards = AmpleCards(books, claimants)
    return cards if min(cards.spare.values()) >= 0 else None
