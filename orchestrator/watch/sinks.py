"""All sinks of a run: live watchers, the event log and the store. Produces nothing by itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.watch.events import EventLog
from orchestrator.watch.live import Watcher
from orchestrator.watch.model import Snapshot
from orchestrator.watch.store import RunStore


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlets:
    """Where a run is written down and shown. A full disk ends none of it: `problems` says what is wrong."""

    watchers: Sequence[Watcher]
    events: EventLog
    store: RunStore

    def show(self, snapshot: Snapshot) -> None:
        """Show the run as it is now, and take a sample of it if one is due."""
        for watcher in (*self.watchers, self.store):
            watcher.update(snapshot)

    def close(self, snapshot: Snapshot) -> None:
        """Show the run as it ended."""
        for watcher in (*self.watchers, self.store):
            watcher.close(snapshot)

    @property
    def problems(self) -> tuple[str, ...]:
        """One sentence for each sink that cannot be written now, or lacks records of a time when it could not."""
        now = tuple(text for text in (self.store.problem, self.events.problem) if text is not None)
        return now or (("the records of this run have gaps: they could not be written for a while",) * self.incomplete)

    @property
    def incomplete(self) -> bool:
        """Whether the records of this run are incomplete."""
        return self.store.incomplete or self.events.incomplete
