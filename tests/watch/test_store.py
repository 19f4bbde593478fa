"""Samples in a real SQLite file, and files that will not be written."""

from __future__ import annotations

import math
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from orchestrator.watch.store import SampleStore
from workers.messages import WorkerState

from .conftest import RowMaker, SnapshotMaker


def read(path: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(query).fetchall()


def test_a_sample_per_slot_and_second(tmp_path: Path, make_row: RowMaker, make_snapshot: SnapshotMaker) -> None:
    path = tmp_path / "samples.sqlite"
    store = SampleStore(path)
    rows = (make_row(), make_row(slot="pc1/1", state=WorkerState.BACKOFF, tflops=None, power_w=math.nan))
    for tenth in range(21):
        store.update(make_snapshot(*rows, elapsed_s=tenth / 10))
    # Committed as it goes: somebody else sees them while the store is open.
    assert read(path, "SELECT count(*), count(DISTINCT at_unix_s) FROM samples") == [(6, 3)]
    assert read(path, "PRAGMA journal_mode") == [("wal",)]
    store.close(make_snapshot(*rows, elapsed_s=2.05))

    assert store.problem is None
    assert read(path, "SELECT count(*) FROM samples") == [(8,)]
    assert read(path, "SELECT key, value FROM meta ORDER BY key") == [("run_id", "run-1"), ("schema_version", "1")]
    assert read(path, "SELECT slot, state, tflops, power_w, cap_bytes FROM samples ORDER BY at_unix_s DESC, slot")[
        :2
    ] == [
        ("pc1/0", "RUNNING", 9.61, 281.4, rows[0].cap_bytes),
        ("pc1/1", "BACKOFF", None, None, rows[1].cap_bytes),
    ]
    assert read(path, "SELECT max(at_unix_s) FROM samples") == [(1_700_000_002.05,)]


def test_the_last_sample_may_fall_on_the_one_before(
    tmp_path: Path, make_row: RowMaker, make_snapshot: SnapshotMaker
) -> None:
    store = SampleStore(tmp_path / "samples.sqlite")
    store.update(make_snapshot(make_row()))
    store.close(make_snapshot(make_row(steps_ok=500)))

    assert store.problem is None
    assert read(tmp_path / "samples.sqlite", "SELECT steps_ok FROM samples") == [(500,)]


def test_hostile_names_are_values_not_sql(tmp_path: Path, make_row: RowMaker, make_snapshot: SnapshotMaker) -> None:
    store = SampleStore(tmp_path / "samples.sqlite")
    store.close(make_snapshot(make_row(slot="'; DROP TABLE samples; --")))

    assert read(tmp_path / "samples.sqlite", "SELECT slot FROM samples") == [("'; DROP TABLE samples; --",)]


def test_a_folder_that_is_not_there_is_a_problem_until_it_is(
    tmp_path: Path, make_row: RowMaker, make_snapshot: SnapshotMaker
) -> None:
    store = SampleStore(tmp_path / "later" / "samples.sqlite")
    store.update(make_snapshot(make_row(), elapsed_s=0.0))
    assert store.problem is not None
    assert "cannot be written" in store.problem
    (tmp_path / "later").mkdir()
    store.update(make_snapshot(make_row(), elapsed_s=1.0))
    store.close(make_snapshot(make_row(), elapsed_s=2.0))

    assert store.problem is None
    assert read(tmp_path / "later" / "samples.sqlite", "SELECT count(*) FROM samples") == [(2,)]


@pytest.mark.parametrize("place", ["file/samples", "/proc/samples", "/dev/full"])
def test_a_place_that_cannot_be_written_never_raises(
    tmp_path: Path, make_row: RowMaker, make_snapshot: SnapshotMaker, place: str
) -> None:
    (tmp_path / "file").touch()
    store = SampleStore(tmp_path / place)
    store.update(make_snapshot(make_row()))
    store.close(make_snapshot(make_row()))

    assert store.problem is not None


def test_a_file_that_is_no_database_never_raises(
    tmp_path: Path, make_row: RowMaker, make_snapshot: SnapshotMaker
) -> None:
    (tmp_path / "samples.sqlite").write_bytes(b"this is a text" * 100)
    store = SampleStore(tmp_path / "samples.sqlite")
    store.update(make_snapshot(make_row()))

    assert "not a database" in str(store.problem)


@pytest.mark.parametrize("opened_before", [True, False])
def test_a_locked_database_is_tried_again(
    tmp_path: Path, make_row: RowMaker, make_snapshot: SnapshotMaker, opened_before: bool
) -> None:
    path = tmp_path / "samples.sqlite"
    first = SampleStore(path)
    first.update(make_snapshot(make_row(), elapsed_s=0.0))
    store = first if opened_before else SampleStore(path)
    with closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN EXCLUSIVE")
        store.update(make_snapshot(make_row(), elapsed_s=1.0))
        assert "locked" in str(store.problem)
        other.rollback()
    store.update(make_snapshot(make_row(), elapsed_s=2.0))

    assert store.problem is None
    assert read(path, "SELECT count(*) FROM samples") == [(2,)]
    first.close(make_snapshot())
    store.close(make_snapshot())


@pytest.mark.parametrize("changed", [{"size": 2**63}, {"slot": "\udc80"}])
def test_values_that_sqlite_does_not_take_never_raise(
    tmp_path: Path, make_row: RowMaker, make_snapshot: SnapshotMaker, changed: dict[str, Any]
) -> None:
    store = SampleStore(tmp_path / "samples.sqlite")
    store.update(make_snapshot(make_row(**changed)))

    assert store.problem is not None


def test_a_full_disk_is_survived(tmp_path: Path, make_row: RowMaker, make_snapshot: SnapshotMaker) -> None:
    path = tmp_path / "samples.sqlite"
    store = SampleStore(path)
    store.update(make_snapshot(make_row(), elapsed_s=0.0))
    # SQLite's own way to make a database full; the connection is the store's.
    store._connection.execute("PRAGMA max_page_count = 1")
    rows = [make_row(slot=f"pc1/{index}" + "x" * 3000) for index in range(50)]
    store.update(make_snapshot(*rows, elapsed_s=1.0))
    assert "full" in str(store.problem)
    store.update(make_snapshot(*rows, elapsed_s=2.0))
    store.close(make_snapshot(elapsed_s=3.0))

    assert store.problem is None
    assert read(path, "SELECT count(*) FROM samples") == [(51,)]
