"""Measures the time from an out-of-memory error to the next good step, through the whole engine.

The matrices of the worker fill its share when a real out-of-memory error occurs in every second
step. Each error shrinks the batch by one and never the size, so that all good steps are alike and
comparable.
"""

from __future__ import annotations

import statistics
import time
from typing import Any, ClassVar

import torch
from benches.common import lone_worker, percentile, run_turn

from workers.engine.engine import Engine
from workers.messages import Begin, Verdict
from workers.workloads.base import StepResult
from workers.workloads.matmul import Matmul


class EverySecondStepFails(Matmul):
    """Allocates more than the budget in every second step, while all its tensors are alive."""

    excess_bytes: ClassVar[int] = 0
    #: Time from each failure to the beginning of the next good step, and time of that step.
    recoveries_s: ClassVar[list[float]] = []
    good_steps_s: ClassVar[list[float]] = []
    _failed_at_s: ClassVar[float | None] = None
    _fails: ClassVar[bool] = True

    def step(self, size: int, batch: int) -> StepResult:
        mine = EverySecondStepFails
        mine._fails = not mine._fails
        if mine._fails:
            try:
                torch.empty(mine.excess_bytes, dtype=torch.uint8, device=self.context.device)
            except RuntimeError:
                mine._failed_at_s = time.perf_counter()
                raise
            raise AssertionError("the device gave more than its budget")
        began_s = time.perf_counter()
        result = super().step(size, min(batch, 1))
        if mine._failed_at_s is not None:
            mine.recoveries_s.append(began_s - mine._failed_at_s)
            mine.good_steps_s.append(time.perf_counter() - began_s)
        return result


def survive(errors: int, device: str, budget_bytes: int, size: int) -> dict[str, Any]:
    """Provoke `errors` errors; return the recovery times, and a sentence for a failed recovery."""
    spec = lone_worker(
        budget_bytes=budget_bytes, device=device, size=size, batch=errors + 10,
        name=f"{__name__}:{EverySecondStepFails.__name__}",
        dtype="fp16" if device == "cuda" else "fp32",
        size_decay=1.0, batch_step=1, batch_floor=1, cleanup_every=0,
    )  # fmt: skip
    EverySecondStepFails.excess_bytes = 2 * budget_bytes
    engine = Engine(spec, Begin(fresh=True))
    broken: list[str] = []
    ooms = 0
    for sequence in range(errors + 1):
        report = run_turn(engine, 0.0)
        counts = report.counts
        ooms += counts.steps_oom
        if report.verdict is not Verdict.OK or counts.steps_error or counts.steps_ok != 1:
            broken.append(
                f"turn {sequence} ended {report.verdict} {report.state}: {report.reason} "
                f"{report.error or ''}"
            )
            break
    if ooms != errors and not broken:
        broken.append(f"{ooms} out-of-memory errors, {errors} were to be provoked")
    found = EverySecondStepFails.recoveries_s
    figures: dict[str, Any] = {"errors": len(found), "unrecovered": broken}
    if found:
        figures |= {
            "recovery_p50_ms": 1e3 * percentile(found, 0.50),
            "recovery_p99_ms": 1e3 * percentile(found, 0.99),
            "good_step_p50_ms": 1e3 * statistics.median(EverySecondStepFails.good_steps_s),
        }
    return figures
