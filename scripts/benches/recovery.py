"""How long an out-of-memory costs: from the exception to the next good step, through the whole engine.

The worker's ring fills its claim when a real out-of-memory strikes at every second step. The batch shrinks by one
each time and the size never does, so that the good steps stay the same and can be compared with.
"""

from __future__ import annotations

import statistics
import time
from typing import Any, ClassVar

import torch

from benches.common import Result, lone_worker, percentile, progress, sized
from workers.engine.engine import Engine
from workers.messages import Directive, Verdict
from workers.workloads.base import StepResult
from workers.workloads.matmul import Matmul


class EverySecondStepFails(Matmul):
    """Asks for more than the whole budget at every second step, with all tensors of the ring alive."""

    excess_bytes: ClassVar[int] = 0
    failed_at_s: ClassVar[list[float]] = []
    began_at_s: ClassVar[list[float]] = []
    ended_at_s: ClassVar[list[float]] = []
    _fails_next: ClassVar[bool] = False

    def step(self, size: int, batch: int) -> StepResult:
        """Do one product, or fail."""
        mine = EverySecondStepFails
        if mine._fails_next:
            mine._fails_next = False
            try:
                torch.empty(mine.excess_bytes, dtype=torch.uint8, device=self.context.device)
            except RuntimeError:
                mine.failed_at_s.append(time.perf_counter())
                raise
            raise AssertionError("the device gave more than its budget")
        began_s = time.perf_counter()
        result = super().step(size, min(batch, 1))
        mine._fails_next = True
        mine.began_at_s.append(began_s)
        mine.ended_at_s.append(time.perf_counter())
        return result


def run(errors: int, device: str, budget_mib: float | None = None, size: int | None = None) -> Result:
    """Provoke `errors` and measure each recovery."""
    budget_bytes, size = sized(device, budget_mib, size)
    spec = lone_worker(
        budget_bytes=budget_bytes,
        device=device,
        name=f"{__name__}:{EverySecondStepFails.__name__}",
        dtype="fp16" if device == "cuda" else "fp32",
        size=size,
        batch=errors + 10,
        size_decay=1.0,
        batch_step=1,
        batch_floor=1,
        cleanup_every=0,
    )
    EverySecondStepFails.excess_bytes = 2 * budget_bytes
    engine = Engine(spec)
    broken: list[str] = []
    ooms = 0
    for sequence in range(errors + 1):
        report = engine.run_slice(Directive(incarnation=0, sequence=sequence, duration_s=0.0, resume=None))
        ooms += report.counts.steps_oom
        if report.verdict is not Verdict.OK or report.counts.steps_error or report.counts.steps_ok != 1:
            broken.append(
                f"slice {sequence} ended {report.verdict} {report.state}: {report.reason} {report.error or ''}"
            )
            break
        if sequence and sequence % max(1, errors // 5) == 0:
            progress(f"{sequence}/{errors}")
    if ooms != errors and not broken:
        broken.append(f"{ooms} out-of-memory errors, {errors} were to be provoked")
    name = torch.cuda.get_device_name() if device == "cuda" else report.device.name if report.device else None
    return Result(
        bench="recovery", figures={"device": device, "name": name, **_figures(spec.budget_bytes, size)}, broken=broken
    )


def _figures(budget_bytes: int, size: int) -> dict[str, Any]:
    mine = EverySecondStepFails
    # The first good step comes before the first failure; from then on they alternate.
    to_next_s = [began - failed for failed, began in zip(mine.failed_at_s, mine.began_at_s[1:], strict=False)]
    to_done_s = [ended - failed for failed, ended in zip(mine.failed_at_s, mine.ended_at_s[1:], strict=False)]
    steps_s = [ended - began for began, ended in zip(mine.began_at_s[1:], mine.ended_at_s[1:], strict=False)]
    if not to_next_s:
        return {"errors": 0}
    step_s = statistics.median(steps_s)
    rows = [
        {
            "from the exception to": words,
            "p50_s": percentile(values, 0.50),
            "p99_s": percentile(values, 0.99),
            "most_s": max(values),
            "p50_in_steps": percentile(values, 0.50) / step_s,
            "p99_in_steps": percentile(values, 0.99) / step_s,
        }
        for words, values in (("next good step begins", to_next_s), ("next good step is done", to_done_s))
    ]
    return {
        "errors": len(to_next_s),
        "budget_bytes": budget_bytes,
        "size": size,
        "good_step_p50_s": step_s,
        **{f"recovery_{key}": rows[0][key] for key in ("p50_s", "p99_s", "p50_in_steps", "p99_in_steps")},
        "rows": rows,
    }
