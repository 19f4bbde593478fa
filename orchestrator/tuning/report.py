"""From the measurements of a pass to rows: effects, parity, verdicts, and the Pareto set. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from orchestrator.tuning.journal import PassData
from orchestrator.tuning.levers import Candidate
from orchestrator.tuning.pareto import Point, pareto_set
from orchestrator.tuning.parity import Course, Noise, Parity, at_equal_time, judge_loss, parity_of
from orchestrator.tuning.rounds import AGAIN, BASELINE
from orchestrator.tuning.rows import ParityClass, Row, Verdict
from orchestrator.tuning.statistics import Effect, effects, holm
from orchestrator.tuning.verdicts import Judged, judge_memory, judge_speed
from workers.tuning.messages import Opened

#: Peaks of memory that differ by less than this share are the same: allocators round, and a CPU's peaks vary.
_SAME_BYTES: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """All that the rows of a pass follow from."""

    data: PassData
    opened: Mapping[str, Opened]
    noise: Noise
    resolve: float
    confidence: float

    def effects(self, names: Sequence[str], to: str = BASELINE) -> dict[str, Effect]:
        """Return the effect of each arm against another one."""
        return effects(self.data.rounds, to, names, self.confidence)


def rows_of(candidates: Sequence[Candidate], found: Measurements, impossible: Mapping[str, str]) -> list[Row]:
    """Return a row for each candidate; `impossible` says why some could not be tried."""
    names = [each.name for each in candidates if each.name not in impossible]
    measured = found.effects(names)
    real = holm({name: effect.p for name, effect in measured.items()}, 1 - found.confidence)
    return [
        Row(
            lever=each.lever,
            setting=each.setting,
            parity_class=None if each.parity is None else each.parity.value,
            verdict=Verdict.UNAVAILABLE,
            reason=impossible[each.name],
        )
        if each.name in impossible
        else _row(each, measured.get(each.name), found, real=each.name in real)
        for each in candidates
    ]


def pareto_names(candidates: Sequence[Candidate], rows: Sequence[Row], opened: Mapping[str, Opened]) -> tuple[str, ...]:
    """Return the names of the rows that nothing beats in speed, device bytes and host bytes."""
    points = [
        Point(
            name=each.name,
            speed_ratio=row.speed_ratio,
            peak_bytes=row.peak_bytes,
            host_bytes=opened[each.name].host_bytes,
        )
        for each, row in zip(candidates, rows, strict=True)
        if row.speed_ratio is not None
        and row.peak_bytes is not None
        and row.verdict not in {Verdict.BROKEN, Verdict.UNAVAILABLE}
        and row.parity_class != ParityClass.OBJECTIVE
        and each.name in opened
    ]
    return tuple(point.name for point in pareto_set(points))


def _row(candidate: Candidate, effect: Effect | None, found: Measurements, *, real: bool) -> Row:
    opened, lost = found.opened.get(candidate.name), found.data.lost.get(candidate.name)
    row = Row(
        lever=candidate.lever,
        setting=candidate.setting,
        speed_ratio=None if effect is None else effect.ratio,
        speed_low=None if effect is None or not effect.low else effect.low,
        speed_high=None if effect is None or math.isinf(effect.high) else effect.high,
        peak_bytes=found.data.peaks.get(candidate.name),
        parity_class=None if candidate.parity is None else candidate.parity.value,
        verdict=Verdict.UNDECIDED,
        reason=lost or "the budget ended before its first round",
    )
    if lost is not None:
        # One that never began cannot run here; one that began was ended, and might run again.
        rounds = 0 if effect is None else effect.rounds
        verdict = Verdict.UNAVAILABLE if opened is None else Verdict.UNDECIDED
        return replace(row, verdict=verdict, reason=f"{lost}, after {rounds} rounds" if opened else lost)
    if opened is None:
        return row
    return _judged(row, candidate, effect, found, real=real)


def _judged(row: Row, candidate: Candidate, effect: Effect | None, found: Measurements, *, real: bool) -> Row:
    speed = judge_speed(effect, real=real, resolve=found.resolve)
    parity = _parity(candidate, found)
    row = replace(row, loss_gap_noise=None if parity is None else parity.gap_noise)
    if parity is not None and parity.kept is False:
        return replace(row, verdict=Verdict.BROKEN, reason=f"{parity.said}; {speed.reason}")
    judged: Judged = speed
    if candidate.aim == "memory":
        judged = judge_memory(row.peak_bytes, found.data.peaks.get(BASELINE), resolve=_same_bytes(found.data))
        judged = replace(judged, reason=f"{judged.reason}; {speed.reason}")
    elif candidate.aim == "loss" and parity is not None:
        later = found.data.later  # the baseline itself has two turns in each round, and has trained for longer
        judged = judge_loss(parity, at_equal_time(later.get(candidate.name), later.get(AGAIN), found.noise))
        if effect is None or math.isinf(effect.high):  # then chance decides who has trained longer
            judged = replace(judged, verdict=Verdict.UNDECIDED)
        judged = replace(judged, reason=f"{judged.reason}; {speed.reason}")
        return replace(row, verdict=judged.verdict, reason=judged.reason)
    said = judged.reason if parity is None else f"{judged.reason}; {parity.said}"
    return replace(row, verdict=judged.verdict, reason=said)


def _same_bytes(data: PassData) -> float:
    """Return the share by which peaks differ without a cause: twice what two equal arms differ by."""
    baseline, again = data.peaks.get(BASELINE), data.peaks.get(AGAIN)
    return max(_SAME_BYTES, 2 * abs(again / baseline - 1)) if baseline and again else _SAME_BYTES


def _parity(candidate: Candidate, found: Measurements) -> Parity | None:
    if candidate.parity is None:
        return None
    arm, baseline = (course_of(found.opened[name]) for name in (candidate.name, BASELINE))
    return parity_of(candidate.parity, arm, baseline, found.noise)


def course_of(opened: Opened) -> Course:
    """Return what is compared of an arm's first steps."""
    return Course(losses=opened.losses, weights_sha256=opened.weights_sha256, validation_loss=opened.validation_loss)
