"""Small trainings on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from workers.training import tasks
from workers.training.batches import Samples
from workers.training.dispatch_modes import OperatorMode
from workers.training.keyed_random import row_keys, uniform
from workers.training.models import Gpt, GptShape
from workers.training.optimizers import states_of
from workers.training.order import Sample
from workers.training.pictures import Cnn, landmark_loss
from workers.training.settings import TrainSettings
from workers.training.tasks import SyntheticText, TrainTask
from workers.training.trainer import Trainer

CPU = torch.device("cpu")
GPT, CNN = "gpt", "cnn"

#: A number, or a function that returns it before each part.
Asked: TypeAlias = int | Callable[[], int]


def settings(**keys: object) -> TrainSettings:
    """Return settings for `trainer`."""
    small: dict[str, Any] = {
        "steps": 200,
        "batch": 12,
        "precision": "fp32",
        "dropout": 0.1,
        "ema_decay": 0.9,
    }
    return TrainSettings(**(small | keys))


class Told(list[tuple[str, dict[str, Any]]]):
    """Collects events."""

    def __call__(self, name: str, **figures: Any) -> None:
        """Record an event."""
        self.append((name, figures))


class Full(OperatorMode):
    """Makes operators run out of memory if `is_full` is true for the operator and its arguments."""

    def __init__(self, is_full: Callable[[Any, tuple[Any, ...]], bool]) -> None:
        super().__init__()
        self._is_full = is_full

    def run(self, func: Any, args: tuple[Any, ...], given: dict[str, Any]) -> Any:
        """Run an operator, or raise an out-of-memory error."""
        if self._is_full(func, args):
            raise torch.OutOfMemoryError("CUDA out of memory. (injected)")
        return func(*args, **given)


class Dots(Samples):
    """A hundred grey pictures with bright dots at known points; noise depends on the epoch."""

    points = 4
    _items = 100

    def __init__(self, edge: int) -> None:
        self._edge = edge

    def __getitems__(self, samples: Sequence[Sample]) -> list[tuple[Tensor, Tensor]]:
        """Return pictures (1, edge, edge) and points from -1 to 1."""
        index = torch.tensor([sample.index for sample in samples])
        epoch = torch.tensor([sample.epoch for sample in samples])
        points = 1.6 * uniform(row_keys(0, [0], index)[0], 2 * self.points) - 0.8
        points = points.view(-1, self.points, 2)
        pixels = torch.linspace(-1, 1, self._edge)
        across, down = (
            torch.exp(-((points[..., axis, None] - pixels) ** 2) * self._edge**2 / 4)
            for axis in (0, 1)
        )
        noise = uniform(row_keys(0, [1], index + self._items * epoch)[0], self._edge**2)
        pictures = torch.einsum("bph,bpw->bhw", down, across) + 0.2 * noise.view(
            -1, self._edge, self._edge
        )
        return list(zip(pictures[:, None], points, strict=True))


def task(kind: str, dropout: float = 0.1, **shape: Any) -> TrainTask:
    """Return the task of a preset with a smaller model, of 71,000 or 58,000 parameters."""
    if kind == CNN:
        return TrainTask(
            name="small-cnn",
            model=partial(Cnn, (16, 24), dropout, Dots.points),
            dataset=Dots(16),
            loss=landmark_loss,
            blocks=tasks.blocks_of,
            by_sample=True,
        )
    sizes = GptShape(**({"layers": 2, "heads": 3, "width": 48, "seq": 16} | shape))
    return TrainTask(
        name="small-gpt",
        model=partial(Gpt, sizes, dropout),
        dataset=SyntheticText(sizes.seq, sizes.vocabulary, 0, items=100),
        loss=tasks.next_token_loss,
        count=tasks.next_tokens,
        blocks=tasks.blocks_of,
        lr=2e-3,
        items="tokens",
    )


def trainer(kind: str = GPT, seed: int = 7, told: Told | None = None, **keys: object) -> Trainer:
    """Return a training of `task(kind)`."""
    chosen = settings(**keys)
    return Trainer(task(kind, chosen.dropout), chosen, CPU, seed, Told() if told is None else told)


def replay(run: Trainer, splits: list[list[int]]) -> None:
    """Compute micro-batches; each split is (samples, level, repetitions)."""
    for limit, level, count in splits:
        for _ in range(count):
            run.micro_batch(limit, level)


def train(run: Trainer, limit: Asked = 5, level: Asked = 0) -> list[float]:
    """Train to the end; return the loss of each step."""
    found: list[float] = []
    while not run.finished:
        rows, now = (each if isinstance(each, int) else each() for each in (limit, level))
        if run.micro_batch(rows, now).updated:
            found.append(run.course.losses[-1])
    return found


def gap(one: list[float], other: list[float]) -> float:
    """Return the largest relative difference between two series of losses."""
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


def in_shared_memory(tensor: Tensor) -> bool:
    """Return whether the kernel counts the tensor's memory as shared, not as private data."""
    for line in Path("/proc/self/maps").read_text(encoding="ascii", errors="replace").splitlines():
        ends, rights, *_ = line.split()
        first, last = (int(end, 16) for end in ends.split("-"))
        if first <= tensor.data_ptr() < last:
            return rights.endswith("s")
    raise AssertionError("the tensor is not in this process's memory")


def private_bytes(run: Trainer) -> int:
    """Return the bytes of the optimiser's states that the cap of a CPU device counts."""
    optimizer = run.optimizer
    states = [
        each for parameter in run.parameters for each in states_of(optimizer, parameter).values()
    ]
    return sum(each.nbytes for each in states if not in_shared_memory(each))
