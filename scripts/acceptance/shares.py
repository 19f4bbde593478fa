"""Shares by duty: the share of time each worker was asked to keep the device busy, and what it did."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from acceptance.crew import crew_of
from acceptance.ground import Ground
from acceptance.outcome import Outcome

_MOST_OFF = 0.05
MUST_HOLD = f"the measured duty is within {_MOST_OFF:.2f} of the one asked, alone and beside six others"

_TOGETHER = 7
_TOGETHER_DUTY = 0.6
#: Turns of a check of duties are longer: what a slice owes is paid by the next one.
_TURNS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Some workers at one duty; `None`: none was asked for."""

    workers: int
    asked: float | None
    measured: tuple[float, ...]
    """Of each worker: time within steps over all of it."""
    flop_per_s: float


def measure(ground: Ground) -> list[Share]:
    """Measure single workers one after the other, and seven at once."""
    scale = ground.scale
    seconds = _TURNS * scale.turn_s
    budget_bytes, _ = ground.fitting(_TOGETHER + len(scale.duties) + 1, scale.small_budget_bytes)
    found = []
    alone = [
        spec
        for number, duty in enumerate((None, *scale.duties))
        for spec in ground.specs(1, budget_bytes, duty=duty, label=f"duty-{number}")
    ]
    with crew_of(alone, ground.watch) as (crew, _):
        crew.turn(ground.watch, seconds=scale.turn_s)  # a step takes its length from the ones before it
        for number, spec in enumerate(alone):
            (turn,) = crew.turn(ground.watch, seconds=seconds, who=[number])
            found.append(Share(workers=1, asked=spec.duty, measured=(turn.duty,), flop_per_s=turn.flop_per_s))
    together = ground.specs(_TOGETHER, budget_bytes, duty=_TOGETHER_DUTY, label="duty-together")
    with crew_of(together, ground.watch) as (crew, _):
        crew.turn(ground.watch, seconds=scale.turn_s)
        turns = crew.turn(ground.watch, seconds=seconds)
        found.append(
            Share(
                workers=_TOGETHER,
                asked=_TOGETHER_DUTY,
                measured=tuple(turn.duty for turn in turns),
                flop_per_s=sum(turn.flop_per_s for turn in turns),
            )
        )
    return found


def judge(shares: Sequence[Share]) -> Outcome:
    """Say whether all kept to their duty."""
    rows: list[dict[str, Any]] = []
    broken: list[str] = []
    unlimited = next((share.flop_per_s for share in shares if share.asked is None), None)
    for share in shares:
        rows.append(
            {
                "workers": share.workers,
                "duty_asked": share.asked,
                "duty_measured_median": statistics.median(share.measured),
                "duty_measured_least": min(share.measured),
                "duty_measured_most": max(share.measured),
                "tflops": share.flop_per_s / 1e12,
                "of_unlimited_pct": 100.0 * share.flop_per_s / unlimited if unlimited else None,
            }
        )
        if share.asked is None:
            continue
        off = max(abs(measured - share.asked) for measured in share.measured)
        if not off <= _MOST_OFF:
            broken.append(f"{share.workers} at a duty of {share.asked:.2f}: up to {off:.3f} off")
    asked = [share for share in shares if share.asked is not None]
    return Outcome(
        check="duty",
        must_hold=MUST_HOLD,
        figures={
            "off_most": max(
                (abs(measured - share.asked) for share in asked for measured in share.measured if share.asked),
                default=None,
            )
        },
        rows=rows,
        broken=broken,
    )


def check(ground: Ground) -> Outcome:
    """Measure and judge."""
    return judge(measure(ground))
