"""How long an out-of-memory costs: from the exception to the next good step, through the whole
engine.

The worker's ring fills its claim when a real out-of-memory strikes at every second step. The batch
shrinks by one each time and the size never does, so that the good steps stay the same and can be
compared with.
"""

from __future__ import annotations

import statistics
import time
from typing import Any, ClassVar

import torch

from benches.common import Result, lone_worker, percentile, progress, run_turn, sized
from workers.engine.engine import Engine
from workers.messages import Begin, Verdict
from workers.workloads.base import StepResult
from workers.workloads.matmul import Matmul


class EverySecondStepFails(Matmul):
    """Asks for more than the whole budget at every second step, with all tensors of the ring alive."""

    excess_bytes: ClassVar[int] = 0
    #: Of each recovery: when the step failed, and when the next good one began and ended.
    recoveries_s: ClassVar[list[tuple[float, float, float]]] = []
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
            mine.recoveries_s.append((mine._failed_at_s, began_s, time.perf_counter()))
        return result


def run(
    errors: int, device: str, budget_mib: float | None = None, size: int | None = None
) -> Result:
    budget_bytes, size = sized(device, budget_mib, size)
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
        if sequence and sequence % max(1, errors // 5) == 0:
            progress(f"{sequence}/{errors}")
    if ooms != errors and not broken:
        broken.append(f"{ooms} out-of-memory errors, {errors} were to be provoked")
    name = report.device.name if report.device else None
    figures = {"device": device, "name": name, **_figures(spec.budget_bytes, size)}
    return Result(bench="recovery", figures=figures, broken=broken)


def _figures(budget_bytes: int, size: int) -> dict[str, Any]:
    recoveries_s = EverySecondStepFails.recoveries_s
    if not recoveries_s:
        return {"errors": 0}
    to_next_s = [began_s - failed_s for failed_s, began_s, _ in recoveries_s]
    to_done_s = [ended_s - failed_s for failed_s, _, ended_s in recoveries_s]
    step_s = statistics.median(ended_s - began_s for _, began_s, ended_s in recoveries_s)
    rows = [
        {
            "from the exception to": words,
            "p50_s": (p50_s := percentile(values, 0.50)),
            "p99_s": (p99_s := percentile(values, 0.99)),
            "most_s": max(values),
            "p50_in_steps": p50_s / step_s,
            "p99_in_steps": p99_s / step_s,
        }
        for words, values in (
            ("next good step begins", to_next_s), ("next good step is done", to_done_s),
        )
    ]  # fmt: skip
    first = ("p50_s", "p99_s", "p50_in_steps", "p99_in_steps")
    return {
        "errors": len(to_next_s), "budget_bytes": budget_bytes, "size": size,
        "good_step_p50_s": step_s, **{f"recovery_{key}": rows[0][key] for key in first},
        "rows": rows,
    }  # fmt: skip
