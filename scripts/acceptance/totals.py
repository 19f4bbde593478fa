"""Totals: what several workers on one card do together, against one of them alone.

The guides claim 180 % for two workers and 250 % for three. What is true depends on how much of the card one worker
leaves idle, so it is measured for a size that fills it and for one that does not. Nothing limits the workers' shares.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benches.common import progress

from acceptance.ground import Ground
from acceptance.outcome import Outcome

_CLAIMED_PCT: Mapping[int, float] = {2: 180.0, 3: 250.0}
MUST_HOLD = "every number of workers works without a failure; the totals are told as they are"


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """So many workers at once, of one size, once."""

    size: int
    workers: int
    flop_per_s: float
    failures: int


def measure(ground: Ground) -> list[Total]:
    """Have the first few of seven workers work, then more of them, and the same backwards."""
    scale = ground.scale
    budget_bytes, _ = ground.fitting(max(scale.counts), scale.large_budget_bytes)
    totals = []
    for size in (scale.size, scale.small_size):
        crew = ground.crews.have(ground.specs(max(scale.counts), budget_bytes, size=size), ground.watch)
        crew.turn(ground.watch, seconds=scale.turn_s / 2)  # finds out how many products make a step; not counted
        for number in range(scale.passes):
            for workers in scale.counts if number % 2 == 0 else reversed(scale.counts):
                turns = crew.turn(ground.watch, seconds=2 * scale.turn_s, who=range(workers))
                totals.append(
                    Total(
                        size=size,
                        workers=workers,
                        flop_per_s=sum(turn.flop_per_s for turn in turns),
                        failures=sum(
                            each.counts.steps_oom + each.counts.steps_error for turn in turns for each in turn.reports
                        ),
                    )
                )
        progress(f"totals: size {size} done")
    return totals


def judge(totals: Sequence[Total]) -> Outcome:
    """Put the totals beside one worker's."""
    rows: list[dict[str, Any]] = []
    broken: list[str] = []
    notes: list[str] = []
    for size in dict.fromkeys(total.size for total in totals):
        mine = [total for total in totals if total.size == size]
        by_count = {
            workers: statistics.median(total.flop_per_s for total in mine if total.workers == workers)
            for workers in dict.fromkeys(total.workers for total in mine)
        }
        one = by_count.get(1)
        for workers, flop_per_s in by_count.items():
            of_one_pct = 100.0 * flop_per_s / one if one else None
            claimed_pct = _CLAIMED_PCT.get(workers)
            rows.append(
                {
                    "size": size,
                    "workers": workers,
                    "total_tflops": flop_per_s / 1e12,
                    "of_one_pct": of_one_pct,
                    "guides_claim_pct": claimed_pct,
                }
            )
            if claimed_pct is not None and of_one_pct is not None and of_one_pct < claimed_pct:
                notes.append(
                    f"{workers} workers of size {size} do {of_one_pct:.0f} % of one's work, not the guides' "
                    f"{claimed_pct:.0f} %"
                )
        failures = sum(total.failures for total in mine)
        if failures:
            broken.append(f"size {size}: {failures} steps failed")
        if not all(flop_per_s > 0 for flop_per_s in by_count.values()) or not one:
            broken.append(f"size {size}: no work was done")
    return Outcome(
        check="totals",
        must_hold=MUST_HOLD,
        figures={"workers_most": max((total.workers for total in totals), default=None)},
        rows=rows,
        broken=broken,
        notes=notes,
    )


def check(ground: Ground) -> Outcome:
    """Measure and judge."""
    return judge(measure(ground))
