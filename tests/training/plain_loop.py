"""Twelve samples of three classes, trained by `ElasticStep` and by the plain loop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from workers.training.elastic import ElasticStep
from workers.training.errors import TaskError

Loss: TypeAlias = Callable[[Any], Any]
#: Computes the loss of a model and a part.
LossOf: TypeAlias = Callable[[Any, Any], Any]

X = torch.randn(12, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.arange(12) % 3


def net(*between: nn.Module, classes: int = 3) -> nn.Sequential:
    """Return a model with the same weights each time."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        layers = nn.Linear(8, 16), nn.Tanh(), *between, nn.Linear(16, classes)
        return nn.Sequential(*layers).double()


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW([w for w in model.parameters() if w.requires_grad], 0.01, eps=1e-2)


def of_classes(model: nn.Module, part: Any) -> Tensor:
    return functional.cross_entropy(model(part[0]), part[1])


def classified(model: nn.Module) -> Loss:
    return lambda part: of_classes(model, part)


def out_of_memory() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. (acted)")


def short(loss: Loss, rows: int) -> Loss:
    """Return a loss that runs out of memory with more than `rows` samples, if it keeps their
    activations for a backward pass.
    """

    def limited(part: Any) -> Tensor:
        value: Tensor = loss(part)
        if value.requires_grad and len(part[0] if isinstance(part, tuple) else part) > rows:
            raise out_of_memory()
        return value

    return limited


def weights(model: nn.Module) -> list[Tensor]:
    return [each.detach().clone() for each in model.state_dict().values()]


def refused(loss: Loss, model: nn.Module, batch: Any = (X, Y), **options: Any) -> str:
    """Return the sentence with which a first step is refused; nothing may have changed."""
    before = weights(model)
    with pytest.raises(TaskError) as said:
        ElasticStep(model, adamw(model), sleep=lambda _: None, **options).step(batch, loss)
    assert all(map(torch.equal, before, weights(model)))
    assert "\n" not in str(said.value)
    return str(said.value)


def trained(
    model: nn.Module,
    loss: Loss,
    batch: Callable[[], Any] = lambda: (X, Y),
    most: int | None = None,
    make: Callable[[Any], Any] = adamw,
) -> list[Tensor]:
    """Return the weights after some steps of `ElasticStep`, in parts or in whole batches."""
    elastic = ElasticStep(model, make(model), sleep=lambda _: None)
    elastic.most_rows = most
    _seed()
    for _ in range(4):
        elastic.step(batch(), loss)
    return weights(model)


def plain(
    model: nn.Module,
    loss: Loss,
    batch: Callable[[], Any] = lambda: (X, Y),
    make: Callable[[Any], Any] = adamw,
) -> list[Tensor]:
    """Return the weights after the same number of steps of the plain loop."""
    optimizer = make(model)
    _seed()
    for _ in range(4):
        optimizer.zero_grad()
        torch.autograd.backward(loss(batch()))
        optimizer.step()
    return weights(model)


def _seed() -> None:
    torch.manual_seed(5)
    np.random.seed(5)


def close(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-8) for a, b in zip(one, other, strict=True))


def trained_as_plain(
    of: LossOf,
    batch: Callable[[], Any] = lambda: (X, Y),
    *,
    rows: int = 12,
    most: int | None = None,
    model: Callable[[], Any] = net,
    make: Callable[[Any], Any] = adamw,
) -> tuple[Any, Any]:
    """Train a model while at most `rows` samples fit, and a copy of it by the plain loop. Compare
    their weights; return both.
    """
    one = model()
    other = copy.deepcopy(one)
    found = trained(one, short(partial(of, one), rows), batch, most, make)
    assert close(found, plain(other, partial(of, other), batch, make))
    return one, other
