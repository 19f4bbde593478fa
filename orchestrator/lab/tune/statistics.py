"""How much faster one arm is than the baseline, and how sure that is. Pure.

An arm is compared with the baseline of the same round only, so that a machine that becomes slower
over minutes changes no ratio. The median is not moved by the few rounds in which something happened
between two arms. Does not measure, and does not judge (`report.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, median
from typing import Final

#: Of the probability that any interval of a tuning is wrong: what the looks after each round may
#: use. The rest is for the intervals at the end: 22 arms need 10 rounds, as without any looks.
LEAVING_SHARE: Final = 0.1

#: c^2 of Wang and Ramdas: arms are expected to be 1 / c = 30 standard deviations apart, so that
#: large differences are found in few rounds. With 4 % of noise, half of a speed is 17 apart.
_PRIOR: Final = 1e-3

#: Half of an interval of a log ratio that says nothing: a factor of 150.
_WIDEST: Final = 5.0

#: From so many rounds the distribution of the signed ranks is normal to three digits.
_NORMAL_FROM: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """An arm against the baseline. Ratios are speeds: 1.03 is 3 % faster."""

    ratio: float
    low: float
    """0 with too few rounds for any interval of this confidence."""
    high: float
    """Infinite then."""
    p: float
    """Probability of a difference at least as consistent between two equal arms."""
    rounds: int
    """In which both were measured."""

    @property
    def half_width(self) -> float:
        """Half of the interval."""
        return (self.high - self.low) / 2

    @property
    def excludes_one(self) -> bool:
        """Whether the interval lies on one side of 1.0."""
        return self.low > 1.0 or self.high < 1.0


def log_ratios(rounds: Sequence[Mapping[str, float]], baseline: str, arm: str) -> list[float]:
    """Return log(speed / speed of the baseline) of each round that has both.

    Rounds hold seconds a sample.
    """
    return [
        math.log(arms[baseline] / arms[arm]) for arms in rounds if baseline in arms and arm in arms
    ]


def effect_of(ratios: Sequence[float], confidence: float) -> Effect | None:
    """Return the effect that log ratios show, with an interval of this confidence.

    `None` without any round.
    """
    if not ratios:
        return None
    if len(ratios) < least_rounds(1, confidence):
        low, high = -math.inf, math.inf
    else:
        low, high = bootstrap_interval(ratios, confidence)
    return Effect(
        ratio=math.exp(median(ratios)),
        low=math.exp(low),
        high=math.exp(high),
        p=signed_rank_p(ratios),
        rounds=len(ratios),
    )


def anytime_effect(ratios: Sequence[float], confidence: float) -> Effect | None:
    """Return the effect with an interval that holds after every round, so that one may look and
    stop.

    It is the confidence sequence of a t-test with a normal prior of the effect size, and `p` the
    inverse of its test martingale at no difference (H. Wang, A. Ramdas: Anytime-valid t-tests and
    confidence sequences for Gaussian means with unknown variance, arXiv 2310.03722). By Ville's
    inequality, the probability that it ever misses is at most 1 - confidence, for log ratios with a
    normal distribution of any variance. `None` while it would be as good as infinite. It begins
    after 4 rounds where the interval of the median needs 10, and is wider than that from then on.
    """
    count = len(ratios)
    if count < 2:
        return None
    mean = fmean(ratios)
    variance, share = fmean([(ratio - mean) ** 2 for ratio in ratios]), _PRIOR / (count + _PRIOR)
    squares = variance + mean**2
    p = (1 - mean**2 * (1 - share) / squares) ** (count / 2) / math.sqrt(share) if squares else 1.0
    growth = (1 / (math.sqrt(share) * (1 - confidence))) ** (2 / count)
    room = 1 - growth * share
    half = math.sqrt(variance * (growth - 1) / room) if room > 0 else math.inf
    if half > _WIDEST:
        return None
    return Effect(
        ratio=math.exp(median(ratios)),
        low=math.exp(mean - half),
        high=math.exp(mean + half),
        p=min(1.0, p),
        rounds=count,
    )


def least_rounds(arms: int, confidence: float) -> int:
    """Return how many rounds the intervals of so many arms need to hold together with this
    confidence.

    Even the whole range of n values misses the median if all of them lie on one side of it: 2
    chances in 2^n.
    """
    return 1 + math.ceil(math.log2(max(1, arms) / (1 - confidence)))


def effects(
    rounds: Sequence[Mapping[str, float]], baseline: str, arms: Sequence[str], confidence: float
) -> dict[str, Effect]:
    """Return the effect of each arm that has a round.

    The intervals are simultaneous: with the probability `confidence` all of them hold their true
    values. All arms share the baseline's noise, so that intervals of their own would miss together.
    """
    of_each = 1 - (1 - confidence) / max(1, len(arms))
    measured = {arm: effect_of(log_ratios(rounds, baseline, arm), of_each) for arm in arms}
    return {arm: effect for arm, effect in measured.items() if effect is not None}


def bootstrap_interval(values: Sequence[float], confidence: float) -> tuple[float, float]:
    """Return the percentile bootstrap interval of the median, computed exactly instead of by
    drawing.

    The median of n values drawn with replacement is at most the k-th smallest value if at least
    half of the draws are among the k smallest, which is a tail of the binomial distribution (Efron,
    1979). Where n is even, the lower bound uses the lower of the two middle values and the upper
    bound the upper one.
    """
    ordered = sorted(values)
    count, half = len(ordered), (len(ordered) + 1) // 2
    tail = (1 - confidence) / 2
    place = next(k for k in range(1, count + 1) if _at_least(half, count, k / count) > tail)
    return ordered[min(place, half) - 1], ordered[count - min(place, half)]


def _at_least(successes: int, count: int, chance: float) -> float:
    """Return the probability of at least so many successes of `count`."""
    if chance >= 1:
        return 1.0
    return math.fsum(
        math.comb(count, k) * chance**k * (1 - chance) ** (count - k)
        for k in range(successes, count + 1)
    )


def signed_rank_p(values: Sequence[float]) -> float:
    """Return the two-sided p of Wilcoxon's signed-rank test that `values` are symmetric around 0.

    Exact below 60 values (by counting the sets of ranks with each sum), otherwise by the normal
    approximation. Values that are 0 say nothing and are left out. Equal values get ranks in their
    order: measured times are rarely equal.
    """
    nonzero = [value for value in values if value != 0]
    count = len(nonzero)
    if not count:
        return 1.0
    ranked = sorted(nonzero, key=abs)
    positive = sum(rank for rank, value in enumerate(ranked, 1) if value > 0)
    total = count * (count + 1) // 2
    smaller = min(positive, total - positive)
    if count >= _NORMAL_FROM:
        deviation = math.sqrt(count * (count + 1) * (2 * count + 1) / 24)
        return min(1.0, 2 * NormalDist().cdf((smaller + 0.5 - total / 2) / deviation))
    ways = [1] + [0] * smaller
    for rank in range(1, count + 1):
        for reached in range(smaller, rank - 1, -1):
            ways[reached] += ways[reached - rank]
    return min(1.0, sum(ways) / float(2 ** (count - 1)))


def holm(p_values: Mapping[str, float], alpha: float) -> frozenset[str]:
    """Return the names whose effect is real.

    The probability of one or more errors is at most `alpha` (Holm, 1979).
    """
    real: set[str] = set()
    for place, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        if p_values[name] > alpha / (len(p_values) - place):
            break
        real.add(name)
    return frozenset(real)
