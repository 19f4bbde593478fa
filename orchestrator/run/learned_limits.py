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
        self._store, self._events = store, events
        self._latest: dict[str, StoredLimit] = {}
        """By slot."""
        self._told: str | None = None
        """The problem that the event log was told last."""

    def add_learned(self, plans: Sequence[SlotPlan], now_unix_s: float) -> tuple[SlotPlan, ...]:
        """Return the slots with workers that know what earlier runs learned: each chooses what
        holds for its workload and its card.
        """
        if self._store is None:
            return tuple(plans)
        learned = self._store.all(now_unix_s)
        self._tell(self._store.problem)
        return tuple(replace(plan, spec=replace(plan.spec, learned=learned)) for plan in plans)

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
        self._store.remember(*sorted(self._latest.values(), key=lambda limit: -limit.learned.size))
        if self._store.problem is None:
            self._latest.clear()  # else the next time may do better
        self._tell(self._store.problem)

    def _tell(self, problem: str | None) -> None:
        if problem not in {None, self._told}:
            self._events.write("limits_unavailable", reason=problem)
        self._told = problem
