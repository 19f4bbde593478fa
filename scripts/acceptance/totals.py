"""Totals: what several workers on one card do together, against one of them alone.

The guides claim 180 % for two workers and 250 % for three. What is true depends on how much of the card one worker
leaves idle, so it is measured for a size that fills it and for one that does not. Nothing limits the workers' shares.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benches.common import progress

from acceptance.ground import Ground
from acceptance.outcome import Outcome, Row

_CLAIMED_PCT: Mapping[int, float] = {2: 180.0, 3: 250.0}
MUST_HOLD = "every number of workers works without a failure; the totals are told as they are"


def measure(ground: Ground) -> Sequence[Row]:
    """Have the first few of seven workers work, then more of them, and the same backwards; return a row for each."""
    scale = ground.scale
    budget_bytes, _ = ground.fitting(max(scale.counts), scale.large_budget_bytes)
    found = []
    for size in (scale.size, scale.small_size):
        crew = ground.crews.have(ground.specs(max(scale.counts), budget_bytes, size=size), ground.watch)
        crew.turn(scale.turn_s / 2)  # finds out how many products make a step; not counted
        for number in range(scale.passes):
            for workers in scale.counts if number % 2 == 0 else reversed(scale.counts):
                turns = crew.turn(2 * scale.turn_s, who=range(workers))
                tflops = sum(turn.flop_per_s for turn in turns) / 1e12
                failures = sum(turn.failures for turn in turns)
                found.append({"size": size, "workers": workers, "tflops": tflops, "failures": failures})
        progress(f"totals: size {size} done")
    return found


def judge(found: Sequence[Row]) -> Outcome:
    """Put the totals beside one worker's."""
    rows: list[dict[str, Any]] = []
    broken: list[str] = []
    notes: list[str] = []
    for size in dict.fromkeys(row["size"] for row in found):
        mine = [row for row in found if row["size"] == size]
        by_count = {
            workers: statistics.median(row["tflops"] for row in mine if row["workers"] == workers)
            for workers in dict.fromkeys(row["workers"] for row in mine)
        }
        one = by_count.get(1)
        for workers, tflops in by_count.items():
            of_one_pct = 100.0 * tflops / one if one else None
            claimed_pct = _CLAIMED_PCT.get(workers)
            rows.append(
                {
                    "size": size,
                    "workers": workers,
                    "total_tflops": tflops,
                    "of_one_pct": of_one_pct,
                    "guides_claim_pct": claimed_pct,
                }
            )
            if claimed_pct is not None and of_one_pct is not None and of_one_pct < claimed_pct:
                done = f"{workers} workers of size {size} do {of_one_pct:.0f} % of one's work"
                notes.append(f"{done}, not the guides' {claimed_pct:.0f} %")
        failures = sum(row["failures"] for row in mine)
        if failures:
            broken.append(f"size {size}: {failures} steps failed")
        if not all(by_count.values()) or not one:
            broken.append(f"size {size}: no work was done")
    figures = {"workers_most": max((row["workers"] for row in found), default=None)}
    return Outcome(figures=figures, rows=rows, broken=broken, notes=notes)
