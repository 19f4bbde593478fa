"""Sampling: what a look at the sensors costs a worker, on an idle card and on a busy one; and what they say."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benches.common import percentile

from acceptance.crew import crew_of, in_child
from acceptance.ground import Ground
from acceptance.outcome import Outcome
from workers.nvml.sampler import SAMPLE_EVERY_S, open_sampler
from workers.readings import SensorReading

_MOST_SHARE = 0.01
MUST_HOLD = (
    f"sampling takes less than {_MOST_SHARE:.0%} of a worker's time at its usual rate, every {SAMPLE_EVERY_S:g} s"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Looks:
    """Some samples, one after the other."""

    when: str
    """`idle` or `busy`."""
    costs_s: tuple[float, ...]
    """Of each, the first (which opens NVML) left out."""
    first_s: float
    last: SensorReading


def look(kind: str, when: str, samples: int) -> Looks:
    """Sample as fast as it goes, on a clock that makes each one due. The body of a child.

    What is asked every thirtieth second only is asked at every thirtieth of these.
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
    return Looks(when=when, costs_s=tuple(costs_s[1:]), first_s=costs_s[0], last=reading)


def measure(ground: Ground) -> list[Looks]:
    """Look with nothing at work, and then beside a worker."""
    scale = ground.scale
    idle = in_child(ground.watch, look, ground.device, "idle", scale.samples)
    budget_bytes, _ = ground.fitting(1, scale.large_budget_bytes)
    with crew_of(ground.specs(1, budget_bytes, label="beside"), ground.watch) as (crew, _):
        busy = crew.beside(ground.watch, 0.04 * scale.samples + 2.0, look, ground.device, "busy", scale.samples)
    return [idle, busy]


def judge(looks: Sequence[Looks]) -> Outcome:
    """Say whether sampling is cheap enough."""
    rows: list[dict[str, Any]] = []
    broken = []
    for each in looks:
        share = statistics.fmean(each.costs_s) / SAMPLE_EVERY_S
        rows.append(
            {
                "when": each.when,
                "samples": len(each.costs_s),
                "mean_ms": 1e3 * statistics.fmean(each.costs_s),
                "p50_ms": 1e3 * percentile(each.costs_s, 0.50),
                "p99_ms": 1e3 * percentile(each.costs_s, 0.99),
                "first_ms": 1e3 * each.first_s,
                "share_pct": 100.0 * share,
            }
        )
        if not share < _MOST_SHARE:
            broken.append(f"{each.when}: {share:.2%} of a worker's time")
        if each.last.lost:
            broken.append(f"{each.when}: the card is lost")
    return Outcome(
        check="sampler",
        must_hold=MUST_HOLD,
        figures={"share_pct_most": max(row["share_pct"] for row in rows), **_readings(looks[-1].last)},
        rows=rows,
        broken=broken,
    )


def check(ground: Ground) -> Outcome:
    """Measure and judge."""
    return judge(measure(ground))


def _readings(reading: SensorReading) -> Mapping[str, Any]:
    """Return every value under its own name; the names have units."""
    return {f"reading_{key}": value for key, value in asdict(reading).items()}
