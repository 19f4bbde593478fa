"""The workload `train` by itself; in the engine it is tested in `tests/engine`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.engine.trainings import settings
from workers.elastic.loop import Loop
from workers.policy.base import Run
from workers.training.trainer import Trainer
from workers.workloads.base import WorkloadContext
from workers.workloads.train import Train


class AtOnce(Loop[Run]):
    """Runs each part as it is."""

    def __init__(self) -> None:
        self.took_s, self.peak_bytes = 0.0, None

    def run(self, part: Callable[[Run], Any]) -> Any:
        return part(Run(size=1, batch=4))


@pytest.mark.parametrize("error", [MemoryError, AssertionError])
def test_a_count_of_operations_that_fails_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def no_count(_: Trainer) -> tuple[float, str]:
        raise error

    monkeypatch.setattr(Trainer, "operations", no_count)
    told: list[tuple[str, Any]] = []
    context = WorkloadContext(
        device=torch.device("cpu"),
        dtype=torch.float32,
        seed=0,
        settings=settings(),
        tell=lambda name, **figures: told.append((name, figures)),
    )
    assert Train(context).run(AtOnce()).flop == 0.0
    assert ("flop_unknown", {"reason": error.__name__}) in told
