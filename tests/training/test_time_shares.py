"""Shares of a training's time."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.training.scene import CPU, GPT, replay, settings, task
from workers.training.time_shares import Part, TimeShares
from workers.training.trainer import Trainer


def test_what_fails_is_timed_too() -> None:
    shares = TimeShares(CPU)
    assert shares.pct(Part.COPIES) is None
    began_s = time.perf_counter()

    def fail() -> None:
        with shares.timing(Part.COPIES):
            time.sleep(0.02)
            raise ValueError("cut off")

    with pytest.raises(ValueError, match="cut off"):
        fail()
    copies = shares.pct(Part.COPIES)
    assert copies is not None
    assert 100 * 0.02 / (time.perf_counter() - began_s) <= copies <= 100
    assert shares.pct(Part.OPTIMIZER) == 0


def test_an_optimiser_that_takes_half_of_the_time_is_seen() -> None:
    began_s = time.perf_counter()

    class Slow(torch.optim.SGD):
        def step(self, *keys: Any, **more: Any) -> None:  # type: ignore[override]
            super().step(*keys, **more)
            time.sleep(time.perf_counter() - began_s)  # as long as all before it

    chosen = settings(steps=3)
    run = Trainer(replace(task(GPT), optimizer=lambda some: Slow(some, lr=0.01)), chosen, CPU, 7)
    replay(run, [[12, 0, 3]])
    told = run.progress()
    assert told.optimizer_pct is not None
    assert told.copies_pct is not None
    assert told.data_wait_pct is not None
    assert 45 <= told.optimizer_pct <= 100
    assert 0 < told.copies_pct < told.optimizer_pct
    assert told.copies_pct + told.optimizer_pct + told.data_wait_pct <= 101
