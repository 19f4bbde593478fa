"""The workload `train` by itself; in the engine it is tested in `tests/engine`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.trainings import settings
from workers.training.trainer import Trainer
from workers.workloads.base import WorkloadContext
from workers.workloads.train import Train


def test_a_count_of_operations_without_memory_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(_: Trainer) -> float:
        raise MemoryError

    monkeypatch.setattr(Trainer, "flop_per_sample", no_memory)
    told: list[tuple[str, Any]] = []
    context = WorkloadContext(
        device=torch.device("cpu"),
        dtype=torch.float32,
        seed=0,
        settings=settings(),
        tell=lambda name, **figures: told.append((name, figures)),
    )
    work = Train(context)
    assert work.step(1, 4).flop == 0.0
    assert ("flop_unknown", {"reason": "MemoryError"}) in told
