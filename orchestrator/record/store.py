"""The record of a run in SQLite, written while the run goes, so that it survives a killed head.

A transaction holds what became of a turn of the head, so that a reader never sees half of one, and
a killed head loses at most the turn it was in; a power cut may take the last seconds. When the disk
is full, `problem` says so, the run goes on, and writing is tried again. Does not read
(`archive.py`), nor say what the columns are (`tables.py`).
"""

from __future__ import annotations

import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from orchestrator.record import tables
from orchestrator.record.model import Snapshot
from orchestrator.record.records import (
    SCHEMA_VERSION,
    CommandRecord,
    RunFacts,
    SlotProgress,
    SlotRecord,
)
from orchestrator.record.tables import Line

SAMPLE_EVERY_S = 1.0
"""Of each slot, at most."""
SAMPLES_MOST_PER_S = 45.0
"""Of all slots: a run of many workers samples each of them less often."""
RETRY_AFTER_S = 1.0
"""After a failure, writing is not tried again for so long: a locked file must not delay the head
each time.
"""
EVENTS_KEPT = 10_000
"""Events that wait while nothing can be written; beyond them the oldest go."""

_ROWS_MOST = 50
"""Rows of a sample in one transaction: the write-ahead log stays as long as its longest one has
made it.
"""
_PATIENCE_S = 0.1
"""How long another program's lock may delay the head."""
_LAST_PATIENCE_S = 2.0
"""At the end of a run a longer wait is harmless, and there is no second chance."""

# Besides SQLite's own: values that a conversion did not foresee must not end a long run.
_FAILURES = (sqlite3.Error, OSError, ValueError, TypeError, OverflowError, RecursionError)

#: Which file, and which write-ahead log, a connection writes to.
_Identity: TypeAlias = tuple[tuple[int, int], ...]


#: What must be known of a run to write it into another file: its start, its heads, and the faults
#: of those before.
_Origin: TypeAlias = tuple[float, int, str]


class RunStore:
    """Keeps a run, its slots, samples of them, and its events. Nothing in it raises.

    A watcher, and more for the head to call. What it is given waits in memory for `commit`, and
    while nothing can be written it goes on waiting: the next success writes all of it.
    """

    def __init__(self, path: Path, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        """Prepare; the file is made at the first commit.

        The clock times the pause after a failure.
        """
        self._path = path
        self._monotonic_s = monotonic_s
        self._connection: sqlite3.Connection | None = None
        self._identity: _Identity | None = None
        self._retry_at_s = float("-inf")
        self._sampled_at_unix_s = float("-inf")
        self._facts: RunFacts | None = None
        self._origin: _Origin | None = None
        self._snapshot: Snapshot | None = None
        self._slots: dict[str, SlotRecord] = {}
        self._progress: dict[str, SlotProgress] = {}
        # What waits for the next commit.
        self._begins = self._figures_wait = False
        self._slots_waiting: dict[str, SlotRecord] = {}
        self._progress_waiting: dict[str, SlotProgress] = {}
        self._samples: list[Line] = []
        self._rows_waiting: dict[str, Line] = {}
        self._events: deque[Line] = deque(maxlen=EVENTS_KEPT)
        self._commands: list[CommandRecord] = []
        self._verdict: Line | None = None
        self._faults: tuple[Mapping[str, Any], ...] = ()
        self.problem: str | None = None
        """A sentence for the user while the store cannot write, `None` while it can."""
        self.incomplete = False
        """Whether anything was ever lost: a sample that could not be written before the next was
        due, an event for which there was no room left to wait, or a file that was removed."""

    def begin(self, facts: RunFacts) -> None:
        """Take note of the run.

        One that the store knows keeps when it started, and has one head more.
        """
        self._facts, self._origin, self._begins = facts, None, True

    def event(self, entry: Mapping[str, Any]) -> None:
        """Take an event as `EventLog` makes it: `at`, `event`, `slot`, then its details."""
        if len(self._events) == EVENTS_KEPT:
            self.incomplete = True
        self._events.append(tables.event_line(entry))

    def command(self, record: CommandRecord) -> None:
        """Take a command of the user; what it changes of a slot is in the slot's record."""
        self._commands.append(record)

    def slots(self, records: Iterable[SlotRecord]) -> None:
        """Take slots as they are now; the latest record of a slot is the one that counts."""
        for record in records:
            self._slots[record.slot] = self._slots_waiting[record.slot] = record
            self._rows_waiting.pop(record.slot, None)  # the record has a newer row

    def progress(self, slots: Iterable[SlotProgress]) -> None:
        """Take what reports have changed in slots that the store has a record of.

        Counts before that record.
        """
        for progress in slots:
            self._progress[progress.slot] = self._progress_waiting[progress.slot] = progress

    def update(self, snapshot: Snapshot) -> None:
        """Take the run as it is now, with a sample of every slot if the last one is old enough."""
        self._snapshot, self._figures_wait = snapshot, True
        every_s = max(SAMPLE_EVERY_S, len(snapshot.rows) / SAMPLES_MOST_PER_S)
        # Also when the clock of the machine was set back.
        if not 0.0 <= snapshot.now_unix_s - self._sampled_at_unix_s < every_s:
            self._sample(snapshot)
        self.commit()

    def close(self, snapshot: Snapshot) -> None:
        """Take the run as it was at last. The file stays open for `end`."""
        self._snapshot, self._figures_wait = snapshot, True
        self._sample(snapshot)
        self.commit()

    def commit(self) -> None:
        """Write all that waits, in one transaction.

        Does nothing if nothing waits, or shortly after a failure.
        """
        if self._anything_waits() and self._monotonic_s() >= self._retry_at_s:
            self._write(_PATIENCE_S)

    def end(
        self, outcome: str, exit_code: int, error: str | None, faults: Sequence[Mapping[str, Any]]
    ) -> None:
        """Write how the run ended, as in the summary, and close the file. One remains, unless it is
        read just now.

        `faults` are those that this head injected, each with what became of it; those of the heads
        before it stay.
        """
        if self._facts is not None:
            self._verdict = tables.end_line(self._facts.run_id, outcome, exit_code, error)
            self._faults = tuple(faults)
            self._figures_wait = (
                self._snapshot is not None
            )  # whether anything was lost is known only now
        if self._anything_waits():
            self._write(_LAST_PATIENCE_S)
        if self._anything_waits():
            self.incomplete = True
        if self._connection is not None:
            # Without a write-ahead log the file can be read anywhere, also where nothing can be
            # written.
            with suppress(sqlite3.Error):
                self._connection.execute("PRAGMA journal_mode = DELETE")
        self._disconnect()

    def _sample(self, snapshot: Snapshot) -> None:
        if self._samples:
            self.commit()
        if self._samples:
            self.incomplete = True  # counters are totals over the run: the gap falsifies nothing
        self._sampled_at_unix_s = snapshot.now_unix_s
        # In the order of their key, new lines fill the pages of the table; in another one pages
        # stay half empty.
        rows = sorted(snapshot.rows, key=lambda row: row.slot)
        self._samples = [tables.sample_line(row, snapshot.now_unix_s) for row in rows]
        self._rows_waiting = {row.slot: line for row, line in zip(rows, self._samples, strict=True)}

    def _anything_waits(self) -> bool:
        known = self._facts is not None and (self._begins or self._figures_wait)
        return known or bool(
            self._progress_waiting
            or self._slots_waiting
            or self._samples
            or self._rows_waiting
            or self._events
            or self._commands
            or self._verdict
        )

    def _write(self, patience_s: float) -> None:
        count = None if self._verdict is not None else _ROWS_MOST
        rows = dict(islice(self._rows_waiting.items(), count))
        try:
            connection = self._connected(patience_s)
            connection.execute("BEGIN IMMEDIATE")
            origin = self._put_run(connection)
            self._put_rest(connection, rows.values())
            connection.execute("COMMIT")
        except _FAILURES as failure:
            self.problem = f"the record of the run cannot be written to {self._path}: {failure}"
            self._retry_at_s = self._monotonic_s() + RETRY_AFTER_S
            self._disconnect()  # a fresh connection is the surest way back
            return
        self.problem = None
        self._origin = origin
        self._begins = self._figures_wait = False
        self._slots_waiting, self._progress_waiting, self._samples, self._verdict = {}, {}, [], None
        self._rows_waiting = dict(islice(self._rows_waiting.items(), len(rows), None))
        self._events.clear()
        self._commands.clear()

    def _put_run(self, connection: sqlite3.Connection) -> _Origin | None:
        """Write the run's own line as far as that is due, and return what the store then knows of
        it.
        """
        facts = self._facts
        if facts is None:
            return None
        origin = self._origin
        if self._begins:
            run = tables.run_line(facts)
            connection.execute(tables.BEGIN_RUN, run)
            origin = connection.execute(tables.FIND_RUN, [run["run_id"]]).fetchone()
        if self._figures_wait and self._snapshot is not None:
            figures = tables.figures_line(facts.run_id, self._snapshot, incomplete=self.incomplete)
            connection.execute(tables.UPDATE_RUN, figures)
        if self._verdict is not None:
            before = None if origin is None else origin[2]
            told = {**self._verdict, "faults": tables.all_faults(before, self._faults)}
            connection.execute(tables.END_RUN, told)
        return origin

    def _put_rest(self, connection: sqlite3.Connection, rows: Iterable[Line]) -> None:
        connection.executemany(tables.PUT_SLOT, map(tables.line_of, self._slots_waiting.values()))
        progress = self._progress_waiting.values()
        try:
            connection.executemany(
                tables.PUT_PROGRESS, (tables.progress_line(slot, cut=False) for slot in progress)
            )
        except OverflowError:  # cutting takes time, and is hardly ever needed
            connection.executemany(
                tables.PUT_PROGRESS, (tables.progress_line(slot, cut=True) for slot in progress)
            )
        connection.executemany(tables.PUT_ROW, rows)
        connection.executemany(tables.PUT_SAMPLE, self._samples)
        connection.executemany(tables.ADD_EVENT, self._events)
        connection.executemany(tables.ADD_COMMAND, map(tables.line_of, self._commands))

    def _connected(self, patience_s: float) -> sqlite3.Connection:
        """Return a connection to the file that is there now: SQLite would go on writing into a
        deleted one.
        """
        if self._connection is not None and self._identity != _identity(self._path):
            self._disconnect()
        if self._connection is None:
            self._connection = _opened(self._path, patience_s)
            self._put_back(self._connection)
            self._identity = _identity(self._path)
        elif patience_s == _LAST_PATIENCE_S:
            self._connection.execute(f"PRAGMA busy_timeout = {patience_s * 1000:.0f}")
        return self._connection

    def _put_back(self, connection: sqlite3.Connection) -> None:
        """Put what is known of the run into a file that does not know it, because the one before
        was taken away.
        """
        if self._facts is None or self._origin is None:
            return
        if (
            connection.execute(tables.FIND_RUN, [tables.text(self._facts.run_id)]).fetchone()
            is not None
        ):
            return
        self.incomplete = True
        started_at_unix_s, heads, _ = self._origin
        run = tables.run_line(self._facts, started_at_unix_s=started_at_unix_s, heads=heads)
        connection.execute(tables.BEGIN_RUN, run)
        self._figures_wait = self._snapshot is not None
        self._slots_waiting, self._progress_waiting = dict(self._slots), dict(self._progress)

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()


def _opened(path: Path, patience_s: float) -> sqlite3.Connection:
    # Transactions are begun by hand: Python would begin one that a reader can spoil.
    connection = sqlite3.connect(path, timeout=patience_s, isolation_level=None)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        # In WAL mode this survives a killed head; only a power cut may take the last seconds.
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("BEGIN IMMEDIATE")
        for statement in tables.CREATE:
            connection.execute(statement)
        for table in tables.LATER_COLUMNS:
            there = [column[1] for column in connection.execute(f"PRAGMA table_info({table})")]
            for statement in tables.columns_lacking(table, there):
                connection.execute(statement)
        connection.execute(tables.SET_META, ("schema_version", str(SCHEMA_VERSION)))
        connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


def _identity(path: Path) -> _Identity | None:
    """Tell the file and its log from others of the same name; `None` where there is not both."""
    try:
        found = [path.stat(), path.with_name(f"{path.name}-wal").stat()]
    except OSError:
        return None
    return tuple((file.st_dev, file.st_ino) for file in found)
