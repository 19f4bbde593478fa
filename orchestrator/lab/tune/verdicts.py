"""Which verdict a measured effect gets. Pure.

What is judged is "it helps": more speed, or for a lever whose aim is memory, fewer bytes. Does not
measure and does not know which lever it judges.
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
class Judged:
    """A verdict and the sentence that says why."""

    verdict: Verdict
    reason: str


def judge_speed(effect: Effect | None, *, real: bool, resolve: float) -> Judged:
    """Judge a speed.

    Args:
        effect: What was measured; `None` if no round was.
        real: Whether it passed the test over all levers together (`statistics.holm`).
        resolve: Differences of at most this share count as none.
    """
    if effect is None:
        return Judged(verdict=Verdict.UNDECIDED, reason="no round was measured")
    span = f"{effect.low:.3f} to {effect.high:.3f} over {effect.rounds} rounds"
    if math.isinf(effect.high):
        reason = f"{effect.ratio:.3f} in {effect.rounds} rounds, which are too few for an interval"
        return Judged(verdict=Verdict.UNDECIDED, reason=reason)
    if effect.low >= 1 - resolve and effect.high <= 1 + resolve:
        reason = f"no difference above {100 * resolve:g} %: {span}"
        return Judged(verdict=Verdict.NO_EFFECT, reason=reason)
    if not (real and effect.excludes_one):
        reason = f"{span} does not tell whether it makes a difference"
        return Judged(verdict=Verdict.UNDECIDED, reason=reason)
    if effect.ratio > 1:
        return Judged(verdict=Verdict.CONFIRMED, reason=f"faster: {span}")
    return Judged(verdict=Verdict.REFUTED, reason=f"slower: {span}")


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
