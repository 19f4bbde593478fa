"""Samples of a run in SQLite, for plots and questions afterwards.

Covers writing. Does not cover reading, nor deciding what to do when the disk is full: `problem` says so in a
sentence, the run goes on, and writing is tried again.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from orchestrator.watch.model import Row, Snapshot, finite

SCHEMA_VERSION = 1
WRITE_EVERY_S = 1.0

_BUSY_TIMEOUT_S = 0.1
"""Somebody else's lock may hold up the head for so long, once a second."""

_CREATE = (
    "CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    """CREATE TABLE IF NOT EXISTS samples (
        at_unix_s REAL NOT NULL, slot TEXT NOT NULL, state TEXT NOT NULL, size INTEGER, batch INTEGER, tflops REAL,
        allocated_bytes INTEGER, reserved_bytes INTEGER, claim_bytes INTEGER, cap_bytes INTEGER,
        steps_ok INTEGER NOT NULL, steps_oom INTEGER NOT NULL, steps_error INTEGER NOT NULL,
        oom_count INTEGER NOT NULL, emergency_count INTEGER NOT NULL, restarts INTEGER NOT NULL,
        duty_measured REAL, temperature_c REAL, power_w REAL,
        PRIMARY KEY (slot, at_unix_s)
    ) WITHOUT ROWID""",
)

_INSERT_META = "INSERT OR REPLACE INTO meta (key, value) VALUES (?, ?)"

# The last sample of a run may fall on the moment of the one before it.
_INSERT_SAMPLE = """INSERT OR REPLACE INTO samples VALUES (
    :at_unix_s, :slot, :state, :size, :batch, :tflops, :allocated_bytes, :reserved_bytes, :claim_bytes, :cap_bytes,
    :steps_ok, :steps_oom, :steps_error, :oom_count, :emergency_count, :restarts,
    :duty_measured, :temperature_c, :power_w
)"""


class SampleStore:
    """A watcher that keeps one line per slot and second. Never raises; `problem` tells what is wrong, if anything.

    Counters are totals over the run, so a sample that could not be written leaves a gap but falsifies nothing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: sqlite3.Connection | None = None
        self._due_unix_s = 0.0
        self.problem: str | None = None
        """A sentence for the user while samples cannot be written, `None` while they can."""

    def update(self, snapshot: Snapshot) -> None:
        """Write a sample of every slot, unless that was done less than `WRITE_EVERY_S` ago."""
        if snapshot.now_unix_s >= self._due_unix_s:
            self._due_unix_s = snapshot.now_unix_s + WRITE_EVERY_S
            self._write(snapshot)

    def close(self, snapshot: Snapshot) -> None:
        """Write the last sample and close the file."""
        self._write(snapshot)
        self._disconnect()

    def _write(self, snapshot: Snapshot) -> None:
        samples = [_sample(row, snapshot.now_unix_s) for row in snapshot.rows]
        try:
            if self._connection is None:
                self._connection = _opened(self._path, snapshot.run_id)
            with self._connection:
                self._connection.executemany(_INSERT_SAMPLE, samples)
        # Besides SQLite's own: a number beyond 64 bits, and text that is no valid Unicode.
        except (sqlite3.Error, OverflowError, ValueError) as failure:
            self.problem = f"samples cannot be written to {self._path}: {failure}"
            self._disconnect()  # a fresh connection is the surest way back, also when the file has vanished
        else:
            self.problem = None

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(sqlite3.Error):
                connection.close()


def _opened(path: Path, run_id: str) -> sqlite3.Connection:
    """Return a connection to the file, with its tables in it; closed again if that fails."""
    connection = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        # In WAL mode this survives a killed head; only a power cut may take the last second.
        connection.execute("PRAGMA synchronous = NORMAL")
        with connection:
            for statement in _CREATE:
                connection.execute(statement)
            connection.executemany(_INSERT_META, [("schema_version", str(SCHEMA_VERSION)), ("run_id", run_id)])
    except BaseException:
        connection.close()
        raise
    return connection


def _sample(row: Row, at_unix_s: float) -> Mapping[str, str | int | float | None]:
    return {
        "at_unix_s": at_unix_s,
        "slot": row.slot,
        "state": row.state.value,
        "size": row.size,
        "batch": row.batch,
        "tflops": finite(row.tflops),
        "allocated_bytes": row.allocated_bytes,
        "reserved_bytes": row.reserved_bytes,
        "claim_bytes": row.claim_bytes,
        "cap_bytes": row.cap_bytes,
        "steps_ok": row.steps_ok,
        "steps_oom": row.steps_oom,
        "steps_error": row.steps_error,
        "oom_count": row.oom_count,
        "emergency_count": row.emergency_count,
        "restarts": row.restarts,
        "duty_measured": finite(row.duty_measured),
        "temperature_c": finite(row.temperature_c),
        "power_w": finite(row.power_w),
    }
