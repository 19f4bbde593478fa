"""Leases: what each worker of a shared card may hold now, as fair shares in which each byte is
promised once. Pure.

Workers of one card all see the same free bytes. When another program frees memory, all of them
would grow into it, and the late ones would fail. So the head leases: what its workers hold and what
is free, less a reserve, is divided max-min fairly by what each may hold (its cap) and uses. Rules:

1. Where the caps of all workers fit, every lease is the cap. A card with one worker, or one without
   a report, has no leases.
2. Bytes are promised once. A promise that was not taken yet counts as used, and so does what a
   directive under way still allows after its lease was cut.
3. A lease is cut when hardly more is there than is promised, or when another worker has less than
   its share and what is free does not make up for it. It grows only into bytes that were there in
   all of the last seconds, and small differences change no lease. A worker far below its share
   waits for half of the rest, not for many small parts.
4. What a worker leaves unused for some reports is lent to the others, except a reserve above what
   it holds. When it grows into that reserve, it gets its share back (`Demand`).

How much there is follows from reports that were made at different moments (`Looks`). A report says
how much its worker held and what the card had free at that moment; what the others held then lies
between their reports before and after. Where that makes no difference the sample is exact; while
workers grow or shrink only bounds are known. Does not enforce a lease (the worker keeps to it) and
does not say when to start a process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, TypeAlias

from workers.messages import MemoryInfo

#: Age of the samples that are used. What has been free for so long may be promised.
WINDOW_S: Final = 5.0

#: Share of the card by which the bounds of a look may differ for it to be used.
_CLEAR: Final = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What one worker saw."""

    slot: str
    at_s: float
    held_bytes: int
    most_bytes: int
    """The most that it held since its previous sample."""
    free_bytes: int | None
    """Free on the card; `None` for a process that has ended: it measured nothing, and holds
    nothing.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Looks:
    """Those of the last seconds, and of each worker at least the last one."""

    taken: tuple[Look, ...] = ()
    granted: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """The most that each worker may come to hold before its next report."""


#: No worker has reported yet.
NO_LOOKS: Final = Looks()


def with_look(looks: Looks, look: Look) -> Looks:
    """Add a sample, and drop those that are too old."""
    taken = (*looks.taken, look)
    last = {look.slot: place for place, look in enumerate(taken)}
    recent = tuple(
        old
        for place, old in enumerate(taken)
        if old.at_s > look.at_s - WINDOW_S
        or (last[old.slot] == place and old.free_bytes is not None)
    )
    return replace(looks, taken=recent)


def without_process(looks: Looks, slot: str, now_s: float) -> Looks:
    """Note that a worker's process has ended, and what it held with it."""
    return with_look(
        looks, Look(slot=slot, at_s=now_s, held_bytes=0, most_bytes=0, free_bytes=None)
    )


def available(looks: Looks, total_bytes: int) -> tuple[int, int] | None:
    """Return the least and the most that the card may have for our workers: what they hold, and
    what is free.

    The least is that of the whole window, so that memory that is free only for a moment is not
    promised. The most is that of the last sample of each worker, so that a short lack changes no
    lease and a lasting one does at once. `None` before the first report.
    """
    bounds = _bounds(looks)
    if not bounds:
        return None
    clear = [bound for bound in bounds if bound[2] - bound[1] <= _CLEAR * total_bytes]
    believed = clear or bounds
    latest = {slot: high for slot, _, high in believed}
    return min(low for _, low, _ in believed), max(latest.values())


def _bounds(looks: Looks) -> list[tuple[str, int, int]]:
    """Return for each sample its worker, and the least and the most that there was for our workers
    then.
    """
    most: dict[str, int] = {}
    before: list[int] = []
    for look in looks.taken:
        before.append(most.get(look.slot, 0))
        most[look.slot] = look.most_bytes
    # Backwards from now, of each worker the least and the most that it may have held; what it has
    # come to hold since its last report is bounded by what it was allowed.
    spans = {
        slot: (bytes_, max(bytes_, looks.granted.get(slot, 0))) for slot, bytes_ in most.items()
    }
    low_bytes, high_bytes = (sum(span[end] for span in spans.values()) for end in (0, 1))
    bounds = []
    for look, before_bytes in zip(reversed(looks.taken), reversed(before), strict=True):
        low_bytes -= spans[look.slot][0]
        high_bytes -= spans[look.slot][1]
        if look.free_bytes is not None:
            seen_bytes = look.free_bytes + look.held_bytes
            bounds.append((look.slot, seen_bytes + low_bytes, seen_bytes + high_bytes))
        span = (min(before_bytes, look.most_bytes), max(before_bytes, look.most_bytes))
        low_bytes += span[0]
        high_bytes += span[1]
        spans[look.slot] = span
    bounds.reverse()
    return bounds


#: A worker that holds less than this share of its lease has left it untaken.
_TAKEN: Final = 0.8

#: A worker that holds more by this share than at the report before is growing.
_GROWING: Final = 0.03

#: Reports in a row that leave a lease unused before it is lent out. Two slices are under way when a
#: lease is raised, and one more must run before it shows. Doubled each time that the worker wants
#: it back, so that a worker whose need changes often disturbs the others less and less.
_PATIENCE: Final = 5
_LONGEST_PATIENCE: Final = 80

#: The reserve that is left to it, as a multiple of what it holds and a share of its cap; and how
#: far it must have grown into that to want more. The gap between the two is wider than the margin
#: that a policy keeps below its lease.
_ROOM: Final = 1.2
_ROOM_OF_CAP: Final = 1 / 32
_GROWN: Final = 1.08
_GROWN_OF_CAP: Final = 1 / 128

#: A share that was left is offered again once it is larger by this.
_WORTH_OFFERING: Final = 1.5

#: A worker that can run nothing cannot grow, and what it needs may have changed: asked again after
#: so many reports, about a minute.
_ASK_AGAIN: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What is known of how much one process wants to hold."""

    held_bytes: int = 0
    """The most in the slice that it reported last."""
    untaken: int = 0
    """Reports in a row in which it left its lease, although the bytes were free, and did not grow.
    """
    patience: int = _PATIENCE
    content_bytes: int | None = None
    """What it held when its share was lent out; `None` while it has a whole one."""
    left_bytes: int = 0
    """The lease that it left then."""
    waited: int = 0

    def wanted_bytes(self, cap_bytes: int) -> int:
        """Return the most that it should be leased while others could use the rest."""
        if self.content_bytes is None:
            return cap_bytes
        return min(cap_bytes, int(_ROOM * self.content_bytes + _ROOM_OF_CAP * cap_bytes))

    def offer(self, share_bytes: int) -> Demand:
        """Return the demand for a share: whole again if what it left was less."""
        if share_bytes <= _WORTH_OFFERING * self.left_bytes:
            return self
        return replace(self, content_bytes=None, untaken=0)


#: Of a process that has not reported yet.
FRESH: Final = Demand()


def with_report(
    demand: Demand,
    *,
    cap_bytes: int,
    lease_bytes: int,
    held_bytes: int,
    free_bytes: int,
    starving: bool,
) -> Demand:
    """Return the demand after a report of a worker that may ever hold its cap, and now its lease.

    `held_bytes` is the most since the report before, `free_bytes` what the card has free besides:
    what is not there was not left. A starving worker could run nothing.
    """
    grew = held_bytes > (1.0 + _GROWING) * demand.held_bytes
    demand = replace(demand, held_bytes=held_bytes, waited=demand.waited + 1)
    if demand.content_bytes is not None:
        if held_bytes > _GROWN * demand.content_bytes + _GROWN_OF_CAP * cap_bytes:
            patience = min(2 * demand.patience, _LONGEST_PATIENCE)
            return replace(demand, content_bytes=None, untaken=0, patience=patience)
        if starving and demand.waited >= _ASK_AGAIN:
            return replace(demand, content_bytes=None, untaken=0)
        return demand
    left = held_bytes < _TAKEN * lease_bytes and lease_bytes <= held_bytes + free_bytes
    if not left or grew:
        return replace(demand, untaken=0)
    if demand.untaken + 1 < demand.patience:
        return replace(demand, untaken=demand.untaken + 1)
    return replace(demand, untaken=0, content_bytes=held_bytes, left_bytes=lease_bytes, waited=0)


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
    report: tuple[int, float] | None = None
    """Incarnation of its present process, and when that told something new last; `None` before.
    """
    memory: MemoryInfo | None = None
    starving: bool = False
    """Whether it could run nothing in that slice: EMERGENCY or PARKED."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What is remembered of one process."""

    report: tuple[int, float]
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


def divide(
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
        book = take_in(books.get(card, CardBook()), sharing, now_s)
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


def take_in(book: CardBook, sharing: Sequence[Claimant], now_s: float) -> CardBook:
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
            looks = without_process(looks, slot, now_s)
    for claimant in sharing:
        earlier = accounts.get(claimant.slot)
        if claimant.report is None or (earlier is not None and earlier.report == claimant.report):
            continue
        account = replace(earlier or Account(report=claimant.report), report=claimant.report)
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
            looks = with_look(looks, look)
            demand = with_report(
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
        after[slot] = demand.offer(share_bytes)
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
