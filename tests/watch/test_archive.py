"""Reading stores: beside a writer, after a kill, from a read-only folder, damaged stores, and names
that lead to other files.
"""

from __future__ import annotations

import math
import os
import shutil
import socket
import sqlite3
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.core.slot import HeadState, Hold, UserOrders
from orchestrator.errors import ArchiveError, NothingStoredError, UsageError
from orchestrator.record.archive import head_of, read_run
from orchestrator.record.events import read_events
from orchestrator.record.folders import find_run, list_runs
from orchestrator.record.jobs import queue_of
from orchestrator.record.store import STORE_NAME, RunStore
from orchestrator.run.resume import environment_of
from tests.factories import FACTS, add_event, begun_run, event, make_row, make_snapshot, record
from tests.scene import namespaced
from tests.watch.scene import begun_head
from workers.keeper.processes import start_time
from workers.messages import Progress, WorkerState
from workers.settings import Learned, PolicyState

#: The facts of a run whose head is this process.
MINE = replace(
    FACTS,
    device="cpu",
    chaos="seed=1",
    head_pid=os.getpid(),
    head_started=start_time(os.getpid()),
    host=socket.gethostname(),
)

#: Reads a store through a mount that cannot be written.
READ_ONLY = """
import os, sys
from pathlib import Path
from orchestrator.record.archive import read_run
from orchestrator.record.events import read_events

place = Path(sys.argv[1])
try:
    (place / "trial").touch()
except OSError:
    print("read-only")
for folder in sorted(place.iterdir()):
    before = sorted(os.listdir(folder))
    told = [event.event for event in read_events(folder, ["run_started"])]
    print(folder.name, read_run(folder).outcome, told)
    assert sorted(os.listdir(folder)) == before
"""

IDS = ("20261120-051500-0b76", "20261120-051501-0b76", "20261121-000000-ffff")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / MINE.run_id
    made.mkdir()
    return made


@pytest.fixture
def store(folder: Path) -> RunStore:
    """Begin a run with two slots."""
    store = begun_run(folder, MINE)
    store.slots([record(), record("pc2/0", state="LOST")])
    assert store.commit(), store.problem
    return store


def test_everything_comes_back_as_it_was(folder: Path, store: RunStore) -> None:
    row = make_row(progress=Progress(train_step=3, loss=math.inf), reason="gr\xf6\xdfer \u2028\n")
    orders = UserOrders(hold=Hold.DRAIN, cap_bytes=5)
    known = PolicyState(learned=(Learned(size=1, unit_bytes=math.inf), None))
    store.slots([record(row=row, orders=orders, resume=known)])
    add_event(store, {**event(name="state", cause="\udc80 \u2028"), "slot": "pc1/0"})
    add_event(store, event(name="other"))
    told = {"notices": ("pc2 has left",), "nodes_seen": ("pc1",)}
    store.update(make_snapshot(row, elapsed_s=12.5, **told), at_once=True)
    store.end("degraded", 1, "too few", [{"kind": "kill", "became": "restarted"}])

    run = read_run(folder)
    assert run.facts == MINE
    first, second = run.slots
    assert first == record(row=row, orders=orders, resume=known)
    assert second == record("pc2/0", state="LOST")
    assert (run.outcome, run.exit_code, run.error) == ("degraded", 1, "too few")
    assert (run.elapsed_s, run.remaining_s, run.updated_at_unix_s) == (12.5, 17.5, 1_700_000_012.5)
    assert (run.nodes_seen, run.notices) == (("pc1",), ("pc2 has left",))
    assert run.faults == ({"kind": "kill", "became": "restarted"},)
    assert not run.was_killed

    snapshot = run.snapshot()
    assert [row.state for row in snapshot.rows] == [WorkerState.RUNNING, HeadState.LOST]
    assert (snapshot.duration_s, snapshot.elapsed_s) == (30.0, 12.5)

    (told,) = read_events(folder, ["state"])
    assert (told.at, told.slot) == ("2023-11-14T22:13:20.123Z", "pc1/0")
    assert told.details == {"number": None, "cause": "\udc80 \u2028"}


@pytest.mark.parametrize("elapsed_s", [0.0, 29.0, 29.1])
@pytest.mark.parametrize("outcome", ["interrupted", "failed", "running"])
def test_what_is_offered_to_be_resumed_is_what_resuming_accepts(
    folder: Path, store: RunStore, outcome: str, elapsed_s: float
) -> None:
    slow = "run: {duration: 30s, poll_s: 1.5}\nnodes: {pc1: {gpu: cpu, gpus: 0, workers: 1, vram_per_worker_gib: 1}}\n"
    run = read_run(folder)
    run = replace(
        run,
        outcome=outcome,
        elapsed_s=elapsed_s,
        facts=replace(run.facts, config_yaml=slow, mode="local"),
    )
    was_refused = elapsed_s == 0 and outcome == "failed"
    assert run.is_resumable == (elapsed_s < 29.1 and outcome != "running" and not was_refused)
    if run.is_resumable:
        assert environment_of(run).config.run.poll_s == 1.5
    elif outcome != "running":
        with pytest.raises(
            UsageError, match="before it began" if was_refused else "has worked all of its 30 s"
        ):
            environment_of(run)


def test_a_run_under_way_is_read_without_disturbing_it(folder: Path, store: RunStore) -> None:
    for number in range(50):
        store.slots([record(incarnation=number)])
        assert store.commit()
        run = read_run(folder)
        assert (run.outcome, run.slots[0].incarnation) == ("running", number)
    assert (store.problem, store.incomplete) == (None, False)
    store.end("good", 0, None, [])
    assert [file.name for file in folder.iterdir()] == [STORE_NAME]


@pytest.mark.parametrize(
    "changed",
    [{"head_started": "1"}, {"head_pid": 2**40}, {"host": "elsewhere"}, {"head_started": None}],
)
def test_a_head_whose_process_is_another_now_was_killed(
    folder: Path, changed: dict[str, Any]
) -> None:
    store = begun_run(folder, replace(MINE, **changed))
    store.slots([record(), record("pc1/1")])
    store.commit()
    run = read_run(folder)
    assert (run.outcome, run.exit_code, run.was_killed) == ("interrupted", None, True)


def test_folders_that_cannot_be_written_can_be_read(tmp_path: Path) -> None:
    with begun_head(tmp_path / "killed"):
        pass
    shutil.copytree(tmp_path / "killed", tmp_path / "ended")
    again = begun_run(tmp_path / "ended", replace(MINE, head_started="1", run_id="ended"))
    again.end("good", 0, None, [])
    files = {place.name: len(list(place.glob(f"{STORE_NAME}*"))) for place in tmp_path.iterdir()}
    assert files == {"killed": 3, "ended": 1}

    mount = 'mount --bind "$1" "$1"; mount -o remount,ro,bind "$1"; exec "$2" -c "$3" "$1"'
    done = namespaced(mount, str(tmp_path), sys.executable, READ_ONLY)
    assert done.returncode == 0, done.stderr
    read = "['run_started']"
    assert done.stdout.splitlines() == [
        "read-only",
        f"ended good {read}",
        f"killed interrupted {read}",
    ]


def test_a_folder_without_a_store_says_so(tmp_path: Path) -> None:
    with pytest.raises(ArchiveError, match="no run folder"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(NothingStoredError, match="holds no record of a run"):
        read_run(tmp_path)
    (tmp_path / STORE_NAME).touch()
    with pytest.raises(NothingStoredError, match="holds no record of a run"):
        read_run(tmp_path)


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Return a store of many slots and events."""
    path = tmp_path_factory.mktemp("run") / STORE_NAME
    store = RunStore(path)
    store.begin(MINE)
    store.slots([record(f"pc1/{index}") for index in range(20)])
    store.end("good", 0, None, [])
    return path.read_bytes()


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_a_sentence_or_still_a_run(
    folder: Path, intact: bytes, data: st.DataObject
) -> None:
    content = bytearray(intact)
    for _ in range(data.draw(st.integers(0, 8))):
        at = data.draw(st.integers(0, len(content) - 1))
        damage = data.draw(st.binary(min_size=1, max_size=200))
        content[at : at + len(damage)] = damage
    keep = data.draw(st.one_of(st.none(), st.integers(0, len(content))))
    (folder / STORE_NAME).write_bytes(bytes(content[:keep]))
    said = ""
    try:
        read_run(folder).snapshot()
        queue_of(folder)
    except ArchiveError as error:
        said = str(error)
    assert said.isprintable()
    assert not said or str(folder) in said


def of_run(key: str, value: str) -> str:
    return f"UPDATE run SET value = '{value}' WHERE key = '{key}'"  # noqa: S608 - ours


@pytest.mark.parametrize(
    ("harm", "word"),
    [
        (b"this is a text" * 1000, "not a database"),
        ("PRAGMA user_version = 2", "another version"),
        ("DROP TABLE slots", "no such table"),
        (of_run("facts", "{}"), "damaged"),
        (of_run("status", '{"elapsed_s": "long"}'), "elapsed_s"),
        (of_run("status", '{"faults": [1]}'), "damaged"),
        (of_run("status", "["), "damaged"),
        ("UPDATE slots SET value = replace(value, 'LOST', 'HAPPY')", "HAPPY"),
        ("UPDATE slots SET value = x'ff'", "damaged"),
        ("UPDATE slots SET value = '" + "[" * 100_000 + "'", "damaged"),
    ],
    ids=lambda value: repr(value[:40]),
)
def test_a_store_that_is_none_or_says_nonsense_is_a_sentence(
    folder: Path, store: RunStore, harm: str | bytes, word: str
) -> None:
    store.update(make_snapshot())
    store.end("good", 0, None, [])
    if isinstance(harm, bytes):
        (folder / STORE_NAME).write_bytes(harm)
    else:
        with closing(sqlite3.connect(folder / STORE_NAME, isolation_level=None)) as other:
            other.executescript(harm)
    with pytest.raises(ArchiveError, match=word) as caught:
        read_run(folder)
    assert (caught.value.exit_code, str(caught.value).isprintable()) == (2, True)
    (listed,) = list_runs(folder.parent)
    assert (listed.outcome, listed.run) == ("unreadable", None)


@pytest.mark.parametrize("kind", ["pipe", "link", "folder", "huge"])
@pytest.mark.parametrize("name", [STORE_NAME, "head.json"])
def test_what_only_has_the_name_of_a_file_of_ours_is_not_read(
    folder: Path, name: str, kind: str
) -> None:
    path = folder / name
    if kind == "pipe":
        os.mkfifo(path)  # opening it would wait for a writer
    elif kind == "link":
        path.with_name("elsewhere").write_text('{"outcome": "good"}')
        path.symlink_to("elsewhere")
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_bytes(b"{}" + b" " * (16 * 2**20 - 1))
    assert head_of(folder) is None
    with pytest.raises(ArchiveError):
        read_run(folder)
    (listed,) = list_runs(folder.parent)
    outcome = "unreadable" if name == STORE_NAME else "interrupted"
    assert (listed.outcome, listed.run) == (outcome, None)


def test_a_run_is_found_by_its_name_its_end_or_as_the_latest(tmp_path: Path) -> None:
    for run_id in IDS:
        (tmp_path / run_id).mkdir()
    for run_id in IDS:
        assert find_run(tmp_path, run_id) == tmp_path / run_id
    assert find_run(tmp_path, "latest") == tmp_path / IDS[2]
    assert find_run(tmp_path, "ffff") == tmp_path / IDS[2]
    assert find_run(tmp_path, "01-0b76") == tmp_path / IDS[1]
    with pytest.raises(UsageError, match="2 runs end in 0b76"):
        find_run(tmp_path, "0b76")


@pytest.mark.parametrize(
    "run_id",
    [
        "", "..", "../secret", "20261120-051500-0b76/..", "20261120-051500-0b76\n", "20261120-051500-0B76",
        "\u0662026112-051500-0b76", "*", "\0", "\ud800", "x" * 100_000, "-", "20261122-000000-aaaa",
        "20261123-000000-aaaa", "20261124-000000-aaaa", "secret", "\x1b[2J",
    ],
)  # fmt: skip
def test_a_hostile_name_leads_nowhere(tmp_path: Path, run_id: str) -> None:
    runs = tmp_path / "runs"
    for name in (*IDS, "secret"):
        (runs / name).mkdir(parents=True)
    (tmp_path / "secret").mkdir()
    (runs / "20261122-000000-aaaa").symlink_to(tmp_path / "secret")
    (runs / "20261123-000000-aaaa").symlink_to(runs / IDS[0])
    (runs / "20261124-000000-aaaa").touch()
    with pytest.raises(UsageError) as caught:
        find_run(runs, run_id)
    assert str(caught.value).isprintable()
    assert IDS[2] in str(caught.value)
    assert len(str(caught.value)) < 400
    assert [listed.run_id for listed in list_runs(runs)] == sorted(IDS, reverse=True)
