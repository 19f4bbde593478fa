"""Trainings for the tests of the workload `train`: tasks with defects, and turns in a folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import SGD

from tests.engine.scene import begun, turn
from tests.scene import MIB, spec_of
from workers.messages import Status, Verdict
from workers.settings import FailureKind, WorkerSpec
from workers.testing import injected_error
from workers.training.settings import TrainSettings
from workers.training.tasks import TrainTask


class Numbers:
    """Items are their indices; the task is to double them."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index / 64])


class Failing(SGD):
    """Fails in the middle of its fourth update, after half of the parameters were changed."""

    updates: ClassVar[int] = 0

    def step(self, closure: Any = None) -> None:
        Failing.updates += 1
        super().step(closure)
        if Failing.updates == 4:
            raise injected_error(FailureKind.DEFINITE)


def _task(**changes: Any) -> TrainTask:
    fields: dict[str, Any] = {
        "name": "numbers",
        "model": lambda: nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)),
        "dataset": Numbers(),
        "loss": lambda model, part: (model(part) - 2 * part).square().sum(),
    }
    return TrainTask(**(fields | changes))


def _nan(model: nn.Module, part: Tensor) -> Tensor:
    _nan.calls += type(part) is Tensor  # type: ignore[attr-defined]  # a planner's tensors have no data
    # The checks before the first step need fewer calls, and each step needs 2.
    factor = float("nan") if _nan.calls > 60 else 1.0  # type: ignore[attr-defined]
    return (model(part) - 2 * part).square().sum() * factor


_nan.calls = 0  # type: ignore[attr-defined]

good = _task()
becomes_nan = _task(loss=_nan)
cut_update = _task(optimizer=lambda parameters: Failing(list(parameters), lr=0.1))
uncut_update = _task(optimizer=lambda parameters: SGD(list(parameters), lr=0.1))
#: A model of 9 MiB: most of its memory is weights, gradients and states.
wide = _task(
    model=lambda: nn.Sequential(nn.Linear(1, 448), *(nn.Linear(448, 448) for _ in range(12)))
)


def settings(**changes: object) -> dict[str, Any]:
    """Return the section `train:` as the head would send it."""
    small = {
        "preset": "gpt-nano",
        "batch": 8,
        "micro": 4,
        "exact": True,
        "seq": None if ":" in str(changes.get("preset")) else 16,
        "steps": 6,
        "precision": "fp32",
    }
    return TrainSettings.model_validate({**small, **changes}).model_dump()


def training_spec(budget_bytes: int = 160 * MIB, **changes: object) -> WorkerSpec:
    """Return the spec of a worker that trains; `changes` are keys of `train:`."""
    usual = spec_of(name="train", policy="adaptive", budget_bytes=budget_bytes)
    # One thread: more threads may add up a sum in another order.
    return replace(
        usual,
        run_id="r",
        workers_on_host=64,
        workload=replace(usual.workload, settings=settings(**changes)),
    )


def trained(
    folder: str,
    spec: WorkerSpec,
    directives: Sequence[Mapping[str, Any]],
    before: Callable[[str], None] | None = None,
    begin: Mapping[str, Any] | None = None,
) -> list[Status]:
    """Run turns, with this folder for states, until the training is done."""
    os.environ["ORCHESTRATOR_STATE_DIR"] = folder
    if before is not None:
        before(folder)
    engine = begun(spec, **(begin or {}))
    reports = []
    for directive in directives:
        reports.append(turn(engine, **directive))
        if reports[-1].verdict is not Verdict.OK:
            break
    return reports
