"""Sweeps with the method optuna: the settings of members, the number of running members, and the
same after a crash.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from orchestrator.jobs.model import Job, JobOrder, JobState, Milestones, Settings, Standing
from orchestrator.jobs.sampler import settings_for
from orchestrator.jobs.spec import parse
from tests.factories import REFERENCE
from tests.jobs.scene import Scene, training

MEMBER = training(
    "hp-0",
    sweep="hp",
    milestones=Milestones(metric="loss", is_min=True),
    ranges={
        "train.lr": ("log", [1e-5, 1.0]),
        "train.batch": ("choice", [8, 16]),
        "train.warmup_steps": ("integer", [1, 9]),
    },
)


def loss(job: Job) -> float:
    """Return a loss that is smallest at a learning rate of 1e-3, whatever the other settings."""
    rate = next(value for key, value in job.settings.items() if key.endswith("lr"))
    assert isinstance(rate, float)
    return (math.log10(rate) + 3) ** 2


def ended(job: Job, value: float | None, state: JobState = JobState.DONE) -> Standing:
    return Standing(job=job, state=state, reason="", since_s=0.0, best=value)


def chosen(count: int, *, is_min: bool = True) -> list[Standing]:
    """Choose settings for members, each after the member before has ended."""
    rule = Milestones(metric="loss", is_min=is_min)
    member, found = replace(MEMBER, milestones=rule), list[Standing]()
    for _ in range(count):
        job = member.with_settings(settings_for(member, found))
        found.append(ended(job, loss(job) if is_min else -loss(job)))
    return found


FILE = """\
stop: {rule: none, metric: score, mode: max}
jobs:
  - name: hp
    command: [tune, "{lr}"]
    sweep: {method: optuna, count: 8, seed: 3, over: {lr: {log: [1e-5, 1.0]}}}
  - {name: eval, command: [eval, "{hp.dir}"], after: [hp], each: true}
  - {name: last, command: [sum-up], after: [hp]}
"""


class SweepScene(Scene):
    """A head on two cards that chooses settings as the dispatcher does."""

    def __init__(self) -> None:
        super().__init__(*parse(FILE, "night.yaml", REFERENCE).jobs)
        self.turn()

    def chosen(self) -> dict[str, tuple[Settings, int | None] | str]:
        member = next(self.queue.unchosen(3), None)
        return {} if member is None else {member[0].name: (settings_for(*member), None)}

    def members(self) -> list[Job]:
        jobs = (job for job in self.queue.jobs if job.sweep == "hp")
        return [job for job in jobs if not job.awaits_settings]

    def finish_one(self) -> None:
        """End the first job on a card; the score of a member is best at a rate of 1e-3."""
        job = self.standing(min(self.on_card)).job
        self.end(job.name, value=-loss(job) if job.settings else None)

    def work_off(self) -> None:
        while not self.queue.is_over:
            self.finish_one()


class TestWithOptuna:
    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip("optuna", reason="optuna is not installed (extra sweep)")

    @pytest.mark.parametrize("is_min", [True, False])
    def test_later_settings_are_better_than_the_first(self, is_min: bool) -> None:
        losses = [loss(each.job) for each in chosen(30, is_min=is_min)]
        assert sorted(losses[-10:])[5] < sorted(losses[:10])[5]

    def test_two_at_a_time_do_not_try_the_same(self) -> None:
        found = chosen(12)
        job = MEMBER.with_settings(settings_for(MEMBER, found))
        second = settings_for(MEMBER, [*found, ended(job, None, JobState.RUNNING)])
        assert second["train.lr"] != job.settings["train.lr"]

    @pytest.mark.parametrize("value", [None, math.nan, math.inf])
    def test_a_failed_member_teaches_nothing(self, value: float | None) -> None:
        found = chosen(12)
        job = MEMBER.with_settings({**found[0].job.settings, "train.lr": 0.5})
        failed = ended(job, 0.1, JobState.FAILED)
        assert settings_for(MEMBER, [*found, ended(job, value)]) == settings_for(
            MEMBER, [*found, failed]
        )

    def test_members_of_other_ranges_are_left_out(self) -> None:
        found = chosen(3)
        odd = MEMBER.with_settings({**found[0].job.settings, "train.batch": 64})
        assert settings_for(MEMBER, [*found, ended(odd, 0.0)])["train.batch"] in {8, 16}

    def test_no_more_are_at_work_than_cards_and_one(self) -> None:
        scene = SweepScene()
        assert [job.name for job in scene.members()] == ["hp-0", "hp-1", "hp-2"]
        assert scene.state("hp-3") == "WAITING"
        assert scene.standing("hp-3").reason == "its settings are chosen once a place is free"
        scene.finish_one()
        assert [job.name for job in scene.members()][3:] == ["hp-3"]

    def test_all_members_come_and_the_last_job_after_them(self) -> None:
        scene = SweepScene()
        scene.work_off()
        assert len(scene.members()) == 8
        assert {standing.state for standing in scene.queue.standings.values()} == {JobState.DONE}
        commands = [job.command for job in scene.members()]
        assert [float(it.argv[1]) for it in commands if it] == [
            job.settings["lr"] for job in scene.members()
        ]

    def test_a_killed_head_goes_on_with_the_same_members(self) -> None:
        plain, killed = SweepScene(), SweepScene()
        plain.work_off()
        while not killed.queue.is_over:
            killed.finish_one()
            killed.next_head()
        assert killed.members() == plain.members()

    def test_what_is_held_or_cancelled_is_not_chosen(self) -> None:
        scene = SweepScene()
        scene.say(JobOrder.HOLD, "hp-3")
        scene.say(JobOrder.CANCEL, "hp-4")
        while scene.on_card:
            scene.finish_one()
        assert scene.standing("hp-3").job.awaits_settings
        scene.say(JobOrder.RELEASE, "hp-3")
        scene.work_off()
        assert scene.state("hp-3") == "DONE"
        assert scene.state("hp-4") == "CANCELLED"
