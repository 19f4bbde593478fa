"""Connects the store of learned limits to a run: passes stored limits to workers, and stores what
they learn.

The worker decides what fits its card and what to remember (`workers/learned_limits.py`). A
store that cannot be read or written does not stop a run; the event log says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.core.placement import SlotPlan
from orchestrator.record.events import EventLog
from workers.learned_limits import LimitStore, choose
from workers.messages import Status
from workers.settings import StoredLimit, WorkerSpec


class LearnedLimits:
    """What one run learns."""

    def __init__(self, store: LimitStore | None, events: EventLog) -> None:
        """Prepare; nothing is read yet. Without a store, nothing is read or kept at all."""
        self._store = store
        self._events = events
        self._latest: dict[str, tuple[StoredLimit, float | None, WorkerSpec]] = {}
        """Of each slot its limit, the best it has sustained, and its specification."""
        self._earlier: tuple[StoredLimit, ...] = ()
        self._told: str | None = None
        """The problem that the event log was told last."""

    def add_learned(self, plans: Sequence[SlotPlan], now_unix_s: float) -> tuple[SlotPlan, ...]:
        """Return the slots with workers that know what earlier runs learned of their workload."""
        store = self._store
        if store is None:
            return tuple(plans)
        names = {plan.spec.workload.name for plan in plans}
        candidates = {name: store.candidates(name, now_unix_s) for name in names}
        self._tell(store)
        self._earlier = tuple(limit for limits in candidates.values() for limit in limits)
        return tuple(
            replace(plan, spec=replace(plan.spec, learned=candidates[plan.spec.workload.name]))
            for plan in plans
        )

    def best_tflops(self, spec: WorkerSpec, status: Status) -> float | None:
        """Return the most that a worker in these circumstances has sustained in earlier runs, if
        that is known.
        """
        if status.learned is None or not self._earlier:
            return None
        under = terms(spec)
        limit = choose(
            (limit for limit in self._earlier if limit.best_under == under), status.learned.key
        )
        return None if limit is None else limit.best_tflops

    def take(self, spec: WorkerSpec, status: Status, best_tflops: float | None = None) -> None:
        """Take in what a worker has learned, and the most that it has sustained so far.

        `save` writes it.
        """
        if status.learned is not None:
            self._latest[status.slot] = (status.learned, best_tflops, spec)

    def save(self) -> None:
        """Keep what the run has learned so far.

        Of workers in the same circumstances the most careful one counts.
        """
        if self._store is None or not self._latest:
            return
        limits = [
            replace(limit, best_tflops=best_tflops, best_under=terms(spec))
            for limit, best_tflops, spec in self._latest.values()
        ]
        # The last one remembered stays.
        self._store.remember(*_with_the_best(sorted(limits, key=lambda limit: -limit.learned.size)))
        if self._store.problem is None:
            self._latest.clear()  # else the next time may do better
        self._tell(self._store)

    def _tell(self, store: LimitStore) -> None:
        if store.problem is not None and store.problem != self._told:
            self._events.write("limits_unavailable", reason=store.problem)
        self._told = store.problem


def terms(spec: WorkerSpec) -> str:
    """Return how much of its card a worker may have, as a text to compare."""
    duty = "all of the time" if spec.duty is None else f"{spec.duty:.0%} of the time"
    share = "" if spec.thread_share is None else f", {spec.thread_share:.0%} of the processors"
    return f"{duty}{share}, one of {round(spec.card_budget_bytes / spec.budget_bytes)}"


def _with_the_best(limits: Sequence[StoredLimit]) -> list[StoredLimit]:
    """Return the limits, each with the best that any worker in its circumstances has done."""
    best: dict[tuple[str, str, str | None], float] = {}
    for limit in limits:
        if limit.best_tflops is not None:
            best[_alike(limit)] = max(limit.best_tflops, best.get(_alike(limit), 0.0))
    return [replace(limit, best_tflops=best.get(_alike(limit))) for limit in limits]


def _alike(limit: StoredLimit) -> tuple[str, str, str | None]:
    return limit.key.card, limit.key.workload, limit.best_under
