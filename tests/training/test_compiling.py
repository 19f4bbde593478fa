"""torch.compile keeps the losses, and is turned off if it fails or compiles too often."""

from __future__ import annotations

import random
import resource
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.training.scene import CPU, Told, gap, settings, train, trainer
from workers.training.errors import TaskError
from workers.training.model_levers import Compiling
from workers.training.settings import TrainSettings
from workers.training.tasks import TrainTask
from workers.training.trainer import Trainer
from workers.units import MIB

#: The compiler's own code uses deprecated functions of torch.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    yield
    torch.compiler.reset()


def test_the_blocks_are_one_graph_for_all_sizes_and_levels() -> None:
    drawn = random.Random(5)  # noqa: S311 - repeatable
    told = Told()
    plain, compiled, other_seed = (
        trainer(steps=12),
        trainer(steps=12, compile="block", told=told),
        trainer(steps=12, seed=8),
    )
    losses = train(plain, 12)
    limits = [drawn.randint(1, 12) for _ in range(12 * 12)]
    assert 1 in limits[:12], "one sample alone is computed too, without a graph"
    again = train(compiled, iter(limits).__next__, lambda: drawn.randint(0, 2))
    assert gap(again, losses) < 0.1 * gap(train(other_seed, 12), losses)
    ((name, figures),) = told
    assert (name, figures["unit"], figures["graphs"]) == ("compiled", "block", 1)
    assert figures["seconds"] > 0


class Stubborn(nn.Module):
    """A module whose compiled code depends on a number that changes in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 1)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Return one number for each sample."""
        self.calls = self.calls + 1
        if self.calls % 3 == 0:
            return torch.zeros(len(x))
        return self.line(x) * self.calls


def compiling(model: nn.Module, backend: Any) -> tuple[Told, Callable[[int], Tensor]]:
    """Return the recorded events, and a function that computes some rows."""
    told = Told()
    made = Compiling(settings(compile="model"), model, [], told, backend)
    return told, lambda rows: made.run(rows, lambda: model(torch.ones(rows, 8)).sum())


def test_what_would_be_compiled_in_every_step_is_taken_back() -> None:
    told, part = compiling(Stubborn(), "eager")
    for rows in range(2, 12):
        part(rows)
    *compiled, (name, figures) = told
    assert {each for each, _ in compiled} == {"compiled"}
    assert len(compiled) == 4
    assert name == "not_compiled"
    assert "more than 4 times" in figures["reason"]


@pytest.mark.parametrize(
    ("error", "trials"),
    [
        (ValueError("no such instruction"), 1),
        (torch.OutOfMemoryError("CUDA out of memory. (injected)"), 3),
        (RuntimeError("Triton Error [CUDA]: out of memory"), 3),
    ],
    ids=["other", "memory", "Triton"],
)
def test_a_compiler_that_fails_costs_its_own_time_only(error: Exception, trials: int) -> None:
    def backend(*_: object) -> None:
        raise error

    told, part = compiling(nn.Linear(8, 1), backend)
    for _ in range(trials - 1):
        with pytest.raises(Exception, match="out of memory"):
            part(3)
    assert float(part(3)) == pytest.approx(float(part(1)) * 3)
    ((name, figures),) = told
    assert name == "not_compiled"
    assert figures["reason"].startswith("memory ran out") == (trials > 1)
    assert str(error) in figures["reason"]


def test_a_cap_that_leaves_the_compiler_no_room_keeps_it_out() -> None:
    told, part = compiling(nn.Linear(8, 1), "eager")
    before = resource.getrlimit(resource.RLIMIT_DATA)
    now_bytes = psutil.Process().memory_info().data
    resource.setrlimit(resource.RLIMIT_DATA, (now_bytes + 100 * MIB, before[1]))
    try:
        part(3)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    ((name, figures),) = told
    assert name == "not_compiled"
    assert "the compiler may take and keep 256 MiB" in figures["reason"]


def test_an_error_of_the_model_itself_is_not_the_compilers() -> None:
    wrong = TrainTask(
        name="wrong",
        model=lambda: nn.Linear(8, 1),
        dataset=TensorDataset(torch.zeros(8, 8)),
        loss=lambda model, part: model(part[0][:, :7]).sum(),
    )
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        Trainer(
            wrong, TrainSettings(batch=4, precision="fp32", compile="model"), CPU, 0
        ).micro_batch(4)


def test_blocks_that_a_task_does_not_name_cannot_be_compiled() -> None:
    with pytest.raises(TaskError, match=r"set train\.compile: model"):
        Compiling(settings(compile="block"), nn.Linear(8, 1), [], Told())
