"""The store of a run, `run.sqlite`: its slots, the jobs of its queue, samples, answered commands.

The head alone writes it. What it is given waits in memory until `commit`, once a turn, writes it in
one transaction, before the head acts: a reader never sees half of a turn, and a killed head loses
at most the turn it was in. While the disk is full or the file is locked, `problem` says so,
the run goes on, and the next success writes what has waited. A turn that changes jobs would survive
a power cut; of other turns a power cut may take the last seconds. Does not say what a reader makes
of it (`archive.py`, `jobs.py`, `history.py`), and keeps no events (`events.py`).
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar, cast

from pydantic import TypeAdapter

from orchestrator.core.slot import NOTHING_ASKED, UserOrders
from orchestrator.errors import ArchiveError, NothingStoredError
from orchestrator.jobs.queue import Queue
from orchestrator.record.events import harmless
from orchestrator.record.model import FIELDS, Row, Snapshot, finite
from workers.settings import PolicyState

STORE_NAME: Final = "run.sqlite"
"""The store's file in the run folder."""
SCHEMA_VERSION: Final = 6
"""Counts up when a reader of the version before could misunderstand the tables."""

SAMPLE_EVERY_S: Final = 1.0
"""Of each slot, at most."""
RETRY_AFTER_S: Final = 1.0
"""After a failure, writing is not tried again for so long: a locked file must not delay the head
each time.
"""
SAMPLES_KEPT: Final = 3_000
"""Samples that wait while nothing can be written; beyond them the oldest go."""

_PATIENCE_S: Final = 0.1
"""How long another program's lock may delay the head."""
_LONG_PATIENCE_S: Final = 2.0
"""At the end of a run, where there is no second chance, and for a reader."""

#: What is sampled of a row.
_SAMPLED: Final = ("slot", *(key for key, each in FIELDS.items() if each.sampled))

#: In a column of the type REAL, SQLite stores a whole number in 0 to 6 bytes instead of 8.
_SAMPLED_COLUMNS: Final = ", ".join(
    name if name in {"slot", "state"} else f"{name} REAL" for name in _SAMPLED
)
#: The key of each table whose rows are one JSON value. Those of `run` are the fields of the run.
_KEYS: Final = {
    "run": "key TEXT",
    "slots": "slot TEXT",
    "jobs": "number INTEGER",
    "commands": "id TEXT",
}
_CREATE: Final = (
    # With a rowid: rows stay in the order in which they came, slots in that of the plan.
    *(
        f"CREATE TABLE IF NOT EXISTS {table} ({key} PRIMARY KEY, value TEXT NOT NULL)"
        for table, key in _KEYS.items()
    ),
    f"""CREATE TABLE IF NOT EXISTS samples (
        at_unix_s REAL NOT NULL, {_SAMPLED_COLUMNS}, PRIMARY KEY (at_unix_s, slot)
    ) WITHOUT ROWID""",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)
_PUT: Final = "INSERT INTO {} VALUES (?, ?) ON CONFLICT DO UPDATE SET value = excluded.value"
# The last sample of a run may fall on the moment of the one before it.
_VALUES: Final = ", ".join("?" * (1 + len(_SAMPLED)))
_PUT_SAMPLE: Final = f"INSERT OR REPLACE INTO samples VALUES ({_VALUES})"  # noqa: S608

#: What a damaged file raises.
_DAMAGE: Final = (
    *(sqlite3.Error, ValueError, LookupError, TypeError, AttributeError),
    *(RecursionError, OverflowError),
)

#: A table and the key of one of its rows.
_Key: TypeAlias = tuple[str, str | int]
_Sample: TypeAlias = tuple[str | int | float | None, ...]
_Value = TypeVar("_Value")


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
    mode: str
    device: str | None
    one_machine: bool
    """This and the device as in `core.placement.Target`."""
    config_yaml: str
    chaos: str | None
    """What was asked for of this head, else of a head before it."""
    nodes_planned: tuple[str, ...]
    head_pid: int
    head_started: str | None
    """When the head's process began, in the kernel's ticks; with the pid it tells a process from
    all others.
    """
    host: str
    """Name of the machine the head runs on: its pid means nothing elsewhere."""
    heads: int = 1
    """How many there have been, this one included; the store counts them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """A run as it was when it was sampled last, or as it ended."""

    elapsed_s: float = 0.0
    """Worked by all heads."""
    updated_at_unix_s: float | None = None
    """Of the last snapshot; `None` before the first."""
    nodes_seen: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    incomplete: bool = False
    """Whether anything of any head is missing."""
    outcome: str | None = None
    """good, degraded, interrupted or failed; `None`: it has not ended, or its head was killed."""
    exit_code: int | None = None
    error: str | None = None
    faults: tuple[Mapping[str, Any], ...] = ()
    """Each injected fault with what became of it; those of a head are known once it has ended by
    itself.
    """
    team_generation: int = 0
    """The last in which a member of a team was named to lead it; 0: none was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRecord:
    """One slot after its last status: enough to show it, and for another head to resume it."""

    row: Row
    incarnation: int
    resume: PolicyState | None = None
    orders: UserOrders = NOTHING_ASKED

    @property
    def slot(self) -> str:
        """Its name."""
        return self.row.slot


class RunStore:
    """Keeps a run, its slots and samples of them, its queue, and its commands. Nothing raises."""

    def __init__(self, path: Path, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        """Prepare; the file is made, for its user alone, when something is to be written.

        The clock times the pause after a failure.
        """
        self._path = path
        self._monotonic_s = monotonic_s
        self._connection: sqlite3.Connection | None = None
        self._retry_at_s = self._sampled_at_unix_s = float("-inf")
        self._status = RunStatus()
        self._slots: dict[str, SlotRecord] = {}
        self._queue: Queue | None = None
        """As it was taken last."""
        self._waiting: dict[_Key, str] = {}
        """What the next commit writes: the newest value of each row."""
        self._samples: deque[_Sample] = deque(maxlen=SAMPLES_KEPT)
        self.problem: str | None = None
        """A sentence for the user while the store cannot write, `None` while it can."""
        self.incomplete = False
        """Whether anything of the run is missing, also of heads before this one."""

    def begin(self, facts: RunFacts) -> None:
        """Take note of the run. One that the store knows has one head more, and has not ended."""
        stored: dict[str, str] = {}
        with suppress(ArchiveError), reading(self._path.parent) as store:  # `commit` says why
            stored = dict(store.execute("SELECT key, value FROM run").fetchall())
        if "facts" in stored:
            before = from_json(RunFacts, stored["facts"])
            heads, head = before.heads, (facts.head_pid, facts.head_started)
            if head != (before.head_pid, before.head_started):
                heads += 1
            facts = replace(facts, heads=heads, chaos=facts.chaos or before.chaos)
        before_it = from_json(RunStatus, stored.get("status", "{}"))
        self._status = replace(before_it, outcome=None, exit_code=None, error=None)
        self.incomplete |= before_it.incomplete
        self._put("run", "facts", facts)
        self._put("run", "status", self._status)

    def slots(self, records: Iterable[SlotRecord], *, at_once: bool = True) -> None:
        """Take slots as they are now, for the next commit, or where that can wait, for that with
        their next sample.
        """
        for record in records:
            self._slots[record.slot] = record
            if at_once:
                self._put("slots", record.slot, record)

    def queue(self, queue: Queue) -> None:
        """Take what is new of a queue."""
        before = self._queue
        known = {} if before is None else before.standings
        for name, standing in queue.standings.items():
            if known.get(name) is not standing:
                self._put("jobs", standing.number, standing)
        if before is None or queue.facts != before.facts:
            self._put("run", "queue", queue.facts)
        self._queue = queue

    def outlook(self, told: Mapping[str, tuple[str, float | None]]) -> None:
        """Take why jobs in line wait, and when they may start: for viewers alone."""
        self._put("run", "outlook", dict(told))

    def command(self, identity: str, told: Mapping[str, Any]) -> None:
        """Take a command of the user with its `answer`; what it changes of a slot is in the slot's
        record.
        """
        self._put("commands", identity, dict(told))

    def has_command(self, identity: str) -> bool:
        """Say whether this head or one before it has taken a command with this id."""
        if ("commands", identity) in self._waiting:
            return True
        query, found = "SELECT 1 FROM commands WHERE id = ?", None
        with suppress(sqlite3.Error, OSError):  # `commit` says why
            found = self._connected(_PATIENCE_S).execute(query, (identity,)).fetchone()
        return found is not None

    def team(self, generation: int) -> None:
        """Take the generation of a team whose leader is to be named next."""
        newest = max(generation, self._status.team_generation)  # of several teams
        self._status = replace(self._status, team_generation=newest)
        self._put("run", "status", self._status)

    def update(self, snapshot: Snapshot, *, at_once: bool = False) -> None:
        """Take the run as it is now with a sample of every slot, `at_once` or once a second."""
        passed_s = snapshot.now_unix_s - self._sampled_at_unix_s
        # It is below 0 where the clock of the machine was set back.
        if not at_once and 0.0 <= passed_s < SAMPLE_EVERY_S:
            return
        self._sampled_at_unix_s = snapshot.now_unix_s
        self._status = replace(
            self._status,
            elapsed_s=finite(snapshot.elapsed_s) or 0.0,
            updated_at_unix_s=snapshot.now_unix_s,
            nodes_seen=snapshot.nodes_seen,
            notices=snapshot.notices,
            incomplete=self.incomplete,
        )
        self._put("run", "status", self._status)
        if len(self._samples) + len(snapshot.rows) > SAMPLES_KEPT:
            self.incomplete = True  # counters are totals over the run: the gap falsifies nothing
        # In the order of their key, new lines fill the pages of the table; in another one pages
        # stay half empty.
        rows = sorted(snapshot.rows, key=lambda row: row.slot)
        self._samples.extend(_sample(row, snapshot.now_unix_s) for row in rows)
        known = (row for row in rows if row.slot in self._slots)
        self.slots([replace(self._slots[row.slot], row=row) for row in known])

    def commit(self, patience_s: float = _PATIENCE_S) -> bool:
        """Write all that waits in one transaction; return whether nothing waits any more.

        Shortly after a failure nothing is tried.
        """
        if not (self._waiting or self._samples):
            return True
        if self._monotonic_s() < self._retry_at_s:
            return False
        try:
            self._write(self._connected(patience_s))
        except (sqlite3.Error, OSError) as failure:
            self.problem = f"the record of the run cannot be written to {self._path}: {failure}"
            self._retry_at_s = self._monotonic_s() + RETRY_AFTER_S
            self._disconnect()  # which rolls back; a fresh connection is the surest way back
            return False
        self.problem = None
        self._waiting.clear()
        self._samples.clear()
        return True

    def end(
        self, outcome: str, exit_code: int, error: str | None, faults: Sequence[Mapping[str, Any]]
    ) -> None:
        """Write how the run, which has begun, ended, as in the summary, and close the file.

        `faults` are those that this head injected, each with what became of it; those of the heads
        before it stay.
        """
        told: dict[str, Any] = {"outcome": outcome, "exit_code": exit_code, "error": error}
        every = (*self._status.faults, *faults)
        # Whether anything was lost is known only now.
        status = replace(self._status, faults=every, incomplete=self.incomplete, **told)
        self._put("run", "status", status)
        self.slots([*self._slots.values()])  # what has waited for a sample
        self.close()

    def close(self) -> None:
        """Write what waits, and close the file. One remains, unless it is read just now."""
        self._retry_at_s = float("-inf")
        self.incomplete |= not self.commit(_LONG_PATIENCE_S)
        if self._connection is not None:
            # Without a write-ahead log the file can be read also where nothing can be written.
            with suppress(sqlite3.Error):
                self._connection.execute("PRAGMA journal_mode = DELETE")
        self._disconnect()

    def _put(self, table: str, key: str | int, value: object) -> None:
        self._waiting[table, key] = as_json(value)

    def _write(self, connection: sqlite3.Connection) -> None:
        # A job that was ended or begun must not come back; what a slot counted may.
        is_of_queue = any(table == "jobs" or key == "queue" for table, key in self._waiting)
        connection.execute(f"PRAGMA synchronous = {'FULL' if is_of_queue else 'NORMAL'}")
        connection.execute("BEGIN IMMEDIATE")
        for (table, key), text in self._waiting.items():
            connection.execute(_PUT.format(table), (key, text))
        connection.executemany(_PUT_SAMPLE, self._samples)
        connection.execute("COMMIT")

    def _connected(self, patience_s: float) -> sqlite3.Connection:
        if self._connection is None:
            # SQLite would make it, and with it the files beside it, readable by others.
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            # Transactions are begun by hand: Python would begin one that a reader can spoil.
            self._connection = sqlite3.connect(self._path, patience_s, isolation_level=None)
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("BEGIN IMMEDIATE")
            for statement in _CREATE:
                self._connection.execute(statement)
            self._connection.execute("COMMIT")
        self._connection.execute(f"PRAGMA busy_timeout = {patience_s * 1000:.0f}")
        return self._connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:  # noqa: ANN401 - a dataclass
    return TypeAdapter(kind)


def as_json(value: Any) -> str:  # noqa: ANN401 - a record, or what JSON knows
    """Return a value as JSON, exactly if JSON can hold it, else made harmless; of a record, without
    what has its default value.

    In ASCII: so a name of a file that is no UTF-8 comes back, too.
    """
    try:
        kind, told = cast("Any", type(value)), value
        if not isinstance(value, dict):
            told = _adapter(kind).dump_python(value, mode="json", exclude_defaults=True)
        return json.dumps(told, separators=(",", ":"))
    except (ValueError, TypeError, RecursionError):  # thousands of digits, a circle
        return json.dumps(harmless(value if isinstance(value, dict) else asdict(value)))


def from_json(kind: type[_Value], text: str) -> _Value:
    """Return a dataclass that `as_json` has written; `ValueError`: it is none of this kind."""
    adapter: TypeAdapter[_Value] = _adapter(cast("Any", kind))
    return adapter.validate_python(json.loads(text))


def _sample(row: Row, at_unix_s: float) -> _Sample:
    return at_unix_s, *(_column(FIELDS[key].value(row)) for key in _SAMPLED)


def _column(value: str | int | float | None) -> str | int | float | None:
    """Return a value as SQLite takes it: an integer of more than 64 bits is unknown."""
    return None if isinstance(value, int) and abs(value) >= 2**63 else value


@contextmanager
def reading(folder: Path) -> Iterator[sqlite3.Connection]:
    """Open the store of a run folder read-only for one consistent look; its head is not disturbed.

    `NothingStoredError`: there is none, or nothing in it yet; `ArchiveError`: it is of another
    version, or what is done with it fails because it is damaged.
    """
    path = folder / STORE_NAME
    if not folder.is_dir():
        raise ArchiveError(
            f"there is no run folder {folder}; `python -m orchestrator runs` lists those there are"
        )
    if not os.path.lexists(path):
        raise NothingStoredError(folder, STORE_NAME)
    if path.is_symlink() or not path.is_file():  # opening a pipe would wait for its other end
        raise ArchiveError(f"{path} cannot be read: it is no regular file")
    uri, patience_s = f"{path.absolute().as_uri()}?mode=ro", _LONG_PATIENCE_S
    try:
        with closing(sqlite3.connect(uri, patience_s, isolation_level=None, uri=True)) as store:
            store.execute("BEGIN")
            if store.execute("SELECT 1 FROM sqlite_master").fetchone() is None:
                raise NothingStoredError(folder, STORE_NAME)
            (found,) = store.execute("PRAGMA user_version").fetchone()
            if found != SCHEMA_VERSION:
                versions = f"schema {found}, this one reads {SCHEMA_VERSION}"
                raise ArchiveError(
                    f"{path} was written by another version of this program ({versions}): go on "
                    "with that one, or begin another run (a queue: `jobs run FILE --new`)"
                )
            yield store
    except _DAMAGE as failure:
        raise ArchiveError(
            f"{path} cannot be read, it is damaged or no record of a run: {failure}; events.jsonl "
            "of the run has what happened as text, and moving the run's folder away takes it out "
            "of the list"
        ) from failure
