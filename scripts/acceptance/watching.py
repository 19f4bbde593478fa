"""What a worker pays for looking: at its card, idle and beside one that works, and at its results.

The check of products cries no wolf, finds flipped bits, and takes no more time than it is given.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from typing import Any

from benches import verify as bench
from benches.common import amiss, percentile, progress

from acceptance.crew import crew_of, in_child
from acceptance.machine import Machine
from acceptance.outcome import Outcome, Row
from workers.devices import open_device
from workers.nvml.sensors import SAMPLE_EVERY_S, open_sampler
from workers.readings import SensorReading
from workers.settings import WorkerSpec
from workers.verification.check import CheckSchedule
from workers.workloads.base import WorkloadContext
from workers.workloads.matmul import Matmul

_MOST_SHARE = 0.01
SAMPLER_MUST_HOLD = (
    f"sampling takes less than {_MOST_SHARE:.0%} of a worker's time at its usual "
    f"rate, every {SAMPLE_EVERY_S:g} s"
)


def look(kind: str, when: str, samples: int) -> tuple[Row, SensorReading]:
    """Sample as fast as it goes, on a clock that makes each one due; return the costs. The body of
    a child.

    What is asked every thirtieth second only is asked at every thirtieth of these. The first, which
    opens NVML, counts by itself.
    """
    costs_s: list[float] = []
    reading: SensorReading | None = None
    with closing(open_sampler(kind)) as sampler:
        for number in range(samples + 1):
            began_s = time.perf_counter()
            reading = sampler.sample_if_due(number * SAMPLE_EVERY_S)
            costs_s.append(time.perf_counter() - began_s)
            if when == "busy":
                time.sleep(0.02)  # a card that is asked without a pause is another card
    if reading is None:
        raise RuntimeError("no sample was taken")
    first_s, *later_s = costs_s
    row = {
        "when": when,
        "samples": len(later_s),
        "mean_ms": 1e3 * statistics.fmean(later_s),
        "p50_ms": 1e3 * percentile(later_s, 0.50),
        "p99_ms": 1e3 * percentile(later_s, 0.99),
        "first_ms": 1e3 * first_s,
        "share_pct": 100.0 * statistics.fmean(later_s) / SAMPLE_EVERY_S,
    }
    return row, reading


def measure_sampler(machine: Machine) -> list[tuple[Row, SensorReading]]:
    scale = machine.scale
    idle = in_child(machine.watch, look, machine.device, "idle", scale.samples)
    budget_bytes, _ = machine.fitting(1, scale.large_budget_bytes)
    with crew_of(machine.specs(1, budget_bytes, label="beside"), machine.watch) as crew:
        return [
            idle,
            crew.beside(0.04 * scale.samples + 2.0, look, machine.device, "busy", scale.samples),
        ]


def judge_sampler(looks: Sequence[tuple[Row, SensorReading]]) -> Outcome:
    rows = [row for row, _ in looks]
    most_pct = 100.0 * _MOST_SHARE
    dear = [row for row in rows if not row["share_pct"] < most_pct]
    broken = [f"{row['when']}: {row['share_pct']:.2f}% of a worker's time" for row in dear]
    broken += [f"{row['when']}: the card is lost" for row, last in looks if last.lost]
    # Every value under its own name; the names have units.
    readings = {f"reading_{key}": value for key, value in asdict(looks[-1][1]).items()}
    figures = {"share_pct_most": max(row["share_pct"] for row in rows), **readings}
    return Outcome(figures=figures, rows=rows, broken=broken)


_SHARE = 0.01
RESULTS_MUST_HOLD = (
    "no right product is refused, every flip of more than 2 tolerances is found, repeats find "
    "all, and checks take "
    f"{_SHARE:.0%} of the time beside the first two and the last"
)


def verify(device: str, name: str, products: int, flips: int) -> Row:
    """Run the bench of the checks for one type. The body of a child."""
    figures = bench.run(checks=products, flips=flips, seed=7, device=device, dtypes=[name]).figures
    counts = {key: sum(row[key] for row in figures["counts"]) for key in bench.COUNTS}
    return {
        "dtype": name,
        "products": figures["checks"],
        "false_alarms": figures["false_alarms"],
        "largest_ratio": figures["largest_ratio"],
        **counts,
    }


def work_and_check(spec: WorkerSpec, seconds: float) -> dict[str, Any]:
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
        # The first two checks of a size are in advance of what it earns, and the last one may be a
        # little.
        "cost_pct_allowed": 100.0 * (_SHARE + 3.0 * max(checks_s) / all_s),
    }


def measure_results(machine: Machine) -> Sequence[Row]:
    scale = machine.scale
    budget_bytes, _ = machine.fitting(1, scale.large_budget_bytes)
    rows = []
    for name in scale.dtypes:
        found = in_child(machine.watch, verify, machine.device, name, scale.products, scale.flips)
        specs = machine.specs(1, budget_bytes, dtype=name, label="verify")
        rows.append({**found, **in_child(machine.watch, work_and_check, *specs, 4 * scale.turn_s)})
        progress(f"results {name}: {found['false_alarms']} false alarms")
    return rows


def judge_results(rows: Sequence[Row]) -> Outcome:
    broken: list[str] = []
    for row in rows:
        refused, missed = row["false_alarms"] + row["refused"], row["large"] - row["large_found"]
        holds = {
            f"{refused} right products were refused": not refused,
            f"{missed} large flips were missed": not missed,
            f"the repeat missed {row['flips'] - row['repeat']} flips": row["repeat"]
            >= row["flips"],
            f"checks took {row['cost_pct']:.2f}% of the time": row["cost_pct"]
            <= row["cost_pct_allowed"],
        }
        broken += amiss(holds, f"{row['dtype']}: ")
    figures = {key: sum(row[key] for row in rows) for key in ("products", "false_alarms", "flips")}
    return Outcome(figures=figures, rows=rows, broken=broken)
