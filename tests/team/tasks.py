"""Small trainings for teams, with settings for the speed and the memory of the process."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW

from tests.training.scene import GPT, task
from workers.settings import FailureKind
from workers.testing import injected_error
from workers.training.models import Gpt, GptShape
from workers.training.settings import TrainSettings
from workers.training.tasks import TrainTask, next_token_loss


@dataclass
class Pace:
    """The speed, memory and patience of this process."""

    row_s: float = 0.0
    most_rows: int | None = None
    """A part with more rows runs out of memory."""
    silent_s: float | None = None
    """Time without a byte after which another member is lost; `None`: the default."""
    away_s: float | None = None
    """Time after which the other members count as missing; `None`: the default."""


PACE = Pace()


def _loss(model: nn.Module, tokens: Tensor) -> Tensor:
    if PACE.most_rows is not None and len(tokens) > PACE.most_rows:
        raise injected_error(FailureKind.DEFINITE)
    began_s = time.perf_counter()
    loss = next_token_loss(model, tokens)
    if PACE.row_s:
        time.sleep(max(0.0, len(tokens) * PACE.row_s - (time.perf_counter() - began_s)))
    return loss


def gpt(settings: TrainSettings) -> TrainTask:
    """Return a GPT of 14,000 parameters on generated text, with dropout."""
    small = task(GPT, 0.1, width=24, heads=2, seq=8)
    return replace(small, name="team-gpt", loss=_loss)


def wide(settings: TrainSettings) -> TrainTask:
    """Return the same as `gpt` with 560,000 parameters, whose sums need several chunks."""
    big = task(GPT, 0.1, width=144, heads=2, seq=8)
    return replace(big, name="team-gpt", loss=_loss)


def with_batch_norm(settings: TrainSettings) -> TrainTask:
    """Return a task whose model keeps statistics of the samples in a part."""
    model = partial(nn.Sequential, nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    return replace(gpt(settings), model=model, blocks=lambda _: ())


def deep(settings: TrainSettings) -> TrainTask:
    """Return a task with four blocks."""
    return replace(task(GPT, 0.1, width=24, heads=2, seq=8, layers=4), name="deep", loss=_loss)


class _Skips(Gpt):
    """Adds the input of the first block to the output of each block."""

    def forward(self, tokens: Tensor, _: Tensor | None = None) -> Tensor:
        hidden = first = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            hidden = block(hidden) + first
        return functional.linear(self.norm(hidden), self.tokens.weight)


def with_skips(settings: TrainSettings) -> TrainTask:
    """Return a task whose model does more between its blocks than pass on hidden states."""
    shape = GptShape(layers=8, heads=2, width=24, seq=8)
    return replace(deep(settings), model=partial(_Skips, shape, 0.1))


class _Own(SGD):
    """An optimiser that the product does not know."""


def with_own_optimizer(settings: TrainSettings) -> TrainTask:
    """Return a task with an unknown optimiser."""
    return replace(deep(settings), optimizer=partial(_Own, lr=0.1))


def _by_place(parameters: Iterable[nn.Parameter]) -> AdamW:
    every = list(parameters)
    return AdamW([{"params": every[::2], "lr": 1e-2}, {"params": every[1::2], "lr": 3e-2}])


def grouped_by_place(settings: TrainSettings) -> TrainTask:
    """Return a task whose optimiser has every second parameter in another group."""
    return replace(deep(settings), optimizer=_by_place)


def called_twice(settings: TrainSettings) -> TrainTask:
    """Return a task whose loss calls the model twice."""
    return replace(deep(settings), loss=lambda model, rows: _loss(model, rows) + _loss(model, rows))
