"""In which order and how long the arms of a round take their turns, and which rounds count.

Each round runs the baseline twice and every other arm once, in an order drawn anew. Two turns of
the baseline cost one block a round, and take a quarter off the variance of every ratio. Pure:
randomness comes from a seed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from workers.tuning.messages import Turn

BASELINE: Final = "baseline"
AGAIN: Final = "a/a=the baseline"
"""The arm that is the baseline once more: what it seems to gain is the error of the method."""

#: Clocks that differ by more than this share between two arms of a round make their speeds
#: incomparable.
_CLOCK_SHARE: Final = 0.02

#: Of its usual length: a turn is so short where there is no time for enough longer ones. The 0.1 s
#: of a rehearsal are 20 ticks of two cores, in which the share of other programs is counted.
_SHORTEST: Final = 0.5

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
    """What other programs used of the card, or of the processors that the arm's threads had; 0 to
    1.
    """


def turns(arms: Sequence[str], seed: int, number: int) -> list[str]:
    """Return the order of a round: the baseline twice, each of `arms` once."""
    order = [BASELINE, BASELINE, *arms]
    random.Random(f"{seed}/{number}").shuffle(order)  # noqa: S311 - no secret
    return order


def shortest(usual: Turn) -> Turn:
    """Return the shortest turn that may stand for the usual one."""
    return Turn(seconds=_SHORTEST * usual.seconds, least_steps=max(1, usual.least_steps // 2))


def round_s(turn: Turn, steps_s: Sequence[float], overhead_s: float) -> float:
    """Return what a round takes, in seconds; `steps_s` are those of a step, for each turn in it.

    A turn has one step that is not counted, and `overhead_s` beside its steps, such as parking.
    """
    return sum(overhead_s + each + max(turn.seconds, turn.least_steps * each) for each in steps_s)


def turn_that_fits(usual: Turn, steps_s: Sequence[float], overhead_s: float, room_s: float) -> Turn:
    """Return the longest turn with which a round takes at most `room_s`, within its bounds."""
    if round_s(usual, steps_s, overhead_s) <= room_s:
        return usual
    least = shortest(usual)
    spare_s = max(0.0, room_s - round_s(least, steps_s, overhead_s)) / len(steps_s)
    return replace(least, seconds=min(usual.seconds, least.seconds + spare_s))


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
