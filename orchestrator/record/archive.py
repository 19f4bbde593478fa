"""Reads a run store back: while the run goes, after its end, and after its head was killed.

A file may come from anywhere: it can only cause an `ArchiveError`. Does not open files
(`reading.py`), nor cover run folders (`folders.py`) or values over time (`history.py`).
"""

from __future__ import annotations

import json
import math
import os
import shutil
import socket
import sqlite3
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import psutil
from pydantic import ConfigDict, TypeAdapter

from orchestrator.core.slot import slot_state
from orchestrator.errors import ArchiveError, NothingStoredError
from orchestrator.record.command_file import any_waits
from orchestrator.record.jobs import QUEUE_NAME, QueueReader, QueueSnapshot, state_of
from orchestrator.record.model import FIELDS, Row, Snapshot
from orchestrator.record.reading import DAMAGE, explained, opened
from orchestrator.record.store import (
    COMMANDS_KNOWN,
    COUNTERS,
    SCHEMA_VERSION,
    STORE_NAME,
    RunFacts,
    SlotRecord,
)
from workers.files import read_small
from workers.host.processes import is_alive
from workers.messages import StepCounts, WorkerState

NOTE_NAME = "head.json"
"""The note in a run folder that says which process works on it."""
LEAST_TO_RESUME_S = 1.0
"""Less of its planned length is not worth starting a cluster for."""

_NOTE_MOST_BYTES = 64 * 2**10
_SLOTS_MOST = 20_000
"""More than any cluster this program plans for."""
EVENTS_MOST = 10_000
_NEW_EVENTS_MOST = 1_000

#: The head writes several times a second. Its store is late when nothing came for so long, and, on
#: another machine where its process cannot be looked up, the head counts as gone after the second.
LATE_AFTER_S = 5.0
_GONE_AFTER_S = 30.0

#: What a store is read from.
_TABLES = ("meta", "runs", "slots", "progress", "samples", "events", "commands")

_hints = cache(get_type_hints)


@contextmanager
def reading(folder: Path, most_s: float | None = None) -> Iterator[sqlite3.Connection]:
    """Open the store of a run for one consistent look, which may take `most_s`.

    Raises:
        NothingStoredError: There is none, or nothing in it yet.
        ArchiveError: It cannot be opened, or what is done with it fails because it is damaged.
    """
    if not folder.is_dir():
        raise ArchiveError(
            f"there is no run folder {folder}; `python -m orchestrator runs` lists those there are"
        )
    with opened(folder / STORE_NAME, _TABLES, SCHEMA_VERSION, most_s) as store:
        yield store


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEvent:
    """One line of the event log."""

    number: int
    """Counts the events of a run."""
    at: str
    """ISO 8601 in UTC."""
    event: str
    slot: str | None
    details: Mapping[str, Any]

    @property
    def at_unix_s(self) -> float | None:
        """Its moment; `None` where `at` is none."""
        try:
            return datetime.fromisoformat(self.at).timestamp()
        except (ValueError, OverflowError, OSError):
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """A run as its store knows it."""

    folder: Path
    facts: RunFacts
    """With the total time worked as `elapsed_s`."""
    outcome: str
    """good, degraded, interrupted or failed as the run said itself; else running, or interrupted:
    its head is gone.
    """
    exit_code: int | None
    """`None` for a run that did not record how it ended."""
    error: str | None
    elapsed_s: float
    updated_at_unix_s: float | None
    """Of the last snapshot; `None` before the first."""
    nodes_seen: tuple[str, ...]
    notices: tuple[str, ...]
    restart_count: int
    """As the run recorded it in its last snapshot; `snapshot` has the newer sum of its slots."""
    incomplete: bool
    heads: int
    faults: tuple[Mapping[str, Any], ...]
    """Each injected fault with what became of it, the last ten thousand; those of a head are known
    once it has ended by itself."""
    slots: tuple[SlotRecord, ...]

    @property
    def remaining_s(self) -> float:
        """Seconds of the planned length that have not been worked."""
        return max(0.0, self.facts.duration_s - self.elapsed_s)

    @property
    def was_refused(self) -> bool:
        """Whether an error ended it before its planned time began; a queue keeps its jobs."""
        is_queue = (self.folder / QUEUE_NAME).exists()
        return self.outcome == "failed" and self.elapsed_s == 0 and not is_queue

    @property
    def is_done(self) -> bool:
        """Whether every slot, or every job of a queue, has finished all that there was to do, and
        no command waits for the queue.
        """
        queue = self.folder / QUEUE_NAME
        if queue.exists():
            return self.outcome == "good" and not any_waits(queue)
        return bool(self.slots) and all(slot.state == WorkerState.DONE for slot in self.slots)

    @property
    def is_resumable(self) -> bool:
        """Whether another head can continue it: it began, has ended in any way, and there is
        something left to do.
        """
        over = self.outcome == "running" or self.was_refused or self.is_done
        return not over and self.remaining_s >= LEAST_TO_RESUME_S

    @property
    def was_killed(self) -> bool:
        """Whether its head ended without recording an outcome: it was killed, or the machine went
        down.
        """
        return self.outcome == "interrupted" and self.exit_code is None

    def snapshot(self) -> Snapshot:
        """The last picture of the run, for every watcher.

        Slots are written at every turn of the head, the figures of the run less often, so the sums
        of the slots are used.
        """
        restarts = self.restart_count
        if self.slots:
            restarts = sum(int(slot.counters.get("restarts", 0)) for slot in self.slots)
        facts, updated_at_unix_s = self.facts, self.updated_at_unix_s
        return Snapshot(
            run_id=facts.run_id,
            started_at=facts.started_at_unix_s,
            now_unix_s=facts.started_at_unix_s if updated_at_unix_s is None else updated_at_unix_s,
            elapsed_s=self.elapsed_s,
            duration_s=facts.duration_s,
            nodes_planned=facts.nodes_planned,
            nodes_seen=self.nodes_seen,
            rows=tuple(map(row_of, self.slots)),
            notices=self.notices,
            restart_count=restarts,
        )


def read_run(folder: Path) -> StoredRun:
    """Return the run in a run folder, as it is now.

    `NothingStoredError` where nothing is stored in it yet.
    """
    with reading(folder) as store:
        line = store.execute("SELECT * FROM runs ORDER BY rowid DESC LIMIT 1").fetchone()
        if line is None:
            raise NothingStoredError(folder, STORE_NAME)
        slots = store.execute(
            "SELECT * FROM slots JOIN progress USING (slot) ORDER BY slots.rowid LIMIT ?",
            [_SLOTS_MOST],
        ).fetchall()
    with explained(folder / STORE_NAME):
        updated_at_unix_s = _value(line, "updated_at_unix_s", float | None)
        return _run(folder, line, tuple(_slot(slot, updated_at_unix_s) for slot in slots))


def read_events(
    folder: Path,
    names: Collection[str] = (),
    *,
    after: int = 0,
    slot: str | None = None,
    limit: int = EVENTS_MOST,
) -> tuple[StoredEvent, ...]:
    """Return the last events after the one of a number, in the order in which they happened.

    Of some names if any are given, and of one slot if one is.
    """
    where, values = "id > ?", [after, *names]
    if names:
        where += f" AND event IN ({', '.join('?' * len(names))})"
    if slot is not None:
        where += " AND slot = ?"
        values.append(slot)
    with reading(folder) as store:
        return events_of(store, where, values, min(limit, EVENTS_MOST))


def read_answers(folder: Path) -> dict[str, Mapping[str, Any]]:
    """Return what the last commands of the user were answered, by their ids."""
    with reading(folder) as store:
        query = "SELECT id, answer FROM commands ORDER BY rowid DESC LIMIT ?"
        lines = store.execute(query, [COMMANDS_KNOWN]).fetchall()
        return {line["id"]: _value(line, "answer", Mapping[str, Any]) for line in reversed(lines)}


def read_answer(folder: Path, identity: str) -> Mapping[str, Any] | None:
    """Return what the command with this id was answered; `None`: nothing so far."""
    with reading(folder) as store:
        line = store.execute("SELECT answer FROM commands WHERE id = ?", [identity]).fetchone()
        return None if line is None else _value(line, "answer", Mapping[str, Any])


def events_of(
    store: sqlite3.Connection, where: str, values: Sequence[object], limit: int
) -> tuple[StoredEvent, ...]:
    """Return the last events that meet a condition in SQL, in the order in which they happened."""
    query = (
        f"SELECT id AS number, at, event, slot, details FROM events WHERE {where} ORDER BY id "  # noqa: S608 - conditions of this package
        "DESC LIMIT ?"
    )
    lines = store.execute(query, (*values, limit)).fetchall()
    return tuple(StoredEvent(**_fields(line, StoredEvent)) for line in reversed(lines))


def head_of(folder: Path) -> psutil.Process | None:
    """Return the head of a run folder if it still runs, by the note in it; `None` as well if it is
    this process.

    The same process id, and not started after the note was written; started exactly then, where the
    note says when.
    """
    note = folder / NOTE_NAME
    try:
        content = json.loads(read_small(note, _NOTE_MOST_BYTES))
        pid = content["pid"]
        if type(pid) is not int or pid <= 1:  # true is an int, and 1 is init
            return None
        process = psutil.Process(pid)
        is_head = process.create_time() <= note.stat().st_mtime + 1.0 and pid != os.getpid()
        began = content.get("started")
    except (*DAMAGE, OSError, AttributeError, psutil.Error):
        return None
    is_head &= began is None or is_alive(pid, began)
    return process if is_head and not (folder / "summary.json").exists() else None


def _run(folder: Path, line: sqlite3.Row, slots: tuple[SlotRecord, ...]) -> StoredRun:
    facts = RunFacts(**_fields(line, RunFacts))
    outcome = _value(line, "outcome", str | None)
    if outcome is None:
        outcome = "running" if _is_running(folder, facts) else "interrupted"
    others = _fields(line, StoredRun, besides=("folder", "facts", "outcome", "slots"))
    return StoredRun(folder=folder, facts=facts, outcome=outcome, slots=slots, **others)


def _is_running(folder: Path, facts: RunFacts) -> bool:
    if facts.host != socket.gethostname():
        return False  # a process id means nothing on another machine
    if facts.head_started is None:
        return head_of(folder) is not None
    return is_alive(facts.head_pid, facts.head_started)


def _slot(line: sqlite3.Row, updated_at_unix_s: float | None) -> SlotRecord:
    counters = {name: _counter(line, name) for name in COUNTERS}
    values = _fields(line, SlotRecord, besides=("counters",))
    slot_state(values["state"])
    row = {**values["row"], **{name: counters[name] for name in COUNTERS if name in FIELDS}}
    row["success_rate"] = success_rate(counters)
    if values["heard_at_unix_s"] is not None and updated_at_unix_s is not None:
        row["heartbeat_age_s"] = max(0.0, updated_at_unix_s - values["heard_at_unix_s"])
    return SlotRecord(**{**values, "row": row}, counters=counters)


def success_rate(counters: Mapping[str, Any]) -> float | None:
    """Return that of a slot, from its counters among these values."""
    known = {
        name: counters[name] for name in StepCounts.__slots__ if type(counters.get(name)) is int
    }
    return StepCounts(**known).success_rate


def _counter(line: sqlite3.Row, name: str) -> int | float:
    value = line[name]  # a worker may have counted something that is not finite
    return value if isinstance(value, int | float) and 0 <= value < math.inf else 0


def row_of(record: SlotRecord) -> Row:
    """Return the slot's row.

    A key that is missing or makes no sense is left unknown, the others are kept.
    """
    own = {"slot": record.slot, "node": record.node, "state": record.state, "reason": record.reason}
    return Row.from_dict({**record.row, **own})


@cache
def _adapter(hint: Any) -> TypeAdapter[Any]:  # noqa: ANN401 - a type or a union
    # A policy's state may hold infinity, and another head must go on from the very same numbers.
    is_finite = hint in (float, float | None)
    return TypeAdapter(hint, config=ConfigDict(allow_inf_nan=not is_finite))


def _fields(line: sqlite3.Row, kind: type, besides: Collection[str] = ()) -> dict[str, Any]:
    return {
        name: _value(line, name, hint) for name, hint in _hints(kind).items() if name not in besides
    }


def _value(line: sqlite3.Row, name: str, hint: Any) -> Any:  # noqa: ANN401 - what the hint says
    """Return a column's value if it fits the hint of a field: SQLite takes anything anywhere."""
    value = line[name]
    if type(value) is hint and hint is not float:  # nearly all of them
        return value
    try:
        if isinstance(value, str) and hint not in (str, str | None):
            # Not by pydantic, which refuses the escape of a lone surrogate, as in a file name.
            value = json.loads(value)
        return _adapter(hint).validate_python(value)
    except ValueError as wrong:
        raise ValueError(f"{name} cannot be {line[name]!r:.80}") from wrong


class Freshness(StrEnum):
    """How far what is shown can be believed to be so now."""

    LIVE = "live"
    LATE = "late"
    HEAD_GONE = "head gone"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A run as its store tells it at one look."""

    number: int
    """Counts the frames that differ in what was read."""
    run: StoredRun
    snapshot: Snapshot
    events: tuple[StoredEvent, ...]
    """What has happened since the frame before; of the first frame, the last events."""
    freshness: Freshness
    late_s: float
    """Seconds since the store last changed."""
    missed: tuple[str, ...] = ()
    """What fell short, of a run that has ended and was not good."""
    queue: QueueSnapshot | None = None
    """The queue of jobs, where the run has one."""
    disk_free_bytes: int | None = None
    """Of the file system with the run folder; `None` where it does not say."""


class Follower:
    """Looks at one run folder again and again."""

    def __init__(
        self,
        folder: Path,
        monotonic_s: Callable[[], float] = time.monotonic,
        unix_s: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._monotonic_s = monotonic_s
        self._unix_s = unix_s
        self._here = socket.gethostname()
        self._queue_reader = QueueReader(folder)
        self._state: tuple[tuple[int, int, int] | None, ...] = ()
        self._frame: Frame | None = None
        self._updated_at_unix_s: float | None = None
        self._changed_at_s = monotonic_s()
        self._event = 0

    def look(self) -> Frame:
        """Return the run as it is now.

        Raises:
            NothingStoredError: The head has not stored anything yet.
            ArchiveError: The folder or its store cannot be read.
        """
        state = tuple(state_of(self._folder / f"{STORE_NAME}{suffix}") for suffix in ("", "-wal"))
        before, now_s = self._frame, self._monotonic_s()
        if before is not None and (state == self._state or before.freshness is Freshness.ENDED):
            # Whether its head still lives does not show in the store.
            run = before.run
            if (
                before.freshness is not Freshness.ENDED
                and now_s - self._changed_at_s > LATE_AFTER_S
            ):
                run = read_run(self._folder)
            freshness, late_s = self._judged(run, now_s)
            self._frame = replace(
                before,
                run=run,
                events=(),
                freshness=freshness,
                late_s=late_s,
                queue=self._queue(before.snapshot, freshness),
                disk_free_bytes=_disk_free_bytes(self._folder),
            )
            return self._frame
        run = read_run(self._folder)
        events = read_events(self._folder, after=self._event, limit=_NEW_EVENTS_MOST)
        self._state = state
        self._event = max((self._event, *(event.number for event in events)))
        if before is None and run.updated_at_unix_s is not None and run.facts.host == self._here:
            self._changed_at_s = now_s - max(0.0, self._unix_s() - run.updated_at_unix_s)
        elif run.updated_at_unix_s != self._updated_at_unix_s or events:
            self._changed_at_s = now_s
        self._updated_at_unix_s = run.updated_at_unix_s
        freshness, late_s = self._judged(run, now_s)
        snapshot = run.snapshot()
        self._frame = Frame(
            number=1 if before is None else before.number + 1,
            run=run,
            snapshot=snapshot,
            events=events,
            freshness=freshness,
            late_s=late_s,
            missed=missed_of(events) or (() if before is None else before.missed),
            queue=self._queue(snapshot, freshness),
            disk_free_bytes=_disk_free_bytes(self._folder),
        )
        return self._frame

    def _queue(self, snapshot: Snapshot, freshness: Freshness) -> QueueSnapshot | None:
        is_alive = freshness in {Freshness.LIVE, Freshness.LATE}
        return self._queue_reader.look(snapshot.rows, self._unix_s(), is_alive=is_alive)

    def _judged(self, run: StoredRun, now_s: float) -> tuple[Freshness, float]:
        late_s = max(0.0, now_s - self._changed_at_s)
        if run.outcome != "running" and not run.was_killed:
            return Freshness.ENDED, late_s
        is_foreign = run.facts.host != self._here
        if (late_s > _GONE_AFTER_S) if is_foreign else run.was_killed:
            return Freshness.HEAD_GONE, late_s
        return (Freshness.LATE if late_s > LATE_AFTER_S else Freshness.LIVE), late_s


def _disk_free_bytes(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def missed_of(events: Iterable[StoredEvent]) -> tuple[str, ...]:
    """Return what fell short, as the end of a run among these events says."""
    ends = [event.details.get("missed") for event in events if event.event == "run_ended"]
    return tuple(map(str, ends[-1])) if ends and isinstance(ends[-1], list) else ()
