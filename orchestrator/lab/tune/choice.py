"""From measurements to rows, and from rows to what is chosen. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from orchestrator.config.schema import TuneConfig
from orchestrator.lab.tune.levers import Candidate
from orchestrator.lab.tune.measuring import Measured
from orchestrator.lab.tune.results import LeverRow
from orchestrator.lab.tune.statistics import (
    LeverVerdict,
    ParityClass,
    effect_of,
    judge,
    most_gap,
    parity_gap,
)
from workers.tuning.messages import Opened

_REASONS = {
    LeverVerdict.TOO_FEW_ROUNDS: "the interval is too wide to tell; give it a longer --budget",
    LeverVerdict.BROKEN: "the losses of its first steps are others than the baseline's",
}
_NOT_CHOSEN = "it changes what is trained, so it is not chosen"


def row_of(
    candidate: Candidate,
    measured: Measured | None,
    baseline: Opened | None,
    rules: TuneConfig,
    *,
    in_fp32: bool = True,
) -> LeverRow:
    """Return the row of a lever.

    Args:
        candidate: The lever.
        measured: What was measured; `None` before its turn.
        baseline: The first steps of the baseline.
        rules: How sure a verdict must be.
        in_fp32: Whether the baseline computes in fp32.
    """
    row = LeverRow(
        lever=candidate.lever,
        setting=candidate.setting,
        parity_class=candidate.parity,
        verdict=LeverVerdict.TOO_FEW_ROUNDS,
        reason="not begun before the tuning ended; give it a longer --budget",
    )
    lost = candidate.unavailable if measured is None else measured.lost
    if lost is not None:
        row = replace(row, verdict=LeverVerdict.UNAVAILABLE, reason=lost)
    if measured is None or measured.opened is None or baseline is None:
        return row
    opened, effect = measured.opened, effect_of(measured.log_ratios, rules.confidence)
    row = replace(
        row,
        speed_ratio=None if effect is None else effect.ratio,
        speed_low=None if effect is None else effect.low,
        speed_high=None if effect is None else effect.high,
        rounds=len(measured.log_ratios),
        peak_bytes=opened.peak_bytes,
        peak_delta_bytes=opened.peak_bytes - baseline.peak_bytes,
        host_bytes=opened.host_bytes,
        host_delta_bytes=opened.host_bytes - baseline.host_bytes,
        samples_per_s=median(measured.speeds) if measured.speeds else None,
        once_s=max(0.0, opened.first_step_s - opened.step_s),
    )
    if lost is not None:
        return row
    most = most_gap(candidate.parity, in_fp32=in_fp32)
    gap = None if most is None else parity_gap(opened.losses, baseline.losses)
    verdict = judge(
        effect,
        _peak_share(row) if candidate.parity is not None else None,
        is_broken=most is not None and (gap is None or gap > most),
        resolve=rules.resolve,
    )
    helps = verdict in {LeverVerdict.FASTER, LeverVerdict.LESS_MEMORY}
    reason = _REASONS.get(verdict, "")
    if helps and candidate.parity is ParityClass.OBJECTIVE:
        reason = _NOT_CHOSEN
    return replace(row, loss_gap=gap, verdict=verdict, reason=reason)


def chosen_of(
    candidates: Sequence[Candidate], rows: Mapping[str, LeverRow], rules: TuneConfig
) -> list[Candidate]:
    """Return the levers to use, the best first, one for each key.

    Args:
        candidates: All levers.
        rows: Theirs, by name; a lever that was not measured has none.
        rules: What counts, and which differences count as none.
    """
    gains = [
        (_gain(rows[each.name], rules.objective, rules.resolve), each)
        for each in candidates
        if each.name in rows
    ]
    taken: list[Candidate] = []
    for gain, candidate in sorted(gains, key=lambda pair: -pair[0]):
        is_free = not any(candidate.changes.keys() & other.changes.keys() for other in taken)
        if gain > 0 and is_free and candidate.parity in {ParityClass.EXACT, ParityClass.NUMERIC}:
            taken.append(candidate)
    return taken


def _gain(row: LeverRow, objective: str, resolve: float) -> float:
    """Return how many times better a lever is by what counts; 0 if it does not help."""
    speed, peak_share = row.speed_ratio or 0.0, _peak_share(row) or 1.0
    is_faster = row.verdict is LeverVerdict.FASTER
    is_less = row.verdict is LeverVerdict.LESS_MEMORY
    if objective == "speed":
        helps, gain = is_faster or (is_less and (row.speed_low or 0.0) >= 1 - resolve), speed
    elif objective == "memory":
        helps, gain = is_less or (is_faster and peak_share <= 1), 1 / peak_share
    else:
        helps, gain = (is_faster or is_less) and speed > peak_share, speed / peak_share
    return gain if helps else 0.0


def _peak_share(row: LeverRow) -> float | None:
    """Return the peak of the device's memory as a share of the baseline's."""
    baseline_bytes = (row.peak_bytes or 0) - (row.peak_delta_bytes or 0)
    return row.peak_bytes / baseline_bytes if row.peak_bytes and baseline_bytes else None
