"""Small trainings on the CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from workers.training import tasks
from workers.training.made_data import DrawnFaces, MadeText
from workers.training.models import Cnn, CnnShape, Gpt, GptShape
from workers.training.settings import TrainSettings
from workers.training.tasks import TrainTask
from workers.training.trainer import Trainer

CPU = torch.device("cpu")
GPT, CNN = "gpt", "cnn"


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
