"""Steps as users write them, well and badly, for any device.

They write into their memory, so that the kernel counts it.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import ClassVar

import torch

from tests.engine.scene import begun, turn
from tests.scene import MIB
from workers.messages import Status
from workers.settings import WorkerSpec
from workers.verification.check import Check
from workers.workloads.base import StepResult, Workload, WorkloadContext


class Squares(Workload):
    """Allocates square matrices, and frees them before its step returns.

    Does not state its need.
    """

    batch_power = 0.0
    squares: ClassVar[int] = 2

    def step(self, size: int, batch: int) -> StepResult:
        self.work(size, self.squares)
        return StepResult(flop=1.0)

    def work(self, size: int, squares: int) -> None:
        held = []
        for _ in range(squares):
            held.append(torch.ones(size, size, device=self.context.device))  # noqa: PERF401 - an error must leave it in the frame
        held[-1].add_(held[0])

    def release(self) -> None:
        pass


class Leaking(Squares):
    """Keeps 2 MiB more with each step, which `release` does not free."""

    kept: ClassVar[list[torch.Tensor]] = []

    def step(self, size: int, batch: int) -> StepResult:
        Leaking.kept.append(torch.ones(2 * MIB, dtype=torch.uint8, device=self.context.device))
        return super().step(size, batch)


class Small(Squares):
    """Makes and frees many small tensors, but keeps the last one, at the end of malloc's heap."""

    def step(self, size: int, batch: int) -> StepResult:
        small = [torch.ones(256, device=self.context.device) for _ in range(size)]
        self.last = small.pop()
        return StepResult(flop=1.0)


class KeepsError(Squares):
    """Keeps an exception whose traceback holds the tensors of the step."""

    error: Exception | None = None

    def work(self, size: int, squares: int) -> None:
        try:
            super().work(size, squares)
        except RuntimeError as error:
            self.error = sys.last_value = error
            raise


class Deep(Workload):
    """A forward and backward pass of a network with 16 layers.

    Its memory grows with `size`, the number of rows in a batch.
    """

    size_power = 1.0
    batch_power = 0.0
    network: torch.nn.Module | None = None

    def step(self, size: int, batch: int) -> StepResult:
        if self.network is None:
            layers = (
                torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.GELU()) for _ in range(16)
            )
            self.network = torch.nn.Sequential(*layers).to(self.context.device)
        rows = torch.randn(size, 128, device=self.context.device)
        self.network(rows).square().mean().backward()
        self.network.zero_grad()
        return StepResult(flop=1.0)

    def release(self) -> None:
        self.network = None


class Greedy(Squares):
    """Allocates twice the cap in the place `where`, and records each try and each success."""

    where: ClassVar[str] = ""
    took_bytes: ClassVar[int] = 0
    tried: ClassVar[list[str]] = []
    obtained: ClassVar[list[str]] = []

    def __init__(self, context: WorkloadContext) -> None:
        super().__init__(context)
        self.take("__init__")

    def take(self, where: str) -> None:
        if where == Greedy.where:
            Greedy.tried.append(where)
            torch.ones(Greedy.took_bytes, dtype=torch.uint8, device=self.context.device)
            Greedy.obtained.append(where)

    def step(self, size: int, batch: int) -> StepResult:
        self.take("step")
        return super().step(min(size, 512), batch)

    def needed_bytes(self, size: int, batch: int) -> int:
        return MIB

    def release(self) -> None:
        self.take("release")

    def check(self, seed: int) -> Check | None:
        self.take("check")
        return None


def greedy(spec: WorkerSpec, where: str) -> tuple[list[Status], list[str], list[str]]:
    """Run a few steps of a workload that allocates too much in one place; return tries, successes.

    Occasional actions of the engine are done once more.
    """
    Greedy.where, Greedy.took_bytes = where, 2 * spec.budget_bytes
    engine = begun(spec)
    reports = [turn(engine, duration_s=0.2) for _ in range(4)]
    session = engine._session
    if session is not None:
        with suppress(RuntimeError, MemoryError):
            session.memory.shed()
    return reports, Greedy.tried, Greedy.obtained
