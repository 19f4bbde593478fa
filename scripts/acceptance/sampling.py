"""The sampler: what a look at the sensors costs a worker, on an idle card and beside one that works."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict

from benches.common import percentile

from acceptance.crew import crew_of, in_child
from acceptance.ground import Ground
from acceptance.outcome import Outcome, Row
from workers.nvml.sampler import SAMPLE_EVERY_S, open_sampler
from workers.readings import SensorReading

_MOST_SHARE = 0.01
MUST_HOLD = (
    f"sampling takes less than {_MOST_SHARE:.0%} of a worker's time at its usual rate, every {SAMPLE_EVERY_S:g} s"
)


def look(kind: str, when: str, samples: int) -> tuple[Row, SensorReading]:
    """Sample as fast as it goes, on a clock that makes each one due; return the costs. The body of a child.

    What is asked every thirtieth second only is asked at every thirtieth of these. The first, which opens NVML, counts
    by itself.
    """
    sampler = open_sampler(kind)
    costs_s: list[float] = []
    reading: SensorReading | None = None
    try:
        for number in range(samples + 1):
            began_s = time.perf_counter()
            reading = sampler.sample_if_due(number * SAMPLE_EVERY_S)
            costs_s.append(time.perf_counter() - began_s)
            if when == "busy":
                time.sleep(0.02)  # a card that is asked without a pause is another card
    finally:
        sampler.close()
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


def measure(ground: Ground) -> list[tuple[Row, SensorReading]]:
    """Look with nothing at work, and then beside a worker."""
    scale = ground.scale
    idle = in_child(ground.watch, look, ground.device, "idle", scale.samples)
    budget_bytes, _ = ground.fitting(1, scale.large_budget_bytes)
    with crew_of(ground.specs(1, budget_bytes, label="beside"), ground.watch) as crew:
        return [idle, crew.beside(0.04 * scale.samples + 2.0, look, ground.device, "busy", scale.samples)]


def judge(looks: Sequence[tuple[Row, SensorReading]]) -> Outcome:
    """Say whether sampling is cheap enough."""
    rows = [row for row, _ in looks]
    most_pct = 100.0 * _MOST_SHARE
    dear = [row for row in rows if not row["share_pct"] < most_pct]
    broken = [f"{row['when']}: {row['share_pct']:.2f}% of a worker's time" for row in dear]
    broken += [f"{row['when']}: the card is lost" for row, last in looks if last.lost]
    # Every value under its own name; the names have units.
    readings = {f"reading_{key}": value for key, value in asdict(looks[-1][1]).items()}
    figures = {"share_pct_most": max(row["share_pct"] for row in rows), **readings}
    return Outcome(figures=figures, rows=rows, broken=broken)
