"""What the second and third pass measure, and what is chosen in the end. Pure.

First each lever alone. Then those that helped are put on top of each other, in the order of the
ladder. Then each one is left out of what was chosen, which finds levers that help alone and harm
together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from orchestrator.lab.tune.levers import EXPECTED, Candidate
from orchestrator.lab.tune.objective import Gain, Objective, told
from orchestrator.lab.tune.rows import ParityClass, Row, Verdict

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


def winners(
    judged: Sequence[Judged], gains: Mapping[str, Gain], objective: Objective, resolve: float
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
        (gain.ratio, each)
        for each, row in judged
        if _may_be_chosen(each, row, objective)
        and (gain := gains.get(each.name)) is not None
        and gain.low > 1.0
        and gain.high > 1.0 + resolve
    ]
    taken: list[Candidate] = []
    for _, each in sorted(helping, key=lambda pair: -pair[0]):
        if not any(each.changes.keys() & other.changes.keys() for other in taken):
            taken.append(each)
    return [each for each, _ in judged if each in taken]


def by_expected_gain(several: Sequence[Candidate], objective: Objective) -> list[Candidate]:
    """Return the levers in the order in which a short budget measures them.

    First those that may be chosen, then those for something else, last those that change what is
    trained; of each the highest expected gain. A lever that is judged against another follows it.
    """
    named = {each.name: each for each in several}

    def rank(each: Candidate) -> tuple[bool, bool, float]:
        speed, peak = EXPECTED.get(each.lever, (1.0, 1.0))
        gain = {"speed": speed, "memory": 1 / peak, "balanced": speed / peak}[objective]
        own = (each.parity is ParityClass.OBJECTIVE, not _is_for(each, objective), -gain)
        beside = named.get(each.beside or "")
        return own if beside is None else max(own, rank(beside))

    return sorted(several, key=rank)


def merged(several: Sequence[Candidate]) -> Candidate:
    """Return one candidate with the changes of several."""
    exact = all(each.parity is ParityClass.EXACT for each in several)
    return Candidate(
        lever=" + ".join(each.lever for each in several),
        setting=" + ".join(each.setting for each in several),
        changes={key: value for each in several for key, value in each.changes.items()},
        parity=None
        if several[0].parity is None
        else ParityClass.EXACT
        if exact
        else ParityClass.NUMERIC,
        aim="memory" if any(each.aim == "memory" for each in several) else "speed",
        copies=max(each.copies for each in several),
    )


def cumulative(several: Sequence[Candidate]) -> list[Candidate]:
    """Return the first lever, the first with the second, these with the third, and so on."""
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
            aim=rest.aim,
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


def kept_after_stacking(
    several: Sequence[Candidate], steps: Sequence[Gain | None]
) -> list[Candidate]:
    """Return the levers that did not make the set before them worse.

    `steps` compares each set with that one.
    """
    return [
        each for each, gain in zip(several, steps, strict=True) if gain is None or gain.high >= 1.0
    ]


def kept_after_leaving_out(
    several: Sequence[Candidate], without: Mapping[str, Gain | None]
) -> list[Candidate]:
    """Return the levers without which the set was not better.

    `without` compares each rest with the whole set.
    """
    kept = []
    for each in several:
        gain = without.get(each.name)
        if gain is None or gain.low <= 1.0:
            kept.append(each)
    return kept


def open_questions(
    judged: Sequence[Judged], gains: Mapping[str, Gain], objective: Objective, resolve: float
) -> list[str]:
    """Return the levers that could still turn out to help by more than the resolution."""
    return [
        each.name
        for each, row in judged
        if _may_be_chosen(each, row, objective)
        and (
            (gain := gains.get(each.name)) is None
            or (gain.narrows and gain.low <= 1.0 < 1.0 + resolve < gain.high)
        )
    ]


def choose(
    best: Candidate | None,
    yours: Candidate | None,
    best_to_yours: Gain | None,
    open_levers: Sequence[str],
    objective: Objective,
) -> Choice:
    """Return the better one of the best set and the user's file; the file where that cannot be
    told.

    `best` is `None` if no lever helped: then the baseline stands for it.
    """
    decided = not open_levers
    doubt = (
        ""
        if decided
        else f"; UNDECIDED for {', '.join(open_levers[:4])}{' and more' * (len(open_levers) > 4)}"
    )
    name, changes = ("baseline", {}) if best is None else (best.name, best.changes)
    if yours is None:
        found = (
            "no lever is better than the baseline"
            if best is None
            else f"{best.name} is better than the baseline"
        )
        return Choice(
            name=name, changes=changes, reason=f"for {objective}, {found}{doubt}", decided=decided
        )
    if best_to_yours is None:
        reason = "your file was not measured against the best set, so it stays"
        return Choice(name=yours.name, changes=yours.changes, reason=reason + doubt, decided=False)
    if math.isinf(best_to_yours.high):
        reason = "your file stays, because too few rounds compare it with the best set"
        return Choice(name=yours.name, changes=yours.changes, reason=reason + doubt, decided=False)
    span = told(objective, name, best_to_yours)
    if best_to_yours.low > 1.0:
        return Choice(name=name, changes=changes, reason=f"{span}{doubt}", decided=decided)
    sure = decided and best_to_yours.high < 1.0
    return Choice(
        name=yours.name,
        changes=yours.changes,
        reason=f"your file stays: {span}{doubt}",
        decided=sure,
    )


def _may_be_chosen(candidate: Candidate, row: Row, objective: Objective) -> bool:
    """Whether a lever keeps the result, and is for what counts."""
    keeps = candidate.parity in {ParityClass.EXACT, ParityClass.NUMERIC, None}
    return (
        _is_for(candidate, objective)
        and keeps
        and row.verdict not in {Verdict.BROKEN, Verdict.UNAVAILABLE}
    )


def _is_for(candidate: Candidate, objective: Objective) -> bool:
    return candidate.aim == "speed" or (candidate.aim == "memory" and objective != "speed")
