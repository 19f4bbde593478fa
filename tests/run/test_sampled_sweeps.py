"""Sweeps whose members are asked for while the queue works: how many, when, and the same after a
crash.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.jobs.model import Job, JobState, Record, Submitted
from orchestrator.jobs.queue import Queue
from orchestrator.jobs.spec import parse
from orchestrator.record.jobs import queue_of
from orchestrator.record.store import STORE_NAME, RunStore
from orchestrator.run.sampled_sweeps import SampledSweeps, sampled_sweeps
from tests.factories import REFERENCE
from tests.jobs.scene import Scene

pytest.importorskip("optuna", reason="optuna is not installed (extra sweep)")

FILE = """\
stop: {rule: none, metric: score, mode: max}
jobs:
  - {name: prep, command: [prep]}
  - name: hp
    command: [tune, "{lr}"]
    sweep: {method: optuna, count: 8, seed: 3, over: {lr: {log: [1e-5, 1.0]}}}
  - {name: eval, command: [eval, "{hp.dir}"], after: [hp], each: true}
  - {name: last, command: [sum-up], after: [hp]}
"""


class SweepScene(Scene):
    """A head whose queue asks for members as the dispatcher does."""

    def __init__(self, text: str = FILE) -> None:
        super().__init__()
        self.begin()
        file = parse(text, "night.yaml", REFERENCE)
        self.take(*sampled_sweeps(file, self.queue))

    def begin(self, queue: Queue | None = None) -> None:
        self.queue = queue or self.queue
        self.sweeps = SampledSweeps(queue=self.queue, config=REFERENCE, head_node=None, cards=2)

    def turn(self, seconds: float = 0.0) -> list[Record]:
        found: list[Record] = []
        while fresh := self.sweeps.next_jobs():
            found += [Submitted(at_s=self.now_s, job=job) for job in fresh]
            self.take(*(Submitted(at_s=self.now_s, job=job) for job in fresh))
        rest = super().turn(seconds)
        return found + rest + (self.turn() if rest else [])

    def members(self) -> list[Job]:
        return [standing.job for standing in self.queue.members("hp")]

    def finish_one(self) -> None:
        """End the first job on a card, a member with a score that is best at a rate of 1e-3."""
        running = (one for one in self.queue.standings.values() if one.state is JobState.RUNNING)
        job = next(running).job
        rate = job.settings.get("lr", 1e-3)
        assert isinstance(rate, float)
        self.end(job.name, value=-abs(math.log10(rate) + 3))


def test_no_more_are_at_work_than_cards_and_one() -> None:
    scene = SweepScene()
    scene.turn()
    assert [job.name for job in scene.members()] == ["hp-0", "hp-1", "hp-2"]
    scene.finish_one()
    assert len(scene.members()) == 4


def test_members_come_until_there_are_as_many_as_counted() -> None:
    scene = SweepScene()
    scene.turn()
    while not scene.queue.is_over:
        scene.finish_one()
    assert len(scene.members()) == 8


def test_a_follower_comes_with_its_member_and_with_the_last() -> None:
    scene = SweepScene()
    scene.turn()
    assert "eval-2" in scene.queue.names
    assert "eval-3" not in scene.queue.names
    assert "last" not in scene.queue.names
    assert "prep" not in scene.queue.names  # it was submitted by who has submitted the file
    while len(scene.members()) < 8:
        scene.finish_one()
    assert "last" in scene.queue.names


def test_the_metric_of_the_sweep_decides_what_is_tried_next() -> None:
    scene = SweepScene()
    scene.turn()
    rule = scene.members()[0].milestones
    assert rule is not None
    assert (rule.metric, rule.is_min) == ("score", False)


def test_a_killed_head_goes_on_with_the_same_members(tmp_path: Path) -> None:
    plain, killed = SweepScene(), SweepScene()
    store = RunStore(tmp_path / STORE_NAME)
    for scene in (plain, killed):
        scene.turn()
    while len(plain.members()) < 8:
        for scene in (plain, killed):
            scene.finish_one()
        store.queue(killed.queue)
        assert store.commit()
        killed.begin(queue_of(tmp_path))
    assert [job.settings for job in killed.members()] == [job.settings for job in plain.members()]
    assert [job.id for job in killed.members()] == [job.id for job in plain.members()]


def test_a_sweep_that_cannot_be_read_does_not_keep_it_going() -> None:
    scene = SweepScene()
    scene.take(replace(scene.queue.sweeps["hp"], text="jobs: 3"))
    scene.turn()
    assert "the sweep hp has no more members: night.yaml" in scene.sweeps.problems["hp"]
    assert scene.queue.is_over_without(scene.sweeps.problems)
