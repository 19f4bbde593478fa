"""The injected faults of one run, and the outcome of each.

A fault gets one outcome, and keeps it. If it is unknown whether it struck, the outcome is MOOT.
Decides nothing (`injection.py` does). Pure.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from workers.messages import FaultKind

#: Faults of which the outcome is kept in full; older ones are only counted.
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


@dataclass(slots=True, kw_only=True)
class Fault:
    """One injected fault and what became of it.

    Those of single steps are one entry for each slot and outcome.
    """

    number: int
    at_s: float
    """Seconds since the run began to count when it was sent; of a group, when the first was
    reported.
    """
    kind: FaultKind
    target: str
    fate: FaultOutcome = FaultOutcome.PENDING
    became: str = "under way"
    """For the user: `RUNNING again after 4.1 s`."""
    detail: str = ""
    """How the head saw it: the slot's reason."""
    recovered_s: float | None = None
    """From the last report before it (of a node: from its end) to the first report, or the last
    slot's, after it.
    """
    count: int = 1


class FaultLog:
    """Every fault of a run, in the order of injection."""

    def __init__(self) -> None:
        self._number = 0
        self._kept: dict[int, Fault] = {}
        self._closed: deque[Fault] = deque()
        """Those of `_kept` that may be dropped, the oldest outcome first."""
        self._dropped: Counter[tuple[FaultKind, FaultOutcome]] = Counter()

    def enter(self, kind: FaultKind, target: str, at_s: float) -> Fault:
        """Return a new fault that is under way from now on."""
        self._number += 1
        self._kept[self._number] = fault = Fault(
            number=self._number, at_s=at_s, kind=kind, target=target
        )
        return fault

    def close(
        self, fault: Fault, fate: FaultOutcome, became: str, recovered_s: float | None = None
    ) -> None:
        """Give a fault its one outcome; of very many closed ones, only the last are kept."""
        fault.fate, fault.became, fault.recovered_s = fate, became, recovered_s
        self._closed.append(fault)
        if len(self._closed) > MAX_KEPT:
            oldest = self._closed.popleft()
            del self._kept[oldest.number]
            self._dropped[oldest.kind, oldest.fate] += oldest.count

    def faults(self) -> list[Fault]:
        """Return those that are kept: all that are under way, and the last `MAX_KEPT` that are
        closed.
        """
        return list(self._kept.values())

    def tally(self, kinds: Iterable[FaultKind]) -> list[dict[str, Any]]:
        """Count the faults of each of these kinds, those no longer kept included.

        `injected` is the sum of `recovered` (or survived in the same slice), `given_up` and
        `pending` (under way, or not back when the run ended). `moot` were planned or sent, and
        overtaken by something else.
        """
        counts = Counter(self._dropped)
        for fault in self._kept.values():
            counts[fault.kind, fault.fate] += fault.count
        tallies = []
        for kind in kinds:
            of = {fate: counts[kind, fate] for fate in FaultOutcome}
            moot = of.pop(FaultOutcome.MOOT)
            tallies.append(
                {
                    "kind": kind,
                    "injected": sum(of.values()),
                    "recovered": of[FaultOutcome.SURVIVED] + of[FaultOutcome.RECOVERED],
                    "given_up": of[FaultOutcome.GIVEN_UP],
                    "pending": of[FaultOutcome.PENDING] + of[FaultOutcome.NOT_BACK],
                    "moot": moot,
                }
            )
        return tallies
