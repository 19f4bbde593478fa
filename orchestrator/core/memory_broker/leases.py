"""Leases: what each worker of a shared card may hold now, as fair shares in which each byte is
promised once. Pure.

Workers of one card all see the same free bytes. When another program frees memory, all of them
would grow into it, and the late ones would fail. So the head leases: what its workers hold and what
is free, less a reserve, is divided max-min fairly by what each may hold (its cap) and uses. Rules:

1. Where the caps of all workers fit, every lease is the cap. A card with one worker, or one without
a report, has no
   leases.
2. Bytes are promised once. A promise that was not taken yet counts as used, and so does what a
directive under way
   still allows after its lease was cut.
3. A lease is cut when hardly more is there than is promised, or when another worker has less than
its share and what
   is free does not make up for it. It grows only into bytes that were there in all of the last
   seconds, and small differences change no lease. A worker far below its share waits for half of
   the rest, not for many small parts.
4. What a worker leaves untaken is lent to the others, and given back when it begins to grow
(`demand.py`).

How much there is follows from reports that were made at different moments (`free_memory.py`). Does
not enforce a lease (the worker keeps to it) and does not say when to start a process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, TypeAlias

from orchestrator.core.memory_broker.demand import FRESH, Demand, heard
from orchestrator.core.memory_broker.free_memory import (
    NO_LOOKS,
    Look,
    Looks,
    available,
    gone,
    looked,
)
from workers.messages import MemoryInfo

#: Share of a card that is not promised where the caps do not fit: what changes between two reports
#: comes out of it.
_SPARE: Final = 0.01

#: When no more than this is left of that, leases are cut: a program that takes all that is free may
#: need more.
_LEFT: Final = 0.25

#: So long a worker waits for at least half of what it is short of: a step that is much too small is
#: worth nothing, and each increase costs a change of size. A worker that gives memory back does so
#: within two slices.
_WAITS_S: Final = 10.0

#: Otherwise a lease moves only by more than this share of itself.
_WORTH_MOVING: Final = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimant:
    """A worker that is at work or about to be, as its last report and what was sent to it say."""

    slot: str
    card: str | None
    """What identifies the card; `None` if it is unknown yet, or not shared by workers."""
    cap_bytes: int
    """What its allocator may ever hold; before it has reported, its budget less `unopened_bytes`.
    """
    granted_bytes: int = 0
    """The most that a directive under way lets it hold: the cap for one without a lease, 0 if none
    is under way.
    """
    leave_free_bytes: int = 0
    """What it leaves free on the card: it shrinks by itself when other programs take of that."""
    unopened_bytes: int = 0
    """What opening the card will cost it, its context; 0 once it has reported."""
    report: tuple[int, int] | None = None
    """Incarnation and sequence of the last report of its present process; `None` before the first.
    """
    memory: MemoryInfo | None = None
    starving: bool = False
    """Whether it could run nothing in that slice: EMERGENCY or PARKED."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What is remembered of one process."""

    report: tuple[int, int]
    """The last one taken in."""
    lease_bytes: int = 0
    short_since_s: float | None = None
    """Since when it has had less than it should; `None` if it has not."""
    demand: Demand = FRESH


@dataclass(frozen=True, slots=True, kw_only=True)
class CardBook:
    """What is remembered of one card."""

    total_bytes: int | None = None
    looks: Looks = NO_LOOKS
    accounts: Mapping[str, Account] = field(default_factory=lambda: MappingProxyType({}))
    """Of every slot whose present process has reported."""


#: Of each card by its identity.
Books: TypeAlias = Mapping[str, CardBook]

NO_BOOKS: Final[Books] = MappingProxyType({})


def leased(
    books: Books, claimants: Sequence[Claimant], now_s: float
) -> tuple[Books, dict[str, int | None]]:
    """Take in what is new, and return the books for the next call and what each worker may hold
    from now on.

    To be called after every turn in which a report arrived, or a worker came or went. A report that
    is new is taken to be of `now_s` (monotonic seconds). A worker that is not among the claimants
    holds nothing and gets nothing. A lease is in bytes, at most the cap. `None` sets no limit
    beyond the cap; 0 is for a process that has not reported yet.
    """
    cards: defaultdict[str, list[Claimant]] = defaultdict(list)
    for claimant in claimants:
        if claimant.card is not None:
            cards[claimant.card].append(claimant)
    leases: dict[str, int | None] = {claimant.slot: None for claimant in claimants}
    after: dict[str, CardBook] = {}
    for card, sharing in cards.items():
        book = taken_in(books.get(card, CardBook()), sharing, now_s)
        if len(sharing) > 1 and book.total_bytes is not None:
            book = _settled(book, book.total_bytes, sharing, now_s)
            lent = {slot: account.lease_bytes for slot, account in book.accounts.items()}
            leases |= {claimant.slot: lent.get(claimant.slot, 0) for claimant in sharing}
        after[card] = book
    return after, leases


def fair_shares(pool_bytes: int, wanted: Mapping[str, int]) -> dict[str, int]:
    """Divide max-min fairly: no worker gets more than it wants, and growing one share would cut a
    smaller one.
    """
    shares = dict.fromkeys(wanted, 0)
    left_bytes = max(0, pool_bytes)
    for place, slot in enumerate(sorted(wanted, key=lambda slot: (wanted[slot], slot))):
        shares[slot] = min(wanted[slot], left_bytes // (len(wanted) - place))
        left_bytes -= shares[slot]
    return shares


def taken_in(book: CardBook, sharing: Sequence[Claimant], now_s: float) -> CardBook:
    """Return the book of a card with what is new in the reports of its workers.

    `now_s` is when they came.
    """
    present = {
        claimant.slot: claimant.report[0] for claimant in sharing if claimant.report is not None
    }
    looks, total_bytes = book.looks, book.total_bytes
    accounts: dict[str, Account] = {}
    for slot, account in book.accounts.items():
        if present.get(slot) == account.report[0]:
            accounts[slot] = account
        else:
            looks = gone(looks, slot, now_s)
    for claimant in sharing:
        known = accounts.get(claimant.slot)
        if claimant.report is None or (known is not None and known.report == claimant.report):
            continue
        account = replace(known or Account(report=claimant.report), report=claimant.report)
        memory = claimant.memory
        if (
            memory is not None
            and memory.device_total_bytes is not None
            and memory.device_used_bytes is not None
        ):
            total_bytes = memory.device_total_bytes
            free_bytes = total_bytes - memory.device_used_bytes
            look = Look(
                slot=claimant.slot,
                at_s=now_s,
                held_bytes=memory.reserved_bytes,
                most_bytes=max(memory.reserved_bytes, memory.peak_bytes),
                free_bytes=free_bytes,
            )
            looks = looked(looks, look)
            demand = heard(
                account.demand,
                cap_bytes=claimant.cap_bytes,
                lease_bytes=account.lease_bytes,
                held_bytes=look.most_bytes,
                free_bytes=free_bytes,
                starving=claimant.starving,
            )
            account = replace(account, demand=demand)
        accounts[claimant.slot] = account
    granted = {claimant.slot: claimant.granted_bytes for claimant in sharing}
    return replace(
        book, total_bytes=total_bytes, looks=replace(looks, granted=granted), accounts=accounts
    )


def _settled(
    book: CardBook, total_bytes: int, sharing: Sequence[Claimant], now_s: float
) -> CardBook:
    bounds = available(book.looks, total_bytes)
    if bounds is None:
        return book
    kept_bytes = sum(claimant.unopened_bytes for claimant in sharing)
    kept_bytes += max(claimant.leave_free_bytes for claimant in sharing)
    least_bytes, most_bytes = (bound - kept_bytes for bound in bounds)
    caps = {claimant.slot: claimant.cap_bytes for claimant in sharing}
    caps_bytes = sum(caps.values())
    leases = {slot: min(account.lease_bytes, caps[slot]) for slot, account in book.accounts.items()}
    spare_bytes = int(_SPARE * total_bytes)
    overdrawn = sum(leases.values()) > _pool(most_bytes, caps_bytes, int(_LEFT * spare_bytes))
    sure_bytes, hoped_bytes = (
        _pool(bound, caps_bytes, spare_bytes) for bound in (least_bytes, most_bytes)
    )
    demands = _offered(
        {slot: account.demand for slot, account in book.accounts.items()}, caps, sure_bytes
    )
    goals, limits = _goals(demands, caps, sure_bytes), _goals(demands, caps, hoped_bytes)
    everything_fits = sure_bytes >= caps_bytes
    short = {
        slot: goals[slot] - lease
        for slot, lease in leases.items()
        if _is_worth(lease, goals[slot]) or (everything_fits and lease < caps[slot])
    }
    if sum(short.values()) + _promised(leases, demands, sharing) > sure_bytes:
        for slot, lease in leases.items():
            if lease > limits[slot] and (overdrawn or _is_worth(limits[slot], lease)):
                leases[slot] = limits[slot]
    short_since_s = {
        slot: now_s if (since_s := book.accounts[slot].short_since_s) is None else since_s
        for slot in short
    }
    for slot, grant in fair_shares(sure_bytes - _promised(leases, demands, sharing), short).items():
        is_tired = now_s > short_since_s[slot] + _WAITS_S and _is_worth(
            leases[slot], leases[slot] + grant
        )
        if grant >= short[slot] / 2 or is_tired:
            leases[slot] += grant
            if grant == short[slot]:
                del short_since_s[slot]
    accounts = {
        slot: replace(
            account,
            lease_bytes=leases[slot],
            demand=demands[slot],
            short_since_s=short_since_s.get(slot),
        )
        for slot, account in book.accounts.items()
    }
    return replace(book, accounts=accounts)


def _pool(available_bytes: int, caps_bytes: int, spare_bytes: int) -> int:
    """Return what may be promised: all of it where every cap fits, and gradually less where they do
    not.
    """
    return max(0, available_bytes - min(spare_bytes, max(0, caps_bytes - available_bytes)))


def _offered(
    demands: Mapping[str, Demand], caps: dict[str, int], pool_bytes: int
) -> dict[str, Demand]:
    """Offer each worker that left its share what that would be now."""
    after = dict(demands)
    for slot, demand in demands.items():
        if demand.content_bytes is None:
            continue
        share_bytes = fair_shares(pool_bytes, {**_wanted(after, caps), slot: caps[slot]})[slot]
        after[slot] = demand.offered(share_bytes)
    return after


def _goals(demands: Mapping[str, Demand], caps: dict[str, int], pool_bytes: int) -> dict[str, int]:
    """Return what each worker should have: its share, and its part of what no worker wants."""
    shares = fair_shares(pool_bytes, _wanted(demands, caps))
    rest = fair_shares(
        pool_bytes - sum(shares.values()), {slot: caps[slot] - shares[slot] for slot in shares}
    )
    return {slot: share + rest[slot] for slot, share in shares.items()}


def _wanted(demands: Mapping[str, Demand], caps: dict[str, int]) -> dict[str, int]:
    """Return what each worker would take.

    One that has not reported yet is expected to take all that it may.
    """
    return caps | {slot: demand.wanted_bytes(caps[slot]) for slot, demand in demands.items()}


def _promised(
    leases: Mapping[str, int], demands: Mapping[str, Demand], sharing: Sequence[Claimant]
) -> int:
    """Return the most that all of them may come to hold before they heed other leases."""
    granted = {claimant.slot: claimant.granted_bytes for claimant in sharing}
    return sum(
        max(lease, demands[slot].held_bytes, granted[slot]) for slot, lease in leases.items()
    )


def _is_worth(fewer_bytes: int, more_bytes: int) -> bool:
    return more_bytes - fewer_bytes > _WORTH_MOVING * more_bytes
