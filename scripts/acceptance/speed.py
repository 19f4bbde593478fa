"""Speed: the product's matmul against a bare torch loop, the same products, taking turns in one run.

The product is driven slice by slice as the head does, with its shipped policy, and counted from outside: work over
time, with everything between two products in it. The bare loop always has a batch queued and waits for nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benches.common import progress

from acceptance.crew import (
    alarms_pct,
    bare_loop,
    bare_turn,
    busy_clock_mhz,
    crew_of,
    most_power_w,
    warmest_c,
)
from acceptance.ground import Ground
from acceptance.outcome import Outcome
from acceptance.seats import BareOrder
from orchestrator.config.gpu_specs import peak_tflops

_LEAST = 0.97
#: Before the turns that count: kernels are loaded, the lengths of steps found, and on a CPU each page is met once.
_WARM_UP_S = 1.0
MUST_HOLD = f"the product reaches {_LEAST:.0%} of a bare torch loop for each type, median of the rounds' ratios"


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """One type."""

    dtype: str
    size: int
    product_flop_per_s: tuple[float, ...]
    """By round."""
    bare_flop_per_s: tuple[float, ...]
    failures: int
    """Steps of the product that failed meanwhile."""
    rated_tflops: float | None
    peak_at_clock_tflops: float | None
    """What the card could do at the clock that was sampled."""
    sm_clock_mhz: float | None
    temperature_most_c: float | None
    power_most_w: float | None
    alarms_pct: float | None

    @property
    def ratio(self) -> float:
        """The middle of the rounds' ratios."""
        pairs = zip(self.product_flop_per_s, self.bare_flop_per_s, strict=True)
        return statistics.median(product / bare for product, bare in pairs)


def measure(ground: Ground) -> list[Race]:
    """Let both take turns, type by type."""
    scale = ground.scale
    budget_bytes, _ = ground.fitting(2, scale.large_budget_bytes)  # the bare loop holds as much
    races = []
    with bare_loop(ground.device) as bare:
        for dtype in scale.dtypes:
            specs = ground.specs(1, budget_bytes, dtype=dtype, label=f"speed-{dtype}")
            with crew_of(specs, ground.watch) as (crew, (first,)):
                claim_bytes = first.last.claim_bytes
                if first.last.size is None or not claim_bytes:
                    raise RuntimeError(f"the worker did not come up: {first.last.state} {first.last.reason}")
                size = first.last.size - first.last.size % 64  # what matmul makes of it
                order = BareOrder(dtype=dtype, size=size, block_bytes=claim_bytes, seconds=scale.turn_s)
                crew.turn(ground.watch, seconds=_WARM_UP_S)
                bare_turn(bare, replace(order, seconds=_WARM_UP_S), ground.watch)
                ground.watch.take()
                product: list[float] = []
                reference: list[float] = []
                failures = 0
                for number in range(scale.rounds):
                    for product_next in (True, False) if number % 2 else (False, True):
                        if product_next:
                            (turn,) = crew.turn(ground.watch, seconds=scale.turn_s)
                            product.append(turn.flop_per_s)
                            failures += sum(each.counts.steps_oom + each.counts.steps_error for each in turn.reports)
                        else:
                            flop, took_s = bare_turn(bare, order, ground.watch)
                            reference.append(flop / took_s)
                readings = ground.watch.take()
            clock_mhz = busy_clock_mhz(readings)
            profile = ground.profile
            races.append(
                Race(
                    dtype=dtype,
                    size=size,
                    product_flop_per_s=tuple(product),
                    bare_flop_per_s=tuple(reference),
                    failures=failures,
                    rated_tflops=None if profile is None else peak_tflops(profile, dtype),
                    peak_at_clock_tflops=None
                    if profile is None or clock_mhz is None
                    else peak_tflops(profile, dtype, clock_mhz),
                    sm_clock_mhz=clock_mhz,
                    temperature_most_c=warmest_c(readings),
                    power_most_w=most_power_w(readings),
                    alarms_pct=alarms_pct(readings),
                )
            )
            progress(f"speed {dtype}: {races[-1].ratio:.4f} of a bare loop")
    return races


def judge(races: Sequence[Race]) -> Outcome:
    """Say whether the product is fast enough in each type."""
    rows: list[dict[str, Any]] = []
    broken = []
    for race in races:
        product_tflops = statistics.median(race.product_flop_per_s) / 1e12
        rows.append(
            {
                "dtype": race.dtype,
                "size": race.size,
                "product_tflops": product_tflops,
                "bare_tflops": statistics.median(race.bare_flop_per_s) / 1e12,
                "ratio_median": race.ratio,
                "rated_tflops": race.rated_tflops,
                "rated_pct": _pct(product_tflops, race.rated_tflops),
                "peak_pct": _pct(product_tflops, race.peak_at_clock_tflops),
                "sm_clock_mhz": race.sm_clock_mhz,
                "temperature_most_c": race.temperature_most_c,
                "power_most_w": race.power_most_w,
                "alarms_pct": race.alarms_pct,
            }
        )
        if not race.ratio >= _LEAST:
            broken.append(f"{race.dtype}: {race.ratio:.4f} of a bare loop")
        if race.failures:
            broken.append(f"{race.dtype}: {race.failures} steps failed")
    return Outcome(
        check="speed",
        must_hold=MUST_HOLD,
        figures={"ratio_least": min(row["ratio_median"] for row in rows)},
        rows=rows,
        broken=broken,
    )


def check(ground: Ground) -> Outcome:
    """Measure and judge."""
    return judge(measure(ground))


def _pct(value: float, of: float | None) -> float | None:
    return 100.0 * value / of if of else None
