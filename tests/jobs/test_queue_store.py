"""The stored queue: what is there after a kill, a full disk or damage, and that it is the queue."""

from __future__ import annotations

import math
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.errors import ArchiveError
from orchestrator.jobs.codec import as_json
from orchestrator.jobs.model import Cause, QueueHeld, Record, Submitted, Word
from orchestrator.record.jobs import QUEUE_STORE, QueueReader, QueueStore, queue_of
from tests.jobs.scene import ASHA, Scene, command, training
from tests.scene import ROOT

#: Gives two jobs the same best value, turn by turn, and says once that it has begun.
WRITER = """
import sys
from pathlib import Path
from orchestrator.jobs.model import Assigned, Measured, Submitted
from orchestrator.record.jobs import QueueStore
from tests.jobs.scene import training
store = QueueStore(Path(sys.argv[1]))
for name in ("a", "b"):
    store.queue.apply(Submitted(at_s=0.0, job=training(name)))
    if store.queue.shown(name).attempt == 0:
        store.queue.apply(
            Assigned(at_s=0.0, job=name, attempt=1, card=name, budget_bytes=1, alone=True)
        )
store.commit()
print("begun", flush=True)
turn = store.queue.shown("a").best_step or 0
while True:
    turn += 1
    for name in ("a", "b"):
        store.queue.apply(
            Measured(
                at_s=turn, job=name, card_title="x", steps_per_s=None, best=-turn, best_step=turn
            )
        )
    store.commit()
"""


def course(folder: Path) -> Scene:
    """Play a few jobs, each turn stored."""
    scene = Scene()
    store = QueueStore(folder)
    scene.queue = store.queue

    def take(*batch: Record) -> None:
        Scene.take(scene, *batch)
        store.commit()

    scene.take = take  # type: ignore[method-assign]
    take(
        *(Submitted(at_s=1.0, job=training(f"lr-{i}", sweep="lr", milestones=ASHA)) for i in (0, 1))
    )
    take(Submitted(at_s=2.0, job=command("eval", after=("lr-0",), hours=(60, 120))))
    scene.turn()
    scene.see("lr-0", step=100, value=0.5)
    scene.see("lr-0", is_at_rest=True, step=100)
    scene.see("lr-1", step=100, value=math.inf)
    scene.end("lr-1", Cause.KILLED, "SIGKILL")
    scene.say(Word.CANCEL, "lr-0", "m1")
    scene.turn(5.0)
    store.close()
    return scene


def test_a_stored_queue_is_the_same(tmp_path: Path) -> None:
    scene = course(tmp_path)

    again = queue_of(tmp_path)

    rows = [[as_json(each.stored(name)) for name in each.names] for each in (scene.queue, again)]
    assert rows[0] == rows[1]
    assert again.facts == scene.queue.facts
    assert again.next_records(scene.world()) == scene.queue.next_records(scene.world())
    assert [path.name for path in tmp_path.iterdir()] == [QUEUE_STORE]


def test_a_writer_killed_at_any_moment_leaves_a_whole_queue(tmp_path: Path) -> None:
    draws, turns = random.Random(7), 0  # noqa: S311 - moments, not secrets
    for _ in range(8):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        with writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "begun\n"
            time.sleep(draws.uniform(0.0, 0.1))
            writer.send_signal(signal.SIGKILL)
        one, other = queue_of(tmp_path).standings.values()
        assert (one.best_step, one.best) == (other.best_step, other.best)
        assert (one.best_step or 0) >= turns, "what was stored is not lost"
        turns = one.best_step or 0
    assert turns > 0


def test_what_the_disk_refuses_is_stored_later(tmp_path: Path) -> None:
    store = QueueStore(tmp_path)
    store.queue.apply(Submitted(at_s=0.0, job=training("a")))
    store.commit()
    (pages,) = store._connection.execute("PRAGMA page_count").fetchone()
    store._connection.execute(f"PRAGMA max_page_count = {pages}")
    store.queue.apply(Submitted(at_s=0.0, job=training("b", origin="x" * 100_000)))
    with pytest.raises(OSError, match="disk is full"):
        store.commit()
    assert list(queue_of(tmp_path).names) == ["a"]

    store._connection.execute("PRAGMA max_page_count = 1000000")
    store.queue.apply(Submitted(at_s=0.0, job=training("c")))
    store.commit()
    assert list(queue_of(tmp_path).names) == ["a", "b", "c"]
    store.close()


def test_a_locked_store_is_told(tmp_path: Path) -> None:
    store = QueueStore(tmp_path)
    other = sqlite3.connect(tmp_path / QUEUE_STORE, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    store.queue.apply(QueueHeld(at_s=0.0, reason="mine"))
    with pytest.raises(OSError, match="locked"):
        store.commit()
    other.close()
    store.commit()
    assert queue_of(tmp_path).held == "mine"
    store.close()


def test_no_other_user_reads_it(tmp_path: Path) -> None:
    store = QueueStore(tmp_path / "jobs")
    modes = {path.stat().st_mode & 0o777 for path in (tmp_path / "jobs").iterdir()}
    assert (modes, (tmp_path / "jobs").stat().st_mode & 0o777) == ({0o600}, 0o700)
    store.close()


def statement(sql: str) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        with sqlite3.connect(path) as store:
            store.execute(sql)
        store.close()

    return change


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.write_bytes(b"hello"), "damaged"),
        (lambda path: path.write_bytes(path.read_bytes()[:5000]), "damaged"),
        (statement("UPDATE jobs SET row = '{}' WHERE number = 1"), "damaged"),
        (statement("UPDATE jobs SET row = replace(row, 'CANCELLED', 'LOST')"), "damaged"),
        (statement("UPDATE queue SET value = '[' WHERE key = 'facts'"), "damaged"),
        (statement("DROP TABLE sweeps"), "damaged"),
        (statement("UPDATE meta SET value = '2'"), "another version"),
    ],
)
def test_what_cannot_be_read_is_one_sentence_and_not_touched(
    tmp_path: Path, damage: Callable[[Path], object], words: str
) -> None:
    folder = tmp_path / "jobs"
    course(folder)
    damage(folder / QUEUE_STORE)
    content = (folder / QUEUE_STORE).read_bytes()
    for read in (queue_of, QueueStore, lambda _: QueueReader(tmp_path).look((), 0.0)):
        with pytest.raises(ArchiveError, match=words) as found:
            read(folder)
        assert len(str(found.value).splitlines()) == 1
    assert (folder / QUEUE_STORE).read_bytes() == content


def test_a_file_name_that_is_no_utf_8_comes_back(tmp_path: Path) -> None:
    job = command("a")
    assert job.command is not None
    odd = replace(job, command=replace(job.command, argv=("cat", "\udcff")))
    store = QueueStore(tmp_path)
    store.queue.apply(Submitted(at_s=0.0, job=odd))
    store.commit()
    store.close()
    assert queue_of(tmp_path).jobs == (odd,)
