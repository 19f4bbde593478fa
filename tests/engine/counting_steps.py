"""A training in small: rungs, levels, a state worth keeping, boundaries, progress and an end; no model.

An optimiser step takes `batch` samples in as many micro-batches as memory asks for. What a sample
takes is written, so that the kernel counts it.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, ClassVar

import torch

from tests.engine.scene import slices
from tests.scene import MIB
from workers.messages import Progress, Report
from workers.settings import FailureKind, WorkerSpec
from workers.testing import OomInjector, injected_error
from workers.workloads.base import Rung, StepResult, Workload, WorkloadContext

#: MiB of a sample by level: level 1 saves half.
SAMPLE_MIB = {0: 4, 1: 2}


class Counting(Workload):
    """Counts samples; `train_step` grows at every boundary."""

    made: ClassVar[list[WorkloadContext]] = []
    calls: ClassVar[list[tuple[str, Any]]] = []
    samples: ClassVar[list[int]] = []
    """Of each micro-batch that ended well."""

    def __init__(self, context: WorkloadContext) -> None:
        super().__init__(context)
        Counting.made.append(context)
        self.batch, self.steps = (
            int(context.settings["batch"] or 0),
            int(context.settings["steps"] or 0),
        )
        self.state_mib = int(context.settings.get("state_mib") or 8)
        self.level = self.step_done = self.in_step = self.micro = 0
        self.saved_step: int | None = None
        self.state: torch.Tensor | None = None
        self.waiting: torch.Tensor | None = None
        if context.state_dir is not None and not context.fresh and self.file.exists():
            self.step_done = self.saved_step = json.loads(self.file.read_text())["step"]

    @property
    def file(self) -> Path:
        assert self.context.state_dir is not None
        return self.context.state_dir / "step.json"

    @property
    def finished(self) -> bool:  # type: ignore[override]
        return self.step_done >= self.steps

    def rungs(self, batch: int) -> tuple[Rung, ...]:
        least, *more = (1 << exponent for exponent in range(self.batch.bit_length()))
        whole = (Rung(SAMPLE_MIB[0] * micro, micro) for micro in (least, *more))
        return (Rung(SAMPLE_MIB[1], 1, 1), *whole)

    def set_level(self, level: int) -> None:
        Counting.calls.append(("level", level))
        self.level = level

    def step(self, size: int, batch: int) -> StepResult:
        if self.state is None:
            self.state = torch.ones(
                self.state_mib * MIB, dtype=torch.uint8, device=self.context.device
            )
        self.micro = min(batch, self.batch - self.in_step)
        torch.ones(
            self.micro * SAMPLE_MIB[self.level] * MIB, dtype=torch.uint8, device=self.context.device
        )
        self.in_step += self.micro
        Counting.samples.append(self.micro)
        if self.in_step == self.batch:
            self.step_done, self.in_step = self.step_done + 1, 0
            self.save()
        return StepResult(flop=float(self.micro))

    def save(self) -> None:
        if self.context.state_dir is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(json.dumps({"step": self.step_done}))
            self.saved_step = self.step_done

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
        return Progress(
            train_step=self.step_done,
            train_steps=self.steps,
            loss=1.0 / (1 + self.step_done),
            first_loss=1.0,
            micro_batch=self.micro or None,
            accumulation=-(-self.batch // self.micro) if self.micro else None,
            memory_level=self.level,
            saved_step=self.saved_step,
            weights_sha256="0" * 64 if self.finished else None,
        )


class RunsOutTwice(Counting):
    """Its thirteenth step runs out of memory, and so does the next attempt."""

    def __init__(self, context: WorkloadContext) -> None:
        super().__init__(context)
        self.injector = OomInjector(num=2, skip=12)

    def step(self, size: int, batch: int) -> StepResult:
        self.injector.check()
        return super().step(size, batch)


class Stateless(Counting):
    """Keeps nothing that is worth parking."""

    def park(self) -> int:
        super().park()
        self.waiting = None
        return 0


class HardToUnpark(Counting):
    """The first time there is not enough memory for its state."""

    tries: ClassVar[int] = 0

    def unpark(self) -> None:
        HardToUnpark.tries += 1
        if HardToUnpark.tries == 1:
            raise injected_error(FailureKind.DEFINITE)
        super().unpark()


class TellsText(Counting):
    """Its progress is no `Progress`."""

    def progress(self) -> Any:
        return "half of it"


class Unordered(Counting):
    """Its rungs are in the wrong order."""

    def rungs(self, batch: int) -> tuple[Rung, ...]:
        return tuple(reversed(super().rungs(batch)))


def counted(
    spec: WorkerSpec, directives: list[dict[str, Any]]
) -> tuple[list[Report], list[tuple[str, Any]], list[int], list[WorkloadContext]]:
    """Run slices.

    Return the reports, what the engine called, the micro-batches, and the contexts.
    """
    return slices(spec, directives), Counting.calls, Counting.samples, Counting.made


def counted_in(folder: str, spec: WorkerSpec, directives: list[dict[str, Any]]) -> Any:
    """Run slices on a machine that keeps states in this folder."""
    os.environ["ORCHESTRATOR_STATE_DIR"] = folder
    return counted(spec, directives)
