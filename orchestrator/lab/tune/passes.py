"""The three passes of one tuning: each lever alone, those that help together, and each of these
left out.

The third pass finds levers that help alone and harm together. Arms run in `measuring.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final

from orchestrator.lab.tune.arms import AGAIN, BASELINE
from orchestrator.lab.tune.levers import EXPECTED, Candidate, TuningTask
from orchestrator.lab.tune.measuring import Journal, Measuring, PassData, Plan
from orchestrator.lab.tune.report import (
    Measurements,
    Objective,
    SeedNoise,
    gain_words,
    rows_of,
)
from orchestrator.lab.tune.results import (
    LeverRow,
    LeverVerdict,
    ParityClass,
    TunedSubject,
    TuningResult,
)
from orchestrator.lab.tune.statistics import Effect

#: When the three passes end, as shares of the budget.
_ALONE: Final = 0.7
_STACKED: Final = 0.85
_LEFT_OUT: Final = 1.0

JudgedLever = tuple[Candidate, LeverRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What to use, and why."""

    changes: Mapping[str, Any]
    """Against the baseline."""
    reason: str
    decided: bool


def winners(
    judged: Sequence[JudgedLever], gains: Mapping[str, Effect], objective: Objective, resolve: float
) -> list[Candidate]:
    """Return the levers that help and keep the result, one for each key, in the order of the
    ladder.

    Args:
        judged: Each lever with its row.
        gains: What each of them gains over the baseline, by name.
        objective: What counts.
        resolve: Gains of at most this share count as none.
    """
    helping = [
        (gain.ratio, candidate)
        for candidate, row in judged
        if _may_be_chosen(candidate, row, objective)
        and (gain := gains.get(candidate.name)) is not None
        and gain.low > 1.0
        and gain.high > 1.0 + resolve
    ]
    taken: list[Candidate] = []
    for _, candidate in sorted(helping, key=lambda pair: -pair[0]):
        if not any(candidate.changes.keys() & other.changes.keys() for other in taken):
            taken.append(candidate)
    return [candidate for candidate, _ in judged if candidate in taken]


def by_expected_gain(several: Sequence[Candidate], objective: Objective) -> list[Candidate]:
    """Return the levers in the order in which a short budget measures them.

    First those that may be chosen, then those for something else, last those that change what is
    trained; of each the highest expected gain. A lever that is judged against another follows it.
    """
    by_name = {candidate.name: candidate for candidate in several}

    def rank(candidate: Candidate) -> tuple[bool, bool, float]:
        speed, peak = EXPECTED.get(candidate.lever, (1.0, 1.0))
        gain = {"speed": speed, "memory": 1 / peak, "balanced": speed / peak}[objective]
        own = (candidate.parity is ParityClass.OBJECTIVE, not _is_for(candidate, objective), -gain)
        beside = by_name.get(candidate.beside or "")
        return own if beside is None else max(own, rank(beside))

    return sorted(several, key=rank)


def merged(several: Sequence[Candidate]) -> Candidate:
    """Return one candidate with the changes of several."""
    parity = several[0].parity
    if parity is not None:
        is_exact = all(candidate.parity is ParityClass.EXACT for candidate in several)
        parity = ParityClass.EXACT if is_exact else ParityClass.NUMERIC
    return Candidate(
        lever=" + ".join(candidate.lever for candidate in several),
        setting=" + ".join(candidate.setting for candidate in several),
        changes={key: value for candidate in several for key, value in candidate.changes.items()},
        parity=parity,
        aim="memory" if any(candidate.aim == "memory" for candidate in several) else "speed",
        copies=max(candidate.copies for candidate in several),
    )


def cumulative(several: Sequence[Candidate]) -> list[Candidate]:
    """Return the first lever, the first with the second, these with the third, and so on."""
    return [merged(several[:count]) for count in range(1, len(several) + 1)]


def with_one_left_out(several: Sequence[Candidate]) -> dict[str, Candidate]:
    """Return, for each lever of a set of two or more, by its name, the set without it."""
    if len(several) < 2:
        return {}
    return {
        left.name: replace(
            merged([candidate for candidate in several if candidate is not left]),
            lever=f"all chosen but {left.lever}",
        )
        for left in several
    }


def your_file(baseline: Mapping[str, Any], yours: Mapping[str, Any]) -> Candidate | None:
    """Return the user's own section as a candidate; `None` if it is the baseline."""
    changes = {key: value for key, value in yours.items() if baseline.get(key) != value}
    if not changes:
        return None
    return Candidate(
        lever="your file",
        setting=", ".join(f"{key} {value}" for key, value in changes.items()),
        changes=changes,
        parity=ParityClass.NUMERIC,
    )


def open_questions(
    judged: Sequence[JudgedLever], gains: Mapping[str, Effect], objective: Objective, resolve: float
) -> list[str]:
    """Return the levers that could still turn out to help by more than the resolution."""

    def is_open(gain: Effect | None) -> bool:
        return gain is None or (gain.rounds > 0 and gain.low <= 1.0 < 1.0 + resolve < gain.high)

    return [
        candidate.name
        for candidate, row in judged
        if _may_be_chosen(candidate, row, objective) and is_open(gains.get(candidate.name))
    ]


def choose(
    best: Candidate | None,
    yours: Candidate | None,
    best_to_yours: Effect | None,
    open_levers: Sequence[str],
    objective: Objective,
) -> Choice:
    """Return the better one of the best set and the user's file; the file where that cannot be
    told.

    `best` is `None` if no lever helped: then the baseline stands for it.
    """
    doubt = ""
    if open_levers:
        more = " and more" if len(open_levers) > 4 else ""
        doubt = f"; UNDECIDED for {', '.join(open_levers[:4])}{more}"
    name, changes = ("baseline", {}) if best is None else (best.name, best.changes)
    decided, stays = not open_levers, False
    if yours is None:
        what = "no lever" if best is None else name
        reason = f"for {objective}, {what} is better than the baseline"
    elif best_to_yours is None:
        reason, decided = "your file was not measured against the best set, so it stays", False
        stays = True
    elif math.isinf(best_to_yours.high):
        reason = "your file stays, because too few rounds compare it with the best set"
        decided, stays = False, True
    else:
        reason = gain_words(objective, name, best_to_yours)
        if best_to_yours.low <= 1.0:
            reason, stays = f"your file stays: {reason}", True
            decided = decided and best_to_yours.high < 1.0
    if stays and yours is not None:
        changes = yours.changes
    return Choice(changes=changes, reason=reason + doubt, decided=decided)


def _may_be_chosen(candidate: Candidate, row: LeverRow, objective: Objective) -> bool:
    """Whether a lever keeps the result, and is for what counts."""
    return (
        _is_for(candidate, objective)
        and candidate.parity is not ParityClass.OBJECTIVE
        and row.verdict not in {LeverVerdict.BROKEN, LeverVerdict.UNAVAILABLE}
    )


def _is_for(candidate: Candidate, objective: Objective) -> bool:
    return candidate.aim == "speed" or (candidate.aim == "memory" and objective != "speed")


class Passes:
    """The passes of one tuning; what was measured before a kill is not measured again."""

    def __init__(
        self,
        task: TuningTask,
        plan: Plan,
        objective: Objective,
        journal: Journal,
        measuring: Measuring,
    ) -> None:
        self._task = task
        self._plan = plan
        self._objective = objective
        self._journal = journal
        self._measuring = measuring

    def run(self, tune_id: str, created_at: str) -> TuningResult:
        """Measure the passes that are not over, and return the result.

        Raises:
            BaselineError: The baseline cannot be measured.
        """
        task, objective = self._task, self._objective
        possible = [
            candidate for candidate in task.candidates if candidate.name not in task.impossible
        ]
        first = self._measuring.settle_steps(len(possible))
        alone = self._measure("alone", by_expected_gain(possible, objective), _ALONE)
        lever, _, setting = AGAIN.partition("=")
        parity = ParityClass.EXACT if task.trains else None
        again = Candidate(lever=lever, setting=setting, changes={}, parity=parity)
        every = self._judged([again, *task.candidates], alone)
        judged = every[1:]
        gains = self._gains(possible, alone)
        best, best_to_yours = None, None
        helping = winners(judged, gains, objective, self._plan.resolve)
        yours = [] if task.yours is None else [task.yours]
        sets = cumulative(helping)
        if (sets or yours) and self._in_time("cumulative"):
            data = self._measure("cumulative", [*sets, *yours], _STACKED)
            # A set of one lever is that lever, and has a row already.
            names = {candidate.name for candidate, _ in every}
            stacked = self._judged([*sets, *yours], data)
            every += [pair for pair in stacked if pair[0].name not in names]
            best, data, more = self._best_of(self._stacked(helping, sets, data), data)
            every += more
            if yours:
                name = BASELINE if best is None else best.name
                best_to_yours = self._gain(data, name, yours[0].name)
        open_levers = open_questions(judged, gains, objective, self._plan.resolve)
        choice = choose(best, task.yours, best_to_yours, open_levers, objective)
        rows = tuple(row for _, row in every)
        passes = self._journal.passes.values()
        reasons = dict.fromkeys(reason for data in passes for reason in data.dropped)
        return TuningResult(
            tune_id=tune_id,
            subject=TunedSubject(
                card=first.card, driver=first.driver, torch=first.torch, model=task.model
            ),
            device_name=first.device_name,
            created_at=created_at,
            duration_s=round(self._journal.noted_s, 1),
            rounds=sum(len(data.rounds) for data in passes),
            dropped={
                reason: sum(data.dropped.get(reason, 0) for data in passes) for reason in reasons
            },
            rows=rows,
            chosen={**task.baseline, **choice.changes},
            choice=choice.reason,
            decided=choice.decided,
        )

    def _measure(self, pass_name: str, candidates: Sequence[Candidate], share: float) -> PassData:
        """Measure candidates until this share of the budget."""
        of = len(candidates) + 1  # with the repetition of the baseline

        def is_over(candidate: Candidate) -> bool:
            return self._measured(self._journal.data(pass_name)).is_over(
                candidate, self._objective, of
            )

        return self._measuring.run(pass_name, candidates, share * self._plan.budget_s, is_over)

    def _in_time(self, pass_name: str) -> bool:
        """Whether a pass may begin, or has begun."""
        return pass_name in self._journal.passes or self._journal.spent_s() < self._plan.budget_s

    def _stacked(
        self, several: Sequence[Candidate], sets: Sequence[Candidate], data: PassData
    ) -> list[Candidate]:
        """Return the levers that did not make the set below them worse."""
        names = [BASELINE, *(candidate.name for candidate in sets)]
        gains = [self._gain(data, upper, lower) for lower, upper in pairwise(names)]
        pairs = zip(several, gains, strict=True)
        return [candidate for candidate, gain in pairs if gain is None or gain.high >= 1.0]

    def _best_of(
        self, several: Sequence[Candidate], stacked: PassData
    ) -> tuple[Candidate | None, PassData, list[JudgedLever]]:
        """Return the best set, after it was measured without each of its levers.

        With it the pass that compares it with the user's file, and the rows that it brought.
        """
        if not several:
            return None, stacked, []
        whole, rests = merged(several), with_one_left_out(several)
        if not rests:
            return whole, stacked, []
        if not self._in_time("one left out"):
            return whole, PassData(), []
        own = [] if self._task.yours is None else [self._task.yours]
        without = list(rests.values())
        data = self._measure("one left out", [whole, *without, *own], _LEFT_OUT)
        needed = []
        for candidate in several:
            gain = self._gain(data, rests[candidate.name].name, whole.name)
            if gain is None or gain.low <= 1.0:  # the set is not better without it
                needed.append(candidate)
        by_changes = {
            tuple(candidate.changes.items()): candidate for candidate in (whole, *without)
        }
        best = by_changes.get(tuple(merged(needed).changes.items()), whole) if needed else whole
        return best, data, self._judged(without, data)

    def _gain(self, data: PassData, name: str, against: str) -> Effect | None:
        if name in data.lost:
            return None
        return self._measured(data).gain(self._objective, name, against)

    def _gains(self, several: Sequence[Candidate], data: PassData) -> dict[str, Effect]:
        """Return what each lever gains over the baseline; the intervals hold together."""
        measured, of = self._measured(data), len(several)
        names = [candidate.name for candidate in several if candidate.name not in data.lost]
        gains = {name: measured.gain(self._objective, name, of=of) for name in names}
        return {name: gain for name, gain in gains.items() if gain is not None}

    def _judged(self, candidates: Sequence[Candidate], data: PassData) -> list[JudgedLever]:
        rows = rows_of(candidates, self._measured(data), self._task.impossible)
        return list(zip(candidates, rows, strict=True))

    def _measured(self, data: PassData) -> Measurements:
        opened, seeds = self._journal.opened, self._plan.seed_names
        return Measurements(
            data=data,
            opened=opened,
            noise=SeedNoise.of([opened[name] for name in (BASELINE, *seeds) if name in opened]),
            resolve=self._plan.resolve,
            confidence=self._plan.confidence,
            seed_names=seeds,
            dtype_of=self._dtype_of,
        )

    def _dtype_of(self, candidate: Candidate | None) -> str | None:
        keys = {**self._task.baseline, **({} if candidate is None else candidate.changes)}
        return keys.get(self._task.dtype_key)
