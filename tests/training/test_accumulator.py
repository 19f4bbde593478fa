"""The sums of gradients are right even if a part fails after some of its gradients were added."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.training.scene import CPU, GPT, Full, gap, settings, task, trainer
from workers.training import accumulator
from workers.training.trainer import Trainer


@pytest.fixture(autouse=True)
def few_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write only the gradients of norms and biases together, in models as small as these."""
    monkeypatch.setattr(accumulator, "_TOGETHER_BYTES", 2048)


def fails(run: Trainer, writes: int, limit: int, level: int) -> bool:
    """Try a part that runs out of memory after `writes` more gradients were added to their sums;
    return whether it did.
    """
    sums, written = {id(own) for own in run.sums.gradients}, count()

    def is_full(func: Any, args: tuple[Any, ...]) -> bool:
        into = args[0][0] if func.__name__ == "_foreach_copy_.default" else args[0]
        is_write = func.__name__ in {"_foreach_copy_.default", "add_.Tensor"} and id(into) in sums
        return is_write and next(written) >= writes

    try:
        with Full(is_full):
            run.micro_batch(limit, level)
    except torch.OutOfMemoryError:
        return True
    return False


def writes_of(run: Trainer) -> int:
    """Count the writes of a first part's gradients into their sums."""
    together = len(run.sums._small)
    assert 1 < together < len(run.parameters)
    return len(run.parameters) - together + 1


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_running_out_of_memory_at_each_gradient_changes_no_bit(precision: str) -> None:
    """The embedding is also the output layer, and both blocks are recomputed."""
    keys: dict[str, Any] = {"steps": 3, "exact": True, "micro": 4, "precision": precision}
    alone, run = trainer(**keys), trainer(**keys)
    while not alone.finished:
        alone.micro_batch(4, 2)
    failures = 0
    while not run.finished:
        last = run.sums.remaining <= 4 and not run.at_boundary
        # Fails before the first write, then after one more each time, in parts before an update.
        failures += not last and fails(run, 0, 4, 2)
        while not last and fails(run, 1, 4, 2):
            failures += 1
        if last:
            run.micro_batch(4, 2)
    assert failures == 3 * (writes_of(run) + len(run.parameters))
    assert run.course.losses == alone.course.losses
    assert run.weights_sha256() == alone.weights_sha256()


def test_smaller_parts_end_where_the_part_that_failed_ends() -> None:
    """This holds whatever parts are tried afterwards."""
    drawn = random.Random(11)  # noqa: S311 - repeatable
    alone, run = trainer(steps=20), trainer(steps=20)
    course, cut, failures = list[float](), list[float](), 0
    while not alone.finished:
        alone.micro_batch(12)
        course.append(alone.course.losses[-1])
    while not run.finished:
        limit, writes = drawn.randint(1, 12), drawn.randint(0, writes_of(run))
        ends = limit >= (run.sums.remaining or 12)
        if not ends and drawn.random() < 0.8:
            failures += fails(run, writes, limit, 0)
        elif run.micro_batch(limit).updated:
            cut.append(run.course.losses[-1])
    assert failures > 30
    assert gap(cut, course) <= 1e-6


class Draws(nn.Module):
    """A model that uses torch's own random numbers, so a repeated part gives another result."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.logits = nn.Embedding(256, 16), nn.Linear(16, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits."""
        return self.logits(functional.dropout(self.tokens(tokens), 0.1))


def test_what_is_not_the_same_again_begins_its_batch_anew() -> None:
    own = replace(task(GPT), model=Draws, blocks=lambda _: ())
    run = Trainer(own, settings(preset="own:task", steps=2), CPU, 1)
    run.micro_batch(4)
    assert run.hazards
    sums = run.sums
    assert fails(run, 0, 4, 0)
    assert (sums.done, sums.is_partly_added) == (4, False)
    assert fails(run, 1, 4, 0)
    assert (sums.done, sums.is_partly_added) == (4, True)
    run.micro_batch(2)
    assert (sums.done, sums.is_partly_added) == (2, False), "what is in a sum cannot be taken out"
