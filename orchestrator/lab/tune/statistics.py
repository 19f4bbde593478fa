"""How much faster a lever is, how sure that is, and what to call it. Pure.

Each round gives one ratio of speeds: a turn of the lever against the turn of the baseline beside
it. Who begins changes with each round (A B B A ...), so that a machine that becomes slower favours
neither. Does not measure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from statistics import median
from typing import Final

#: Of the losses, relative: for levers that add in another order and change nothing else.
EXACT_GAP: Final = 1e-6
#: For levers that compute in another arithmetic. Measured in a small training over 100 steps: bf16
#: against fp32 differs by 2.5e-4, 8-bit AdamW by 5.9e-4, and another seed by 1.8e-2.
NUMERIC_GAP: Final = 5e-3

#: Peaks of equal arms differ by up to 5 % on a CPU (measured), and by nothing on a card.
_SAME_BYTES: Final = 0.05


class LeverVerdict(StrEnum):
    """What a measurement says of a lever."""

    FASTER = "FASTER"
    LESS_MEMORY = "LESS MEMORY"
    """Its peak is at least 5 % lower. It may be slower: the interval says by how much."""
    NO_DIFFERENCE = "NO DIFFERENCE"
    """The whole interval is within `tune.resolve` of 1.0."""
    SLOWER = "SLOWER"
    TOO_FEW_ROUNDS = "TOO FEW ROUNDS"
    """There is no interval yet, or it is too wide to tell."""
    BROKEN = "BROKEN"
    """It changes the losses of the training more than its parity class allows."""
    UNAVAILABLE = "UNAVAILABLE"
    """This machine or this version cannot run it."""


class ParityClass(StrEnum):
    """How much of the training's losses a lever may change."""

    EXACT = "exact"
    NUMERIC = "numeric"
    OBJECTIVE = "objective"
    """It changes what is trained, so losses are not compared, and it is never chosen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """A lever against the baseline. Ratios are speeds: 1.03 is 3 % faster."""

    ratio: float
    """The median over all pairs of rounds of the geometric mean of their ratios."""
    low: float | None
    """`None` with too few rounds for any interval of this confidence."""
    high: float | None
    rounds: int


def effect_of(log_ratios: Sequence[float], confidence: float) -> Effect | None:
    """Return the effect that the logarithms of ratios show; `None` without any round.

    The ratio is the estimate of Hodges and Lehmann, and the interval Tukey's, between two of the
    Walsh averages: the values that Wilcoxon's signed-rank test does not reject (Hollander, Wolfe,
    Chicken: Nonparametric Statistical Methods, 3rd edition, 3.2 and 3.3). It asks for no
    distribution but a symmetric one, which the logarithm of a ratio of two equal arms has.
    """
    if not log_ratios:
        return None
    count = len(log_ratios)
    walsh = sorted(
        (one + other) / 2 for place, one in enumerate(log_ratios) for other in log_ratios[place:]
    )
    effect = Effect(ratio=math.exp(median(walsh)), low=None, high=None, rounds=count)
    left_out = _left_out(count, confidence)
    if left_out is None:
        return effect
    low, high = math.exp(walsh[left_out]), math.exp(walsh[-1 - left_out])
    return Effect(ratio=effect.ratio, low=low, high=high, rounds=count)


def least_rounds(confidence: float) -> int:
    """Return how many rounds an interval of this confidence needs: 6 for 0.95."""
    return next(count for count in range(1, 64) if _left_out(count, confidence) is not None)


@cache
def _left_out(count: int, confidence: float) -> int | None:
    """Return how many Walsh averages lie beyond the interval on each side.

    It is the largest k for which the sum of the positive ranks of `count` values is below k + 1
    with a probability of at most (1 - confidence) / 2. `None`: there is no interval.
    """
    most = count * (count + 1) // 2
    ways = [1] + [0] * most  # sets of the ranks 1 to `count` with each sum
    for rank in range(1, count + 1):
        for total in range(most, rank - 1, -1):
            ways[total] += ways[total - rank]
    allowed, reached = (1 - confidence) / 2 * 2**count, 0
    for total, number in enumerate(ways):
        reached += number
        if reached > allowed:
            return total - 1 if total else None
    return most


def parity_gap(losses: Sequence[float], baseline: Sequence[float]) -> float | None:
    """Return the largest relative difference of losses; `None` without any."""
    pairs = list(zip(losses, baseline, strict=False))
    gaps = [abs(one - other) / max(abs(other), 1e-12) for one, other in pairs]
    return max((math.inf if math.isnan(gap) else gap for gap in gaps), default=None)


def most_gap(parity: ParityClass | None, *, in_fp32: bool) -> float | None:
    """Return how far losses may differ; `None`: they are not compared.

    With another number type than fp32, also sums in another order differ by as much as number
    types do.
    """
    if parity is ParityClass.EXACT and in_fp32:
        return EXACT_GAP
    return NUMERIC_GAP if parity in {ParityClass.EXACT, ParityClass.NUMERIC} else None


def judge(
    effect: Effect | None, peak_share: float | None, *, is_broken: bool, resolve: float
) -> LeverVerdict:
    """Return the verdict.

    Args:
        effect: The speed against the baseline's.
        peak_share: The peak of the device's memory, of the baseline's.
        is_broken: Whether the losses differ too much.
        resolve: Differences of at most this share count as none.
    """
    if is_broken:
        return LeverVerdict.BROKEN
    if effect is None or effect.low is None or effect.high is None:
        return LeverVerdict.TOO_FEW_ROUNDS
    is_small = 1 - resolve <= effect.low and effect.high <= 1 + resolve
    if effect.low > 1 and not is_small:
        return LeverVerdict.FASTER
    if peak_share is not None and peak_share < 1 - _SAME_BYTES:
        return LeverVerdict.LESS_MEMORY
    if is_small:
        return LeverVerdict.NO_DIFFERENCE
    return LeverVerdict.SLOWER if effect.high < 1 else LeverVerdict.TOO_FEW_ROUNDS
