"""The levers of a model on a real card: the same bits, the kernel that is asked for, and the memory of the plan.

python -m pytest tests/gpu/test_model_levers.py
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.gpu.scene import ON_A_CARD
from workers.training.memory_plan import MemoryPlanner
from workers.training.settings import TrainSettings
from workers.training.tasks import find_task
from workers.training.trainer import Trainer

pytestmark = ON_A_CARD

Found = dict[str, Any]

SMALL: Found = {
    "preset": "gpt2-small",
    "batch": 8,
    "seq": 256,
    "steps": 4,
    "recompute": "none",
    "dropout": 0.1,
}


def trained(levers: Found) -> Found:
    """Train four steps in parts of four samples; return what came out, and what it took."""
    settings = TrainSettings(**(SMALL | levers))
    task, device = find_task(settings, 0), torch.device("cuda")
    plan = MemoryPlanner(task, settings, on_card=True).plan(4, 0)
    run = Trainer(task, settings, device, 0)
    ran = run.attention_kernels()
    losses = []
    torch.cuda.reset_peak_memory_stats()
    while not run.finished:
        if run.micro_batch(4).updated:
            losses.append(run.course.losses[-1])
    return {
        "losses": losses,
        "sha256": run.weights_sha256(),
        "ran": ran,
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "planned_bytes": plan.total_bytes,
    }


def test_what_waits_on_the_host_changes_no_bit(in_child: Callable[..., Any]) -> None:
    plain = in_child(trained, {"deterministic": True, "ema_decay": 0.9})
    levered = in_child(
        trained,
        {"deterministic": True, "ema_decay": 0.9, "activations_on_host": True, "ema_on": "host"},
    )
    assert levered["losses"] == plain["losses"]
    assert levered["sha256"] == plain["sha256"]
    for found in (plain, levered):
        assert found["planned_bytes"] == pytest.approx(found["peak_bytes"], rel=0.1)
    assert levered["peak_bytes"] < 0.8 * plain["peak_bytes"]
