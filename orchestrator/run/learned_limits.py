"""Connects the store of learned limits to a run: passes stored limits to workers, and stores what
they learn.

The worker decides what fits its card and what to remember (`workers/learned_limits`). A store that
cannot be read or written does not stop a run; the event log says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from orchestrator.core.placement import SlotPlan
from orchestrator.record.events import EventLog
from workers.learned_limits import LimitStore
from workers.messages import Status
from workers.settings import StoredLimit


class LearnedLimits:
    """What one run learns."""

    def __init__(self, store: LimitStore | None, events: EventLog) -> None:
        """Prepare; nothing is read yet. Without a store, nothing is read or kept at all."""
        self._store = store
        self._events = events
        self._latest: dict[str, StoredLimit] = {}
        """By slot."""
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
        return tuple(
            replace(plan, spec=replace(plan.spec, learned=candidates[plan.spec.workload.name]))
            for plan in plans
        )

    def take(self, status: Status) -> None:
        """Take in what a worker has learned; `save` writes it."""
        if status.learned is not None:
            self._latest[status.slot] = status.learned

    def save(self) -> None:
        """Keep what the run has learned so far.

        Of workers in the same circumstances the most careful one counts.
        """
        if self._store is None or not self._latest:
            return
        # The last one remembered stays.
        limits = sorted(self._latest.values(), key=lambda limit: -limit.learned.size)
        self._store.remember(*limits)
        if self._store.problem is None:
            self._latest.clear()  # else the next time may do better
        self._tell(self._store)

    def _tell(self, store: LimitStore) -> None:
        if store.problem is not None and store.problem != self._told:
            self._events.write("limits_unavailable", reason=store.problem)
        self._told = store.problem
