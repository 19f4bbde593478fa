"""What a person is told of records that cannot be written, and of those that could not."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from orchestrator.watch.events import EventLog
from orchestrator.watch.sinks import Outlets
from orchestrator.watch.store import RunStore
from tests.watch.conftest import RowMaker, SnapshotMaker


def test_a_gap_is_still_told_when_writing_goes_on(
    tmp_path: Path, make_row: RowMaker, make_snapshot: SnapshotMaker
) -> None:
    now_s = 0.0
    store = RunStore(tmp_path / "run.sqlite", monotonic_s=lambda: now_s)
    outlets = Outlets(watchers=(), events=EventLog(tmp_path / "events.jsonl", also=store.event), store=store)
    outlets.show(make_snapshot(make_row(), now_unix_s=1000.0))
    assert outlets.problems == ()

    with sqlite3.connect(tmp_path / "run.sqlite", isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        for second in range(1, 4):
            now_s = 10.0 * second
            outlets.show(make_snapshot(make_row(), now_unix_s=1000.0 + second))
        (locked,) = outlets.problems
        assert "locked" in locked
        other.execute("ROLLBACK")
    other.close()

    now_s = 100.0
    outlets.show(make_snapshot(make_row(), now_unix_s=1010.0))
    assert store.problem is None
    (gap,) = outlets.problems
    assert "have gaps" in gap
    outlets.close(make_snapshot(make_row(), now_unix_s=1011.0))
    store.end("degraded", 1, None, ())
    outlets.events.close()
