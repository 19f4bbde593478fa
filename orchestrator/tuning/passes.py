"""What the second and third pass measure, and what is chosen in the end. Pure.

First each lever alone. Then those that helped are put on top of each other, in the order of the ladder. Then each one
is left out of what was chosen, which finds levers that help alone and harm together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from orchestrator.tuning.levers import Candidate
from orchestrator.tuning.rows import ParityClass, Row, Verdict
from orchestrator.tuning.statistics import Effect

YOURS: Final = "your file"

Judged = tuple[Candidate, Row]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What to use, and why."""

    name: str
    """Of the arm; `baseline`, `your file=…` or a set."""
    changes: Mapping[str, Any]
    """Against the baseline."""
    reason: str
    decided: bool


def winners(judged: Sequence[Judged]) -> list[Candidate]:
    """Return the levers that made it faster and kept the result, one for each key, in the order of the ladder."""
    fast = [(each, row) for each, row in judged if _may_be_chosen(each) and row.verdict == Verdict.CONFIRMED]
    taken: list[Candidate] = []
    for each, _ in sorted(fast, key=lambda pair: -(pair[1].speed_ratio or 0.0)):
        if not any(each.changes.keys() & other.changes.keys() for other in taken):
            taken.append(each)
    return [each for each, _ in judged if each in taken]


def merged(several: Sequence[Candidate]) -> Candidate:
    """Return one candidate with the changes of several."""
    exact = all(each.parity is ParityClass.EXACT for each in several)
    return Candidate(
        lever=" + ".join(each.lever for each in several),
        setting=" + ".join(each.setting for each in several),
        changes={key: value for each in several for key, value in each.changes.items()},
        parity=None if several[0].parity is None else ParityClass.EXACT if exact else ParityClass.NUMERIC,
        copies=max(each.copies for each in several),
    )


def cumulative(several: Sequence[Candidate]) -> list[Candidate]:
    """Return the first lever with the second, these with the third, and so on; one lever alone is measured already."""
    return [merged(several[:count]) for count in range(1, len(several) + 1)]


def with_one_left_out(several: Sequence[Candidate]) -> dict[str, Candidate]:
    """Return, for each lever of a set of two or more, by its name, the set without it."""
    if len(several) < 2:
        return {}
    return {
        left.name: Candidate(
            lever=f"all chosen but {left.lever}",
            setting=rest.setting,
            changes=rest.changes,
            parity=rest.parity,
            copies=rest.copies,
        )
        for left in several
        for rest in [merged([each for each in several if each is not left])]
    }


def your_file(baseline: Mapping[str, Any], yours: Mapping[str, Any]) -> Candidate | None:
    """Return the user's own section as a candidate; `None` if it is the baseline."""
    changes = {key: value for key, value in yours.items() if baseline.get(key) != value}
    if not changes:
        return None
    return Candidate(
        lever=YOURS,
        setting=", ".join(f"{key} {value}" for key, value in changes.items()),
        changes=changes,
        parity=ParityClass.NUMERIC,
    )


def kept_after_stacking(several: Sequence[Candidate], steps: Sequence[Effect | None]) -> list[Candidate]:
    """Return the levers that did not make the set before them slower; `steps` compares each set with that one."""
    return [each for each, effect in zip(several, steps, strict=True) if effect is None or effect.high >= 1.0]


def kept_after_leaving_out(several: Sequence[Candidate], without: Mapping[str, Effect | None]) -> list[Candidate]:
    """Return the levers without which the set was not faster; `without` compares each rest with the whole set."""
    kept = []
    for each in several:
        effect = without.get(each.name)
        if effect is None or effect.low <= 1.0:
            kept.append(each)
    return kept


def open_questions(judged: Sequence[Judged], resolve: float) -> list[str]:
    """Return the levers that could still turn out faster by more than the resolution."""
    return [
        each.name
        for each, row in judged
        if _may_be_chosen(each) and row.verdict == Verdict.UNDECIDED and (row.speed_high or 2.0) > 1 + resolve
    ]


def choose(
    best: Candidate | None, yours: Candidate | None, best_to_yours: Effect | None, open_levers: Sequence[str]
) -> Choice:
    """Return the faster one of the best set and the user's file; the file where that cannot be told.

    `best` is `None` if no lever helped: then the baseline stands for it.
    """
    decided = not open_levers
    doubt = "" if decided else f"; UNDECIDED for {', '.join(open_levers[:4])}{' and more' * (len(open_levers) > 4)}"
    name, changes = ("baseline", {}) if best is None else (best.name, best.changes)
    if yours is None:
        found = "no lever is faster than the baseline" if best is None else f"{best.name} is faster than the baseline"
        return Choice(name=name, changes=changes, reason=found + doubt, decided=decided)
    if best_to_yours is None:
        reason = "your file was not measured against the best set, so it stays"
        return Choice(name=yours.name, changes=yours.changes, reason=reason + doubt, decided=False)
    if math.isinf(best_to_yours.high):
        reason = "your file stays, because too few rounds compare it with the best set"
        return Choice(name=yours.name, changes=yours.changes, reason=reason + doubt, decided=False)
    span = f"{best_to_yours.ratio:.3f} x your file's speed, {best_to_yours.low:.3f} to {best_to_yours.high:.3f}"
    if best_to_yours.low > 1.0:
        return Choice(name=name, changes=changes, reason=f"{name} has {span}{doubt}", decided=decided)
    reason = f"your file stays: {name} has {span}{doubt}"
    sure = decided and best_to_yours.high < 1.0
    return Choice(name=yours.name, changes=yours.changes, reason=reason, decided=sure)


def _may_be_chosen(candidate: Candidate) -> bool:
    return candidate.aim == "speed" and candidate.parity in {ParityClass.EXACT, ParityClass.NUMERIC, None}
