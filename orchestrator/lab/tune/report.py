"""From the measurements of a pass to rows: effects, parity, verdicts, and the Pareto set. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from orchestrator.lab.tune.absolute import Absolute, absolute_of
from orchestrator.lab.tune.journal import PassData
from orchestrator.lab.tune.levers import Candidate
from orchestrator.lab.tune.objective import Gain, Objective, gain_of
from orchestrator.lab.tune.pareto import Point, pareto_set
from orchestrator.lab.tune.parity import Course, Noise, Parity, at_equal_time, judge_loss, parity_of
from orchestrator.lab.tune.rounds import AGAIN, BASELINE
from orchestrator.lab.tune.rows import ParityClass, Row, Verdict
from orchestrator.lab.tune.statistics import (
    LEAVING_SHARE,
    Effect,
    anytime_effect,
    effects,
    holm,
    log_ratios,
)
from orchestrator.lab.tune.verdicts import judge_memory, judge_speed
from workers.tuning.messages import Opened

#: Two draws of a normal distribution differ by less than so many standard deviations in 95 % of
#: cases.
_TWO_DRAWS: Final = 2.77

#: The mean range of 2, 3, 4 and more draws, in standard deviations (Tippett, 1925).
_MEAN_RANGES: Final = (1.13, 1.69, 2.06, 2.33, 2.53, 2.70, 2.85, 2.97, 3.08, 3.17)


#: The order in which a budget is spent is that of `passes.by_expected_gain`.
NOT_BEGUN: Final = (
    "not begun: the budget went to levers of which more is expected; give it a longer --budget"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """All that the rows of a pass follow from."""

    data: PassData
    opened: Mapping[str, Opened]
    noise: Noise
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
        so_far = self.effect_so_far(name, against, of)
        return so_far if so_far is not None and so_far.excludes_one else effect

    def effect_so_far(self, name: str, against: str = BASELINE, of: int = 1) -> Effect | None:
        """Return the effect with an interval that one may look at after each round, if there is
        one.
        """
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
        effect, so_far = self.effect(name, of=of), self.effect_so_far(name, of=of)
        if effect is None or so_far is None:
            return False
        gain = gain_of(
            objective, so_far, self.peak_bytes(name), self.peak_bytes(BASELINE), self.peak_noise
        )
        cannot_win = so_far.high < 1 and (gain is None or gain.high < 1)
        return cannot_win or effect.half_width <= self.resolve

    def gain(
        self, objective: Objective, name: str, against: str = BASELINE, of: int = 1
    ) -> Gain | None:
        """Return what an arm gains over another one, by what is to be best."""
        effect = self.effect(name, against, of)
        return gain_of(
            objective, effect, self.peak_bytes(name), self.peak_bytes(against), self.peak_noise
        )

    def peak_bytes(self, name: str) -> int | None:
        """Return the highest use of the device by tensors in the first steps of an arm."""
        return None if name not in self.opened else self.opened[name].peak_bytes or None

    @property
    def peak_noise(self) -> float:
        """The share by which peaks of equal arms differ: from the baseline, its repetition, and
        other seeds.
        """
        known = [
            peak for name in (BASELINE, AGAIN, *self.seed_names) if (peak := self.peak_bytes(name))
        ]
        if len(known) < 2:
            return 0.0
        return _TWO_DRAWS / _MEAN_RANGES[len(known) - 2] * (max(known) / min(known) - 1)

    def absolute(self, candidate: Candidate | None) -> Absolute:
        """Return what an arm does and takes, not compared with anything; `None`: the baseline."""
        name = BASELINE if candidate is None else candidate.name
        per_item_s = [each[name] for each in self.data.rounds if name in each]
        return absolute_of(
            per_item_s, self.opened.get(name), self.dtype_of(candidate), self.data.clocks_mhz
        )


def rows_of(
    candidates: Sequence[Candidate], found: Measurements, impossible: Mapping[str, str]
) -> list[Row]:
    """Return a row for each candidate; `impossible` says why some could not be tried."""
    possible = [each for each in candidates if each.name not in impossible]
    judged = {
        each.name: found.effect(each.name, _against(each, found), len(possible))
        for each in possible
    }
    real = holm(
        {name: effect.p for name, effect in judged.items() if effect is not None},
        1 - found.confidence,
    )
    return [
        Row(
            lever=each.lever,
            setting=each.setting,
            parity_class=None if each.parity is None else each.parity.value,
            verdict=Verdict.UNAVAILABLE,
            reason=impossible[each.name],
        )
        if each.name in impossible
        else _row(
            each,
            found.effect(each.name, of=len(possible)),
            judged[each.name],
            found,
            real=each.name in real,
        )
        for each in candidates
    ]


def pareto_names(
    candidates: Sequence[Candidate], rows: Sequence[Row], opened: Mapping[str, Opened]
) -> tuple[str, ...]:
    """Return the names of the rows that nothing beats in speed, device bytes and host bytes.

    The baseline has no row, so its repetition stands for it. A speed without an interval, from two
    rounds or fewer, is no ground for a name.
    """
    points = [
        Point(
            name=BASELINE if each.name == AGAIN else each.name,
            speed_ratio=row.speed_ratio,
            peak_bytes=row.peak_bytes,
            host_bytes=opened[each.name].host_bytes,
        )
        for each, row in zip(candidates, rows, strict=True)
        if row.speed_ratio is not None
        and row.speed_low is not None
        and row.speed_high is not None
        and row.peak_bytes is not None
        and row.verdict not in {Verdict.BROKEN, Verdict.UNAVAILABLE}
        and row.parity_class != ParityClass.OBJECTIVE
        and each.name in opened
    ]
    return tuple(point.name for point in pareto_set(points))


def course_of(opened: Opened) -> Course:
    """Return what is compared of an arm's first steps."""
    return Course(
        losses=opened.losses,
        weights_sha256=opened.weights_sha256,
        validation_loss=opened.validation_loss,
    )


def _against(candidate: Candidate, found: Measurements) -> str:
    """Return what a candidate is judged against: the arm of the keys that it needs beside its own,
    if there was one.
    """
    beside = candidate.beside
    is_known = beside is not None and beside in found.opened and beside not in found.data.lost
    return (
        beside
        if beside is not None and is_known and found.effect(candidate.name, beside)
        else BASELINE
    )


def _row(
    candidate: Candidate,
    effect: Effect | None,
    judged: Effect | None,
    found: Measurements,
    *,
    real: bool,
) -> Row:
    """Return the row of a candidate.

    Args:
        candidate: The lever.
        effect: Its speed against the baseline, which is shown.
        judged: Its speed against what it is judged against.
        found: All measurements.
        real: Whether that is a difference.
    """
    opened, lost = found.opened.get(candidate.name), found.data.lost.get(candidate.name)
    arm, baseline = found.absolute(candidate), found.absolute(None)
    row = Row(
        lever=candidate.lever,
        setting=candidate.setting,
        speed_ratio=None if effect is None else effect.ratio,
        speed_low=None if effect is None or not effect.low else effect.low,
        speed_high=None if effect is None or math.isinf(effect.high) else effect.high,
        peak_bytes=arm.peak_bytes,
        parity_class=None if candidate.parity is None else candidate.parity.value,
        verdict=Verdict.UNDECIDED,
        reason=lost or (NOT_BEGUN if opened is None else "the budget ended before its first round"),
        samples_per_s=arm.items_per_s if candidate.parity is not None else None,
        tflops=arm.tflops,
        mfu_pct=arm.mfu_pct,
        peak_delta_bytes=arm.more_peak_bytes(baseline),
        host_bytes=arm.host_bytes,
        host_delta_bytes=arm.more_host_bytes(baseline),
        once_s=arm.once_s,
        pays_after_s=arm.pays_after_s(baseline, effect),
    )
    if lost is not None:
        # One that never began cannot run here; one that began was ended, and might run again.
        rounds = 0 if effect is None else effect.rounds
        verdict = Verdict.UNAVAILABLE if opened is None else Verdict.UNDECIDED
        return replace(
            row, verdict=verdict, reason=f"{lost}, after {rounds} rounds" if opened else lost
        )
    if opened is None:
        return row
    return _judged(row, candidate, judged, found, real=real)


def _judged(
    row: Row, candidate: Candidate, effect: Effect | None, found: Measurements, *, real: bool
) -> Row:
    against = _against(candidate, found)
    speed = judge_speed(effect, real=real, resolve=found.resolve)
    if against != BASELINE:
        speed = replace(speed, reason=f"against {against}: {speed.reason}")
    parity = _parity(candidate, found, against)
    row = replace(row, loss_gap_noise=None if parity is None else parity.gap_noise)
    if parity is not None and parity.kept is False:
        return replace(row, verdict=Verdict.BROKEN, reason=f"{parity.said}; {speed.reason}")
    judged = speed
    if candidate.aim == "memory":
        peaks = (row.peak_bytes, found.peak_bytes(against))
        judged = judge_memory(*peaks, noise=found.peak_noise, resolve=found.resolve)
        if judged.verdict is Verdict.CONFIRMED and (effect is None or math.isinf(effect.high)):
            judged = replace(judged, verdict=Verdict.UNDECIDED)  # what it costs is not known
        judged = replace(judged, reason=f"{judged.reason}; {speed.reason}")
    elif candidate.aim == "loss" and parity is not None:
        # The baseline itself has two turns in each round, and has trained for longer than its
        # repetition.
        same_time = AGAIN if against == BASELINE else against
        arm, other = (found.data.later.get(name, {}) for name in (candidate.name, same_time))
        turns = max(arm.keys() & other.keys(), default=0)
        judged = judge_loss(parity, at_equal_time(arm.get(turns), other.get(turns), found.noise))
        if effect is None or math.isinf(effect.high):  # then chance decides who has trained longer
            judged = replace(judged, verdict=Verdict.UNDECIDED)
        judged = replace(judged, reason=f"{judged.reason}; {speed.reason}")
        return replace(row, verdict=judged.verdict, reason=judged.reason)
    said = judged.reason if parity is None else f"{judged.reason}; {parity.said}"
    return replace(row, verdict=judged.verdict, reason=said)


def _parity(candidate: Candidate, found: Measurements, against: str) -> Parity | None:
    if candidate.parity is None:
        return None
    arm, other = (course_of(found.opened[name]) for name in (candidate.name, against))
    return parity_of(candidate.parity, arm, other, found.noise)
