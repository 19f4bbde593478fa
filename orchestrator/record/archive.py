"""Reads a run from its folder: during the run, after its end, and after its head was killed.

Does not open the store (`store.py`) or find run folders (`folders.py`), and does not read the queue
(`jobs.py`), events (`events.py`) or values over time (`history.py`).
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from orchestrator.errors import NothingStoredError
from orchestrator.record.command_file import any_waits
from orchestrator.record.jobs import QUEUE_NAME
from orchestrator.record.model import Snapshot
from orchestrator.record.store import (
    STORE_NAME,
    RunFacts,
    RunStatus,
    SlotRecord,
    from_json,
    reading,
)
from workers.files import read_small
from workers.host.processes import is_alive
from workers.messages import WorkerState

NOTE_NAME: Final = "head.json"
"""The file in a run folder that names the process of its head."""
LEAST_TO_RESUME_S: Final = 1.0
"""Shortest remaining time for which a run can be resumed."""

_NOTE_MOST_BYTES: Final = 64 * 2**10


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun(RunStatus):
    """A run as read from its store."""

    folder: Path
    facts: RunFacts
    outcome: str
    """The stored outcome, else `running`, or `interrupted` if the head no longer runs."""
    slots: tuple[SlotRecord, ...]

    @property
    def remaining_s(self) -> float:
        """Seconds of the planned length that the run has not worked yet."""
        return max(0.0, self.facts.duration_s - self.elapsed_s)

    @property
    def was_refused(self) -> bool:
        """Whether an error ended the run before its planned time began; never for a queue, which
        keeps its jobs.
        """
        is_queue = (self.folder / QUEUE_NAME).exists()
        return self.outcome == "failed" and self.elapsed_s == 0 and not is_queue

    @property
    def is_done(self) -> bool:
        """Whether all work is finished: that of every slot, of one member of a team, or of every
        job of a queue, while no command waits for it.
        """
        queue = self.folder / QUEUE_NAME
        if queue.exists():
            return self.outcome == "good" and not any_waits(queue)
        rows = [record.row for record in self.slots]
        done = [row.state is WorkerState.DONE for row in rows]
        return any(done) if any(row.shares_steps for row in rows) else bool(done) and all(done)

    @property
    def is_resumable(self) -> bool:
        """Whether another head can continue the run: it began, has ended in any way, and has work
        and time left.
        """
        over = self.outcome == "running" or self.was_refused or self.is_done
        return not over and self.remaining_s >= LEAST_TO_RESUME_S

    @property
    def was_killed(self) -> bool:
        """Whether the head ended without storing an outcome: it was killed, or its PC went down."""
        return self.outcome == "interrupted" and self.exit_code is None

    def snapshot(self) -> Snapshot:
        """The last snapshot of the run, for viewers."""
        facts, updated_at_unix_s = self.facts, self.updated_at_unix_s
        return Snapshot(
            run_id=facts.run_id,
            now_unix_s=facts.started_at_unix_s if updated_at_unix_s is None else updated_at_unix_s,
            elapsed_s=self.elapsed_s,
            duration_s=facts.duration_s,
            nodes_planned=facts.nodes_planned,
            nodes_seen=self.nodes_seen,
            rows=tuple(record.row for record in self.slots),
            notices=self.notices,
        )


def read_run(folder: Path) -> StoredRun:
    """Return the run in a run folder, as it is now.

    `NothingStoredError`: nothing is stored in it yet; `ArchiveError`: the store cannot be read.
    """
    with reading(folder) as store:
        values = dict(store.execute("SELECT key, value FROM run").fetchall())
        if "facts" not in values:
            raise NothingStoredError(folder, STORE_NAME)
        slots = store.execute("SELECT value FROM slots ORDER BY rowid").fetchall()
        facts = from_json(RunFacts, values["facts"])
        status = from_json(RunStatus, values.get("status", "{}"))
        known = {name: getattr(status, name) for name in RunStatus.__slots__}
        known["elapsed_s"] = max(facts.elapsed_s, status.elapsed_s)
        # A process id is valid only on its own machine.
        is_here = facts.host == socket.gethostname()
        runs = is_here and is_alive(facts.head_pid, facts.head_started)
        known["outcome"] = status.outcome or ("running" if runs else "interrupted")
        records = tuple(from_json(SlotRecord, text) for (text,) in slots)
        return StoredRun(folder=folder, facts=facts, slots=records, **known)


def read_answer(folder: Path, identity: str) -> Mapping[str, Any] | None:
    """Return the answer to the command with this id; `None`: there is none yet."""
    with reading(folder) as store:
        found = store.execute("SELECT value FROM commands WHERE id = ?", (identity,)).fetchone()
        return None if found is None else dict(json.loads(found[0])["answer"])


def head_of(folder: Path) -> psutil.Process | None:
    """Return the process of the head of a run folder, if it runs and is not this process.

    The note in the folder has its process id. A process that started after the note was written is
    another one; so is one whose start differs from the start in the note, if the note has one.
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
    except (ValueError, LookupError, TypeError, AttributeError, OSError, psutil.Error):
        return None
    is_head &= began is None or is_alive(pid, began)
    return process if is_head and not (folder / "summary.json").exists() else None
