"""The predicted memory of a training equals the memory that the kernel measures."""

from __future__ import annotations

import ctypes
import gc
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.in_child import InChild
from tests.training.picture_folder import drawn_folder
from workers.devices.cpu import process_memory, reset_highest
from workers.training.memory_plan import MemoryPlanner
from workers.training.settings import TrainSettings
from workers.training.tasks import TrainTask, find_task
from workers.training.trainer import Trainer

#: glibc's M_MMAP_THRESHOLD: larger blocks return to the kernel as soon as they are freed.
_M_MMAP_THRESHOLD, _THRESHOLD_BYTES = -3, 64 * 1024

GPT = {"preset": "gpt-nano", "batch": 128, "precision": "fp32"}
CNN = {"preset": "cnn-landmarks", "batch": 32, "precision": "fp32"}
CASES = [
    (GPT | {"batch": 64, "dropout": 0.1, "ema_decay": 0.99}, 0),
    (GPT, 4),
    (GPT | {"activations_on_host": True, "dropout": 0.1}, 0),
    (CNN | {"precision": "bf16", "activations_on_host": True}, 2),
    (GPT | {"adapter": "dora"}, 0),
    (CNN | {"optimizer": "adamw-foreach"}, 0),
]

#: In bf16 the conversions of a CPU library need memory too: depending on the CPU, 15 % more or less
#: than planned.
TOLERANCES = {"fp32": 0.1, "bf16": 0.2}


def planner_of(on_card: bool = False, **settings: Any) -> MemoryPlanner:
    """Return the planner of a preset."""
    wanted = TrainSettings(**settings)
    return MemoryPlanner(find_task(wanted, 0), wanted, on_card=on_card)


@pytest.mark.parametrize(("settings", "level"), CASES, ids=str)
def test_the_predicted_peak_is_the_measured_one(
    in_child: InChild, settings: dict[str, Any], level: int, record_property: Any, tmp_path: Path
) -> None:
    if settings["preset"] == "cnn-landmarks":
        settings = {**settings, "data": str(drawn_folder(tmp_path, rows=64))}
    planned, measured = in_child(planned_and_measured, settings, level)
    record_property("error_pct", 100 * (planned / measured - 1))
    assert planned == pytest.approx(measured, rel=TOLERANCES[settings["precision"]])


def planned_and_measured(chosen: dict[str, Any], level: int) -> tuple[int, int]:
    """Return the planned memory, and the kernel's peak in two steps.

    Freed memory of this process returns to the kernel.
    """
    warnings.simplefilter("ignore")
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES)
    torch.set_num_threads(1)
    settings = TrainSettings(steps=9, **chosen)
    task = find_task(settings, 0)
    planned = MemoryPlanner(task, settings, on_card=False).plan(settings.batch, level).total_bytes
    small = Trainer(task, settings.model_copy(update={"batch": 2}), torch.device("cpu"), 0)
    small.micro_batch(1, level)  # so that libraries are loaded before the measurement
    small.micro_batch(1, level)
    del small
    gc.collect()
    libc.malloc_trim(0)
    before = process_memory().resident_bytes
    trainer = Trainer(task, settings, torch.device("cpu"), 0)
    reset_highest()
    for _ in range(2):
        trainer.micro_batch(settings.batch, level)
    return planned, process_memory().highest_bytes - before


def test_the_parts_of_a_plan_are_those_of_the_model() -> None:
    plan = planner_of(
        preset="gpt-nano", precision="fp32", ema_decay=0.9, optimizer="adamw-foreach"
    ).plan(4, 0)
    model = find_task(TrainSettings(preset="gpt-nano"), 0).model()
    weights = sum(each.nbytes for each in model.parameters())
    assert plan.weights_bytes == plan.average_bytes == plan.update_bytes == weights
    assert plan.gradients_bytes == pytest.approx(weights, rel=1e-3)
    assert plan.optimizer_bytes == pytest.approx(2 * weights, rel=1e-3)
    assert plan.total_bytes == plan.state_bytes + plan.activations_bytes + plan.workspace_bytes


def test_an_absent_card_is_planned_for_without_its_memory() -> None:
    before = process_memory().resident_bytes
    planner = planner_of(on_card=True, preset="gpt2-medium", batch=12, precision="bf16")
    plan = planner.plan(1, 0)
    assert plan.state_bytes == pytest.approx(4 * 354_823_168 * 4, rel=0.001)
    assert process_memory().resident_bytes - before < 2**28
    assert planner.plan(1, planner.most_level).total_bytes < plan.total_bytes


def test_a_users_task_with_its_own_optimiser_is_planned() -> None:
    task = TrainTask(
        name="own",
        model=lambda: nn.Sequential(
            nn.Linear(64, 256), nn.Dropout(0.1), nn.BatchNorm1d(256), nn.Linear(256, 2)
        ),
        dataset=TensorDataset(torch.zeros(8, 64), torch.zeros(8, dtype=torch.int64)),
        loss=lambda model, batch: nn.functional.cross_entropy(
            model(batch[0]), batch[1], reduction="sum"
        ),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    )
    plan = MemoryPlanner(task, TrainSettings(batch=8, precision="fp32"), on_card=False).plan(8, 0)
    numbers = 64 * 256 + 256 + 256 * 2 + 256 * 2 + 2
    assert (
        plan.weights_bytes == 4 * (numbers + 2 * 256) + 8
    )  # the means, variances and the counter of the norm
    assert plan.gradients_bytes == pytest.approx(4 * numbers, abs=16)
    assert plan.optimizer_bytes == 0
