"""Runs in a real SQLite file: killed writers, full disks, locks, files that are taken away, and hostile values."""

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
from orchestrator.record.store import (
    COUNTERS,
    EVENTS_KEPT,
    STORE_NAME,
    ProgressLine,
    RunStore,
)
from orchestrator.run.supervisor import Outlets
from tests.factories import FACTS, event, make_row, make_snapshot, record
from tests.scene import ROOT, namespaced
from tests.watch.scene import Clock, head_process
from workers.messages import WorkerState

#: Fills a disk of 1 MiB, and lets go of the space.
FULL_DISK = """
import json, os, sqlite3, sys
from pathlib import Path
from orchestrator.record.store import RunStore
from tests.factories import event
from tests.watch.scene import Clock

disk, clock = Path(sys.argv[1]), Clock()
store = RunStore(disk / "run.sqlite", clock)
store.event(event(0))
store.commit()
assert store.problem is None
(disk / "ballast").write_bytes(b"x" * 500_000)
number = 0
while store.problem is None and number < 500:
    number += 1
    store.event(event(number, text="x" * 3000))
    store.commit()
for _ in range(4):  # still full
    assert "cannot be written" in store.problem and "full" in store.problem, store.problem
    clock.now_s += 1.0
    store.commit()
(disk / "ballast").unlink()
clock.now_s += 1.0
store.commit()
assert store.problem is None, store.problem
store.event(event(number + 1))
store.end("good", 0, None, [])
assert (store.problem, store.incomplete, os.listdir(disk)) == (None, False, ["run.sqlite"])
kept = sqlite3.connect(disk / "run.sqlite").execute("SELECT details FROM events ORDER BY id").fetchall()
assert [json.loads(details)["number"] for (details,) in kept] == list(range(number + 2))
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


def numbers(path: Path, name: str = "numbered") -> list[int]:
    query = (
        f"SELECT json_extract(details, '$.number') FROM events WHERE event = '{name}' ORDER BY id"  # noqa: S608 - ours
    )
    return [number for (number,) in read(path, query)]


def test_the_documented_query_is_answered(path: Path, store: RunStore) -> None:
    page = (ROOT / "docs" / "run-records.md").read_text(encoding="utf-8")
    (query,) = re.findall(r"sqlite3 -readonly \S+ '([^']+)'", page)
    store.close(make_snapshot(make_row(), elapsed_s=1.0))
    (row,) = read(path, query)
    assert (row[0], len(row)) == ("pc1/0", 3)


def test_a_sample_per_slot_and_second(path: Path, store: RunStore) -> None:
    rows = (
        make_row(),
        make_row(slot="pc1/1", state=WorkerState.BACKOFF, tflops=None, power_w=math.nan),
    )
    for tenth in range(21):
        store.update(make_snapshot(*rows, elapsed_s=tenth / 10))
    # Committed as it goes: another process sees them while the store is open.
    assert read(path, "SELECT count(*), count(DISTINCT at_unix_s) FROM samples") == [(6, 3)]
    assert read(path, "PRAGMA journal_mode") == [("wal",)]
    store.close(make_snapshot(*rows, elapsed_s=2.05))

    assert (store.problem, store.incomplete) == (None, False)
    assert read(path, "SELECT count(*) FROM samples") == [(8,)]
    assert read(path, "SELECT key, value FROM meta") == [("schema_version", "2")]
    assert read(
        path, "SELECT slot, state, tflops, power_w FROM samples ORDER BY at_unix_s DESC, slot"
    )[:2] == [("pc1/0", "RUNNING", 9.61, 281.4), ("pc1/1", "BACKOFF", None, None)]
    assert read(path, "SELECT max(at_unix_s) FROM samples") == [(1_700_000_002.05,)]


def test_samples_go_on_after_the_clock_was_set_back(path: Path, store: RunStore) -> None:
    for now_unix_s in (5000.0, 1000.0, 1000.5, 1001.0):
        store.update(make_snapshot(make_row(), now_unix_s=now_unix_s))
    assert read(path, "SELECT at_unix_s FROM samples") == [(1000.0,), (1001.0,), (5000.0,)]


def test_a_transaction_holds_all_that_waited(path: Path, store: RunStore) -> None:
    store.slots([record(), record("pc1/1")])
    store.slots([record(reason="newer")])
    store.event(event(1))
    assert not path.exists()
    store.commit()
    assert read(path, "SELECT slot, reason FROM slots") == [("pc1/0", "newer"), ("pc1/1", "steady")]
    assert numbers(path) == [1]
    assert read(path, "SELECT run_id, heads, outcome FROM runs") == [(FACTS.run_id, 1, None)]

    before = path.with_name(f"{STORE_NAME}-wal").stat()
    store.commit()
    after = path.with_name(f"{STORE_NAME}-wal").stat()
    assert (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)


def moved_on(
    steps_ok: float, slot: str = "pc1/0", heard_at_unix_s: float = 1_700_000_001.5
) -> ProgressLine:
    counters = {**dict.fromkeys(COUNTERS, 0), "steps_ok": steps_ok, "restarts": 2}
    return (slot, heard_at_unix_s, *counters.values())


def test_progress_counts_before_the_record_of_its_slot(path: Path, store: RunStore) -> None:
    store.slots([record(row=make_row().to_dict()), record("pc1/1")])
    store.progress([moved_on(500)])
    store.update(make_snapshot(make_row(), elapsed_s=2.0))
    store.progress([moved_on(600)])
    store.commit()
    first, second = read_run(path.parent).slots
    assert (first.counters["steps_ok"], first.counters["restarts"]) == (600, 2)
    assert first.row["steps_ok"] == 600
    assert first.row["restarts"] == 2
    assert first.row["success_rate"] == 1.0
    assert first.row["heartbeat_age_s"] == 0.5
    assert first.row["size"] == make_row().size, "of the last sample"
    store.progress([moved_on(600, heard_at_unix_s=1_700_000_003.0)])
    store.commit()
    assert read_run(path.parent).slots[0].row["heartbeat_age_s"] == 0.0, (
        "heard after the last snapshot"
    )
    assert second.counters == record().counters


@pytest.mark.parametrize(("counted", "told"), [(2**70, 2**63 - 1), (math.nan, 0)])
def test_progress_with_an_impossible_counter_is_written(
    path: Path, store: RunStore, counted: float, told: int
) -> None:
    store.slots([record()])
    store.progress([moved_on(counted)])
    store.commit()
    assert store.problem is None
    assert read_run(path.parent).slots[0].counters["steps_ok"] == told


def test_another_head_goes_on_where_the_first_one_stopped(path: Path) -> None:
    first = RunStore(path)
    first.begin(FACTS)
    first.update(make_snapshot(make_row(), elapsed_s=20.0))
    first.end("interrupted", 130, "Ctrl-C", [{"kind": "kill"}])
    second = RunStore(path)
    second.begin(replace(FACTS, started_at_unix_s=9e9, elapsed_s=20.0, head_pid=7))
    second.update(make_snapshot(make_row(), elapsed_s=0.0))  # before it begins to count

    query = "SELECT started_at_unix_s, elapsed_s, heads, head_pid, outcome, exit_code, error, faults FROM runs"
    assert read(path, query) == [
        (1_700_000_000.0, 20.0, 2, 7, None, None, None, '[{"kind":"kill"}]')
    ]
    second.end("good", 0, None, [])
    assert read(path, "SELECT heads, outcome, exit_code FROM runs") == [(2, "good", 0)]


def resumed(path: Path, chaos: str | None, pid: int) -> RunStore:
    head = RunStore(path)
    head.begin(replace(FACTS, chaos=chaos, head_pid=pid))
    head.commit()
    return head


def test_another_head_keeps_the_chaos_of_the_heads_before(path: Path) -> None:
    query = "SELECT chaos, faults FROM runs"
    resumed(path, "kill=3", 1).end("interrupted", 130, None, [{"kind": "kill"}])
    second = resumed(path, None, 2)
    assert read(path, query) == [("kill=3", '[{"kind":"kill"}]')]
    second.end("failed", 1, None, [])
    assert read(path, query) == [("kill=3", '[{"kind":"kill"}]')]
    third = resumed(path, "oom=1", 3)
    third.end("good", 0, None, [{"kind": "oom", "at_unix_s": math.nan}])
    both = '[{"kind":"kill"},{"kind":"oom","at_unix_s":null}]'
    assert read(path, query) == [("oom=1", both)]
    third.end("failed", 1, "a second word at the end", [{"kind": "oom", "at_unix_s": math.nan}])
    assert read(path, query) == [("oom=1", both)]


def test_a_killed_writer_leaves_what_it_committed(path: Path) -> None:
    """In several lives, each killed at a random moment after it began to write."""
    chance = random.Random()  # noqa: S311 - moments, not secrets
    turns_before = 0
    for life in range(1, 4):
        with head_process(path.parent) as head:
            assert head.stdout is not None
            said = head.stdout.readline()
            time.sleep(chance.random() * 0.15)
            head.kill()
            said += head.stdout.read()
        told = int(said.rsplit(b"\n", 2)[-2])  # the last line that is whole
        run = read_run(path.parent)
        assert (run.outcome, run.heads) == ("interrupted", life)
        assert read(path, "PRAGMA integrity_check") == [("ok",)]
        # A turn may have been committed and not said any more, never the other way round; and none
        # is there in part.
        turns = numbers(path, "turn")[turns_before:]
        assert turns == list(range(1, len(turns) + 1))
        assert told <= len(turns) <= told + 1
        turns_before += len(turns)
        if told > 0:
            assert {(slot.incarnation, slot.row["steps_ok"]) for slot in run.slots} == {
                (len(turns), len(turns))
            }


def test_a_disk_that_is_full_and_empties_again(tmp_path: Path) -> None:
    script = 'mount -t tmpfs -o size=1m x "$1"; exec "$2" -c "$3" "$1"'
    done = namespaced(script, str(tmp_path), sys.executable, FULL_DISK)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("opened_before", [True, False])
def test_a_locked_file_costs_a_short_wait_and_no_event(path: Path, opened_before: bool) -> None:
    store = RunStore(path, clock := Clock())
    if opened_before:
        store.event(event(0))
        store.commit()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("PRAGMA journal_mode = WAL")
        other.execute("BEGIN EXCLUSIVE")
        store.event(event(1))
        store.commit()
        assert "locked" in str(store.problem)
        other.rollback()
        # The lock is free, but it is too early: nothing is tried.
        for number in (2, 3):
            clock.now_s += 0.4
            store.event(event(number))
            store.commit()
            assert "locked" in str(store.problem)
        clock.now_s += 0.4
        store.commit()
    assert (store.problem, store.incomplete) == (None, False)
    assert numbers(path) == ([0] if opened_before else []) + [1, 2, 3]


def test_an_event_for_which_there_is_no_room_to_wait_is_a_gap(path: Path, tmp_path: Path) -> None:
    store = RunStore(tmp_path / "later" / STORE_NAME)
    for number in range(EVENTS_KEPT):
        store.event(event(number))
    assert not store.incomplete
    store.event(event(EVENTS_KEPT))
    assert store.incomplete
    (tmp_path / "later").mkdir()
    store.commit()
    assert numbers(tmp_path / "later" / STORE_NAME) == list(range(1, EVENTS_KEPT + 1))


def test_a_sample_that_the_next_one_overtakes_is_a_gap(tmp_path: Path) -> None:
    store = RunStore(tmp_path / "later" / STORE_NAME, clock := Clock())
    store.begin(FACTS)
    store.update(make_snapshot(make_row(), elapsed_s=0.0))
    assert "cannot be written" in str(store.problem)
    assert not store.incomplete
    clock.now_s += 0.9
    store.update(make_snapshot(make_row(), elapsed_s=1.0))
    assert store.incomplete
    (tmp_path / "later").mkdir()
    clock.now_s += 1.0
    store.update(make_snapshot(make_row(), elapsed_s=2.0))

    assert store.problem is None
    later = tmp_path / "later" / STORE_NAME
    assert read(later, "SELECT at_unix_s FROM samples") == [(1_700_000_001.0,), (1_700_000_002.0,)]
    store.end("good", 0, None, [])
    assert read(later, "SELECT incomplete FROM runs") == [(1,)]


@pytest.mark.parametrize("taken", ["file", "log", "all"])
def test_a_removed_file_is_made_again_with_all_that_is_known(
    path: Path, store: RunStore, taken: str
) -> None:
    store.update(make_snapshot(make_row(), elapsed_s=1.0))
    store.slots([record(), record("pc1/1")])
    store.progress([moved_on(500, slot="pc1/1")])
    store.event(event(1))
    store.commit()
    suffixes = {"file": [""], "log": ["-wal"], "all": ["", "-wal", "-shm"]}[taken]
    for suffix in suffixes:
        path.with_name(STORE_NAME + suffix).unlink()
    store.slots([record(incarnation=8)])
    store.event(event(2))
    store.commit()

    assert store.problem is None
    run = read_run(path.parent)
    assert (run.heads, run.elapsed_s, run.facts.config_yaml) == (1, 1.0, FACTS.config_yaml)
    assert {slot.slot: slot.incarnation for slot in run.slots} == {"pc1/0": 8, "pc1/1": 2}
    assert run.slots[1].counters["steps_ok"] == 500
    # Only the log was taken: the store still had it open, and loses nothing.
    assert (numbers(path), store.incomplete) == (([1, 2], False) if taken == "log" else ([2], True))
    store.end("good", 0, None, [])
    assert read_run(path.parent).outcome == "good"


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
        {"slot": "\udc80"},
        {"reason": "a\0b\n\x1b[2J"},
        {"incarnation": 2**200},
        {"counters": {"work_flop": math.inf}},
        {"resume": {"learned": math.nan}},
        {"row": {"size": 10**5000}},
        {"row": {1: {2, 3}}},
    ],
)
def test_a_hostile_value_does_not_keep_the_others_out(
    path: Path, store: RunStore, hostile: dict[str, Any]
) -> None:
    store.slots([record("pc1/7"), record(**{"node": "pc1", **hostile})])
    store.event(event(1))
    samples = (make_row(size=2**63, steps_ok=2**70, tflops=math.inf), make_row(slot="\udc80"))
    store.update(make_snapshot(*samples, elapsed_s=math.nan, notices=("\udc80",)))

    assert (store.problem, store.incomplete) == (None, False)
    assert numbers(path) == [1]
    assert read(path, "SELECT count(*) FROM samples") == [(2,)]
    run = read_run(path.parent)
    assert [slot.node for slot in run.slots] == ["pc1", "pc1"]
    assert len(run.snapshot().rows) == 2
    assert run.notices == ("\udc80",)


def test_a_gap_is_still_told_when_writing_goes_on(tmp_path: Path) -> None:
    store = RunStore(tmp_path / STORE_NAME, clock := Clock())
    outlets = Outlets(
        watchers=(), events=EventLog(tmp_path / "events.jsonl", also=store.event), store=store
    )
    outlets.show(make_snapshot(make_row(), now_unix_s=1000.0))
    assert outlets.problems == ()

    with closing(sqlite3.connect(tmp_path / STORE_NAME, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        for second in range(1, 4):
            clock.now_s = 10.0 * second
            outlets.show(make_snapshot(make_row(), now_unix_s=1000.0 + second))
        (locked,) = outlets.problems
        assert "locked" in locked
        other.execute("ROLLBACK")

    clock.now_s = 100.0
    outlets.show(make_snapshot(make_row(), now_unix_s=1010.0))
    assert store.problem is None
    (gap,) = outlets.problems
    assert "have gaps" in gap
    outlets.close(make_snapshot(make_row(), now_unix_s=1011.0))
    store.end("degraded", 1, None, ())
    outlets.events.close()
