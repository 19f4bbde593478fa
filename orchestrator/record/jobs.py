"""The queue of a run as viewers see it: what its journal adds up to, and what the head expects.

The journal is the truth; `outlook.json` beside it is written by the head for people, and may be
absent or old. Does not lay anything out (`view/jobs.py`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from orchestrator.errors import ArchiveError
from orchestrator.jobs.journal import JOURNAL_NAME, QUEUE_NAME, decoded, queue_of
from orchestrator.jobs.model import IN_LINE, ON_CARD, JobState, Standing
from orchestrator.jobs.queue import Queue
from orchestrator.record.model import Row
from workers.files import open_regular, read_small, replace_whole

_OUTLOOK_NAME: Final = "outlook.json"
_OUTLOOK_MOST_BYTES: Final = 16 * 2**20
_WAITS: Final = frozenset(
    {JobState.WAITING, *IN_LINE, JobState.PARKED, JobState.PAUSED, JobState.HELD}
)


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
    milestones: Mapping[str, int] = field(default_factory=dict)
    """The last one that a job has reached."""
    files: str = ""
    """Folder with a folder for each job."""


class QueueReader:
    """Looks at the queue of a run folder again and again; reads what its journal has grown by."""

    def __init__(self, folder: Path) -> None:
        """Touch nothing yet; `folder` is the run folder."""
        self._folder = folder / QUEUE_NAME
        self._queue = Queue()
        self._inode: int | None = None
        self._read_bytes = 0
        self._state: tuple[object, ...] = ()
        self._standings: tuple[Standing, ...] = ()

    def look(
        self, rows: Iterable[Row], now_s: float, *, is_alive: bool = True
    ) -> QueueSnapshot | None:
        """Return the queue as it is now; `None` where the run has none.

        `is_alive`: its head is at work. Without it no job is, and what it expected is void.

        Raises:
            ArchiveError: The journal cannot be read.
        """
        journal, outlook = self._folder / JOURNAL_NAME, self._folder / _OUTLOOK_NAME
        state = (*map(state_of, (journal, outlook)), is_alive)
        if state[0] is None:
            return None
        if state != self._state:
            try:
                self._read(journal)
            except OSError as failure:
                raise ArchiveError(f"{journal} cannot be read: {failure.strerror}") from failure
            told = _outlook(outlook) if is_alive else {}
            standings = self._queue.standings.values()
            self._standings = tuple(
                _expected(one, told) if is_alive else _without_head(one) for one in standings
            )
            self._state = state
        return QueueSnapshot(
            standings=self._standings,
            held=self._queue.held,
            now_s=now_s,
            rows={row.slot: row for row in rows},
            milestones={job: milestone for job, milestone, _ in self._queue.reached},
            files=str(self._folder / "files"),
        )

    def _read(self, journal: Path) -> None:
        """Take in the lines that are complete; those before only where the file was replaced."""
        with open_regular(journal) as file:
            status = os.fstat(file.fileno())
            if status.st_ino != self._inode or status.st_size < self._read_bytes:
                self._queue, self._inode, self._read_bytes = Queue(), status.st_ino, 0
            file.seek(self._read_bytes)
            lines = file.readlines()
        try:
            for line in lines:
                if line.endswith(b"\n"):
                    for entry in decoded(line) if self._read_bytes else ():
                        self._queue.apply(entry)
                    self._read_bytes += len(line)
        except (ValueError, RuntimeError):
            self._inode = None
            self._queue = queue_of(self._folder)  # says what is wrong with which line


def write_outlook(folder: Path, standings: Iterable[Standing]) -> None:
    """Tell viewers why jobs wait, and when they may start; `folder` is that of the queue.

    The head calls it with the standings of its queue; nothing is written where nothing is new.
    `OSError` where it cannot be written.
    """
    outlook = {
        one.job.name: [one.reason, one.expected_start_s]
        for one in standings
        if one.state in _WAITS and one.expected_start_s is not None
    }
    if outlook != _outlook(folder / _OUTLOOK_NAME):
        replace_whole(folder / _OUTLOOK_NAME, json.dumps(outlook) + "\n")


def _outlook(path: Path) -> Mapping[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(read_small(path, _OUTLOOK_MOST_BYTES))
        return content if isinstance(content, dict) else {}
    return {}


def _expected(standing: Standing, outlook: Mapping[str, Any]) -> Standing:
    told = outlook.get(standing.job.name)
    if standing.state not in _WAITS or not isinstance(told, list) or len(told) != 2:
        return standing
    reason, start_s = told
    return replace(
        standing,
        reason=reason if isinstance(reason, str) else standing.reason,
        expected_start_s=float(start_s) if isinstance(start_s, int | float) else None,
    )


def _without_head(standing: Standing) -> Standing:
    if standing.state not in ON_CARD:
        return standing
    return replace(standing, state=JobState.PARKED, reason="its head is not running", card=None)


def state_of(path: Path) -> tuple[int, int, int] | None:
    """Return what changes when a file is written; `None` if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns
