"""The record of a run in SQLite, written while the run goes, so that it survives a killed head.

A transaction holds what became of a turn of the head, so that a reader never sees half of one, and
a killed head loses at most the turn it was in; a power cut may take the last seconds. When the disk
is full, `problem` says so, the run goes on, and writing is tried again. Column names are promises
to users of SQL; bytes and seconds throughout. Does not read (`archive.py`).
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Any, TypeAlias

from orchestrator.record.events import harmless
from orchestrator.record.model import FIELDS, Row, Snapshot, finite
from workers.messages import ResumeState, StepCounts

STORE_NAME = "run.sqlite"
"""The store's file in the run folder."""

SCHEMA_VERSION = 2
"""Counts up when a reader of the version before could misunderstand the tables."""

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

#: Counters of a slot, as its line in `progress` has them.
COUNTERS = (*StepCounts.__slots__, "restarts")

#: What every status of a slot changes.
ProgressLine: TypeAlias = tuple[str | int | float | None, ...]
COMMANDS_KNOWN = 1_000
"""Answers that a head remembers, its predecessors' included: an id that comes again gets the same
one.
"""
Line: TypeAlias = Mapping[str, str | int | float | None]

#: What is sampled of a row, besides the moment.
_SAMPLED = ("slot", *(key for key, each in FIELDS.items() if each.sampled))

#: In a column of the type REAL, SQLite stores a float without a fraction in 0 to 6 bytes instead of
#: 8.
_SAMPLED_COLUMNS = ", ".join(
    f"{name} REAL" if FIELDS[name].type is float else name for name in _SAMPLED
)
CREATE = (
    "CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    """CREATE TABLE IF NOT EXISTS runs (
        run_id TEXT PRIMARY KEY, started_at_unix_s REAL NOT NULL, duration_s REAL NOT NULL,
        elapsed_s REAL NOT NULL,
        min_success_rate REAL NOT NULL, mode TEXT NOT NULL, device TEXT,
        one_machine INTEGER NOT NULL,
        config_yaml TEXT NOT NULL, chaos TEXT, nodes_planned TEXT NOT NULL,
        head_pid INTEGER NOT NULL, head_started TEXT, host TEXT NOT NULL, heads INTEGER NOT NULL,
        updated_at_unix_s REAL, nodes_seen TEXT NOT NULL DEFAULT '[]',
        notices TEXT NOT NULL DEFAULT '[]',
        restart_count INTEGER NOT NULL DEFAULT 0,
        incomplete INTEGER NOT NULL DEFAULT 0,
        outcome TEXT, exit_code INTEGER, error TEXT, faults TEXT NOT NULL DEFAULT '[]'
    )""",
    # With a rowid: slots stay in the order in which they were first told of, that of the plan.
    """CREATE TABLE IF NOT EXISTS slots (
        slot TEXT PRIMARY KEY, node TEXT NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL,
        incarnation INTEGER NOT NULL, resume TEXT, row TEXT NOT NULL, orders TEXT
    )""",
    f"""CREATE TABLE IF NOT EXISTS samples (
        at_unix_s REAL NOT NULL, {_SAMPLED_COLUMNS}, PRIMARY KEY (at_unix_s, slot)
    ) WITHOUT ROWID""",
    # What every status changes, in few bytes.
    f"""CREATE TABLE IF NOT EXISTS progress (
        slot TEXT PRIMARY KEY, heard_at_unix_s REAL,
        {", ".join(COUNTERS)}
    ) WITHOUT ROWID""",
    """CREATE TABLE IF NOT EXISTS events (
        id INTEGER PRIMARY KEY, at TEXT NOT NULL, event TEXT NOT NULL, slot TEXT,
        details TEXT NOT NULL
    )""",
    "CREATE INDEX IF NOT EXISTS events_of_slot ON events (slot, event, id)",
    """CREATE TABLE IF NOT EXISTS commands (
        id TEXT PRIMARY KEY, at_unix_s REAL NOT NULL, do TEXT NOT NULL, slots TEXT NOT NULL,
        by TEXT NOT NULL,
        amount_bytes INTEGER, answer TEXT NOT NULL
    )""",
)
_SET_META = "INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)"
FAULTS_KEPT = 10_000
"""Injected faults of all heads together; beyond them the oldest go."""

#: A new head has no elapsed time until it counts: the time of earlier heads is kept.
_UPDATE_RUN = """UPDATE runs SET
    elapsed_s = max(elapsed_s, :elapsed_s), updated_at_unix_s = :updated_at_unix_s,
    nodes_seen = :nodes_seen,
    notices = :notices, restart_count = :restart_count,
    incomplete = max(incomplete, :incomplete)
WHERE run_id = :run_id"""
_END_RUN = """UPDATE runs SET outcome = :outcome, exit_code = :exit_code, error = :error,
faults = :faults
WHERE run_id = :run_id"""
_SLOT_COLUMNS = ("slot", "node", "state", "reason", "incarnation", "resume", "row", "orders")
_MARKS = ", ".join("?" * (2 + len(COUNTERS)))
PUT_PROGRESS = f"INSERT OR REPLACE INTO progress VALUES ({_MARKS})"  # noqa: S608 - question marks

#: Both take what `sample_line` returns.
PUT_ROW = "UPDATE slots SET row = :row WHERE slot = :slot"
# Besides SQLite's own: values that a conversion did not foresee must not end a long run.
_FAILURES = (sqlite3.Error, OSError, ValueError, TypeError, OverflowError, RecursionError)

#: Which file, and which write-ahead log, a connection writes to.
_Identity: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What is known of a run before its first step, and needed to resume it after its head was
    killed.
    """

    run_id: str
    started_at_unix_s: float
    """When its first head began."""
    duration_s: float
    """Planned length."""
    elapsed_s: float = 0.0
    """Already worked when this head began: by the heads before it."""
    min_success_rate: float
    """Share of good steps below which the run is degraded, 0..1."""
    mode: str
    device: str | None
    one_machine: bool
    """This and the device as in `core.placement.Target`."""
    config_yaml: str
    chaos: str | None
    nodes_planned: tuple[str, ...]
    head_pid: int
    head_started: str | None
    """When the head's process began, in the kernel's ticks; with the pid it tells a process from
    all others.
    """
    host: str
    """Name of the machine the head runs on: its pid means nothing elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRecord:
    """A command of the user, with what it was answered."""

    id: str
    at_unix_s: float
    do: str
    slots: tuple[str, ...]
    by: str
    amount_bytes: int | None
    answer: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRecord:
    """One slot after its last status: enough to show it, and for another head to resume
    it.
    """

    slot: str
    node: str
    state: str
    """A value of `WorkerState`."""
    reason: str
    incarnation: int
    counters: Mapping[str, int | float] = field(default_factory=dict)
    resume: ResumeState | None = None
    row: Mapping[str, Any] = field(default_factory=dict)
    """`Row.known()` of the slot."""
    orders: Mapping[str, Any] | None = None
    """What the user has asked of it, as `core.slot.UserOrders`; `None`: nothing."""
    heard_at_unix_s: float | None = None
    """Of the last status of the present process; `None` before the first."""

    @property
    def progress(self) -> ProgressLine:
        """Its line in `progress`."""
        counters = (self.counters.get(name, 0) for name in COUNTERS)
        return (self.slot, self.heard_at_unix_s, *counters)


def _names(record: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(record))


def _insert(table: str, columns: Sequence[str], verb: str = "INSERT") -> str:
    return (
        f"{verb} INTO {table} ({', '.join(columns)}) VALUES "
        f"({', '.join(f':{name}' for name in columns)})"
    )


def _upsert(table: str, columns: Sequence[str], key: str, updates: Mapping[str, str]) -> str:
    changes = ", ".join(f"{name} = {value}" for name, value in updates.items())
    return f"{_insert(table, columns)} ON CONFLICT ({key}) DO UPDATE SET {changes}"


def _excluded(names: Iterable[str], *but: str) -> dict[str, str]:
    return {name: f"excluded.{name}" for name in names if name not in but}


#: Another head of the same run keeps when it began and what was done to it, and has not ended it
#: yet.
_BEGIN_RUN = _upsert(
    "runs",
    (*_names(RunFacts), "heads"),
    "run_id",
    {
        **_excluded(_names(RunFacts), "run_id", "started_at_unix_s"),
        "elapsed_s": "max(elapsed_s, excluded.elapsed_s)",
        "chaos": "coalesce(excluded.chaos, chaos)",
        "heads": "heads + (head_pid IS NOT excluded.head_pid OR head_started IS NOT "
        "excluded.head_started)",
        **dict.fromkeys(("outcome", "exit_code", "error"), "NULL"),
    },
)


PUT_SLOT = _upsert("slots", _SLOT_COLUMNS, "slot", _excluded(_SLOT_COLUMNS, "slot"))


# The last sample of a run may fall on the moment of the one before it.
PUT_SAMPLE = _insert("samples", ("at_unix_s", *_SAMPLED), "INSERT OR REPLACE")

_ADD_COMMAND = _insert("commands", _names(CommandRecord), "INSERT OR IGNORE")

_ADD_EVENT = _insert("events", ("at", "event", "slot", "details"))


def line_of(
    record: RunFacts | SlotRecord | CommandRecord, columns: Sequence[str] | None = None
) -> Line:
    """Return a record as a line of its columns.

    A policy's state to the letter, as far as JSON can hold it.
    """
    return _line(**{name: getattr(record, name) for name in columns or _names(type(record))})


def sample_line(row: Row, at_unix_s: float) -> Line:
    """Return what is sampled of a slot, and its row."""
    known = row.known()
    return {
        **_line(at_unix_s=at_unix_s, **{name: known.get(name) for name in _SAMPLED}),
        "row": _json_text(known),
    }


def _all_faults(before: object, own: Sequence[Mapping[str, Any]]) -> str:
    """Return the faults of the heads before, as their column holds them, and a head's own behind
    them.
    """
    try:
        known = json.loads(before) if isinstance(before, str) else []
    except (ValueError, RecursionError):
        known = []  # invalid text; a reader would refuse the whole run because of it
    earlier = (
        [fault for fault in known if isinstance(fault, dict)] if isinstance(known, list) else []
    )
    return _json_text([*earlier, *(dict(fault) for fault in own)][-FAULTS_KEPT:])


def _event_line(entry: Mapping[str, Any]) -> Line:
    """Return an event of the diary; what is not a column of its own is in `details`."""
    details = {key: value for key, value in entry.items() if key not in {"at", "event", "slot"}}
    line = _line(at=entry["at"], event=entry["event"], slot=entry["slot"])
    return {**line, "details": _json_text(details)}


def _text(value: str) -> str:
    """Return a text that UTF-8 can hold: a lone surrogate, as in a file name, is written as an
    escape.
    """
    return value.encode("utf-8", "backslashreplace").decode("utf-8")


def _json_text(value: object, *, allow_nan: bool = False) -> str:
    """Return a value as JSON in ASCII, exactly if JSON can hold it, else made harmless."""
    try:
        return json.dumps(value, allow_nan=allow_nan, separators=(",", ":"))
    except (ValueError, TypeError, RecursionError):  # not finite, thousands of digits, a circle
        return json.dumps(harmless(value), separators=(",", ":"))


def _line(**values: object) -> Line:
    return {name: _value(value) for name, value in values.items()}


def _value(value: object) -> str | int | float | None:
    """Return a value as SQLite takes it: numbers within 64 bits, 0 for one that is not finite,
    containers as JSON.
    """
    if value is None:
        return None
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int):
        return max(-(2**63), min(2**63 - 1, value))
    if isinstance(value, float):
        return finite(value) or 0.0
    # Python's JSON has words for infinity, and another head must go on from the very same numbers.
    return _json_text(value, allow_nan=True)


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
        self._has_begun = False
        self._faults_before: str | None = None
        """Faults of the heads before this one, as they are stored."""
        self._snapshot: Snapshot | None = None
        self._slots: dict[str, SlotRecord] = {}
        self._progress: dict[str, ProgressLine] = {}
        # What waits for the next commit.
        self._begins = self._figures_wait = False
        self._slots_waiting: dict[str, SlotRecord] = {}
        self._progress_waiting: dict[str, ProgressLine] = {}
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
        self._facts, self._begins, self._has_begun = facts, True, False

    def event(self, entry: Mapping[str, Any]) -> None:
        """Take an event as `EventLog` makes it: `at`, `event`, `slot`, then its details."""
        if len(self._events) == EVENTS_KEPT:
            self.incomplete = True
        self._events.append(_event_line(entry))

    def command(self, record: CommandRecord) -> None:
        """Take a command of the user; what it changes of a slot is in the slot's record."""
        self._commands.append(record)

    def slots(self, records: Iterable[SlotRecord]) -> None:
        """Take slots as they are now; the latest record of a slot is the one that counts."""
        for record in records:
            self._slots[record.slot] = self._slots_waiting[record.slot] = record
            self._rows_waiting.pop(record.slot, None)  # the record has a newer row
            self.progress((record.progress,))

    def progress(self, lines: Iterable[ProgressLine]) -> None:
        """Take what statuses have changed in slots that the store has a record of."""
        for line in lines:
            slot = str(line[0])
            self._progress[slot] = self._progress_waiting[slot] = line

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
            self._verdict = _line(
                run_id=self._facts.run_id, outcome=outcome, exit_code=exit_code, error=error
            )
            self._faults = tuple(faults)
            # Whether anything was lost is known only now.
            self._figures_wait = self._snapshot is not None
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
        self._samples = [sample_line(row, snapshot.now_unix_s) for row in rows]
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
            self._put_run(connection)
            self._put_rest(connection, rows.values())
            connection.execute("COMMIT")
        except _FAILURES as failure:
            self.problem = f"the record of the run cannot be written to {self._path}: {failure}"
            self._retry_at_s = self._monotonic_s() + RETRY_AFTER_S
            self._disconnect()  # a fresh connection is the surest way back
            return
        self.problem = None
        self._has_begun |= self._begins
        self._begins = self._figures_wait = False
        self._slots_waiting, self._progress_waiting, self._samples, self._verdict = {}, {}, [], None
        self._rows_waiting = dict(islice(self._rows_waiting.items(), len(rows), None))
        self._events.clear()
        self._commands.clear()

    def _put_run(self, connection: sqlite3.Connection) -> None:
        """Write the run's own line as far as that is due."""
        facts = self._facts
        if facts is None:
            return
        if self._begins:
            connection.execute(_BEGIN_RUN, {**line_of(facts), "heads": 1})
            if not self._has_begun:
                self._faults_before = self._stored_faults(connection)
        if self._figures_wait and self._snapshot is not None:
            names = (
                "elapsed_s",
                "nodes_seen",
                "notices",
                "restart_count",
            )
            figures = {name: getattr(self._snapshot, name) for name in names}
            moment = {"updated_at_unix_s": self._snapshot.now_unix_s, "run_id": facts.run_id}
            connection.execute(_UPDATE_RUN, _line(**figures, **moment, incomplete=self.incomplete))
        if self._verdict is not None:
            faults = _all_faults(self._faults_before, self._faults)
            connection.execute(_END_RUN, {**self._verdict, "faults": faults})

    def _stored_faults(self, connection: sqlite3.Connection) -> str | None:
        """Return the faults of the run in the store; `None`: it does not know the run."""
        query = "SELECT faults FROM runs WHERE run_id = ?"
        line = connection.execute(query, [_text(self._facts.run_id if self._facts else "")])
        return next((str(faults) for (faults,) in line), None)

    def _put_rest(self, connection: sqlite3.Connection, rows: Iterable[Line]) -> None:
        slots = self._slots_waiting.values()
        connection.executemany(PUT_SLOT, (line_of(record, _SLOT_COLUMNS) for record in slots))
        progress = self._progress_waiting.values()
        try:
            connection.executemany(PUT_PROGRESS, progress)
        except (OverflowError, UnicodeError):  # to make them harmless takes time
            connection.executemany(PUT_PROGRESS, (tuple(map(_value, line)) for line in progress))
        connection.executemany(PUT_ROW, rows)
        connection.executemany(PUT_SAMPLE, self._samples)
        connection.executemany(_ADD_EVENT, self._events)
        connection.executemany(_ADD_COMMAND, map(line_of, self._commands))

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
        """Have all that is known of the run written again if the file before was taken away."""
        if self._has_begun and self._stored_faults(connection) is None:
            self.incomplete = self._begins = True
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
        for statement in CREATE:
            connection.execute(statement)
        connection.execute(_SET_META, ("schema_version", str(SCHEMA_VERSION)))
        connection.execute("COMMIT")
    except BaseException:
        connection.close()
        raise
    return connection


def _identity(path: Path) -> _Identity | None:
    """Tell the file and its log from others of the same name; `None` where there is not both."""
    try:
        statuses = [path.stat(), path.with_name(f"{path.name}-wal").stat()]
    except OSError:
        return None
    return tuple((file.st_dev, file.st_ino) for file in statuses)
