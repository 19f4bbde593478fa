"""The injected faults of one run: those under way, and the outcome of each.

Rules:

1. A slot has at most one strike under way, and none while its node is down or on its way back.
2. A fault gets one outcome, and keeps it. If it is unknown whether it struck, the outcome is MOOT.
3. Same plan, same seed, same sequence of calls: same faults.

Keeps what `schedule.py` and `outcomes.py` decide. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TypeAlias

from orchestrator.core.chaos.plan import ChaosPlan, NodeFault
from workers.messages import FaultKind

#: Outcomes kept in the book; older ones are only counted.
MAX_KEPT = 10_000


class FaultOutcome(StrEnum):
    """How a fault ended, as far as that is known."""

    #: Under way.
    PENDING = "pending"
    #: The process continued.
    SURVIVED = "survived"
    #: A fresh process reports, or all workers of a node do.
    RECOVERED = "recovered"
    #: A slot was quarantined over it.
    GIVEN_UP = "given_up"
    #: The run, or the node's next fault, came before it was back.
    NOT_BACK = "not_back"
    #: Something else came first, so it struck nothing, or that is unknown.
    MOOT = "moot"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One injected fault and what became of it; those of single steps are one entry for each slot and outcome."""

    number: int
    """From 1, in the order of injection."""
    at_s: float
    """Seconds since the run began to count when it was sent; of a group, when the first was reported."""
    kind: FaultKind
    target: str
    """A slot, or a node."""
    fate: FaultOutcome = FaultOutcome.PENDING
    became: str = "under way"
    """For the user: `RUNNING again after 4.1 s`."""
    detail: str = ""
    """How the head saw it: the slot's reason."""
    recovered_s: float | None = None
    """From the last report before it (of a node: from its end) to the first report, or the last slot's, after it."""
    count: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KindTally:
    """The faults of one kind. `injected` is the sum of the three after it."""

    injected: int
    recovered: int
    """Those survived in the same slice included."""
    given_up: int
    pending: int
    """Under way, or not back when the run ended."""
    moot: int
    """Planned or sent, and overtaken by something else; not injected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndNode:
    """End a node's raylet now."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StartNode:
    """Start that node again."""

    node: str


NodeCommand: TypeAlias = EndNode | StartNode


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """The next fault of a kind that happens every so often."""

    kind: FaultKind
    every_s: float
    at_s: float
    count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A strike under way in the slot `fault.target`."""

    fault: Fault
    sequence: int
    """It strikes in this slice or, if no step of that one met it, in a later one."""
    last_heard_s: float | None = None
    """The last report before it struck; `None` while it has not been seen to strike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Down:
    """The node `fault.target`, from its end until all its slots report again."""

    fault: Fault
    ended_at_s: float
    start_at_s: float | None
    """`None` once it was started again."""
    waiting: frozenset[str]
    given_up: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosState:
    """Everything known about the faults of a run. Changed only by the functions below, which return the next one."""

    plan: ChaosPlan
    homes: Mapping[str, str]
    """The node of each slot."""
    head_node: str
    began_s: float | None = None
    calm_from_s: float | None = None
    """From then on nothing is struck by the clock or by chance."""
    over: bool = False
    number: int = 0
    working: frozenset[str] = frozenset()
    """Slots whose present process has reported."""
    quarantined: frozenset[str] = frozenset()
    clocks: tuple[Clock, ...] = ()
    planned: tuple[NodeFault, ...] = ()
    sent: tuple[Sent, ...] = ()
    down: tuple[Down, ...] = ()
    steps: tuple[Fault, ...] = ()
    closed: tuple[Fault, ...] = ()
    dropped: Mapping[tuple[FaultKind, FaultOutcome], int] = field(default_factory=dict)


def faults(book: ChaosState) -> tuple[Fault, ...]:
    """Every fault of the book, in the order of injection; of the closed ones, the last `MAX_KEPT`."""
    open_ones = [sent.fault for sent in book.sent] + [down.fault for down in book.down]
    return tuple(sorted((*open_ones, *book.steps, *book.closed), key=lambda fault: fault.number))


def tally(book: ChaosState) -> dict[FaultKind, KindTally]:
    """Count the faults of each kind that the plan can bring, those no longer kept included."""
    counts: Counter[tuple[FaultKind, FaultOutcome]] = Counter(book.dropped)
    for fault in faults(book):
        counts[fault.kind, fault.fate] += fault.count
    return {kind: _kind_tally({fate: counts[kind, fate] for fate in FaultOutcome}) for kind in book.plan.kinds()}


def _kind_tally(by_fate: Mapping[FaultOutcome, int]) -> KindTally:
    recovered = by_fate[FaultOutcome.SURVIVED] + by_fate[FaultOutcome.RECOVERED]
    given_up, pending = by_fate[FaultOutcome.GIVEN_UP], by_fate[FaultOutcome.PENDING] + by_fate[FaultOutcome.NOT_BACK]
    return KindTally(
        injected=recovered + given_up + pending,
        recovered=recovered,
        given_up=given_up,
        pending=pending,
        moot=by_fate[FaultOutcome.MOOT],
    )


def new_fault(book: ChaosState, kind: FaultKind, target: str, now_s: float) -> tuple[ChaosState, Fault]:
    """Enter a fault that is under way from now on."""
    at_s = now_s - book.began_s if book.began_s is not None else 0.0
    fault = Fault(number=book.number + 1, at_s=at_s, kind=kind, target=target)
    return replace(book, number=fault.number), fault


def close(
    book: ChaosState, fault: Fault, fate: FaultOutcome, became: str, recovered_s: float | None = None
) -> ChaosState:
    """Give a fault its one outcome; of very many closed ones, only the last are kept."""
    closed = (*book.closed, replace(fault, fate=fate, became=became, recovered_s=recovered_s))
    if len(closed) <= MAX_KEPT:
        return replace(book, closed=closed)
    oldest, *kept = closed
    key = (oldest.kind, oldest.fate)
    return replace(book, closed=tuple(kept), dropped={**book.dropped, key: book.dropped.get(key, 0) + oldest.count})


def sent_to(book: ChaosState, slot: str) -> Sent | None:
    """Return the strike under way in a slot, if there is one."""
    return next((sent for sent in book.sent if sent.fault.target == slot), None)


def without(book: ChaosState, sent: Sent) -> ChaosState:
    """Take a strike out of those under way."""
    return replace(book, sent=tuple(other for other in book.sent if other is not sent))


def down_around(book: ChaosState, slot: str) -> Down | None:
    """Return the fault of the node that a slot lives on, if it is under way."""
    return next((down for down in book.down if down.fault.target == book.homes[slot]), None)


def with_down(book: ChaosState, down: Down, now_s: float) -> ChaosState:
    """Keep a changed node fault, or close it if nothing is left to wait for."""
    others = tuple(other for other in book.down if other.fault.number != down.fault.number)
    if down.start_at_s is not None or down.waiting:
        return replace(book, down=(*others, down))
    book = replace(book, down=others)
    took_s = now_s - down.ended_at_s
    if down.given_up:
        became = f"back after {took_s:.1f} s without {', '.join(down.given_up)}"
        return close(book, down.fault, FaultOutcome.GIVEN_UP, became, took_s)
    return close(book, down.fault, FaultOutcome.RECOVERED, f"all its workers report again after {took_s:.1f} s", took_s)
