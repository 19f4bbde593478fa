"""The queue of a run as it is stored: for the head that goes on with it, and for viewers.

What happened to a job is not here but in the event log. Does not write (`store.py`), decide what
follows (`jobs/queue.py`) or lay anything out (`view/jobs.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from orchestrator.errors import NothingStoredError
from orchestrator.jobs.codec import from_json
from orchestrator.jobs.model import ON_CARD, JobState, Standing, SweepSubmitted
from orchestrator.jobs.queue import Queue, QueueFacts
from orchestrator.record.model import Row
from orchestrator.record.store import reading

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
    """Of the run, by slot; a job's slot has the name of the job."""
    etas_s: Mapping[str, float] = field(default_factory=dict)
    """What is left of jobs on a card, as they say; where there are no rows."""
    files: str = ""
    """Folder with a folder for each job."""


def queue_of(folder: Path) -> Queue:
    """Return the queue of a run folder as it is stored; where nothing is, an empty one.

    Raises:
        ArchiveError: It cannot be read, or is of another version.
    """
    try:
        with reading(folder) as store:
            jobs = store.execute("SELECT value FROM jobs ORDER BY number").fetchall()
            sweeps = store.execute("SELECT value FROM sweeps ORDER BY rowid").fetchall()
            facts = store.execute("SELECT value FROM run WHERE key = 'queue'").fetchone() or ("{}",)
            return Queue(
                [from_json(Standing, text) for (text,) in jobs],
                [from_json(SweepSubmitted, text) for (text,) in sweeps],
                from_json(QueueFacts, facts[0]),
            )
    except NothingStoredError:
        return Queue()


def queue_snapshot(
    folder: Path, rows: Iterable[Row], now_s: float, *, is_alive: bool = True
) -> QueueSnapshot | None:
    """Return the queue of a run folder as it is now; `None` where the run has none.

    `is_alive`: its head is at work. Without it no job is, and what it expected is void.

    Raises:
        ArchiveError: It cannot be read, or is of another version.
    """
    if not (folder / QUEUE_NAME).is_dir():
        return None
    standings: list[Standing] = []
    told: dict[str, Any] = {}
    try:
        with reading(folder) as store:
            told = dict(
                store.execute("SELECT key, value FROM run WHERE key IN ('queue', 'outlook')")
            )
            texts = store.execute("SELECT value FROM jobs ORDER BY number").fetchall()
            standings += [_standing(text) for (text,) in texts]
            outlook = json.loads(told.get("outlook", "{}")) if is_alive else {}
            held = from_json(QueueFacts, told.get("queue", "{}")).held
    except NothingStoredError:  # a head is about to begin it
        outlook, held = {}, None
    return QueueSnapshot(
        standings=tuple(
            _expected(each, outlook) if is_alive else _without_head(each) for each in standings
        ),
        held=held,
        now_s=now_s,
        rows={row.slot: row for row in rows},
        files=str(folder / QUEUE_NAME / "files"),
    )


@lru_cache(maxsize=4_096)
def _standing(text: str) -> Standing:
    """Return a row for one who only looks: at the next look most are the same."""
    return from_json(Standing, text)


def _expected(standing: Standing, outlook: Mapping[str, Any]) -> Standing:
    reason, start_s = outlook.get(standing.job.name, (None, None))
    if start_s is None:
        return standing
    return replace(standing, reason=reason, expected_start_s=start_s)


def _without_head(standing: Standing) -> Standing:
    if standing.state not in ON_CARD:
        return standing
    return replace(standing, state=JobState.PARKED, reason="its head is not running", card=None)
