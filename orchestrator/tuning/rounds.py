"""In which order the arms of a round take their turns, and which rounds count. Pure: randomness comes from a seed.

Each round runs the baseline twice and every other arm once, in an order drawn anew. Two turns of the baseline cost one
block a round, and take a quarter off the variance of every ratio. Does not run anything.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

BASELINE: Final = "baseline"
AGAIN: Final = "a/a=the baseline"
"""The arm that is the baseline once more: what it seems to gain is the error of the method."""

#: Clocks that differ by more than this share between two arms of a round make their speeds incomparable.
_CLOCK_SHARE: Final = 0.02

#: A core that others used for more than this share of a block.
_NEIGHBOUR_SHARE: Final = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One turn of one arm."""

    arm: str
    seconds_per_sample: float
    clock_mhz: float | None = None
    """The mean clock of the card; `None` where it has no sensor."""
    throttled: bool = False
    """Whether the card slowed itself down, for heat or power."""
    neighbour_share: float | None = None
    """What other programs used of the card, or of the processors that the arm's threads had; 0 to 1."""


def turns(arms: Sequence[str], seed: int, number: int) -> list[str]:
    """Return the order of a round: the baseline twice, each of `arms` once."""
    order = [BASELINE, BASELINE, *arms]
    random.Random(f"{seed}/{number}").shuffle(order)  # noqa: S311 - no secret
    return order


def disturbance(blocks: Sequence[Block]) -> str | None:
    """Return why a round does not count; `None` if it does."""
    if any(block.throttled for block in blocks):
        return "throttled"
    clocks = [block.clock_mhz for block in blocks if block.clock_mhz]
    if clocks and max(clocks) > min(clocks) * (1 + _CLOCK_SHARE):
        return "clock moved"
    if any((block.neighbour_share or 0.0) > _NEIGHBOUR_SHARE for block in blocks):
        return "another program"
    return None


def clock_of(blocks: Sequence[Block]) -> float | None:
    """Return the mean clock of the card in a round; `None` where it has no sensor."""
    clocks = [block.clock_mhz for block in blocks if block.clock_mhz]
    return sum(clocks) / len(clocks) if clocks else None


def seconds_of(blocks: Iterable[tuple[str, float]]) -> Mapping[str, float]:
    """Return the seconds a sample of each arm of a round; of several turns their geometric mean."""
    logs: dict[str, list[float]] = {}
    for arm, seconds in blocks:
        logs.setdefault(arm, []).append(math.log(seconds))
    return {arm: math.exp(math.fsum(each) / len(each)) for arm, each in logs.items()}
