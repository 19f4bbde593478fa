"""Whether a lever leaves the result of a training as its parity class promises. Pure.

Losses of the first optimiser steps are compared with the baseline's, and the difference with what
another seed changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Final

from orchestrator.lab.tune.rows import ParityClass, Verdict
from orchestrator.lab.tune.verdicts import Judged

#: Of the loss, for levers that add in another order and change nothing else.
EXACT_GAP: Final = 1e-6

#: Of what another seed changes, for levers that compute in another arithmetic.
NUMERIC_SHARE: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """The first steps of one arm."""

    losses: Sequence[float]
    weights_sha256: str | None = None
    validation_loss: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """What another seed changes: mean differences between the seeds."""

    loss: float | None
    validation: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """What was found. `kept` is `None` where that cannot be said."""

    kept: bool | None
    gap_noise: float | None
    """The gap as a multiple of the noise; of validation losses where the lever changes what is
    trained.
    """
    said: str


def noise_of(courses: Sequence[Course]) -> Noise:
    """Return the mean gap between courses that differ by their seed alone."""
    losses = [_gap(one.losses, other.losses) for one, other in combinations(courses, 2)]
    known = [gap for gap in losses if gap is not None]
    validations = [each.validation_loss for each in courses if each.validation_loss is not None]
    gaps = [abs(one - other) for one, other in combinations(validations, 2)]
    return Noise(
        loss=sum(known) / len(known) if known else None,
        validation=sum(gaps) / len(gaps) if gaps else None,
    )


def parity_of(kind: ParityClass, arm: Course, baseline: Course, noise: Noise) -> Parity:
    """Compare an arm with the baseline, as its class asks."""
    if kind is ParityClass.OBJECTIVE:
        return _validation(
            arm.validation_loss, baseline.validation_loss, noise.validation, "at equal steps"
        )
    gap = _gap(arm.losses, baseline.losses)
    share = None if gap is None or not noise.loss else gap / noise.loss
    if kind is ParityClass.NUMERIC:
        if share is None:
            return Parity(kept=None, gap_noise=None, said="its losses cannot be compared")
        said = f"the loss differs by {100 * share:.2g} % of seed noise"
        return Parity(kept=share <= NUMERIC_SHARE, gap_noise=share, said=said)
    if arm.weights_sha256 is not None and arm.weights_sha256 == baseline.weights_sha256:
        return Parity(kept=True, gap_noise=0.0, said="the same bits")
    pairs = list(zip(arm.losses, baseline.losses, strict=False))
    if not pairs:
        return Parity(kept=None, gap_noise=None, said="its losses cannot be compared")
    largest = max(abs(one - other) / max(abs(other), 1e-12) for one, other in pairs)
    kept = largest <= EXACT_GAP
    return Parity(
        kept=kept, gap_noise=share, said=f"other bits; the loss differs by {largest:.1e} at most"
    )


def judge_loss(at_steps: Parity, at_time: Parity) -> Judged:
    """Judge a lever whose aim is a lower validation loss, at equal time.

    That at equal steps is told as well.
    """
    if at_time.gap_noise is None:
        return Judged(verdict=Verdict.UNDECIDED, reason="its validation loss cannot be compared")
    said = f"{at_time.said}; {at_steps.said}"
    if abs(at_time.gap_noise) <= 1:
        return Judged(verdict=Verdict.NO_EFFECT, reason=said)
    return Judged(
        verdict=Verdict.CONFIRMED if at_time.gap_noise < 0 else Verdict.REFUTED, reason=said
    )


def at_equal_time(arm_loss: float | None, baseline_loss: float | None, noise: Noise) -> Parity:
    """Compare validation losses after about equal time."""
    return _validation(arm_loss, baseline_loss, noise.validation, "at equal time")


def _validation(
    arm: float | None, baseline: float | None, noise: float | None, when: str
) -> Parity:
    if arm is None or baseline is None or not noise:
        return Parity(kept=None, gap_noise=None, said=f"no validation loss {when}")
    gap = (arm - baseline) / noise
    said = f"validation loss {when} {arm:.4g} against {baseline:.4g}, {gap:+.2g} x seed noise"
    return Parity(kept=None, gap_noise=gap, said=said)


def _gap(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Return the mean difference over the last half of the steps that both have done."""
    pairs = list(zip(one, other, strict=False))
    last = pairs[len(pairs) // 2 :]
    return sum(abs(a - b) for a, b in last) / len(last) if last else None
