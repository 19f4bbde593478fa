"""A training whose micro-batch changes at any time has the losses of an undisturbed training."""

from __future__ import annotations

import random
from itertools import count
from typing import Any

import pytest
import torch

from tests.training.scene import CNN, GPT, Full, gap, in_shared_memory, train, trainer
from workers.training.batches import tensors_in
from workers.training.trainer import Trainer


def held_by(run: Trainer) -> list[torch.Tensor]:
    """Return all tensors that a training holds between two calls."""
    optimizer = list(run.optimizer.state.values())
    sums = [*run.sums.gradients, *run.sums.loss]
    return list(tensors_in([run.model.state_dict(), optimizer, run._average.tensors, sums]))


@pytest.mark.parametrize("kind", [GPT, CNN])
def test_any_micro_batches_change_the_loss_by_rounding_only(kind: str) -> None:
    alone = train(trainer(kind, steps=100), 12)
    control = train(trainer(kind, steps=100))
    drawn = random.Random(3)  # noqa: S311 - repeatable
    changing = trainer(kind, steps=100)
    limits: list[int] = []

    def limit() -> int:
        limits.append(drawn.randint(1, 12))
        return limits[-1]

    losses = train(changing, limit)
    assert alone[-1] < 0.8 * alone[0], "it learns, so a difference would show"
    assert gap(losses, alone) <= max(1e-6, 3 * gap(control, alone))
    first, again, same = trainer(kind, steps=100), trainer(kind, steps=100), iter(limits)
    while first.step < 40:
        first.micro_batch(next(same), 0)
    again.load(first.state())
    train(again, same.__next__)
    assert again.step == 100
    assert again.weights_sha256() == changing.weights_sha256(), "another process went on"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", [GPT, CNN])
def test_any_recomputation_levels_change_no_bit(kind: str, precision: str) -> None:
    keys: dict[str, Any] = {"precision": precision, "steps": 40}
    alone = trainer(kind, **keys)
    changing = trainer(kind, **keys)
    drawn = random.Random(4)  # noqa: S311 - repeatable
    levels: list[int] = []

    def level() -> int:
        levels.append(drawn.randint(0, 2))
        return levels[-1]

    assert train(alone, 6) == train(changing, 6, level)
    assert alone.weights_sha256() == changing.weights_sha256()
    assert set(levels) == {0, 1, 2}


def test_parking_in_the_middle_of_a_batch_changes_no_bit() -> None:
    alone, run = trainer(steps=4), trainer(steps=4)
    train(alone)
    for _ in range(4):
        run.micro_batch(5)
    needed_bytes = sum(each.nbytes for each in held_by(run))
    assert run.park() == needed_bytes
    assert all(in_shared_memory(each) for each in held_by(run)), (
        "on a CPU, outside of what the cap counts"
    )
    operators = count()
    with Full(lambda *_: next(operators) >= 30), pytest.raises(torch.OutOfMemoryError):
        run.unpark()
    assert all(in_shared_memory(each) for each in held_by(run)), "all of it stays in host memory"
    run.unpark()
    assert not any(in_shared_memory(each) for each in held_by(run))
    train(run)
    assert run.weights_sha256() == alone.weights_sha256()
