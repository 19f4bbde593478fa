"""The three passes of one tuning: each lever alone, those that help together, and each of these
left out.

Decides in `passes.py` and `report.py`; arms run in `measuring.py`. Writes no file but the journal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from orchestrator.lab.tune import passes, store
from orchestrator.lab.tune.journal import Journal, PassData
from orchestrator.lab.tune.kinds import Kind
from orchestrator.lab.tune.levers import Candidate
from orchestrator.lab.tune.measuring import Measuring, Plan
from orchestrator.lab.tune.objective import Gain, Objective
from orchestrator.lab.tune.parity import noise_of
from orchestrator.lab.tune.report import Measurements, course_of, pareto_names, rows_of
from orchestrator.lab.tune.rounds import AGAIN, BASELINE
from orchestrator.lab.tune.rows import ParityClass, Row
from workers.tuning.messages import Opened

#: When the three passes end, as shares of the budget.
_ALONE: Final = 0.7
_STACKED: Final = 0.85
_LEFT_OUT: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """All that a tuning has measured, and what follows from it."""

    first: Opened
    """The first steps of the baseline."""
    rows: tuple[Row, ...]
    choice: passes.Choice
    pareto: tuple[str, ...]


class Course:
    """The passes of one tuning, of which those that were measured before a kill are not measured
    again.
    """

    def __init__(
        self, kind: Kind, plan: Plan, objective: Objective, journal: Journal, measuring: Measuring
    ) -> None:
        self._kind = kind
        self._plan = plan
        self._objective = objective
        self._journal = journal
        self._measuring = measuring

    def run(self) -> Found:
        """Measure the passes that are not over, and return what was found in all.

        Raises:
            BaselineError: The baseline cannot be measured.
        """
        several = self._kind.candidates
        possible = [each for each in several if each.name not in self._kind.impossible]
        first = self._measuring.settle_steps(len(possible))
        alone = self._run("alone", passes.by_expected_gain(possible, self._objective), _ALONE)
        every = list(
            zip(
                [self._again(), *several], self._rows([self._again(), *several], alone), strict=True
            )
        )
        judged = every[1:]
        gains = self._gains(possible, alone)
        helping = passes.winners(judged, gains, self._objective, self._plan.resolve)

        yours = self._kind.yours
        best, best_to_yours = None, None
        stacked_sets = passes.cumulative(helping)
        if (stacked_sets or yours is not None) and self._in_time("cumulative"):
            shown = [*stacked_sets, *([] if yours is None else [yours])]
            data = self._run("cumulative", shown, _STACKED)
            # A set of one lever is that lever, and has a row already.
            known = {each.name for each, _ in every}
            every += [
                pair
                for pair in zip(shown, self._rows(shown, data), strict=True)
                if pair[0].name not in known
            ]
            best, last = self._best_of(self._stacked(helping, stacked_sets, data), data)
            every += last.rows
            if yours is not None:
                best_to_yours = self._gain(
                    last.data, BASELINE if best is None else best.name, yours.name
                )
        open_levers = passes.open_questions(judged, gains, self._objective, self._plan.resolve)
        return Found(
            first=first,
            rows=tuple(row for _, row in every),
            choice=passes.choose(best, yours, best_to_yours, open_levers, self._objective),
            pareto=pareto_names(
                [each for each, _ in every], [row for _, row in every], self._journal.opened
            ),
        )

    def _run(self, pass_name: str, candidates: Sequence[Candidate], share: float) -> PassData:
        """Measure candidates until this share of the budget."""
        of = len(candidates) + 1  # with the repetition of the baseline

        def is_over(each: Candidate) -> bool:
            return self._measured(self._journal.data(pass_name)).is_over(each, self._objective, of)

        return self._measuring.run(pass_name, candidates, share * self._plan.budget_s, is_over)

    def _in_time(self, pass_name: str) -> bool:
        """Whether a pass may begin, or has begun."""
        return pass_name in self._journal.passes or self._journal.elapsed_s < self._plan.budget_s

    def _stacked(
        self, several: Sequence[Candidate], sets: Sequence[Candidate], data: PassData
    ) -> list[Candidate]:
        """Return the levers that did not make the set below them worse."""
        names = [BASELINE, *(each.name for each in sets)]
        return passes.kept_after_stacking(
            several, [self._gain(data, upper, lower) for lower, upper in pairwise(names)]
        )

    def _best_of(
        self, kept: Sequence[Candidate], stacked: PassData
    ) -> tuple[Candidate | None, _Last]:
        """Return the best set, after it was measured without each of its levers, and the pass that
        compares it.
        """
        if not kept:
            return None, _Last(data=stacked)
        whole, rests = passes.merged(kept), passes.with_one_left_out(kept)
        if not rests:
            return whole, _Last(data=stacked)
        if not self._in_time("one left out"):
            return whole, _Last(data=PassData())
        own = [] if self._kind.yours is None else [self._kind.yours]
        without = list(rests.values())
        data = self._run("one left out", [whole, *without, *own], _LEFT_OUT)
        to_whole = {name: self._gain(data, each.name, whole.name) for name, each in rests.items()}
        final = passes.kept_after_leaving_out(kept, to_whole)
        rows = tuple(zip(without, self._rows(without, data), strict=True))
        named = {tuple(each.changes.items()): each for each in (whole, *without)}
        best = named.get(tuple(passes.merged(final).changes.items()), whole) if final else whole
        return best, _Last(data=data, rows=rows)

    def _gain(self, data: PassData, name: str, against: str) -> Gain | None:
        return (
            None if name in data.lost else self._measured(data).gain(self._objective, name, against)
        )

    def _gains(self, several: Sequence[Candidate], data: PassData) -> Mapping[str, Gain]:
        """Return what each lever gains over the baseline; the intervals hold together."""
        found = self._measured(data)
        known = {
            each.name: found.gain(self._objective, each.name, of=len(several))
            for each in several
            if each.name not in data.lost
        }
        return {name: gain for name, gain in known.items() if gain is not None}

    def _measured(self, data: PassData) -> Measurements:
        opened, seeds = self._journal.opened, self._plan.seed_names
        return Measurements(
            data=data,
            opened=opened,
            noise=noise_of(
                [course_of(opened[name]) for name in (BASELINE, *seeds) if name in opened]
            ),
            resolve=self._plan.resolve,
            confidence=self._plan.confidence,
            seed_names=seeds,
            dtype_of=self._dtype_of,
        )

    def _dtype_of(self, candidate: Candidate | None) -> str | None:
        keys = {**self._kind.baseline, **({} if candidate is None else candidate.changes)}
        return keys.get(self._kind.dtype_key)

    def _rows(self, candidates: Sequence[Candidate], data: PassData) -> list[Row]:
        return rows_of(candidates, self._measured(data), self._kind.impossible)

    def _again(self) -> Candidate:
        lever, _, setting = AGAIN.partition("=")
        parity = ParityClass.EXACT if self._kind.trains else None
        return Candidate(lever=lever, setting=setting, changes={}, parity=parity)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Last:
    """The pass that compares the best set with the user's file, and rows that it brought."""

    data: PassData
    rows: tuple[tuple[Candidate, Row], ...] = ()


def result_of(
    folder_name: str, created_at: str, kind: Kind, journal: Journal, found: Found
) -> store.Result:
    """Return the result of a tuning, as it is stored."""
    first, data = found.first, journal.passes.values()
    dropped: dict[str, int] = {}
    for each in data:
        for reason, count in each.dropped.items():
            dropped[reason] = dropped.get(reason, 0) + count
    return store.Result(
        tune_id=folder_name,
        subject=store.Subject(
            card=first.card, driver=first.driver, torch=first.torch, model=kind.model
        ),
        device_name=first.device_name,
        created_at=created_at,
        duration_s=round(journal.elapsed_s, 1),
        rounds=sum(len(each.rounds) for each in data),
        dropped=dropped,
        rows=found.rows,
        chosen={**kind.baseline, **found.choice.changes},
        choice=found.choice.reason,
        decided=found.choice.decided,
        pareto=found.pareto,
    )
