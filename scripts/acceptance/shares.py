"""Shares by duty: the share of time each worker was asked to keep the device busy, and what it did."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from acceptance.crew import crew_of
from acceptance.ground import Ground
from acceptance.outcome import Outcome, Row
from acceptance.seats import Turn

_MOST_OFF = 0.05
MUST_HOLD = f"the measured duty is within {_MOST_OFF:.2f} of the one asked, alone and beside six others"

_TOGETHER = 7
_TOGETHER_DUTY = 0.6
#: Turns of a check of duties are longer: what a slice owes is paid by the next one.
_TURNS = 4


def measure(ground: Ground) -> Sequence[Row]:
    """Measure single workers one after the other, the first of them at no duty, and seven at once."""
    scale = ground.scale
    seconds = _TURNS * scale.turn_s
    budget_bytes, _ = ground.fitting(_TOGETHER + len(scale.duties) + 1, scale.small_budget_bytes)
    alone = [
        spec
        for number, duty in enumerate((None, *scale.duties))
        for spec in ground.specs(1, budget_bytes, duty=duty, label=f"duty-{number}")
    ]
    with crew_of(alone, ground.watch) as crew:
        crew.turn(scale.turn_s)  # a step takes its length from the ones before it
        found = [_row(spec.duty, crew.turn(seconds, who=[number])) for number, spec in enumerate(alone)]
    together = ground.specs(_TOGETHER, budget_bytes, duty=_TOGETHER_DUTY, label="duty-together")
    with crew_of(together, ground.watch) as crew:
        crew.turn(scale.turn_s)
        return [*found, _row(_TOGETHER_DUTY, crew.turn(seconds))]


def _row(asked: float | None, turns: Sequence[Turn]) -> Row:
    """Return what some workers at one duty did: time within steps over all of it."""
    duties = [turn.duty for turn in turns]
    return {
        "workers": len(turns),
        "duty_asked": asked,
        "duty_measured_median": statistics.median(duties),
        "duty_measured_least": min(duties),
        "duty_measured_most": max(duties),
        "tflops": sum(turn.flop_per_s for turn in turns) / 1e12,
    }


def judge(found: Sequence[Row]) -> Outcome:
    """Say whether all kept to their duty."""
    unlimited = next((row["tflops"] for row in found if row["duty_asked"] is None), None)
    rows = [{**row, "of_unlimited_pct": 100.0 * row["tflops"] / unlimited if unlimited else None} for row in found]
    off = {
        f"{row['workers']} at a duty of {asked:.2f}": max(
            abs(row[key] - asked) for key in ("duty_measured_least", "duty_measured_most")
        )
        for row in found
        if (asked := row["duty_asked"]) is not None
    }
    broken = [f"{who}: up to {value:.3f} off" for who, value in off.items() if not value <= _MOST_OFF]
    return Outcome(figures={"off_most": max(off.values(), default=None)}, rows=rows, broken=broken)
