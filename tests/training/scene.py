"""Small trainings on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from workers.training import tasks
from workers.training.host_states import states_of
from workers.training.made_data import DrawnFaces, MadeText
from workers.training.models import Cnn, CnnShape, Gpt, GptShape
from workers.training.settings import TrainSettings
from workers.training.tasks import TrainTask
from workers.training.trainer import Trainer

CPU = torch.device("cpu")
GPT, CNN = "gpt", "cnn"

#: A number, or what is asked for one before each part.
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


def task(kind: str, dropout: float = 0.1, **shape: Any) -> TrainTask:
    """Return the task of a preset with a smaller model, of 71,000 or 58,000 parameters."""
    if kind == CNN:
        edges = CnnShape(edge=16, widths=(16, 24))
        return TrainTask(
            name="small-cnn",
            model=partial(Cnn, edges, dropout),
            dataset=DrawnFaces(edges.edge, 0, items=100),
            loss=tasks.landmark_loss,
            blocks=tasks.blocks_of,
            by_sample=True,
        )
    sizes = GptShape(**({"layers": 2, "heads": 3, "width": 48, "seq": 16} | shape))
    return TrainTask(
        name="small-gpt",
        model=partial(Gpt, sizes, dropout),
        dataset=MadeText(sizes.seq, sizes.vocabulary, 0, items=100),
        loss=tasks.next_token_loss,
        count=tasks.next_tokens,
        blocks=tasks.blocks_of,
        lr=2e-3,
        items="tokens",
    )


def trainer(kind: str = GPT, seed: int = 7, **keys: object) -> Trainer:
    """Return a training of `task(kind)`."""
    chosen = settings(**keys)
    return Trainer(task(kind, chosen.dropout), chosen, CPU, seed)


def replay(run: Trainer, splits: list[list[int]]) -> None:
    """Compute micro-batches of so many samples, at a level, each so many times."""
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
    """Return the largest relative difference of two courses."""
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


def in_shared_memory(tensor: Tensor) -> bool:
    """Whether the kernel counts the tensor's memory as shared, and not as this process's own data."""
    for line in Path("/proc/self/maps").read_text(encoding="ascii", errors="replace").splitlines():
        ends, rights, *_ = line.split()
        first, last = (int(end, 16) for end in ends.split("-"))
        if first <= tensor.data_ptr() < last:
            return rights.endswith("s")
    raise AssertionError("the tensor is not in this process's memory")


def private_bytes(run: Trainer) -> int:
    """Return the bytes of the optimiser's states that the cap of a CPU device counts."""
    optimizer = run._update.optimizer
    states = [
        each for parameter in run.parameters for each in states_of(optimizer, parameter).values()
    ]
    return sum(each.nbytes for each in states if not in_shared_memory(each))
