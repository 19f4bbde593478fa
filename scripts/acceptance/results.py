"""Results: the check of products cries no wolf, finds flipped bits, and costs no more time than it is given."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import Any

from benches import verify as bench
from benches.common import progress

from acceptance.crew import in_child
from acceptance.ground import Ground
from acceptance.outcome import Outcome, Row
from workers.devices.opening import open_device
from workers.settings import WorkerSpec
from workers.verification.schedule import CheckSchedule
from workers.workloads.base import WorkloadContext
from workers.workloads.matmul import Matmul

_SHARE = 0.01
MUST_HOLD = (
    f"no right product is refused, every flip of more than 2 tolerances is found, repeats find all, and checks take "
    f"{_SHARE:.0%} of the time beside the first two and the last"
)


def verify(device: str, name: str, products: int, flips: int) -> Row:
    """Run the bench of the checks for one type. The body of a child."""
    figures = bench.run(checks=products, flips=flips, seed=7, device=device, dtypes=[name], timed=False).figures
    counts = {key: sum(row[key] for row in figures["counts"]) for key in bench.COUNTS}
    return {
        "dtype": name,
        "products": figures["checks"],
        "false_alarms": figures["false_alarms"],
        "largest_ratio": figures["largest_ratio"],
        **counts,
    }


def work_and_check(spec: WorkerSpec, seconds: float) -> dict[str, Any]:
    """Run steps, and the workload's own checks as they fall due. The body of a child."""
    device = open_device(spec)
    workload = Matmul(WorkloadContext(device=device.torch_device, dtype=device.torch_dtype, seed=0))
    workload.resize(device.free_bytes() // 2)
    size, batch = spec.workload.size, spec.workload.batch
    n = size - size % 64
    for _ in range(4):
        device.timed(lambda: workload.step(size, batch))  # finds out how many products make a step
    schedule = CheckSchedule(_SHARE)
    worked_s = 0.0
    checks_s: list[float] = []
    products_s: list[float] = []
    refused = 0
    began_s = time.perf_counter()
    while time.perf_counter() - began_s < seconds or not checks_s:
        result, took_s = device.timed(lambda: workload.step(size, batch))
        worked_s += took_s
        products_s.append(took_s * 2.0 * n**3 / result.flop)
        due = schedule.after_step(size, batch, took_s)
        if due is None:
            continue
        number = due
        found, took_s = device.timed(lambda: workload.check(number))  # noqa: B023 - called at once
        schedule.after_check(took_s)
        checks_s.append(took_s)
        refused += found is not None and not found.ok
    checked_s, all_s = sum(checks_s), worked_s + sum(checks_s)
    return {
        "size": size,
        "checks": len(checks_s),
        "refused": refused,
        "check_in_products": statistics.fmean(checks_s) / statistics.median(products_s),
        "cost_pct": 100.0 * checked_s / all_s,
        # The first two checks of a size are in advance of what it earns, and the last one may be a little.
        "cost_pct_allowed": 100.0 * (_SHARE + 3.0 * max(checks_s) / all_s),
    }


def measure(ground: Ground) -> Sequence[Row]:
    """Verify each type."""
    scale = ground.scale
    budget_bytes, _ = ground.fitting(1, scale.large_budget_bytes)
    rows = []
    for name in scale.dtypes:
        found = in_child(ground.watch, verify, ground.device, name, scale.products, scale.flips)
        specs = ground.specs(1, budget_bytes, dtype=name, label="verify")
        rows.append({**found, **in_child(ground.watch, work_and_check, *specs, 4 * scale.turn_s)})
        progress(f"results {name}: {found['false_alarms']} false alarms")
    return rows


def judge(rows: Sequence[Row]) -> Outcome:
    """Say whether the checks can be trusted, and paid for."""
    broken: list[str] = []
    for row in rows:
        refused, missed = row["false_alarms"] + row["refused"], row["large"] - row["large_found"]
        if refused:
            broken.append(f"{row['dtype']}: {refused} right products were refused")
        if missed:
            broken.append(f"{row['dtype']}: {missed} large flips were missed")
        if row["repeat"] < row["flips"]:
            broken.append(f"{row['dtype']}: the repeat missed {row['flips'] - row['repeat']} flips")
        if row["cost_pct"] > row["cost_pct_allowed"]:
            broken.append(f"{row['dtype']}: checks took {row['cost_pct']:.2f}% of the time")
    figures = {key: sum(row[key] for row in rows) for key in ("products", "false_alarms", "flips")}
    return Outcome(figures=figures, rows=rows, broken=broken)
