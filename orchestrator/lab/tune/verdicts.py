"""Which verdict a measured effect gets. Pure.

A claim is a range, such as a speed ratio of 1.05 to 1.10. Without one, what is judged is "it
helps": more speed, or for a lever whose aim is memory, fewer bytes. Does not measure and does not
know which lever it judges.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from orchestrator.lab.tune.rows import Verdict
from orchestrator.lab.tune.statistics import Effect

Aim: TypeAlias = Literal["speed", "memory", "loss"]


#: Peaks of memory that differ by less are equal to a person who asks what fits.
_SAME_BYTES: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Claimed:
    """What guides claim of a speed ratio, all of them together."""

    said: str
    """Such as `1.5 to 2 x (003)`."""
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A verdict and the sentence that says why."""

    verdict: Verdict
    reason: str


def against(
    claimed: tuple[float, float], low: float, high: float, *, neutral: float, width: float
) -> Verdict:
    """Return the verdict on a claimed range, of a value between `low` and `high`.

    More of a gain than claimed confirms it, more of a cost refutes it. An interval that holds both
    the claim and no effect is too wide to tell.

    Args:
        claimed: Lowest and highest value; infinite where only one end is claimed.
        low: The least that the value may be.
        high: The most.
        neutral: The value of no effect: 1.0 of a ratio, 0 of a difference.
        width: What counts as no difference from it.
    """
    claimed_low, claimed_high = claimed
    overlaps = low <= claimed_high and high >= claimed_low
    if claimed_low <= neutral <= claimed_high:
        is_within = low >= claimed_low - width and high <= claimed_high + width
        return (
            Verdict.CONFIRMED if is_within else Verdict.UNDECIDED if overlaps else Verdict.REFUTED
        )
    if low >= neutral - width and high <= neutral + width:
        return Verdict.NO_EFFECT
    if low <= neutral <= high:
        return Verdict.UNDECIDED
    is_gain = claimed_low > neutral
    is_beyond = low > claimed_high if is_gain else high < claimed_low
    if (low > neutral) is not is_gain or (is_beyond and not is_gain):
        return Verdict.REFUTED
    return Verdict.CONFIRMED if overlaps or is_beyond else Verdict.PARTLY


def judge_speed(
    effect: Effect | None, *, real: bool, resolve: float, claim: Claimed | None = None
) -> Judged:
    """Judge a speed.

    Args:
        effect: What was measured; `None` if no round was.
        real: Whether it passed the test over all levers together (`statistics.holm`).
        resolve: Differences of at most this share count as none.
        claim: What is claimed of it.
    """
    if effect is None:
        return Judged(verdict=Verdict.UNDECIDED, reason="no round was measured")
    span = f"{effect.low:.3f} to {effect.high:.3f} over {effect.rounds} rounds"
    if math.isinf(effect.high):
        reason = f"{effect.ratio:.3f} in {effect.rounds} rounds, which are too few for an interval"
        return Judged(verdict=Verdict.UNDECIDED, reason=reason)
    says_none = claim is not None and claim.low <= 1 <= claim.high
    if not says_none and effect.low >= 1 - resolve and effect.high <= 1 + resolve:
        return Judged(
            verdict=Verdict.NO_EFFECT, reason=f"no difference above {100 * resolve:g} %: {span}"
        )
    if not says_none and not (real and effect.excludes_one):
        return Judged(
            verdict=Verdict.UNDECIDED, reason=f"{span} does not tell whether it makes a difference"
        )
    if claim is None:
        verdict = Verdict.CONFIRMED if effect.ratio > 1 else Verdict.REFUTED
        return Judged(
            verdict=verdict, reason=f"{'faster' if effect.ratio > 1 else 'slower'}: {span}"
        )
    verdict = against((claim.low, claim.high), effect.low, effect.high, neutral=1.0, width=resolve)
    return Judged(verdict=verdict, reason=f"claimed {claim.said}, measured {span}")


def judge_memory(
    peak_bytes: int | None, against_bytes: int | None, *, noise: float, resolve: float
) -> Judged:
    """Judge a lever whose aim is memory by the peaks of the first steps.

    Args:
        peak_bytes: Of the lever.
        against_bytes: Of what it is compared with.
        noise: The share by which peaks of equal arms differ.
        resolve: Differences of at most this share count as none.
    """
    if not peak_bytes or not against_bytes:
        return Judged(verdict=Verdict.UNDECIDED, reason="the peak of its memory is not known")
    ratio, least = peak_bytes / against_bytes, max(noise, resolve)
    said = f"{100 * (ratio - 1):+.1f} % peak memory"
    if abs(ratio - 1) > least:
        return Judged(verdict=Verdict.CONFIRMED if ratio < 1 else Verdict.REFUTED, reason=said)
    if least <= _SAME_BYTES:
        return Judged(verdict=Verdict.NO_EFFECT, reason=said)
    return Judged(
        verdict=Verdict.UNDECIDED, reason=f"{said}, and equal arms differ by {100 * noise:.0f} %"
    )
