"""Which verdict a measured effect gets. Pure.

A claim is a range of speed ratios, such as 1.05 to 1.10. Without one, what is judged is "it helps": more speed, or for
a lever whose aim is memory, fewer bytes. Does not measure and does not know which lever it judges.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias

from orchestrator.tuning.rows import Verdict
from orchestrator.tuning.statistics import Effect

Aim: TypeAlias = Literal["speed", "memory", "loss"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A verdict and the sentence that says why."""

    verdict: Verdict
    reason: str


def judge_speed(
    effect: Effect | None, *, real: bool, resolve: float, claim: tuple[float, float] | None = None
) -> Judged:
    """Judge a speed.

    Args:
        effect: What was measured; `None` if no round was.
        real: Whether it passed the test over all levers together (`statistics.holm`).
        resolve: Differences of at most this share count as none.
        claim: Lowest and highest ratio that is claimed.
    """
    if effect is None:
        return Judged(verdict=Verdict.UNDECIDED, reason="no round was measured")
    span = f"{effect.low:.3f} to {effect.high:.3f} over {effect.rounds} rounds"
    if math.isinf(effect.high):
        reason = f"{effect.ratio:.3f} in {effect.rounds} rounds, which are too few for an interval"
        return Judged(verdict=Verdict.UNDECIDED, reason=reason)
    if effect.low >= 1 - resolve and effect.high <= 1 + resolve and not _within(claim, resolve):
        return Judged(verdict=Verdict.NO_EFFECT, reason=f"within {100 * resolve:g} % of the baseline: {span}")
    if not (real and effect.excludes_one):
        return Judged(verdict=Verdict.UNDECIDED, reason=f"{span} does not tell whether it differs from the baseline")
    if claim is None:
        verdict = Verdict.CONFIRMED if effect.ratio > 1 else Verdict.REFUTED
        return Judged(verdict=verdict, reason=f"{'faster' if effect.ratio > 1 else 'slower'}: {span}")
    return _against(claim, effect, f"claimed {claim[0]:g} to {claim[1]:g}, measured {span}")


def _against(claim: tuple[float, float], effect: Effect, said: str) -> Judged:
    """Compare an effect that is real with what is claimed."""
    low, high = claim
    if effect.low <= high and effect.high >= low:
        return Judged(verdict=Verdict.CONFIRMED, reason=said)
    claimed_faster = low + high > 2
    if claimed_faster != (effect.ratio > 1):
        return Judged(verdict=Verdict.REFUTED, reason=f"the other direction: {said}")
    if effect.low > high if claimed_faster else effect.high < low:
        return Judged(verdict=Verdict.CONFIRMED, reason=f"more than that: {said}")
    return Judged(verdict=Verdict.PARTLY, reason=f"the right direction, but less: {said}")


def judge_memory(peak_bytes: int | None, baseline_bytes: int | None, *, resolve: float) -> Judged:
    """Judge a lever whose aim is memory by the peaks of device bytes, which repeat to within a block."""
    if not peak_bytes or not baseline_bytes:
        return Judged(verdict=Verdict.UNDECIDED, reason="the peak of its memory is not known")
    ratio = peak_bytes / baseline_bytes
    said = f"{100 * (ratio - 1):+.1f} % of the baseline's peak memory"
    if abs(ratio - 1) <= resolve:
        return Judged(verdict=Verdict.NO_EFFECT, reason=said)
    return Judged(verdict=Verdict.CONFIRMED if ratio < 1 else Verdict.REFUTED, reason=said)


def _within(claim: tuple[float, float] | None, resolve: float) -> bool:
    """Whether a claim itself says: no difference."""
    return claim is not None and claim[0] >= 1 - resolve and claim[1] <= 1 + resolve
