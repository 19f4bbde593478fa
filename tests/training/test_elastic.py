"""`ElasticStep`: a user's loop whose batch is divided into parts that fit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.training.plain_loop import X, Y, adamw, classified, net, short
from workers.resilience.attempts import OutOfBatchError, Retry
from workers.training.elastic import ElasticStep
from workers.training.errors import NotFiniteError, UpdateInterruptedError

BATCH = X, Y


def test_a_loop_short_of_memory_has_the_same_losses() -> None:
    courses = []
    for memory in ([12] * 40, [12] * 10 + [5] * 10 + [2] * 10 + [12] * 10):
        model, failed = net(nn.Dropout(0.1)), list[Retry]()
        elastic = ElasticStep(model, adamw(model), clip=1.0, on_retry=failed.append)
        losses, parts = [], []
        for room in memory:
            losses.append(elastic.step(BATCH, short(classified(model), room)))
            parts.append(list(elastic.parts))
        courses.append(losses)
    assert courses[0][-1] < 0.7 * courses[0][0]
    assert max(abs(a - b) / a for a, b in zip(*courses, strict=True)) < 1e-6
    assert all(sum(each) == 12 for each in parts), (
        "no sample is computed twice in a step, or left out"
    )
    assert {max(each) for each in parts[21:30]} <= {1, 2}
    assert 0 < len(failed) <= 6


def test_it_is_a_plain_loop_of_torch_where_memory_suffices() -> None:
    model, other = net(), net()
    elastic, optimizer = ElasticStep(model, adamw(model), clip=0.5), adamw(other)
    for _ in range(20):
        wanted = classified(other)(BATCH)
        wanted.backward()
        nn.utils.clip_grad_norm_(other.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert elastic.step(BATCH, classified(model)) == pytest.approx(wanted.item(), rel=1e-5)


def test_a_scheduler_that_is_made_later_does_not_warn(recwarn: pytest.WarningsRecorder) -> None:
    model = net()
    optimizer = adamw(model)
    elastic = ElasticStep(model, optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for _ in range(2):
        elastic.step(BATCH, classified(model))
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 1e-2 / 4
    assert [each for each in recwarn if "lr_scheduler" in str(each.message)] == []


def test_when_not_one_sample_fits_it_says_so() -> None:
    model = net()
    elastic = ElasticStep(model, adamw(model), max_wait_s=0)
    with pytest.raises(
        OutOfBatchError, match="ElasticStep ran out of memory at its smallest batch size too"
    ):
        elastic.step(BATCH, short(classified(model), 0))
    assert elastic.steps == 0
    elastic.step(BATCH, classified(model))
    assert elastic.steps == 1


def test_errors_name_what_to_do() -> None:
    model = net()
    optimizer = adamw(model)
    elastic = ElasticStep(model, optimizer)
    with pytest.raises(NotFiniteError, match="the loss of optimiser step 0 is nan"):
        elastic.step(BATCH, lambda part: model(part[0]).sum() * float("nan"))

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. (injected)")

    handle = optimizer.register_step_pre_hook(fail)
    with pytest.raises(UpdateInterruptedError, match="load the last checkpoint"):
        elastic.step(BATCH, classified(model))
    handle.remove()
    with pytest.raises(UpdateInterruptedError):
        elastic.step(BATCH, classified(model))
    elastic.recovered()
    elastic.step(BATCH, classified(model))
