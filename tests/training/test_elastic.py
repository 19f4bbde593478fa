"""`ElasticStep`: a loop of one's own whose batch is split into what fits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from workers.resilience.attempts import OutOfBatchError
from workers.training.elastic import ElasticStep
from workers.training.errors import NotFiniteError, UpdateInterruptedError

Batch = tuple[Tensor, Tensor]


def made(dropout: float = 0.1) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model with the same weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(dropout), nn.Linear(32, 4))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def batches(count: int, rows: int = 12) -> list[Batch]:
    """Return learnable made data."""
    drawn = torch.Generator().manual_seed(2)
    made_of = torch.randn(8, 4, generator=drawn)
    inputs = [torch.randn(rows, 8, generator=drawn) for _ in range(count)]
    return [(each, (each @ made_of).argmax(1)) for each in inputs]


class Memory:
    """The mean loss of a part, in a memory that holds so many rows for a backward pass."""

    def __init__(self, model: nn.Module, rows: Callable[[], int]) -> None:
        self._model = model
        self._rows = rows
        self.failures = 0

    def __call__(self, part: Batch) -> Tensor:
        inputs, targets = part
        if torch.is_grad_enabled() and len(inputs) > self._rows():
            self.failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory. (acted)")
        return functional.cross_entropy(self._model(inputs), targets)


def test_a_loop_short_of_memory_has_the_same_losses() -> None:
    room: list[int] = []
    courses = []
    for memory in ([12] * 40, [12] * 10 + [5] * 10 + [2] * 10 + [12] * 10):
        model, optimizer = made()
        elastic = ElasticStep(model, optimizer, clip=1.0)
        loss = Memory(model, lambda: room[0])
        losses, parts = [], []
        for now, batch in zip(memory, batches(40), strict=True):
            room[:] = [now]
            losses.append(elastic.step(batch, loss))
            parts.append(list(elastic.parts))
        courses.append(losses)
    assert courses[0][-1] < 0.7 * courses[0][0]
    assert max(abs(a - b) / a for a, b in zip(*courses, strict=True)) < 1e-6
    assert all(sum(each) == 12 for each in parts), (
        "no sample is computed twice in a step, or left out"
    )
    assert {max(each) for each in parts[21:30]} <= {1, 2}
    assert loss.failures <= 6


def test_it_is_a_plain_loop_of_torch_where_memory_suffices() -> None:
    model, optimizer = made(dropout=0)
    elastic = ElasticStep(model, optimizer, clip=0.5)
    plain, plain_optimizer = made(dropout=0)
    for batch in batches(20):
        loss = elastic.step(batch, Memory(model, lambda: 12))
        wanted = functional.cross_entropy(plain(batch[0]), batch[1])
        wanted.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        assert loss == pytest.approx(wanted.item(), rel=1e-5)


def test_a_scheduler_that_is_made_later_does_not_warn(recwarn: pytest.WarningsRecorder) -> None:
    model, optimizer = made()
    elastic = ElasticStep(model, optimizer)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    for batch in batches(2):
        elastic.step(batch, Memory(model, lambda: 12))
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 1e-2 / 4
    assert [each for each in recwarn if "lr_scheduler" in str(each.message)] == []


def test_when_not_one_sample_fits_it_says_so() -> None:
    model, optimizer = made()
    elastic = ElasticStep(model, optimizer, max_wait_s=0)
    batch = batches(1)[0]
    with pytest.raises(
        OutOfBatchError, match="ElasticStep ran out of memory at its smallest batch size too"
    ):
        elastic.step(batch, Memory(model, lambda: 0))
    assert elastic.steps == 0
    elastic.step(batch, Memory(model, lambda: 12))
    assert elastic.steps == 1


def test_errors_name_what_to_do() -> None:
    model, optimizer = made()
    elastic = ElasticStep(model, optimizer)
    batch = batches(1)[0]
    with pytest.raises(NotFiniteError, match="the loss of optimiser step 0 is nan"):
        elastic.step(batch, lambda part: model(part[0]).sum() * float("nan"))

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. (injected)")

    handle = optimizer.register_step_pre_hook(fail)
    with pytest.raises(UpdateInterruptedError, match="load the last checkpoint"):
        elastic.step(batch, Memory(model, lambda: 12))
    handle.remove()
    with pytest.raises(UpdateInterruptedError):
        elastic.step(batch, Memory(model, lambda: 12))
    elastic.recovered()
    elastic.step(batch, Memory(model, lambda: 12))
