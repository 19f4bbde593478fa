"""The tables of a run store: their columns, the statements that fill them, and what a record is as a line.

Covers converting every value to one that SQLite takes: one text that is not valid Unicode, or one number that is not
finite or has more than 64 bits, must not stop the other values. Does not cover connections (`store.py`) nor reading
(`archive.py`). Column names are promises to users of SQL; bytes and seconds throughout.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from orchestrator.watch.events import harmless
from orchestrator.watch.model import Row, Snapshot, finite
from orchestrator.watch.records import COUNTERS, RunFacts, SlotProgress, SlotRecord

Line: TypeAlias = Mapping[str, str | int | float | None]

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
        counters TEXT NOT NULL, resume TEXT, row TEXT NOT NULL
    )""",
    """CREATE TABLE IF NOT EXISTS samples (
        at_unix_s REAL NOT NULL, slot TEXT NOT NULL, state TEXT NOT NULL, size INTEGER, batch INTEGER, tflops REAL,
        allocated_bytes INTEGER, reserved_bytes INTEGER, claim_bytes INTEGER, cap_bytes INTEGER,
        steps_ok INTEGER NOT NULL, steps_oom INTEGER NOT NULL, steps_error INTEGER NOT NULL,
        oom_count INTEGER NOT NULL, emergency_count INTEGER NOT NULL, restarts INTEGER NOT NULL,
        duty_measured REAL, temperature_c REAL, power_w REAL,
        PRIMARY KEY (at_unix_s, slot)
    ) WITHOUT ROWID""",
    # What every report changes, in few bytes: it counts before the same columns of `slots`.
    f"""CREATE TABLE IF NOT EXISTS progress (
        slot TEXT PRIMARY KEY, next_sequence INTEGER NOT NULL, steps_at_risk INTEGER NOT NULL, heard_at_unix_s REAL,
        {", ".join(COUNTERS)}
    ) WITHOUT ROWID""",
    """CREATE TABLE IF NOT EXISTS events (
        id INTEGER PRIMARY KEY, at TEXT NOT NULL, event TEXT NOT NULL, slot TEXT, details TEXT NOT NULL
    )""",
)

SET_META = "INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)"

_RUN_COLUMNS = (
    "run_id, started_at_unix_s, duration_s, elapsed_s, min_success_rate, mode, device, one_machine, config_yaml, "
    "chaos, nodes_planned, head_pid, head_started, host"
)

FAULTS_KEPT = 10_000
"""Injected faults of all heads together; beyond them the oldest go."""

#: Another head of the same run keeps when it began and what was done to it, and has not ended it yet.
BEGIN_RUN = f"""INSERT INTO runs ({_RUN_COLUMNS}, heads)
VALUES (:{_RUN_COLUMNS.replace(", ", ", :")}, :heads)
ON CONFLICT (run_id) DO UPDATE SET
    duration_s = excluded.duration_s, elapsed_s = max(elapsed_s, excluded.elapsed_s),
    min_success_rate = excluded.min_success_rate, mode = excluded.mode, device = excluded.device,
    one_machine = excluded.one_machine, config_yaml = excluded.config_yaml,
    chaos = coalesce(excluded.chaos, chaos), nodes_planned = excluded.nodes_planned,
    heads = heads + (head_pid IS NOT excluded.head_pid OR head_started IS NOT excluded.head_started),
    head_pid = excluded.head_pid, head_started = excluded.head_started, host = excluded.host,
    outcome = NULL, exit_code = NULL, error = NULL
"""  # noqa: S608 - our own column names

FIND_RUN = "SELECT started_at_unix_s, heads, faults FROM runs WHERE run_id = ?"

#: A new head has no elapsed time until it counts: the time of earlier heads is kept.
UPDATE_RUN = """UPDATE runs SET
    elapsed_s = max(elapsed_s, :elapsed_s), updated_at_unix_s = :updated_at_unix_s, nodes_seen = :nodes_seen,
    notices = :notices, restart_count = :restart_count, steps_lost_upper_bound = :steps_lost_upper_bound,
    incomplete = max(incomplete, :incomplete)
WHERE run_id = :run_id"""

END_RUN = """UPDATE runs SET outcome = :outcome, exit_code = :exit_code, error = :error, faults = :faults
WHERE run_id = :run_id"""

PUT_SLOT = """INSERT INTO slots VALUES (
    :slot, :node, :state, :reason, :incarnation, :next_sequence, :steps_at_risk, :counters, :resume, :row
) ON CONFLICT (slot) DO UPDATE SET
    node = excluded.node, state = excluded.state, reason = excluded.reason, incarnation = excluded.incarnation,
    next_sequence = excluded.next_sequence, steps_at_risk = excluded.steps_at_risk, counters = excluded.counters,
    resume = excluded.resume, row = excluded.row"""

_COUNTS_SAMPLED = ("steps_ok", "steps_oom", "steps_error", "oom_count", "emergency_count")

PUT_ROW = "UPDATE slots SET row = ? WHERE slot = ?"

PUT_PROGRESS = f"INSERT OR REPLACE INTO progress VALUES (?, ?, ?, ?{', ?' * len(COUNTERS)})"  # noqa: S608 - question marks

# The last sample of a run may fall on the moment of the one before it.
PUT_SAMPLE = """INSERT OR REPLACE INTO samples VALUES (
    :at_unix_s, :slot, :state, :size, :batch, :tflops, :allocated_bytes, :reserved_bytes, :claim_bytes, :cap_bytes,
    :steps_ok, :steps_oom, :steps_error, :oom_count, :emergency_count, :restarts,
    :duty_measured, :temperature_c, :power_w
)"""

ADD_EVENT = "INSERT INTO events (at, event, slot, details) VALUES (:at, :event, :slot, :details)"


def run_line(facts: RunFacts, *, started_at_unix_s: float, heads: int) -> Line:
    """Return the run as it begins; `heads` only counts where the run is not known yet."""
    return {
        "run_id": text(facts.run_id),
        "started_at_unix_s": _real(started_at_unix_s),
        "duration_s": _real(facts.duration_s),
        "elapsed_s": _real(facts.elapsed_s),
        "min_success_rate": _real(facts.min_success_rate),
        "mode": text(facts.mode),
        "device": _text_if_any(facts.device),
        "one_machine": int(facts.one_machine),
        "config_yaml": text(facts.config_yaml),
        "chaos": _text_if_any(facts.chaos),
        "nodes_planned": json_text(list(facts.nodes_planned)),
        "head_pid": _whole(facts.head_pid),
        "head_started": _text_if_any(facts.head_started),
        "host": text(facts.host),
        "heads": heads,
    }


def figures_line(run_id: str, snapshot: Snapshot, *, incomplete: bool) -> Line:
    """Return what a snapshot says of the run as a whole."""
    return {
        "run_id": text(run_id),
        "elapsed_s": _real(snapshot.elapsed_s),
        "updated_at_unix_s": _real(snapshot.now_unix_s),
        "nodes_seen": json_text(list(snapshot.nodes_seen)),
        "notices": json_text(list(snapshot.notices)),
        "restart_count": _whole(snapshot.restart_count),
        "steps_lost_upper_bound": _whole_if_any(snapshot.steps_lost_upper_bound),
        "incomplete": int(incomplete),
    }


def slot_line(record: SlotRecord) -> Line:
    """Return a slot; its policy's state to the letter, as far as JSON can hold it."""
    return {
        "slot": text(record.slot),
        "node": text(record.node),
        "state": text(record.state),
        "reason": text(record.reason),
        "incarnation": _whole(record.incarnation),
        "next_sequence": _whole(record.next_sequence),
        "steps_at_risk": _whole(record.steps_at_risk),
        # Python's JSON has words for infinity, and another head must go on from the very same numbers.
        "counters": json_text(dict(record.counters), allow_nan=True),
        "resume": None if record.resume is None else json_text(dict(record.resume), allow_nan=True),
        "row": json_text(dict(record.row)),
    }


def row_line(row: Row) -> tuple[str, str]:
    """Return a slot's row as it is stored, and the slot."""
    return json_text(row.to_dict()), text(row.slot)


def progress_line(progress: SlotProgress) -> tuple[str | int | float | None, ...]:
    """Return what a report has changed. SQLite refuses the line if a counter has more than 64 bits."""
    slot, next_sequence, steps_at_risk, heard_at_unix_s, counters = progress
    return slot, next_sequence, steps_at_risk, heard_at_unix_s, *counters


def safe_progress_line(progress: SlotProgress) -> tuple[str | int | float | None, ...]:
    """Return what a report has changed, with every counter cut to 64 bits."""
    counters = (_whole(counter) if isinstance(counter, int) else counter for counter in progress.counters)
    return progress_line(progress._replace(counters=tuple(counters)))


def sample_line(row: Row, at_unix_s: float) -> Line:
    """Return what is sampled of a slot."""
    return {
        "at_unix_s": _real(at_unix_s),
        "slot": text(row.slot),
        "state": row.state.value,
        "size": _whole_if_any(row.size),
        "batch": _whole_if_any(row.batch),
        "tflops": finite(row.tflops),
        "allocated_bytes": _whole_if_any(row.allocated_bytes),
        "reserved_bytes": _whole_if_any(row.reserved_bytes),
        "claim_bytes": _whole_if_any(row.claim_bytes),
        "cap_bytes": _whole_if_any(row.cap_bytes),
        **{name: _whole(getattr(row.counts, name)) for name in _COUNTS_SAMPLED},
        "restarts": _whole(row.restarts),
        "duty_measured": finite(row.duty_measured),
        "temperature_c": finite(row.temperature_c),
        "power_w": finite(row.power_w),
    }


def all_faults(before: object, own: Sequence[Mapping[str, Any]]) -> str:
    """Return the faults of the heads before, as their column holds them, and a head's own behind them."""
    try:
        known = json.loads(before) if isinstance(before, str) else []
    except (ValueError, RecursionError):
        known = []  # invalid text; a reader would refuse the whole run because of it
    earlier = [fault for fault in known if isinstance(fault, dict)] if isinstance(known, list) else []
    return json_text([*earlier, *(dict(fault) for fault in own)][-FAULTS_KEPT:])


def event_line(entry: Mapping[str, Any]) -> Line:
    """Return an event of the diary; what is not a column of its own is in `details`."""
    details = {key: value for key, value in entry.items() if key not in {"at", "event", "slot"}}
    slot = entry.get("slot")
    return {
        "at": text(str(entry.get("at"))),
        "event": text(str(entry.get("event"))),
        "slot": None if slot is None else text(str(slot)),
        "details": json_text(details),
    }


def text(value: str) -> str:
    """Return a text that UTF-8 can hold: a lone surrogate, as in a file name, is written as an escape."""
    return value.encode("utf-8", "backslashreplace").decode("utf-8")


def json_text(value: object, *, allow_nan: bool = False) -> str:
    """Return a value as JSON in ASCII, exactly if JSON can hold it, else made harmless."""
    try:
        return json.dumps(value, allow_nan=allow_nan, separators=(",", ":"))
    except (ValueError, TypeError, RecursionError):  # not finite, thousands of digits, no JSON at all, a circle
        return json.dumps(harmless(value), separators=(",", ":"))


def _text_if_any(value: str | None) -> str | None:
    return None if value is None else text(value)


def _real(value: float) -> float:
    """Return a number for a column that must have one; 0 for what is none."""
    return finite(value) or 0.0


def _whole(value: int) -> int:
    """Return a count within the 64 bits of a column."""
    return max(-(2**63), min(2**63 - 1, value))


def _whole_if_any(value: int | None) -> int | None:
    return None if value is None else _whole(value)
