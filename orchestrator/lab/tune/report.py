"""From the measurements of a pass to rows: effects, parity, verdicts. Pure.

What is judged is "it helps": more speed, for a lever whose aim is memory fewer bytes, and for one
that changes what is trained a lower validation loss. A lever must leave the result of a training as
its parity class promises: losses of the first optimiser steps are compared with the baseline's, and
the difference with what another seed changes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import median
from typing import Final, Literal, TypeAlias

from orchestrator.config.gpu_specs import match_profile, peak_tflops
from orchestrator.lab.tune.arms import AGAIN, BASELINE
from orchestrator.lab.tune.levers import Candidate
from orchestrator.lab.tune.measuring import PassData
from orchestrator.lab.tune.results import LeverRow, LeverVerdict, ParityClass
from orchestrator.lab.tune.statistics import (
    LEAVING_SHARE,
    Effect,
    anytime_effect,
    effects,
    holm,
    log_ratios,
)
from orchestrator.view.cells import mean
from workers.tuning.messages import Opened

Objective: TypeAlias = Literal["speed", "memory", "balanced"]

Judgement: TypeAlias = tuple[LeverVerdict, str]
"""A verdict, and the sentence that says why."""

#: Of the loss, for levers that add in another order and change nothing else.
EXACT_GAP: Final = 1e-6
#: Of what another seed changes, for levers that compute in another arithmetic.
NUMERIC_SHARE: Final = 0.1

#: Peaks of memory that differ by less are equal to a person who asks what fits.
_SAME_BYTES: Final = 0.05

#: Two draws of a normal distribution differ by less than so many standard deviations in 95 % of
#: cases.
_TWO_DRAWS: Final = 2.77
#: The mean range of 2, 3, 4 and more draws, in standard deviations (Tippett, 1925).
_MEAN_RANGES: Final = (1.13, 1.69, 2.06, 2.33, 2.53, 2.70, 2.85, 2.97, 3.08, 3.17)

#: The order in which a budget is spent is that of `passes.by_expected_gain`.
NOT_BEGUN: Final = (
    "not begun: the budget went to levers of which more is expected; give it a longer --budget"
)


def gain_of(
    objective: Objective,
    effect: Effect | None,
    peak_bytes: int | None,
    against_bytes: int | None,
    peak_noise: float,
) -> Effect | None:
    """Return how many times better one arm is than another one by what counts.

    `None` where something of it was not measured. A gain of memory is of no round: more rounds do
    not narrow its interval.

    Args:
        objective: What counts.
        effect: The speed of the one against the other.
        peak_bytes: Of the one.
        against_bytes: Of the other.
        peak_noise: The share by which peaks of equal arms differ.
    """
    if objective == "speed":
        return effect
    if not peak_bytes or not against_bytes:
        return None
    fewer, noise = against_bytes / peak_bytes, 1 + peak_noise
    if objective == "memory":
        return Effect(ratio=fewer, low=fewer / noise, high=fewer * noise, p=1.0, rounds=0)
    if effect is None:
        return None
    return replace(
        effect,
        ratio=effect.ratio * fewer,
        low=effect.low * fewer / noise,
        high=effect.high * fewer * noise,
    )


def gain_words(objective: Objective, name: str, gain: Effect) -> str:
    """Return how a set compares with the user's file."""
    if objective == "memory":
        few, most = 1 / gain.high, 1 / gain.low
        return (
            f"{name} takes {1 / gain.ratio:.3f} x your file's peak memory, {few:.3f} to {most:.3f}"
        )
    what = "speed" if objective == "speed" else "speed for each byte of its peak"
    return f"{name} has {gain.ratio:.3f} x your file's {what}, {gain.low:.3f} to {gain.high:.3f}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedNoise:
    """What another seed changes: mean differences between baselines that differ by it alone."""

    loss: float | None
    validation: float | None

    @classmethod
    def of(cls, baselines: Sequence[Opened]) -> SeedNoise:
        """Return what the first steps of some baselines show."""
        pairs = list(combinations(baselines, 2))
        losses = [_loss_gap(one, other) for one, other in pairs]
        validations = [
            abs(one.validation_loss - other.validation_loss)
            for one, other in pairs
            if one.validation_loss is not None and other.validation_loss is not None
        ]
        return cls(loss=mean(losses), validation=mean(validations))


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """Whether a result was kept; `None` where that cannot be said."""

    kept: bool | None
    gap_noise: float | None
    """The gap as a multiple of the noise; of validation losses for OBJECTIVE levers."""
    reason: str


def parity_of(parity: ParityClass, arm: Opened, baseline: Opened, noise: SeedNoise) -> Parity:
    """Compare an arm with the baseline, as its class asks."""
    if parity is ParityClass.OBJECTIVE:
        losses = (arm.validation_loss, baseline.validation_loss)
        return validation_parity(*losses, noise, "at equal steps")
    gap = _loss_gap(arm, baseline)
    share = None if gap is None or not noise.loss else gap / noise.loss
    if parity is ParityClass.NUMERIC and share is not None:
        reason = f"the loss differs by {100 * share:.2g} % of seed noise"
        return Parity(kept=share <= NUMERIC_SHARE, gap_noise=share, reason=reason)
    if parity is ParityClass.NUMERIC or gap is None:
        return Parity(kept=None, gap_noise=None, reason="its losses cannot be compared")
    if arm.weights_sha256 is not None and arm.weights_sha256 == baseline.weights_sha256:
        return Parity(kept=True, gap_noise=0.0, reason="the same bits")
    pairs = zip(arm.losses, baseline.losses, strict=False)
    largest = max(abs(one - other) / max(abs(other), 1e-12) for one, other in pairs)
    reason = f"other bits; the loss differs by {largest:.1e} at most"
    return Parity(kept=largest <= EXACT_GAP, gap_noise=share, reason=reason)


def validation_parity(
    arm: float | None, baseline: float | None, noise: SeedNoise, when: str
) -> Parity:
    """Compare validation losses, as a multiple of what another seed changes."""
    if arm is None or baseline is None or not noise.validation:
        return Parity(kept=None, gap_noise=None, reason=f"no validation loss {when}")
    gap = (arm - baseline) / noise.validation
    reason = f"validation loss {when} {arm:.4g} against {baseline:.4g}, {gap:+.2g} x seed noise"
    return Parity(kept=None, gap_noise=gap, reason=reason)


def _loss_gap(one: Opened, other: Opened) -> float | None:
    """Return the mean difference over the last half of the steps that both have done."""
    pairs = list(zip(one.losses, other.losses, strict=False))
    return mean(abs(a - b) for a, b in pairs[len(pairs) // 2 :])


def judge_speed(effect: Effect | None, *, real: bool, resolve: float) -> Judgement:
    """Judge a speed.

    Args:
        effect: What was measured; `None` if no round was.
        real: Whether it passed the test over all levers together (`statistics.holm`).
        resolve: Differences of at most this share count as none.
    """
    if effect is None:
        return LeverVerdict.UNDECIDED, "no round was measured"
    span = f"{effect.low:.3f} to {effect.high:.3f} over {effect.rounds} rounds"
    if math.isinf(effect.high):
        reason = f"{effect.ratio:.3f} in {effect.rounds} rounds, which are too few for an interval"
        return LeverVerdict.UNDECIDED, reason
    if effect.low >= 1 - resolve and effect.high <= 1 + resolve:
        return LeverVerdict.NO_EFFECT, f"no difference above {100 * resolve:g} %: {span}"
    if not (real and effect.excludes_one):
        return LeverVerdict.UNDECIDED, f"{span} does not tell whether it makes a difference"
    if effect.ratio > 1:
        return LeverVerdict.CONFIRMED, f"faster: {span}"
    return LeverVerdict.REFUTED, f"slower: {span}"


def judge_memory(
    peak_bytes: int | None, against_bytes: int | None, *, noise: float, resolve: float
) -> Judgement:
    """Judge a lever whose aim is memory by the peaks of the first steps.

    Args:
        peak_bytes: Of the lever.
        against_bytes: Of what it is compared with.
        noise: The share by which peaks of equal arms differ.
        resolve: Differences of at most this share count as none.
    """
    if not peak_bytes or not against_bytes:
        return LeverVerdict.UNDECIDED, "the peak of its memory is not known"
    ratio, least = peak_bytes / against_bytes, max(noise, resolve)
    reason = f"{100 * (ratio - 1):+.1f} % peak memory"
    if abs(ratio - 1) > least:
        return (LeverVerdict.CONFIRMED if ratio < 1 else LeverVerdict.REFUTED), reason
    if least <= _SAME_BYTES:
        return LeverVerdict.NO_EFFECT, reason
    return LeverVerdict.UNDECIDED, f"{reason}, and equal arms differ by {100 * noise:.0f} %"


def judge_loss(at_steps: Parity, at_time: Parity) -> Judgement:
    """Judge a lever whose aim is a lower validation loss, at equal time.

    That at equal steps is said as well.
    """
    if at_time.gap_noise is None:
        return LeverVerdict.UNDECIDED, "its validation loss cannot be compared"
    reason = f"{at_time.reason}; {at_steps.reason}"
    if abs(at_time.gap_noise) <= 1:
        return LeverVerdict.NO_EFFECT, reason
    return (LeverVerdict.CONFIRMED if at_time.gap_noise < 0 else LeverVerdict.REFUTED), reason


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """All that the rows of a pass follow from."""

    data: PassData
    opened: Mapping[str, Opened]
    noise: SeedNoise
    resolve: float
    confidence: float
    seed_names: Sequence[str] = ()
    """The baselines with other seeds."""
    dtype_of: Callable[[Candidate | None], str | None] = lambda _: None
    """The number type of a candidate; `None`: of the baseline."""

    def effect(self, name: str, against: str = BASELINE, of: int = 1) -> Effect | None:
        """Return the effect of an arm; its interval holds together with those of `of` arms in all.

        One that left before it had enough rounds for the interval of a median has that by which it
        left, which excludes 1.0.
        """
        confidence = 1 - (1 - LEAVING_SHARE) * (1 - self.confidence) / max(1, of)
        effect = effects(self.data.rounds, against, [name], confidence).get(name)
        if effect is None or math.isfinite(effect.high):
            return effect
        so_far = self._effect_so_far(name, against, of)
        return so_far if so_far is not None and so_far.excludes_one else effect

    def _effect_so_far(self, name: str, against: str, of: int) -> Effect | None:
        """Return the effect with an interval that holds after each round, if there is one."""
        ratios = log_ratios(self.data.rounds, against, name)
        return anytime_effect(ratios, 1 - LEAVING_SHARE * (1 - self.confidence) / max(1, of))

    def is_over(self, candidate: Candidate, objective: Objective, of: int) -> bool:
        """Whether more rounds of an arm say nothing: it is measured finely enough, or it cannot
        win.

        It cannot once it is slower than the baseline and no better by what counts. That is
        successive elimination (E. Even-Dar, S. Mannor, Y. Mansour: Action elimination and stopping
        conditions for the multi-armed bandit and reinforcement learning problems, JMLR 7, 2006),
        with intervals that hold at all looks and for all `of` arms.
        """
        name = candidate.name
        if candidate.aim == "loss" and name not in self.data.later:
            return False
        effect, so_far = self.effect(name, of=of), self._effect_so_far(name, BASELINE, of)
        if effect is None or so_far is None:
            return False
        gain = self._gain(objective, so_far, name, BASELINE)
        cannot_win = so_far.high < 1 and (gain is None or gain.high < 1)
        return cannot_win or effect.half_width <= self.resolve

    def gain(
        self, objective: Objective, name: str, against: str = BASELINE, of: int = 1
    ) -> Effect | None:
        """Return what an arm gains over another one, by what is to be best."""
        return self._gain(objective, self.effect(name, against, of), name, against)

    def _gain(
        self, objective: Objective, effect: Effect | None, name: str, against: str
    ) -> Effect | None:
        peaks = (self.peak_bytes(name), self.peak_bytes(against))
        return gain_of(objective, effect, *peaks, self.peak_noise)

    def peak_bytes(self, name: str) -> int | None:
        """Return the highest use of the device by tensors in the first steps of an arm."""
        return None if name not in self.opened else self.opened[name].peak_bytes or None

    @property
    def peak_noise(self) -> float:
        """The share by which peaks of equal arms differ: baseline, repetition, other seeds."""
        names = (BASELINE, AGAIN, *self.seed_names)
        peaks = [peak for name in names if (peak := self.peak_bytes(name))]
        if len(peaks) < 2:
            return 0.0
        return _TWO_DRAWS / _MEAN_RANGES[len(peaks) - 2] * (max(peaks) / min(peaks) - 1)

    def items_per_s(self, name: str) -> float | None:
        """Samples, tokens where lengths differ, or 10^9 operations of products; the median over
        rounds.

        Those of different rounds are comparable only as far as the machine was the same, so
        verdicts use ratios.
        """
        seconds = [arms[name] for arms in self.data.rounds if name in arms]
        return 1 / median(seconds) if seconds else None

    def against(self, candidate: Candidate) -> str:
        """Return what a candidate is judged against: the arm it names, if there was one."""
        beside = candidate.beside
        if beside is None or beside not in self.opened or beside in self.data.lost:
            return BASELINE
        return beside if self.effect(candidate.name, beside) else BASELINE


def rows_of(
    candidates: Sequence[Candidate], measured: Measurements, impossible: Mapping[str, str]
) -> list[LeverRow]:
    """Return a row for each candidate; `impossible` says why some could not be tried."""
    possible = [candidate for candidate in candidates if candidate.name not in impossible]
    judged = {
        candidate.name: measured.effect(candidate.name, measured.against(candidate), len(possible))
        for candidate in possible
    }
    p_values = {name: effect.p for name, effect in judged.items() if effect is not None}
    real = holm(p_values, 1 - measured.confidence)
    rows = []
    for candidate in candidates:
        row = LeverRow(
            lever=candidate.lever,
            setting=candidate.setting,
            parity_class=candidate.parity,
            verdict=LeverVerdict.UNAVAILABLE,
            reason=impossible.get(candidate.name, ""),
        )
        if candidate.name not in impossible:
            effect = measured.effect(candidate.name, of=len(possible))
            row = _with_figures(row, candidate, effect, measured)
            if row.verdict is LeverVerdict.UNDECIDED and not row.reason:
                row = _judged(
                    row, candidate, judged[candidate.name], measured, real=candidate.name in real
                )
        rows.append(row)
    return rows


def _with_figures(
    row: LeverRow, candidate: Candidate, effect: Effect | None, measured: Measurements
) -> LeverRow:
    """Return the row with what an arm does and takes; with a reason if it cannot be judged."""
    opened, lost = measured.opened.get(candidate.name), measured.data.lost.get(candidate.name)
    baseline, rounds = measured.opened.get(BASELINE), 0 if effect is None else effect.rounds
    reason = "" if opened else NOT_BEGUN
    if lost is not None:
        reason = f"{lost}, after {rounds} rounds" if opened else lost
    row = replace(
        row,
        # One that never began cannot run here; one that began was ended, and might run again.
        verdict=LeverVerdict.UNAVAILABLE if lost and not opened else LeverVerdict.UNDECIDED,
        reason=reason,
        speed_ratio=None if effect is None else effect.ratio,
        speed_low=None if effect is None or not effect.low else effect.low,
        speed_high=None if effect is None or math.isinf(effect.high) else effect.high,
    )
    speed = measured.items_per_s(candidate.name)
    if candidate.parity is not None:
        row = replace(row, samples_per_s=speed)
    if opened is None:
        return row
    tflops = speed * opened.flop / 1e12 if speed is not None and opened.flop else None
    rated = _rated_tflops(opened, measured.dtype_of(candidate), measured.data.clocks_mhz)
    row = replace(
        row,
        tflops=tflops,
        mfu_pct=100 * tflops / rated if tflops is not None and rated else None,
        peak_bytes=opened.peak_bytes or None,
        host_bytes=opened.host_bytes or None,
        once_s=_once_s(opened),
    )
    if baseline is None:
        return row
    return replace(
        row,
        peak_delta_bytes=_difference(row.peak_bytes, baseline.peak_bytes),
        host_delta_bytes=_difference(row.host_bytes, baseline.host_bytes),
        pays_after_s=_pays_after_s(row.once_s, _once_s(baseline), effect),
    )


def _once_s(opened: Opened) -> float | None:
    """Return what the first step took beyond another one, such as a compilation."""
    return max(0.0, opened.first_step_s - opened.step_s) if opened.first_step_s else None


def _difference(one: int | None, other: int | None) -> int | None:
    return one - other if one and other else None


def _pays_after_s(
    once_s: float | None, baseline_once_s: float | None, effect: Effect | None
) -> float | None:
    """Return after how many seconds of training it has done as much as a slower arm that began
    faster.

    Where o are the seconds once and r the ratio of speeds, both have done as much at T with
    r (T - o1) = T - o2. `None`: it is not known to be faster.
    """
    if effect is None or effect.low <= 1.0 or once_s is None or baseline_once_s is None:
        return None
    if once_s <= baseline_once_s:
        return 0.0
    return (effect.ratio * once_s - baseline_once_s) / (effect.ratio - 1.0)


def _rated_tflops(opened: Opened, dtype: str | None, clocks_mhz: Sequence[float]) -> float | None:
    """Return what the card is rated for in a number type at the clock of the rounds."""
    if opened.card == "cpu" or dtype is None:
        return None
    profile = match_profile(opened.device_name, opened.device_bytes)
    if profile is None:
        return None
    rated = peak_tflops(profile, dtype, median(clocks_mhz) if clocks_mhz else None)
    return rated if rated is not None and math.isfinite(rated) else None


def _judged(
    row: LeverRow,
    candidate: Candidate,
    effect: Effect | None,
    measured: Measurements,
    *,
    real: bool,
) -> LeverRow:
    """Return the row with its verdict; `effect` is against what the candidate is judged against."""
    against = measured.against(candidate)
    verdict, reason = judge_speed(effect, real=real, resolve=measured.resolve)
    speed = reason if against == BASELINE else f"against {against}: {reason}"
    parity, reason = None, speed
    if candidate.parity is not None:
        arm, other = measured.opened[candidate.name], measured.opened[against]
        parity = parity_of(candidate.parity, arm, other, measured.noise)
        row = replace(row, loss_gap_noise=parity.gap_noise)
        if parity.kept is False:
            broken = LeverVerdict.BROKEN
            return replace(row, verdict=broken, reason=f"{parity.reason}; {speed}")
    # What it costs, or who has trained longer, is not known without an interval.
    no_interval = effect is None or math.isinf(effect.high)
    if candidate.aim == "loss" and parity is not None:
        # The baseline itself has two turns in each round, and has trained for longer than its
        # repetition.
        same_time = AGAIN if against == BASELINE else against
        arms = [measured.data.later.get(name, {}) for name in (candidate.name, same_time)]
        turns = max(arms[0].keys() & arms[1].keys(), default=0)
        losses = (arms[0].get(turns), arms[1].get(turns))
        at_time = validation_parity(*losses, measured.noise, "at equal time")
        verdict, reason = judge_loss(parity, at_time)
        verdict = LeverVerdict.UNDECIDED if no_interval else verdict
        return replace(row, verdict=verdict, reason=f"{reason}; {speed}")
    if candidate.aim == "memory":
        peaks = (row.peak_bytes, measured.peak_bytes(against))
        verdict, memory = judge_memory(*peaks, noise=measured.peak_noise, resolve=measured.resolve)
        if verdict is LeverVerdict.CONFIRMED and no_interval:
            verdict = LeverVerdict.UNDECIDED
        reason = f"{memory}; {speed}"
    if parity is not None:
        reason = f"{reason}; {parity.reason}"
    return replace(row, verdict=verdict, reason=reason)
