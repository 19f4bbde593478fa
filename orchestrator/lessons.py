"""The shell around the store of learned limits: sends along what earlier runs have learned, keeps what this one does.

The worker decides what fits its card and what is worth remembering (`workers/limits.py`); this only carries. A store
that cannot be read or written costs a run nothing but a sentence.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from orchestrator.placement import SlotPlan
from orchestrator.watch.events import EventLog
from workers.limit_store import LimitStore
from workers.limits import StoredLimit
from workers.messages import Report

#: How often at most the store is written while a run goes on: a head that is killed loses no more.
_SAVE_EVERY_S = 60.0

#: So many candidates, the newest, travel to a worker with each directive.
_SENT_MOST = 64


class Lessons:
    """What one run learns."""

    def __init__(self, store: LimitStore | None, events: EventLog) -> None:
        """Prepare; nothing is read yet.

        Args:
            store: `None` neither reads nor keeps anything.
            events: Told when the store cannot be read or written.
        """
        self._store = store
        self._events = events
        self._latest: dict[str, StoredLimit] = {}
        self._saved_at_s = time.monotonic()

    def sent_along(self, plans: Sequence[SlotPlan]) -> tuple[SlotPlan, ...]:
        """Return the slots with workers that know what earlier runs have learned of their workload."""
        store = self._store
        if store is None:
            return tuple(plans)
        now_unix_s = time.time()
        names = {plan.spec.workload.name for plan in plans}
        known = {name: store.candidates(name, None, now_unix_s)[:_SENT_MOST] for name in names}
        self._tell(store)
        return tuple(replace(plan, spec=replace(plan.spec, learned=known[plan.spec.workload.name])) for plan in plans)

    def take(self, report: Report) -> None:
        """Take in what a worker has learned; written now and then."""
        if report.learned is not None:
            self._latest[report.slot] = report.learned
        if time.monotonic() - self._saved_at_s >= _SAVE_EVERY_S:
            self.save()

    def save(self) -> None:
        """Keep what the run has learned so far. Of workers in the same circumstances the most careful one counts."""
        self._saved_at_s = time.monotonic()
        if self._store is None or not self._latest:
            return
        # The last one remembered stays.
        self._store.remember(*sorted(self._latest.values(), key=lambda limit: -limit.learned.size))
        if self._store.problem is None:
            self._latest.clear()  # else the next time may do better
        self._tell(self._store)

    def _tell(self, store: LimitStore) -> None:
        if store.problem is not None:
            self._events.write("limits_unavailable", reason=store.problem)
