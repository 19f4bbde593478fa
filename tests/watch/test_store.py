"""Runs in a real SQLite file: killed writers, full disks, locks, and hostile values."""

from __future__ import annotations

import math
import random
import re
import sqlite3
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.record.archive import read_run
from orchestrator.record.events import EventLog
from orchestrator.record.store import SAMPLES_KEPT, SCHEMA_VERSION, STORE_NAME, RunStore
from orchestrator.run.supervisor import Outlets
from tests.factories import FACTS, make_row, make_snapshot, record
from tests.scene import ROOT, namespaced
from tests.watch.scene import Clock, begun_head
from workers.messages import WorkerState
from workers.settings import Learned, PolicyState

#: Fills a disk of 1 MiB, and then frees the space.
FULL_DISK = """
import os, sys
from pathlib import Path
from orchestrator.record.archive import read_run
from orchestrator.record.events import EVENTS_NAME, EventLog, read_events
from orchestrator.record.store import RunStore
from tests.factories import FACTS, record
from tests.watch.scene import Clock

disk, clock = Path(sys.argv[1]), Clock()
store, log = RunStore(disk / "run.sqlite", clock), EventLog(disk / EVENTS_NAME)
store.begin(FACTS)
assert store.commit(), store.problem
(disk / "ballast").write_bytes(b"x" * 500_000)
number = 0
while (store.problem is None or log.problem is None) and number < 500:
    number += 1
    clock.now_s += 1.0
    log.write("numbered", number=number, text="x" * 3000)
    store.slots([record(f"pc1/{number}", reason="x" * 3000)])
    store.commit()
for _ in range(4):  # still full
    assert "cannot be written" in store.problem and "full" in store.problem, store.problem
    clock.now_s += 1.0
    assert not store.commit()
(disk / "ballast").unlink()
clock.now_s += 1.0
assert store.commit(), store.problem
log.write("numbered", number=number + 1)
assert (store.problem, store.incomplete, log.problem, log.incomplete) == (None, False, None, False)
store.end("good", 0, None, [])
assert sorted(os.listdir(disk)) == [EVENTS_NAME, "run.sqlite"]
names = [f"pc1/{each}" for each in range(1, number + 1)]
assert [slot.slot for slot in read_run(disk).slots] == names
assert [each.details["number"] for each in read_events(disk)] == list(range(1, number + 2))
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / STORE_NAME


@pytest.fixture
def store(path: Path) -> RunStore:
    """Begin a run in a store."""
    begun = RunStore(path, Clock())
    begun.begin(FACTS)
    return begun


def read(path: Path, query: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(query).fetchall()


def moments(path: Path) -> list[float]:
    return [at for (at,) in read(path, "SELECT at_unix_s FROM samples")]


def test_the_documented_query_is_answered(path: Path, store: RunStore) -> None:
    page = (ROOT / "docs" / "run-records.md").read_text(encoding="utf-8")
    (query,) = re.findall(r"sqlite3 -readonly \S+ '([^']+)'", page)
    store.update(make_snapshot(make_row(), elapsed_s=1.0))
    store.close()
    (row,) = read(path, query)
    assert (row[0], len(row)) == ("pc1/0", 3)


def test_a_sample_per_slot_and_second(path: Path, store: RunStore) -> None:
    rows = (
        make_row(),
        make_row(slot="pc1/1", state=WorkerState.BACKOFF, tflops=None, power_w=math.nan),
    )
    for tenth in range(21):
        store.update(make_snapshot(*rows, elapsed_s=tenth / 10))
        store.commit()
    # Committed during the run: another process reads them while the store is open.
    assert read(path, "SELECT count(*), count(DISTINCT at_unix_s) FROM samples") == [(6, 3)]
    assert read(path, "PRAGMA journal_mode") == [("wal",)]
    store.update(make_snapshot(*rows, elapsed_s=2.05), at_once=True)
    store.close()

    assert (store.problem, store.incomplete) == (None, False)
    assert read(path, "SELECT count(*) FROM samples") == [(8,)]
    assert read(path, "PRAGMA user_version") == [(SCHEMA_VERSION,)]
    assert read(
        path, "SELECT slot, state, tflops, power_w FROM samples ORDER BY at_unix_s DESC, slot"
    )[:2] == [("pc1/0", "RUNNING", 9.61, 281.4), ("pc1/1", "BACKOFF", None, None)]
    assert max(moments(path)) == 1_700_000_002.05


def test_samples_go_on_after_the_clock_was_set_back(path: Path, store: RunStore) -> None:
    for now_unix_s in (5000.0, 1000.0, 1000.5, 1001.0):
        store.update(make_snapshot(make_row(), now_unix_s=now_unix_s))
    store.commit()
    assert moments(path) == [1000.0, 1001.0, 5000.0]


def resumed(path: Path, chaos: str | None, pid: int) -> RunStore:
    head = RunStore(path)
    head.begin(replace(FACTS, chaos=chaos, head_pid=pid, elapsed_s=20.0 if pid > 1 else 0.0))
    head.commit()
    return head


def test_another_head_goes_on_where_the_first_one_stopped(path: Path) -> None:
    first = resumed(path, "kill=3", 1)
    first.incomplete = True
    first.update(make_snapshot(make_row(), elapsed_s=20.0))
    first.end("interrupted", 130, "Ctrl-C", [{"kind": "kill"}])
    second = resumed(path, None, 2)
    run = read_run(path.parent)
    assert (run.elapsed_s, run.facts.heads, run.facts.head_pid) == (20.0, 2, 2)
    assert (run.outcome, run.exit_code, run.error) == ("interrupted", None, None)
    assert (run.facts.chaos, run.faults, run.incomplete) == ("kill=3", ({"kind": "kill"},), True)
    second.end("failed", 1, None, [])
    assert read_run(path.parent).faults == ({"kind": "kill"},)

    third = resumed(path, "oom=1", 3)
    for error in (None, "a second word at the end"):
        third.end("good", 0, error, [{"kind": "oom", "at_unix_s": math.nan}])
        run = read_run(path.parent)
        assert (run.facts.heads, run.outcome, run.exit_code, run.error) == (3, "good", 0, error)
        assert run.facts.chaos == "oom=1"
        assert [fault["kind"] for fault in run.faults] == ["kill", "oom"]
    assert run.incomplete


def test_a_killed_writer_leaves_what_it_committed(path: Path) -> None:
    """Several heads in turn are killed, each at a random moment after it began to write."""
    chance = random.Random()  # noqa: S311 - moments, not secrets
    for life in range(1, 4):
        with begun_head(path.parent) as head:
            assert head.stdout is not None
            said = b"0\n"
            time.sleep(chance.random() * 0.15)
            head.kill()
            said += head.stdout.read()
        told = int(said.rsplit(b"\n", 2)[-2])  # the last complete line
        run = read_run(path.parent)
        assert (run.outcome, run.facts.heads) == ("interrupted", life)
        assert read(path, "PRAGMA integrity_check") == [("ok",)]
        # A turn may have been committed and not yet printed, but never the reverse; no turn is
        # stored in part.
        if told > 0:
            ((turn, steps_ok),) = {(it.incarnation, it.row.counts.steps_ok) for it in run.slots}
            assert turn == steps_ok
            assert told <= turn <= told + 1


def test_a_disk_that_is_full_and_empties_again(tmp_path: Path) -> None:
    script = 'mount -t tmpfs -o size=1m x "$1"; exec "$2" -c "$3" "$1"'
    done = namespaced(script, str(tmp_path), sys.executable, FULL_DISK)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("opened_before", [True, False])
def test_a_locked_file_costs_a_short_wait_and_no_row(path: Path, opened_before: bool) -> None:
    store = RunStore(path, clock := Clock())
    store.begin(FACTS)
    if opened_before:
        assert store.commit()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA journal_mode = WAL")
        other.execute("BEGIN EXCLUSIVE")
        store.slots([record("pc1/1")])
        assert not store.commit()
        assert "locked" in str(store.problem)
        other.rollback()
        # The lock is free, but the store does not try again so early.
        for number in (2, 3):
            clock.now_s += 0.4
            store.slots([record(f"pc1/{number}")])
            assert not store.commit()
            assert "locked" in str(store.problem)
        clock.now_s += 0.4
        assert store.commit()
    assert (store.problem, store.incomplete) == (None, False)
    assert [slot.slot for slot in read_run(path.parent).slots] == ["pc1/1", "pc1/2", "pc1/3"]


@pytest.mark.parametrize("place", ["nowhere/run", "text", "/dev/full"])
def test_what_cannot_be_written_at_the_end_is_a_gap(tmp_path: Path, place: str) -> None:
    (tmp_path / "text").write_bytes(b"this is no database" * 100)
    store = RunStore(tmp_path / place)
    store.begin(FACTS)
    store.end("good", 0, None, [])
    assert "cannot be written" in str(store.problem)
    assert store.incomplete


@pytest.mark.parametrize(
    "hostile",
    [
        {"reason": "a\0b\n\x1b[2J"},
        {"reason": "\udc80"},
        {"incarnation": 2**200},
        {"work_flop": math.inf},
        {"resume": PolicyState(learned=(Learned(size=1, unit_bytes=math.nan),))},
        {"size": 10**5000},
    ],
)
def test_a_hostile_value_does_not_keep_the_others_out(
    path: Path, store: RunStore, hostile: dict[str, Any]
) -> None:
    store.slots([record("pc1/7"), record(**hostile)])
    samples = (make_row(slot="pc1/7", size=2**63, steps_ok=2**70, tflops=math.inf), make_row())
    store.update(make_snapshot(*samples, elapsed_s=math.nan, now_unix_s=1e9, notices=("\udc80",)))
    store.commit()

    assert (store.problem, store.incomplete) == (None, False)
    assert read(path, "SELECT count(*) FROM samples") == [(2,)]
    run = read_run(path.parent)
    assert [slot.slot for slot in run.slots] == ["pc1/7", "pc1/0"]
    assert run.notices == ("\udc80",)


def test_no_other_user_reads_it(path: Path, store: RunStore) -> None:
    store.commit()
    assert {file.stat().st_mode & 0o777 for file in path.parent.iterdir()} == {0o600}
    store.close()


def test_a_gap_is_still_told_when_writing_goes_on(tmp_path: Path) -> None:
    store = RunStore(tmp_path / STORE_NAME, clock := Clock())
    store.begin(FACTS)
    outlets = Outlets(watchers=(), events=EventLog(tmp_path / "events.jsonl"), store=store)
    outlets.show(make_snapshot(make_row(), now_unix_s=1000.0))
    assert store.commit()
    assert outlets.problems == ()

    with closing(sqlite3.connect(tmp_path / STORE_NAME, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        for second in range(SAMPLES_KEPT + 2):
            outlets.show(make_snapshot(make_row(), now_unix_s=1000.0 + second))
        assert not store.commit()
        (locked,) = outlets.problems
        assert "locked" in locked
        other.execute("ROLLBACK")

    clock.now_s = 100.0
    assert store.commit()
    (gap,) = outlets.problems
    assert "have gaps" in gap
    outlets.close(make_snapshot(make_row(), now_unix_s=1011.0))
    store.end("degraded", 1, None, ())
    outlets.events.close()
