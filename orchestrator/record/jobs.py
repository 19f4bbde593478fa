"""Reads the stored queue of a run, for the head that continues it and for viewers.

The history of a job is in the event log, not here. Does not write the queue (`store.py`), make its
decisions (`jobs/queue.py`) or show it (`view/jobs.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from orchestrator.errors import NothingStoredError
from orchestrator.jobs.model import IN_LINE, ON_CARD, JobState, Sent, Standing
from orchestrator.jobs.queue import Queue, QueueFacts, with_messages
from orchestrator.record.model import Row
from orchestrator.record.store import from_json, reading

QUEUE_NAME: Final = "jobs"
"""The folder in the run folder that has the commands to the queue and the files of its jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSnapshot:
    """A queue at one moment, for viewers."""

    standings: tuple[Standing, ...]
    """In order of submission."""
    now_s: float
    """Unix seconds."""
    held: str | None = None
    """Why no job starts; `None`: the queue is not held."""
    rows: Mapping[str, Row] = field(default_factory=dict)
    """Rows of the run, keyed by slot."""
    files: str = ""
    """Folder with a folder for each job."""

    def rows_of(self, standing: Standing) -> list[Row]:
        """Return the rows of a job's slots, the one with most steps first."""
        rows = [self.rows[slot] for slot in standing.places if slot in self.rows]
        return sorted(rows, key=lambda row: -(row.progress.train_step or 0))

    def row_of(self, standing: Standing) -> Row | None:
        """Return the first of the rows of a job's slots; `None`: it has none."""
        return next(iter(self.rows_of(standing)), None)


def queue_of(folder: Path) -> Queue:
    """Return the stored queue of a run folder; empty if nothing is stored yet.

    `ArchiveError`: the store cannot be read, or is of another version.
    """
    queue, _ = _stored(folder)
    return queue


def queue_snapshot(
    folder: Path,
    rows: Iterable[Row],
    now_s: float,
    *,
    is_alive: bool = True,
    sent: Sequence[Sent] = (),
) -> QueueSnapshot | None:
    """Return the queue of a run folder as it is now; `None`: the run has no queue.

    Without a head (`is_alive`) no job is at work, and expected starts are void. `sent` are messages
    of users that the head may not have processed. `ArchiveError`: the store cannot be read, or is
    of another version.
    """
    if not (folder / QUEUE_NAME).is_dir():
        return None
    stored, outlook = _stored(folder)
    queue, standings = with_messages(stored, sent, now_s), []
    for name, each in queue.standings.items():
        if name not in stored.standings:
            why = "submitted; the head has not processed it yet"
            standings.append(replace(each, reason=why))
        elif is_alive and each.state in IN_LINE and name in outlook:
            reason, start_s = outlook[name]
            standings.append(replace(each, reason=reason, expected_start_s=start_s))
        elif not is_alive and each.state in ON_CARD:
            state, why = JobState.PARKED, "its head is not running"
            if each.recalled_to is JobState.HELD:
                state, why = JobState.HELD, each.reason
            standings.append(replace(each, state=state, reason=why))
        else:
            standings.append(each)
    return QueueSnapshot(
        standings=tuple(standings),
        held=queue.facts.held,
        now_s=now_s,
        rows={row.slot: row for row in rows},
        files=str(folder / QUEUE_NAME / "files"),
    )


def _stored(folder: Path) -> tuple[Queue, Mapping[str, Any]]:
    """Return the queue of a run folder, and the stored outlook of the jobs in line."""
    try:
        with reading(folder) as store:
            jobs = store.execute("SELECT value FROM jobs ORDER BY number").fetchall()
            values = dict(store.execute("SELECT key, value FROM run").fetchall())
            standings = [from_json(Standing, text) for (text,) in jobs]
            facts = from_json(QueueFacts, values.get("queue", "{}"))
            queue = Queue(standings={each.job.name: each for each in standings}, facts=facts)
            return queue, json.loads(values.get("outlook", "{}"))
    except NothingStoredError:  # the head is still starting
        return Queue(), {}
