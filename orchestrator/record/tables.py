"""The tables of a run store: their columns, the statements that fill them, and what a record is as
a line.

One text that is not valid Unicode, or one number that is not finite or has more than 64 bits, must
not stop the other values. Connects and reads nothing. Column names are promises to users of SQL;
bytes and seconds throughout.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypeAlias

from orchestrator.record.catalogue import FIELDS
from orchestrator.record.events import harmless
from orchestrator.record.model import Row, Snapshot, finite, is_row_value
from orchestrator.record.records import COUNTERS, CommandRecord, RunFacts, SlotProgress, SlotRecord

Line: TypeAlias = Mapping[str, str | int | float | None]

#: What is sampled of a row, besides the moment.
_SAMPLED = ("slot", *(key for key, each in FIELDS.items() if each.sampled))
#: In a column of the type REAL, SQLite stores a float without a fraction in 0 to 6 bytes instead of
#: 8.
_SAMPLED_COLUMNS = ", ".join(
    f"{name} REAL" if is_row_value(name, 0.5) else name for name in _SAMPLED
)

CREATE = (
    "CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    """CREATE TABLE IF NOT EXISTS runs (
        run_id TEXT PRIMARY KEY, started_at_unix_s REAL NOT NULL, duration_s REAL NOT NULL, elapsed_s REAL NOT NULL,
        min_success_rate REAL NOT NULL, mode TEXT NOT NULL, device TEXT, one_machine INTEGER NOT NULL,
        config_yaml TEXT NOT NULL, chaos TEXT, nodes_planned TEXT NOT NULL,
        head_pid INTEGER NOT NULL, head_started TEXT, host TEXT NOT NULL, heads INTEGER NOT NULL,
        updated_at_unix_s REAL, nodes_seen TEXT NOT NULL DEFAULT '[]', notices TEXT NOT NULL DEFAULT '[]',
        restart_count INTEGER NOT NULL DEFAULT 0, steps_lost_upper_bound INTEGER, incomplete INTEGER NOT NULL DEFAULT 0,
        outcome TEXT, exit_code INTEGER, error TEXT, faults TEXT NOT NULL DEFAULT '[]'
    )""",
    # With a rowid: slots stay in the order in which they were first told of, that of the plan.
    """CREATE TABLE IF NOT EXISTS slots (
        slot TEXT PRIMARY KEY, node TEXT NOT NULL, state TEXT NOT NULL, reason TEXT NOT NULL,
        incarnation INTEGER NOT NULL, next_sequence INTEGER NOT NULL, steps_at_risk INTEGER NOT NULL,
        counters TEXT NOT NULL, resume TEXT, row TEXT NOT NULL, orders TEXT
    )""",
    f"""CREATE TABLE IF NOT EXISTS samples (
        at_unix_s REAL NOT NULL, {_SAMPLED_COLUMNS}, PRIMARY KEY (at_unix_s, slot)
    ) WITHOUT ROWID""",
    # What every report changes, in few bytes: it counts before the same columns of `slots`.
    f"""CREATE TABLE IF NOT EXISTS progress (
        slot TEXT PRIMARY KEY, next_sequence INTEGER NOT NULL, steps_at_risk INTEGER NOT NULL, heard_at_unix_s REAL,
        {", ".join(COUNTERS)}
    ) WITHOUT ROWID""",
    """CREATE TABLE IF NOT EXISTS events (
        id INTEGER PRIMARY KEY, at TEXT NOT NULL, event TEXT NOT NULL, slot TEXT, details TEXT NOT NULL
    )""",
    "CREATE INDEX IF NOT EXISTS events_of_slot ON events (slot, event, id)",
    """CREATE TABLE IF NOT EXISTS commands (
        id TEXT PRIMARY KEY, at_unix_s REAL NOT NULL, do TEXT NOT NULL, slots TEXT NOT NULL, by TEXT NOT NULL,
        amount_bytes INTEGER, answer TEXT NOT NULL
    )""",
)

#: Columns that a store of an earlier version may lack.
LATER_COLUMNS: Mapping[str, Sequence[str]] = {
    "samples": _SAMPLED,
    "slots": ("orders",),
    "progress": COUNTERS,
}


def columns_lacking(table: str, known: Iterable[str]) -> tuple[str, ...]:
    """Return the statements that add them to one of `LATER_COLUMNS`."""
    missing = [name for name in LATER_COLUMNS[table] if name not in set(known)]
    return tuple(f"ALTER TABLE {table} ADD COLUMN {name}" for name in missing)


SET_META = "INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)"

FAULTS_KEPT = 10_000
"""Injected faults of all heads together; beyond them the oldest go."""


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
BEGIN_RUN = _upsert(
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

FIND_RUN = "SELECT started_at_unix_s, heads, faults FROM runs WHERE run_id = ?"

#: A new head has no elapsed time until it counts: the time of earlier heads is kept.
UPDATE_RUN = """UPDATE runs SET
    elapsed_s = max(elapsed_s, :elapsed_s), updated_at_unix_s = :updated_at_unix_s, nodes_seen = :nodes_seen,
    notices = :notices, restart_count = :restart_count, steps_lost_upper_bound = :steps_lost_upper_bound,
    incomplete = max(incomplete, :incomplete)
WHERE run_id = :run_id"""

END_RUN = """UPDATE runs SET outcome = :outcome, exit_code = :exit_code, error = :error, faults = :faults
WHERE run_id = :run_id"""

PUT_SLOT = _upsert("slots", _names(SlotRecord), "slot", _excluded(_names(SlotRecord), "slot"))

# By name: a column that was added later stands last.
PUT_PROGRESS = f"""INSERT OR REPLACE INTO progress
    (slot, next_sequence, steps_at_risk, heard_at_unix_s, {", ".join(COUNTERS)})
VALUES (?, ?, ?, ?{", ?" * len(COUNTERS)})"""  # noqa: S608 - names of ours and question marks

#: Both take what `sample_line` returns.
PUT_ROW = "UPDATE slots SET row = :row WHERE slot = :slot"
# The last sample of a run may fall on the moment of the one before it.
PUT_SAMPLE = _insert("samples", ("at_unix_s", *_SAMPLED), "INSERT OR REPLACE")

ADD_COMMAND = _insert("commands", _names(CommandRecord), "INSERT OR IGNORE")

ADD_EVENT = _insert("events", ("at", "event", "slot", "details"))


def line_of(record: RunFacts | SlotRecord | CommandRecord) -> Line:
    """Return a record as a line of its columns.

    A policy's state to the letter, as far as JSON can hold it.
    """
    return _line(**{name: getattr(record, name) for name in _names(type(record))})


def run_line(facts: RunFacts, **changed: float) -> Line:
    """Return the run as it begins; `heads` only counts where the run is not known yet."""
    return {**line_of(facts), "heads": 1, **_line(**changed)}


def figures_line(run_id: str, snapshot: Snapshot, *, incomplete: bool) -> Line:
    """Return what a snapshot says of the run as a whole."""
    return _line(
        run_id=run_id,
        elapsed_s=snapshot.elapsed_s,
        updated_at_unix_s=snapshot.now_unix_s,
        nodes_seen=snapshot.nodes_seen,
        notices=snapshot.notices,
        restart_count=snapshot.restart_count,
        steps_lost_upper_bound=snapshot.steps_lost_upper_bound,
        incomplete=incomplete,
    )


def end_line(run_id: str, outcome: str, exit_code: int, error: str | None) -> Line:
    """Return how a run ended."""
    return _line(run_id=run_id, outcome=outcome, exit_code=exit_code, error=error)


def progress_line(progress: SlotProgress, *, cut: bool) -> tuple[str | int | float | None, ...]:
    """Return what a report has changed.

    `cut` to 64 bits, more of which SQLite refuses in a counter.
    """
    counters = progress.counters
    if cut:
        counters = tuple(_whole(count) if isinstance(count, int) else count for count in counters)
    return *progress[:-1], *counters


def sample_line(row: Row, at_unix_s: float) -> Line:
    """Return what is sampled of a slot, and its row."""
    known = row.known()
    return {
        **_line(at_unix_s=at_unix_s, **{name: known.get(name) for name in _SAMPLED}),
        "row": json_text(known),
    }


def all_faults(before: object, own: Sequence[Mapping[str, Any]]) -> str:
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
    return json_text([*earlier, *(dict(fault) for fault in own)][-FAULTS_KEPT:])


def event_line(entry: Mapping[str, Any]) -> Line:
    """Return an event of the diary; what is not a column of its own is in `details`."""
    details = {key: value for key, value in entry.items() if key not in {"at", "event", "slot"}}
    slot = entry.get("slot")
    line = _line(
        at=str(entry.get("at")),
        event=str(entry.get("event")),
        slot=None if slot is None else str(slot),
    )
    return {**line, "details": json_text(details)}


def text(value: str) -> str:
    """Return a text that UTF-8 can hold: a lone surrogate, as in a file name, is written as an
    escape.
    """
    return value.encode("utf-8", "backslashreplace").decode("utf-8")


def json_text(value: object, *, allow_nan: bool = False) -> str:
    """Return a value as JSON in ASCII, exactly if JSON can hold it, else made harmless."""
    try:
        return json.dumps(value, allow_nan=allow_nan, separators=(",", ":"))
    except (
        ValueError,
        TypeError,
        RecursionError,
    ):  # not finite, thousands of digits, no JSON at all, a circle
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
        return text(value)
    if isinstance(value, int):
        return _whole(value)
    if isinstance(value, float):
        return finite(value) or 0.0
    # Python's JSON has words for infinity, and another head must go on from the very same numbers.
    return json_text(value, allow_nan=True)


def _whole(value: int) -> int:
    return max(-(2**63), min(2**63 - 1, value))
