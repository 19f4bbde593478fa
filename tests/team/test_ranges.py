"""Rows that two trainings compute add up to the batch, whatever their ranges and parts."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from tests.team.scene import member_spec
from tests.training.scene import CPU, GPT, settings, task, trainer
from tests.training.test_accumulator import fails
from workers.messages import TeamOrders
from workers.team.desk import Work
from workers.team.member import DataMember
from workers.team.shares import Rows
from workers.team.tensors import OwnSums, checksum, load, split_weights
from workers.training.errors import TaskError
from workers.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("one_thread")


def shared(seed: int = 7, **keys: object) -> Trainer:
    """Return a training whose batches are shared with others."""
    chosen = settings(**keys)
    return Trainer(task(GPT, chosen.dropout), chosen, CPU, seed, is_shared=True)


def compute(run: Trainer, ranges: list[tuple[int, int]], draw: random.Random) -> None:
    """Compute ranges in parts of random sizes; some parts run out of memory in their sums."""
    for first, rows in ranges:
        run.add_rows(first, rows)
    while run.has_rows:
        fails(run, draw.choice([3, 10_000]), draw.randint(1, 12), 0)


@pytest.mark.parametrize("seed", range(3))
def test_ranges_in_two_trainings_are_the_training(seed: int) -> None:
    """A third training without rows makes the same update."""
    draw = random.Random(seed)  # noqa: S311 - sizes, not secrets
    alone, members = trainer(steps=8), [shared(steps=8) for _ in range(3)]
    own = [OwnSums(run) for run in members[:2]]
    while not alone.finished:
        while not alone.micro_batch(12).updated:
            pass
        cut, other = sorted(draw.sample(range(1, 12), 2))
        ranges = [[(other, 12 - other), (0, cut)], [(cut, other - cut)]]
        for run, sums, places in zip(members, own, ranges, strict=False):
            compute(run, places, draw)
            sums.take(0)
        parts = [sums.units[0] for sums in own]
        assert sum(part.rows for part in parts) == 12
        total, loss = parts[0].flat + parts[1].flat, parts[0].loss + parts[1].loss
        for run in members:
            run.write_sums(total, loss, parts[0].used)
            run.finish(lambda *own: own)
            assert run.course.losses[-1] == pytest.approx(alone.course.losses[-1], abs=2e-6)
    assert len({checksum(run.parameters) for run in members}) == 1
    assert len({run.weights_sha256() for run in members}) == 1
    assert members[0].course == members[1].course == members[2].course


def member_with(run: Trainer) -> DataMember:
    """Return the first member of a team of two, with this training."""
    spec = member_spec("pc0/0", ["pc0/0", "pc1/0"], {}).team
    assert spec is not None
    member = DataMember(spec, "pc0/0", lambda *_, **__: None)
    member.open(run)
    return member


def test_rows_computed_for_a_leader_that_is_left_count_no_more() -> None:
    """This also holds if the next action is an update with the sums of others."""
    run = shared()
    member = member_with(run)
    member.give(Work(rows=Rows(0, 7, 0)))
    member.part(8, 0)
    assert run.done_rows == 7
    member.clear()
    seen: list[int] = []
    member.give(Work(change=lambda trainer: seen.append(trainer.done_rows)))
    member.part(8, 0)
    assert seen == [0]


def test_a_leader_that_is_left_gives_out_no_more_rows() -> None:
    """This also holds if a part of its step is still running, and ends later."""
    run = shared()
    member = member_with(run)
    leads = TeamOrders(generation=1, leader="pc0/0", address="", secret=bytes(32))
    member.obey(leads)

    def turn() -> None:
        while not member.wait(0.05):
            pass
        member.part(1, 0)

    def left(*_: object) -> None:
        hook.remove()
        member.obey(replace(leads, generation=2, leader="pc1/0", address="127.0.0.1:1"))
        while member._work is not None:
            time.sleep(0.01)

    turn()  # the member claims rows
    hook = run.model.register_forward_pre_hook(left)
    turn()
    assert member._work is None


def test_the_state_of_another_member_brings_what_is_not_trained() -> None:
    """The member's report of its frozen weights decides which weights are sent to and by it."""
    run, other = shared(adapter="lora"), shared(8, adapter="lora")
    member = member_with(run)
    own, theirs = (checksum(split_weights(each)[1].values()) for each in (run, other))
    assert member.constant == own != theirs
    member.give(Work(change=partial(load, state=other.state())))
    member.part(8, 0)
    assert member.constant == theirs


def test_a_training_whose_passes_change_the_model_is_refused() -> None:
    def count(model: nn.Module, _: object) -> None:
        model.get_buffer("seen").add_(1)

    run = shared(preset="x:y")
    run.model.register_buffer("seen", torch.zeros(()))
    run.model.register_forward_pre_hook(count)
    run.add_rows(0, 6)
    with pytest.raises(TaskError, match="cannot be shared by a team: each pass changes seen"):
        run.micro_batch(6)
