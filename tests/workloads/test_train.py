"""The workload `train` by itself; in the engine it is tested in `tests/engine`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine.trainings import settings
from workers.training.trainer import Trainer
from workers.workloads.base import WorkloadContext
from workers.workloads.train import Train


@pytest.mark.parametrize("error", [MemoryError, AssertionError])
def test_a_count_of_operations_that_fails_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def no_count(_: Trainer) -> float:
        raise error

    monkeypatch.setattr(Trainer, "flop_per_sample", no_count)
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
    assert ("flop_unknown", {"reason": error.__name__}) in told
