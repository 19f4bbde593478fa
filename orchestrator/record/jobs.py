"""The queue of a run in SQLite: its state, written by the head alone, and read by viewers.

A transaction holds what became of a turn of the head, and would survive a power cut when `commit`
returns: a head that is killed at any moment leaves the queue as it was after one of its turns. What
happened to a job is not here but in the event log. Does not decide what follows (`jobs/queue.py`)
nor lay anything out (`view/jobs.py`).
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from orchestrator.errors import ArchiveError, NothingStoredError
from orchestrator.jobs.codec import as_json, from_json
from orchestrator.jobs.model import IN_LINE, ON_CARD, JobState, Standing, SweepSubmitted
from orchestrator.jobs.queue import Queue, QueueFacts
from orchestrator.record.model import Row
from orchestrator.record.reading import opened

QUEUE_NAME: Final = "jobs"
"""Of the folder of a queue in its run folder."""
QUEUE_STORE: Final = "jobs.sqlite"
"""The file with the queue in that folder."""
_SCHEMA_VERSION: Final = 1
_OF_EARLIER_BUILDS: Final = "journal.jsonl"

_CREATE: Final = (
    "CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    # A row is the JSON of `Standing`; a number is in order of submission.
    """CREATE TABLE IF NOT EXISTS jobs (
        number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, state TEXT NOT NULL,
        row TEXT NOT NULL
    )""",
    "CREATE TABLE IF NOT EXISTS sweeps (name TEXT PRIMARY KEY, row TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS queue (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
)
_TABLES: Final = ("meta", "jobs", "sweeps", "queue")
_FACTS, _OUTLOOK = "facts", "outlook"
_PUT_JOB: Final = "INSERT OR REPLACE INTO jobs VALUES (?, ?, ?, ?)"
_PUT_SWEEP: Final = (
    "INSERT INTO sweeps VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET row = excluded.row"
)
_PUT: Final = "INSERT OR REPLACE INTO queue VALUES (?, ?)"
#: How long another program's lock may delay the head.
_PATIENCE_S: Final = 0.1

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
    files: str = ""
    """Folder with a folder for each job."""


class QueueStore:
    """Keeps the queue of a folder on the disk. One process has it, which holds the lock of the run
    folder.
    """

    def __init__(self, folder: Path) -> None:
        """Open the store, or begin one.

        Raises:
            OSError: It cannot be written.
            ArchiveError: It is damaged, or of another version.
        """
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.queue = queue_of(folder)
        """The queue: it changes in memory, and `commit` stores what has changed."""
        self._facts, self._sweeps = self.queue.facts, dict(self.queue.sweeps)
        self._outlook = ""
        path = folder / QUEUE_STORE
        # SQLite would make it, and with it the files beside it, readable by others.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        with _as_os_error():
            self._connection = sqlite3.connect(path, timeout=_PATIENCE_S, isolation_level=None)
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = FULL")
        version = ("schema_version", str(_SCHEMA_VERSION))
        with self._transaction() as connection:
            for statement in _CREATE:
                connection.execute(statement)
            connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", version)

    def commit(self) -> None:
        """Store what has changed of the queue, in one transaction.

        Raises:
            OSError: Nothing of it is stored; the next commit stores it too.
        """
        queue, facts = self.queue, self.queue.facts
        sweeps = [each for name, each in queue.sweeps.items() if self._sweeps.get(name) is not each]
        if not queue.unsaved and not sweeps and facts == self._facts:
            return
        rows = [queue.stored(name) for name in queue.unsaved]
        with self._transaction() as connection:
            connection.executemany(_PUT_JOB, map(_line, rows))
            connection.executemany(_PUT_SWEEP, ((each.name, as_json(each)) for each in sweeps))
            connection.execute(_PUT, (_FACTS, as_json(facts)))
        queue.unsaved.clear()
        self._facts, self._sweeps = facts, dict(queue.sweeps)

    def write_outlook(self, standings: Iterable[Standing]) -> None:
        """Tell viewers why jobs wait, and when they may start; nothing depends on it.

        Raises:
            OSError: It cannot be written.
        """
        outlook = json.dumps(
            {
                each.job.name: [each.reason, each.expected_start_s]
                for each in standings
                if each.state in _WAITS and each.expected_start_s is not None
            }
        )
        if outlook != self._outlook:
            with self._transaction() as connection:
                connection.execute(_PUT, (_OUTLOOK, outlook))
            self._outlook = outlook

    def clear(self) -> None:
        """Begin once more without jobs.

        Raises:
            OSError: It cannot be written.
        """
        with self._transaction() as connection:
            for table in ("jobs", "sweeps", "queue"):
                connection.execute(f"DELETE FROM {table}")  # noqa: S608 - names of this module
        self.queue, self._facts, self._sweeps = Queue(), QueueFacts(), {}

    def close(self) -> None:
        """Close the file. One remains, unless it is read just now."""
        with suppress(sqlite3.Error):
            self._connection.execute("PRAGMA journal_mode = DELETE")
        self._connection.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with _as_os_error():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise


@contextmanager
def _as_os_error() -> Iterator[None]:
    try:
        yield
    except sqlite3.Error as failure:
        raise OSError(str(failure)) from failure


def _line(standing: Standing) -> tuple[int, str, str, str]:
    return standing.number, standing.job.name, standing.state.value, as_json(standing)


def queue_of(folder: Path) -> Queue:
    """Return the queue of a folder as it is stored; where nothing is, an empty one.

    Raises:
        ArchiveError: It cannot be read, or is of another version.
    """
    return _Look(folder).queue


class _Look:
    """What is stored in the folder of a queue; rows that are the same as in the look before are not
    read again.
    """

    def __init__(self, folder: Path, before: _Look | None = None) -> None:
        self.rows: dict[int, tuple[str, Standing]] = {}
        self.queue = Queue()
        self.outlook: Mapping[str, Any] = {}
        known = {} if before is None else before.rows
        if not _is_there(folder):
            return
        with (
            suppress(NothingStoredError),  # a head is about to begin it
            opened(folder / QUEUE_STORE, _TABLES, _SCHEMA_VERSION) as store,
        ):
            for number, text in store.execute("SELECT number, row FROM jobs ORDER BY number"):
                there = known.get(number)
                is_same = there is not None and there[0] == text
                row = there[1] if is_same and there else from_json(Standing, text)
                self.rows[number] = text, row
            sweeps = store.execute("SELECT row FROM sweeps ORDER BY rowid").fetchall()
            told = dict(store.execute("SELECT key, value FROM queue").fetchall())
            self.queue = Queue(
                (row for _, row in self.rows.values()),
                (from_json(SweepSubmitted, text) for (text,) in sweeps),
                from_json(QueueFacts, told.get(_FACTS, "{}")),
            )
            self.outlook = dict(json.loads(told.get(_OUTLOOK, "{}")))


def _is_there(folder: Path) -> bool:
    path = folder / QUEUE_STORE
    if not os.path.lexists(path):
        if (folder / _OF_EARLIER_BUILDS).exists():
            raise ArchiveError(
                f"{folder} is a queue of an earlier version of this program "
                f"({_OF_EARLIER_BUILDS}), which this one cannot read: go on with the version that "
                "wrote it, or begin another queue with `jobs run FILE --new`"
            )
        return False
    if path.is_symlink() or not path.is_file():
        raise ArchiveError(f"{path} cannot be read: it is no regular file")
    return True


class QueueReader:
    """Looks at the queue of a run folder again and again."""

    def __init__(self, folder: Path) -> None:
        """Touch nothing yet; `folder` is the run folder."""
        self._folder = folder / QUEUE_NAME
        self._look: _Look | None = None
        self._state: tuple[object, ...] = ()
        self._standings: tuple[Standing, ...] = ()

    def look(
        self, rows: Iterable[Row], now_s: float, *, is_alive: bool = True
    ) -> QueueSnapshot | None:
        """Return the queue as it is now; `None` where the run has none.

        `is_alive`: its head is at work. Without it no job is, and what it expected is void.

        Raises:
            ArchiveError: The queue cannot be read.
        """
        if not _is_there(self._folder):
            return None
        files = (self._folder / f"{QUEUE_STORE}{suffix}" for suffix in ("", "-wal"))
        state = (*map(state_of, files), is_alive)
        if self._look is None or state != self._state:
            self._look = _Look(self._folder, self._look)
            told = self._look.outlook if is_alive else {}
            self._standings = tuple(
                _expected(each, told) if is_alive else _without_head(each)
                for each in self._look.queue.standings.values()
            )
            self._state = state
        return QueueSnapshot(
            standings=self._standings,
            held=self._look.queue.held,
            now_s=now_s,
            rows={row.slot: row for row in rows},
            files=str(self._folder / "files"),
        )


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
