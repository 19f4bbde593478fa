"""Reads a run store back: while the run goes, after its end, and after its head was killed.

Covers turning a store into values, and the outcome of a run that did not record one. Does not cover writing
(`store.py`), opening (`opening.py`), which run folders there are (`folders.py`), nor showing anything. A file may come
from anywhere: the worst that it can cause is an `ArchiveError`.
"""

from __future__ import annotations

import json
import math
import socket
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.core.slot import slot_state
from orchestrator.errors import NothingStoredError
from orchestrator.watch.head_process import head_of, lives
from orchestrator.watch.model import ROW_KEYS, Row, Snapshot
from orchestrator.watch.opening import explained, reading
from orchestrator.watch.records import COUNTERS, STORE_NAME, RunFacts, SlotRecord

LEAST_TO_RESUME_S = 1.0
"""Less of its planned length is not worth starting a cluster for."""

_SLOTS_MOST = 20_000
"""More than any cluster this program plans for."""
_EVENTS_MOST = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredEvent:
    """One line of the event log."""

    at: str
    """ISO 8601 in UTC."""
    event: str
    slot: str | None
    details: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """A run as its store knows it."""

    folder: Path
    facts: RunFacts
    """With the total time worked as `elapsed_s`, so that another head can continue from them."""
    outcome: str
    """good, degraded, interrupted or failed as the run said itself; else running, or interrupted: its head is gone."""
    exit_code: int | None
    """`None` for a run that did not record how it ended."""
    error: str | None
    elapsed_s: float
    updated_at_unix_s: float | None
    """Of the last snapshot; `None` before the first."""
    nodes_seen: tuple[str, ...]
    notices: tuple[str, ...]
    restart_count: int
    """As `steps_lost_upper_bound`."""
    steps_lost_upper_bound: int | None
    """As the run recorded it in its last snapshot; `snapshot` has the newer sum of its slots."""
    incomplete: bool
    """Samples or events are missing."""
    heads: int
    """How many heads have worked on it."""
    faults: tuple[Mapping[str, Any], ...]
    """Each injected fault with what became of it, the last ten thousand; those of a head are known once it has ended
    by itself."""
    slots: tuple[SlotRecord, ...]
    """In the order of the plan."""

    @property
    def remaining_s(self) -> float:
        """Seconds of the planned length that have not been worked."""
        return max(0.0, self.facts.duration_s - self.elapsed_s)

    @property
    def is_resumable(self) -> bool:
        """Whether another head can continue it: it has ended in any way, and there is time left."""
        return self.outcome != "running" and self.remaining_s >= LEAST_TO_RESUME_S

    @property
    def was_killed(self) -> bool:
        """Whether its head ended without recording an outcome: it was killed, or the machine went down."""
        return self.outcome == "interrupted" and self.exit_code is None

    def snapshot(self) -> Snapshot:
        """The last picture of the run, for every watcher.

        Slots are written at every turn of the head, the figures of the run less often, so the sums of the slots are
        used. Once the head has ended, slices that were under way count as lost.
        """
        lost, restarts = self.steps_lost_upper_bound, self.restart_count
        if self.slots:
            lost = sum(_count(record.counters.get("steps_lost_upper_bound")) for record in self.slots)
            restarts = sum(_count(record.counters.get("restarts")) for record in self.slots)
            if self.outcome != "running":
                lost += sum(_count(record.steps_at_risk) for record in self.slots)
        ended_at_unix_s = self.updated_at_unix_s
        if ended_at_unix_s is None:
            ended_at_unix_s = self.facts.started_at_unix_s
        return Snapshot(
            run_id=self.facts.run_id,
            started_at=self.facts.started_at_unix_s,
            now_unix_s=ended_at_unix_s,
            elapsed_s=self.elapsed_s,
            duration_s=self.facts.duration_s,
            nodes_planned=self.facts.nodes_planned,
            nodes_seen=self.nodes_seen,
            rows=tuple(_row(record) for record in self.slots),
            notices=self.notices,
            restart_count=restarts,
            steps_lost_upper_bound=lost,
        )


def read_run(folder: Path) -> StoredRun:
    """Return the run in a run folder, as it is now.

    Raises:
        NothingStoredError: There is no store in the folder, or nothing in it yet.
        ArchiveError: There is no such folder, or the store cannot be read.
    """
    with reading(folder) as store:
        found = store.execute("SELECT * FROM runs ORDER BY rowid DESC LIMIT 1").fetchone()
        if found is None:
            raise NothingStoredError(folder, STORE_NAME)
        lines = store.execute("SELECT * FROM slots ORDER BY rowid LIMIT ?", [_SLOTS_MOST]).fetchall()
        # A store of schema 1 has no such table.
        has_progress = store.execute("PRAGMA table_list(progress)").fetchone() is not None
        query = "SELECT * FROM progress LIMIT ?"
        newer = store.execute(query, [_SLOTS_MOST]).fetchall() if has_progress else []
    with explained(folder / STORE_NAME):
        progress = {line["slot"]: line for line in newer}
        updated_at_unix_s = _take(found, "updated_at_unix_s", float, None)
        return _run(folder, found, tuple(_slot(line, progress, updated_at_unix_s) for line in lines))


def read_events(folder: Path, names: Sequence[str]) -> tuple[StoredEvent, ...]:
    """Return the events of these names, in the order in which they happened; the last ten thousand.

    Raises:
        ArchiveError: As for `read_run`.
    """
    marks = ", ".join("?" * len(names))
    query = f"SELECT * FROM events WHERE event IN ({marks}) ORDER BY id DESC LIMIT ?"  # noqa: S608 - question marks
    with reading(folder) as store:
        lines = store.execute(query, (*names, _EVENTS_MOST)).fetchall()
    with explained(folder / STORE_NAME):
        return tuple(
            StoredEvent(
                at=_take(line, "at", str),
                event=_take(line, "event", str),
                slot=_take(line, "slot", str, None),
                details=_json(line, "details", dict),
            )
            for line in reversed(lines)
        )


def _run(folder: Path, line: sqlite3.Row, slots: tuple[SlotRecord, ...]) -> StoredRun:
    facts = RunFacts(
        run_id=_take(line, "run_id", str),
        started_at_unix_s=_take(line, "started_at_unix_s", float),
        duration_s=_take(line, "duration_s", float),
        elapsed_s=_take(line, "elapsed_s", float),
        min_success_rate=_take(line, "min_success_rate", float),
        mode=_take(line, "mode", str),
        device=_take(line, "device", str, None),
        one_machine=bool(_take(line, "one_machine", int)),
        config_yaml=_take(line, "config_yaml", str),
        chaos=_take(line, "chaos", str, None),
        nodes_planned=_texts(line, "nodes_planned"),
        head_pid=_take(line, "head_pid", int),
        head_started=_take(line, "head_started", str, None),
        host=_take(line, "host", str),
    )
    outcome = _take(line, "outcome", str, None)
    if outcome is None:
        outcome = "running" if _is_running(folder, facts) else "interrupted"
    faults = _json(line, "faults", list)
    if not all(isinstance(fault, dict) for fault in faults):
        raise ValueError("faults must be objects")
    return StoredRun(
        folder=folder,
        facts=facts,
        outcome=outcome,
        exit_code=_take(line, "exit_code", int, None),
        error=_take(line, "error", str, None),
        elapsed_s=facts.elapsed_s,
        updated_at_unix_s=_take(line, "updated_at_unix_s", float, None),
        nodes_seen=_texts(line, "nodes_seen"),
        notices=_texts(line, "notices"),
        restart_count=_take(line, "restart_count", int),
        steps_lost_upper_bound=_take(line, "steps_lost_upper_bound", int, None),
        incomplete=bool(_take(line, "incomplete", int)),
        heads=_take(line, "heads", int),
        faults=tuple(faults),
        slots=slots,
    )


def _is_running(folder: Path, facts: RunFacts) -> bool:
    if facts.host != socket.gethostname():
        return False  # a process id means nothing on another machine
    if facts.head_started is None:
        return head_of(folder) is not None
    return lives(facts.head_pid, facts.head_started)


def _slot(line: sqlite3.Row, progress: Mapping[str, sqlite3.Row], updated_at_unix_s: float | None) -> SlotRecord:
    record = _record(line)
    newer = progress.get(record.slot)
    if newer is None:
        return record
    counters = {**record.counters, **{name: _number(newer, name) for name in COUNTERS}}
    row = {**record.row, **{name: value for name, value in counters.items() if name in ROW_KEYS}}
    steps = sum(counters[name] for name in ("steps_ok", "steps_oom", "steps_error"))
    row["success_rate"] = counters["steps_ok"] / steps if steps else None
    heard_at_unix_s = _take(newer, "heard_at_unix_s", float, None)
    if heard_at_unix_s is not None and updated_at_unix_s is not None:
        row["heartbeat_age_s"] = max(0.0, updated_at_unix_s - heard_at_unix_s)
    return replace(
        record,
        next_sequence=_take(newer, "next_sequence", int),
        steps_at_risk=_take(newer, "steps_at_risk", int),
        counters=counters,
        row=row,
    )


def _number(line: sqlite3.Row, name: str) -> int | float:
    """Return a counter; 0 for what is none: a worker may have counted something that is not finite."""
    value = line[name]
    return value if isinstance(value, int | float) and 0 <= value < math.inf else 0


def _record(line: sqlite3.Row) -> SlotRecord:
    return SlotRecord(
        slot=_take(line, "slot", str),
        node=_take(line, "node", str),
        state=slot_state(_take(line, "state", str)).value,
        reason=_take(line, "reason", str),
        incarnation=_take(line, "incarnation", int),
        next_sequence=_take(line, "next_sequence", int),
        steps_at_risk=_take(line, "steps_at_risk", int),
        counters=_json(line, "counters", dict),
        resume=None if line["resume"] is None else _json(line, "resume", dict),
        row=_json(line, "row", dict),
    )


def _row(record: SlotRecord) -> Row:
    """Return the slot's row; a key that is missing or makes no sense is left unknown, the others are kept."""
    sure = {"slot": record.slot, "node": record.node, "state": record.state, "reason": record.reason}
    told = {key: value for key, value in record.row.items() if key not in sure}
    try:
        return Row.from_dict({**sure, **told})
    except ValueError:
        return Row.from_dict({**sure, **{key: value for key, value in told.items() if _fits(sure, key, value)}})


def _fits(sure: Mapping[str, Any], key: str, value: object) -> bool:
    try:
        Row.from_dict({**sure, key: value})
    except ValueError:
        return False
    return True


def _count(value: object) -> int:
    """Return a count that a file holds; 0 for what is none."""
    return max(0, value) if type(value) is int else 0


def _take(line: sqlite3.Row, name: str, *kinds: type | None) -> Any:  # noqa: ANN401 - one of `kinds`
    """Return a column's value if it is of one of the kinds: SQLite itself takes anything anywhere."""
    value = line[name]
    if value is None and None in kinds:
        return None
    if float in kinds and isinstance(value, int | float) and math.isfinite(value):
        return float(value)
    if type(value) in kinds and float not in kinds:
        return value
    raise ValueError(f"{name} cannot be {value!r:.80}")


def _json(line: sqlite3.Row, name: str, kind: type) -> Any:  # noqa: ANN401 - a `kind`
    value = json.loads(_take(line, name, str))
    if type(value) is not kind:
        raise ValueError(f"{name} is no {kind.__name__}")
    return value


def _texts(line: sqlite3.Row, name: str) -> tuple[str, ...]:
    values = _json(line, name, list)
    if not all(isinstance(value, str) for value in values):
        raise ValueError(f"{name} holds something else than texts")
    return tuple(values)
