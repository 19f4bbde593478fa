"""The store of a run, `run.sqlite`: its slots, the jobs of its queue, samples, answered commands.

Only the head writes it. Changes wait in memory until `commit`, once per turn, writes them in one
transaction before the head acts. So a reader never sees half of a turn, and a killed head loses at
most its last turn. While the disk is full or the file is locked, `problem` says so, the run
continues, and the next successful commit writes all that waits. A turn that changes jobs survives a
power cut; a power cut may lose the last seconds of other turns. Does not interpret what it stores
(`archive.py`, `jobs.py`, `history.py`), and stores no events (`events.py`).
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
"""Name of the store's file in the run folder."""
SCHEMA_VERSION: Final = 6
"""Increases when a reader of the version before could misread the tables."""

SAMPLE_EVERY_S: Final = 1.0
"""Shortest time between two samples of a slot."""
RETRY_AFTER_S: Final = 1.0
"""Pause after a failed write, so that a locked file does not delay the head in every turn."""
SAMPLES_KEPT: Final = 3_000
"""Most samples that wait while the store cannot write; then the oldest are dropped."""

_PATIENCE_S: Final = 0.1
"""How long another program's lock may delay the head."""
_LONG_PATIENCE_S: Final = 2.0
"""The same at the end of a run, when there is no second try, and for a reader."""

#: Keys of a row that are sampled.
_SAMPLED: Final = ("slot", *(key for key, each in FIELDS.items() if each.sampled))

#: Type REAL: SQLite stores a whole number there in 0 to 6 bytes instead of 8.
_SAMPLED_COLUMNS: Final = ", ".join(
    name if name in {"slot", "state"} else f"{name} REAL" for name in _SAMPLED
)
#: The key column of each table that stores one JSON value per row.
_KEYS: Final = {
    "run": "key TEXT",
    "slots": "slot TEXT",
    "jobs": "number INTEGER",
    "commands": "id TEXT",
}
_CREATE: Final = (
    # With a rowid, rows keep the order of insertion: slots that of the plan.
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
# OR REPLACE: the last sample of a run may have the same time as the one before.
_VALUES: Final = ", ".join("?" * (1 + len(_SAMPLED)))
_PUT_SAMPLE: Final = f"INSERT OR REPLACE INTO samples VALUES ({_VALUES})"  # noqa: S608

#: Exceptions that a damaged file causes.
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
    """Facts about a run that are known before its first step, for showing it and for resuming it
    after its head was killed.
    """

    run_id: str
    started_at_unix_s: float
    """When the first head began."""
    duration_s: float
    """Planned length."""
    elapsed_s: float = 0.0
    """Seconds that earlier heads have worked before this head began."""
    mode: str
    device: str | None
    one_machine: bool
    """Device and machine as in `core.placement.Target`."""
    config_yaml: str
    chaos: str | None
    """Value of `--chaos` for this head, else for an earlier one."""
    nodes_planned: tuple[str, ...]
    head_pid: int
    head_started: str | None
    """When the head's process began, in kernel ticks; with the pid it identifies the process."""
    host: str
    """Name of the head's machine: the pid is valid only there."""
    heads: int = 1
    """Number of heads so far, this one included; the store counts them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The status of a run at its last sample, or at its end."""

    elapsed_s: float = 0.0
    """Seconds worked by all heads."""
    updated_at_unix_s: float | None = None
    """Time of the last snapshot; `None` before the first."""
    nodes_seen: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    incomplete: bool = False
    """Whether the record of any head has a gap."""
    outcome: str | None = None
    """good, degraded, interrupted or failed; `None`: it has not ended, or its head was killed."""
    exit_code: int | None = None
    error: str | None = None
    faults: tuple[Mapping[str, Any], ...] = ()
    """Each injected fault with its recovery; a head that was killed has stored none."""
    team_generation: int = 0
    """The last generation for which a leader was chosen; 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRecord:
    """One slot after its last status, for showing it and for resuming it by another head."""

    row: Row
    incarnation: int
    resume: PolicyState | None = None
    orders: UserOrders = NOTHING_ASKED

    @property
    def slot(self) -> str:
        """The name of the slot."""
        return self.row.slot


class RunStore:
    """Stores a run with its slots, samples, queue and commands. No method raises."""

    def __init__(self, path: Path, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        """Open no file yet; the first commit creates it, readable only by its user.

        `monotonic_s` is the clock for the pause after a failure.
        """
        self._path = path
        self._monotonic_s = monotonic_s
        self._connection: sqlite3.Connection | None = None
        self._retry_at_s = self._sampled_at_unix_s = float("-inf")
        self._status = RunStatus()
        self._slots: dict[str, SlotRecord] = {}
        self._queue: Queue | None = None
        """The last queue that was given to `queue`."""
        self._waiting: dict[_Key, str] = {}
        """The newest value of each row that the next commit writes."""
        self._samples: deque[_Sample] = deque(maxlen=SAMPLES_KEPT)
        self.problem: str | None = None
        """A sentence for the user while the store cannot write, else `None`."""
        self.incomplete = False
        """Whether the record of this or an earlier head has a gap."""

    def begin(self, facts: RunFacts) -> None:
        """Store the facts of the run. A run that is stored already gets one more head, and counts
        as not ended.
        """
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
        """Take the present state of slots, for the next commit, or without `at_once` for the commit
        with their next sample.
        """
        for record in records:
            self._slots[record.slot] = record
            if at_once:
                self._put("slots", record.slot, record)

    def queue(self, queue: Queue) -> None:
        """Take the changes of a queue."""
        before = self._queue
        known = {} if before is None else before.standings
        for name, standing in queue.standings.items():
            if known.get(name) is not standing:
                self._put("jobs", standing.number, standing)
        if before is None or queue.facts != before.facts:
            self._put("run", "queue", queue.facts)
        self._queue = queue

    def outlook(self, reasons: Mapping[str, tuple[str, float | None]]) -> None:
        """Take why each job in line waits, and its expected start in world seconds, for viewers."""
        self._put("run", "outlook", dict(reasons))

    def command(self, identity: str, content: Mapping[str, Any]) -> None:
        """Take a command of the user with its `answer`; its effect on a slot is in the slot's
        record.
        """
        self._put("commands", identity, dict(content))

    def has_command(self, identity: str) -> bool:
        """Return whether this or an earlier head has stored a command with this id."""
        if ("commands", identity) in self._waiting:
            return True
        query, found = "SELECT 1 FROM commands WHERE id = ?", None
        with suppress(sqlite3.Error, OSError):  # `commit` says why
            found = self._connected(_PATIENCE_S).execute(query, (identity,)).fetchone()
        return found is not None

    def team(self, generation: int) -> None:
        """Take the generation of a team, before the head names its leader."""
        newest = max(generation, self._status.team_generation)  # a queue may have several teams
        self._status = replace(self._status, team_generation=newest)
        self._put("run", "status", self._status)

    def update(self, snapshot: Snapshot, *, at_once: bool = False) -> None:
        """Take a snapshot with a sample of every slot, `at_once` or every `SAMPLE_EVERY_S`."""
        passed_s = snapshot.now_unix_s - self._sampled_at_unix_s
        # Negative if the clock of the machine was set back.
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
            self.incomplete = True  # a gap in the samples; counters are totals and stay right
        # Inserts in the order of the key fill the pages of the table; others leave them half empty.
        rows = sorted(snapshot.rows, key=lambda row: row.slot)
        self._samples.extend(_sample(row, snapshot.now_unix_s) for row in rows)
        known = (row for row in rows if row.slot in self._slots)
        self.slots([replace(self._slots[row.slot], row=row) for row in known])

    def commit(self, patience_s: float = _PATIENCE_S) -> bool:
        """Write all that waits in one transaction; return whether nothing waits any more.

        Within `RETRY_AFTER_S` after a failure, do not try.
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
            self._disconnect()  # rolls back; a new connection recovers from any state
            return False
        self.problem = None
        self._waiting.clear()
        self._samples.clear()
        return True

    def end(
        self, outcome: str, exit_code: int, error: str | None, faults: Sequence[Mapping[str, Any]]
    ) -> None:
        """Write the outcome of a run that has begun, as in its summary, and close the file.

        `faults` are the faults that this head injected, each with its recovery; faults of earlier
        heads stay stored.
        """
        end: dict[str, Any] = {"outcome": outcome, "exit_code": exit_code, "error": error}
        every = (*self._status.faults, *faults)
        # `incomplete` is final only now.
        status = replace(self._status, faults=every, incomplete=self.incomplete, **end)
        self._put("run", "status", status)
        self.slots([*self._slots.values()])  # also those that wait for a sample
        self.close()

    def close(self) -> None:
        """Write all that waits, and close the store. It becomes one file, unless a reader has it
        open.
        """
        self._retry_at_s = float("-inf")
        self.incomplete |= not self.commit(_LONG_PATIENCE_S)
        if self._connection is not None:
            # Without a write-ahead log, the file is readable on a read-only file system, too.
            with suppress(sqlite3.Error):
                self._connection.execute("PRAGMA journal_mode = DELETE")
        self._disconnect()

    def _put(self, table: str, key: str | int, value: object) -> None:
        self._waiting[table, key] = as_json(value)

    def _write(self, connection: sqlite3.Connection) -> None:
        # Changes of jobs must survive a power cut; counts of slots need not.
        is_of_queue = any(table == "jobs" or key == "queue" for table, key in self._waiting)
        connection.execute(f"PRAGMA synchronous = {'FULL' if is_of_queue else 'NORMAL'}")
        connection.execute("BEGIN IMMEDIATE")
        for (table, key), text in self._waiting.items():
            connection.execute(_PUT.format(table), (key, text))
        connection.executemany(_PUT_SAMPLE, self._samples)
        connection.execute("COMMIT")

    def _connected(self, patience_s: float) -> sqlite3.Connection:
        if self._connection is None:
            # SQLite would make the file, and those beside it, readable by other users.
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            # No implicit transactions: Python's are deferred, so a reader can make them fail.
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
    """Return a dataclass or dict as JSON: exactly if JSON can hold it, else through `harmless`.
    Fields of a dataclass with their default value are left out.

    The result is ASCII, so names of files that are not UTF-8 can be read back.
    """
    try:
        kind, plain = cast("Any", type(value)), value
        if not isinstance(value, dict):
            plain = _adapter(kind).dump_python(value, mode="json", exclude_defaults=True)
        return json.dumps(plain, separators=(",", ":"))
    except (ValueError, TypeError, RecursionError):  # thousands of digits, a cycle
        return json.dumps(harmless(value if isinstance(value, dict) else asdict(value)))


def from_json(kind: type[_Value], text: str) -> _Value:
    """Return a dataclass from the text of `as_json`; `ValueError`: it is not of this kind."""
    adapter: TypeAdapter[_Value] = _adapter(cast("Any", kind))
    return adapter.validate_python(json.loads(text))


def _sample(row: Row, at_unix_s: float) -> _Sample:
    return at_unix_s, *(_column(FIELDS[key].value(row)) for key in _SAMPLED)


def _column(value: str | int | float | None) -> str | int | float | None:
    """Return a value for SQLite; an integer that does not fit into 64 bits becomes `None`."""
    return None if isinstance(value, int) and abs(value) >= 2**63 else value


@contextmanager
def reading(folder: Path) -> Iterator[sqlite3.Connection]:
    """Open the store of a run folder read-only, in one transaction that does not block its head.

    `NothingStoredError`: there is no store, or it is empty; `ArchiveError`: it is of another
    version, or reading fails because it is damaged.
    """
    path = folder / STORE_NAME
    if not folder.is_dir():
        raise ArchiveError(
            f"there is no run folder {folder}; `python -m orchestrator runs` lists all runs"
        )
    if not os.path.lexists(path):
        raise NothingStoredError(folder, STORE_NAME)
    if path.is_symlink() or not path.is_file():  # opening a pipe would block
        raise ArchiveError(f"{path} cannot be read: it is not a regular file")
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
                    f"{path} was written by another version of this program ({versions}): continue "
                    "with that one, or begin another run (a queue: `jobs run FILE --new`)"
                )
            yield store
    except _DAMAGE as failure:
        raise ArchiveError(
            f"{path} cannot be read, it is damaged or not a record of a run: {failure}; "
            "events.jsonl of the run has its events as text, and moving the run's folder away "
            "removes it from the list"
        ) from failure
