"""Speed: the product's matmul against a bare torch loop, the same products, taking turns in one run.

The product is driven slice by slice as the head does, with its shipped policy, and counted from outside: work over
time, with everything between two products in it. The bare loop always has a batch queued and waits for nothing.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import replace

from benches.common import progress

from acceptance import seats
from acceptance.crew import Seat, asked, crew_of, summed_up
from acceptance.ground import Ground
from acceptance.outcome import Outcome, Row
from acceptance.seats import BareOrder
from orchestrator.config.gpu_specs import peak_tflops

_LEAST = 0.97
#: Before the turns that count: kernels are loaded, the lengths of steps found, and on a CPU each page is met once.
_WARM_UP_S = 1.0
MUST_HOLD = f"the product reaches {_LEAST:.0%} of a bare torch loop for each type, median of the rounds' ratios"


def measure(ground: Ground) -> Sequence[Row]:
    """Let both take turns, type by type; return a row for each."""
    budget_bytes, _ = ground.fitting(2, ground.scale.large_budget_bytes)  # the bare loop holds as much
    with contextlib.closing(Seat("bare loop", seats.bare_seat, ground.device)) as bare:
        return [_race(ground, bare, dtype, budget_bytes) for dtype in ground.scale.dtypes]


def _race(ground: Ground, bare: Seat, dtype: str, budget_bytes: int) -> Row:
    scale, watch = ground.scale, ground.watch
    with crew_of(ground.specs(1, budget_bytes, dtype=dtype, label=f"speed-{dtype}"), watch) as crew:
        first = crew.first[0].last
        if first.size is None or not first.claim_bytes:
            raise RuntimeError(f"the worker did not come up: {first.state} {first.reason}")
        size = first.size - first.size % 64  # what matmul makes of it
        order = BareOrder(dtype=dtype, size=size, block_bytes=first.claim_bytes, seconds=scale.turn_s)
        crew.turn(_WARM_UP_S)
        asked(bare, replace(order, seconds=_WARM_UP_S), watch, _WARM_UP_S)
        watch.take()
        product: list[float] = []
        reference: list[float] = []
        failures = 0
        for number in range(scale.rounds):
            for product_next in (True, False) if number % 2 else (False, True):
                if product_next:
                    (turn,) = crew.turn(scale.turn_s)
                    product.append(turn.flop_per_s)
                    failures += turn.failures
                else:
                    reference.append(asked(bare, order, watch, scale.turn_s))
    sensed = summed_up(watch.take())
    profile, clock_mhz = ground.profile, sensed["sm_clock_mhz"]
    tflops = statistics.median(product) / 1e12
    rated = None if profile is None else peak_tflops(profile, dtype)
    # What the card could do at the clock that was sampled.
    peak = None if profile is None or clock_mhz is None else peak_tflops(profile, dtype, clock_mhz)
    ratio = statistics.median(ours / theirs for ours, theirs in zip(product, reference, strict=True))
    progress(f"speed {dtype}: {ratio:.4f} of a bare loop")
    return {
        "dtype": dtype,
        "size": size,
        "product_tflops": tflops,
        "bare_tflops": statistics.median(reference) / 1e12,
        "ratio_median": ratio,
        "failures": failures,
        "rated_tflops": rated,
        "rated_pct": 100.0 * tflops / rated if rated else None,
        "peak_pct": 100.0 * tflops / peak if peak else None,
        **sensed,
    }


def judge(rows: Sequence[Row]) -> Outcome:
    """Say whether the product is fast enough in each type."""
    broken = []
    for row in rows:
        if not row["ratio_median"] >= _LEAST:
            broken.append(f"{row['dtype']}: {row['ratio_median']:.4f} of a bare loop")
        if row["failures"]:
            broken.append(f"{row['dtype']}: {row['failures']} steps failed")
    return Outcome(figures={"ratio_least": min(row["ratio_median"] for row in rows)}, rows=rows, broken=broken)
