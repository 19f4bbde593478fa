"""The stored queue equals the queue, also after a kill, a full disk or damage."""

from __future__ import annotations

import math
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.errors import ArchiveError
from orchestrator.jobs.lifecycle import Event
from orchestrator.jobs.model import AttemptStatus, JobOrder, World
from orchestrator.jobs.queue import Queue, decide
from orchestrator.record.jobs import queue_of, queue_snapshot
from orchestrator.record.store import STORE_NAME, RunStore, as_json
from tests.jobs.scene import ASHA, Scene, command, training
from workers.messages import Cause


def course(folder: Path) -> Scene:
    """Run a few jobs, and store each turn."""
    scene = Scene()
    store = RunStore(folder / STORE_NAME)

    def stored(world: World) -> tuple[Queue, tuple[Event, ...]]:
        queue, events = decide(scene.queue, world)
        store.queue(queue)
        assert store.commit()
        return queue, events

    scene.decide = stored  # type: ignore[method-assign]
    scene.submit(*(training(f"lr-{i}", sweep="lr", milestones=ASHA) for i in (0, 1)))
    scene.submit(command("eval", after=("lr-0",), hours=(60, 120)))
    scene.turn()
    scene.see("lr-0", step=100, value=0.5)
    scene.see("lr-0", is_at_rest=True, step=100)
    scene.see("lr-1", step=100, value=math.inf)
    scene.end("lr-1", Cause.KILLED, "SIGKILL")
    scene.say(JobOrder.CANCEL, "lr-0", "m1")
    scene.say(JobOrder.HOLD, None, "m2")
    scene.turn(5.0)
    store.close()
    return scene


def test_a_stored_queue_is_the_same(tmp_path: Path) -> None:
    scene = course(tmp_path)

    again = queue_of(tmp_path)

    rows = [list(map(as_json, each.standings.values())) for each in (scene.queue, again)]
    assert rows[0] == rows[1]
    assert again.facts == scene.queue.facts
    assert again.facts.held == "ann holds it"
    ended = AttemptStatus(attempt=2, is_at_rest=True)
    later = replace(scene.world(), statuses={"lr-0": ended})
    assert decide(again, later) == decide(scene.queue, later)
    assert decide(again, later)[1]
    assert [path.name for path in tmp_path.iterdir()] == [STORE_NAME]


@pytest.mark.parametrize(
    "harm",
    [
        "UPDATE jobs SET value = '{}' WHERE number = 1",
        "UPDATE jobs SET value = replace(value, 'CANCELLED', 'LOST')",
        "UPDATE run SET value = '[' WHERE key = 'queue'",
        "DROP TABLE jobs",
    ],
)
def test_what_cannot_be_read_is_one_sentence_and_not_touched(tmp_path: Path, harm: str) -> None:
    course(tmp_path)
    with closing(sqlite3.connect(tmp_path / STORE_NAME, isolation_level=None)) as store:
        store.execute(harm)
    content = (tmp_path / STORE_NAME).read_bytes()
    (tmp_path / "jobs").mkdir()
    for read in (queue_of, lambda folder: queue_snapshot(folder, (), 0.0)):
        with pytest.raises(ArchiveError, match="damaged") as found:
            read(tmp_path)
        assert len(str(found.value).splitlines()) == 1
    assert (tmp_path / STORE_NAME).read_bytes() == content
