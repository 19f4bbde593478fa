"""A training in small: stages, levels, a state worth keeping, and boundaries; no model.

An optimiser step takes `batch` samples in as many micro-batches as memory asks for. What a sample
takes is written, so that the kernel counts it.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from tests.engine.scene import turns
from tests.scene import MIB
from workers.elastic.loop import Loop
from workers.messages import Progress, Status
from workers.policy.adaptive import CONTRADICTIONS
from workers.policy.base import Run, Stages
from workers.settings import FailureKind, WorkerSpec
from workers.testing import OomInjector, injected_error
from workers.workloads.base import StepResult, Workload, WorkloadContext

#: MiB of a sample by level: level 1 saves half.
SAMPLE_MIB = {0: 4, 1: 2}


class Counting(Workload):
    """Counts samples; `train_step` grows at every boundary."""

    calls: ClassVar[list[tuple[str, Any]]] = []
    samples: ClassVar[list[int]] = []
    """Of each micro-batch that ended well."""

    def __init__(self, context: WorkloadContext) -> None:
        super().__init__(context)
        self.batch = int(context.settings["batch"] or 0)
        self.state_mib = int(context.settings.get("state_mib") or 8)
        self.level = self.step_done = self.in_step = 0
        self.state: torch.Tensor | None = None
        self.waiting: torch.Tensor | None = None

    def stages(self) -> Stages:
        batches = tuple(1 << exponent for exponent in range(self.batch.bit_length()))
        return Stages(batches=batches, keeps=(1.0, 1.0))

    def run(self, loop: Loop[Run]) -> StepResult:
        while not loop.run(self.part):
            pass
        return StepResult(flop=float(self.batch))

    def part(self, run: Run) -> bool:
        if run.level != self.level:
            Counting.calls.append(("level", run.level))
            self.level = run.level
        where: dict[str, Any] = {"dtype": torch.uint8, "device": self.context.device}
        if self.state is None:
            self.state = torch.ones(self.state_mib * MIB, **where)
        micro = min(run.batch, self.batch - self.in_step)
        torch.ones(micro * SAMPLE_MIB[self.level] * MIB, **where)
        self.in_step += micro
        Counting.samples.append(micro)
        if self.in_step == self.batch:
            self.step_done, self.in_step = self.step_done + 1, 0
        return self.in_step == 0

    def release(self) -> None:
        raise AssertionError("a state is not dropped")

    def shed(self) -> None:
        Counting.calls.append(("shed", self.state is not None))

    def park(self) -> int:
        if self.state is not None:
            # On a CPU only what is shared lies outside of what the cap counts.
            self.waiting, self.state = self.state.share_memory_(), None
        waits = 0 if self.waiting is None else self.waiting.nbytes
        Counting.calls.append(("park", waits))
        return waits

    def unpark(self) -> None:
        Counting.calls.append(("unpark", None))
        assert self.waiting is not None
        self.state, self.waiting = self.waiting.clone(), None

    def progress(self) -> Progress:
        return Progress(train_step=self.step_done, memory_level=self.level)


class RunsOut(Counting):
    """Its thirteenth step runs out of memory, and so does each attempt until it is believed."""

    def __init__(self, context: WorkloadContext) -> None:
        super().__init__(context)
        self.injector = OomInjector(num=CONTRADICTIONS + 1, skip=12)

    def part(self, run: Run) -> bool:
        self.injector.check()
        return super().part(run)


class HardToUnpark(Counting):
    """The first time there is not enough memory for its state."""

    tries: ClassVar[int] = 0

    def unpark(self) -> None:
        HardToUnpark.tries += 1
        if HardToUnpark.tries == 1:
            raise injected_error(FailureKind.DEFINITE)
        super().unpark()


def counted(
    spec: WorkerSpec, directives: list[dict[str, Any]]
) -> tuple[list[Status], list[tuple[str, Any]], list[int]]:
    """Drive turns; return the statuses, what the engine called, and the micro-batches."""
    return turns(spec, directives), Counting.calls, Counting.samples
