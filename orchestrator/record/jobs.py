"""The queue of a run as it is stored: for the head that goes on with it, and for viewers.

What happened to a job is not here but in the event log. Does not write (`store.py`), decide what
follows (`jobs/queue.py`) or lay anything out (`view/jobs.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from orchestrator.errors import NothingStoredError
from orchestrator.jobs.model import IN_LINE, ON_CARD, JobState, Sent, Standing
from orchestrator.jobs.queue import Queue, QueueFacts, heard
from orchestrator.record.model import Row
from orchestrator.record.store import from_json, reading

QUEUE_NAME: Final = "jobs"
"""The folder of a queue in its run folder: commands to it, and the files of its jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueSnapshot:
    """The picture of a queue at one moment."""

    standings: tuple[Standing, ...]
    """In the order in which they were submitted."""
    now_s: float
    """Unix."""
    held: str | None = None
    """Why nothing starts any more."""
    rows: Mapping[str, Row] = field(default_factory=dict)
    """Of the run, by slot."""
    files: str = ""
    """Folder with a folder for each job."""

    def rows_of(self, standing: Standing) -> list[Row]:
        """Return the rows of a job's slots; of a team that which is furthest first."""
        rows = [self.rows[slot] for slot in standing.places if slot in self.rows]
        return sorted(rows, key=lambda row: -(row.progress.train_step or 0))

    def row_of(self, standing: Standing) -> Row | None:
        """Return the first of these."""
        return next(iter(self.rows_of(standing)), None)


def queue_of(folder: Path) -> Queue:
    """Return the queue of a run folder as it is stored; where nothing is, an empty one.

    `ArchiveError`: it cannot be read, or is of another version.
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
    """Return the queue of a run folder as it is now; `None` where the run has none.

    `is_alive`: its head is at work. Without it no job is, and what it expected is void. `sent` is
    what its users have sent, and the head may not have taken yet. `ArchiveError`: it cannot be
    read, or is of another version.
    """
    if not (folder / QUEUE_NAME).is_dir():
        return None
    stored, outlook = _stored(folder)
    queue, standings = heard(stored, sent, now_s), []
    for name, each in queue.standings.items():
        if name not in stored.standings:
            why = "submitted, and not taken by the head yet"
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
    """Return the queue of a run folder, and what is expected of the jobs in line."""
    try:
        with reading(folder) as store:
            jobs = store.execute("SELECT value FROM jobs ORDER BY number").fetchall()
            told = dict(store.execute("SELECT key, value FROM run").fetchall())
            standings = [from_json(Standing, text) for (text,) in jobs]
            facts = from_json(QueueFacts, told.get("queue", "{}"))
            queue = Queue(standings={each.job.name: each for each in standings}, facts=facts)
            return queue, json.loads(told.get("outlook", "{}"))
    except NothingStoredError:  # a head is about to begin it
        return Queue(), {}
