"""What this machine says of a guide's claim: computed from the claim and from facts, never stored.
Pure.

The facts are the rows of a tuning, the memory plan, the card's data, torch's defaults, and what a
run recorded. What is missing among them gives UNAVAILABLE (it cannot be had here) or UNDECIDED (a
command would measure it), with the reason.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from orchestrator.lab.tune.claims import QUANTITIES, Claim, Workload, names_in
from orchestrator.lab.tune.rows import ParityClass, Row, Verdict
from orchestrator.lab.tune.verdicts import against

#: Effects of at most this share count as none, as `tune` resolves by default.
RESOLVE: Final = 0.01

_OPERATORS: Final[Mapping[type[ast.operator], Callable[[float, float], float]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}

#: Where a value comes from, unless the facts say it better.
_SOURCES: Final = {
    "sum": "the guide's own numbers",
    "card": "the card's data",
    "plan": "memory plan",
    "torch": "torch's default",
    "here": "the driver",
}

#: What would measure it, on a machine with a card and on one without.
_TUNE: Final[Mapping[Workload, tuple[str, str]]] = {
    "gpt": ("tune --local --preset gpt2-medium", "tune --rehearse --preset gpt-nano"),
    "cnn": ("tune --local --preset cnn-landmarks", "tune --rehearse --preset cnn-small"),
    "matmul": ("tune --local --workload matmul", "tune --rehearse --workload matmul"),
}
_RUN: Final = ("burn --local", "burn --rehearse")

#: What a tuning of a lever needs beside it. It tries a batch 1.5 and 2 times as large: 8, 12, 16.
_BESIDE: Final = {
    "batch": " --set train.batch=8",
    "bucketing": " --set train.min_seq=8",
    "packing": " --set train.min_seq=8",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known here. All of it may be empty."""

    values: Mapping[str, float] = field(default_factory=dict)
    """By name, such as `plan.medium_fp32.total_gib`."""
    absent: Mapping[str, str] = field(default_factory=dict)
    """Why a name, or all names that begin so, cannot have a value here: UNAVAILABLE. A name in
    neither: UNDECIDED.
    """
    sources: Mapping[str, str] = field(default_factory=dict)
    """Where the values of a family come from, such as `run` from `run 20261123-…`."""
    rows: Mapping[Workload, tuple[Row, ...]] = field(default_factory=dict)
    """The newest tuning on this machine, by what was tuned."""
    plain: Mapping[Workload, Mapping[str, str]] = field(default_factory=dict)
    """The settings of its baseline, which have no row, by lever."""
    on_card: bool = False
    """Whether this machine has a card, known or not."""
    cards: frozenset[str] = frozenset()
    """The cards of this machine, by their keys in `gpu_specs`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """What this machine says of one claim."""

    verdict: Verdict
    reason: str
    low: float | None = None
    """The value here, in the unit of the claim's quantity; with `high` a range. `None`: there is
    none.
    """
    high: float | None = None
    command: str | None = None
    """What would measure it; `None` where nothing is missing, or nothing helps."""


class _NoValueError(Exception):
    """A name in an expression has no value."""


def judge(claim: Claim, facts: Facts, needs: Mapping[str, str]) -> Here:
    """Return what the facts say of a claim.

    `needs` says why something that a claim needs is not here.
    """
    missing = [needs[need] for need in claim.needs if need in needs]
    if missing:
        return Here(verdict=Verdict.UNAVAILABLE, reason="; ".join(missing))
    if claim.how == "none":
        return Here(verdict=Verdict.UNDECIDED, reason="nothing measures it yet")
    if claim.on is not None and claim.on not in facts.cards:
        others = (
            f"this machine has {', '.join(sorted(facts.cards))}"
            if facts.cards
            else "this machine has no known card"
        )
        return Here(verdict=Verdict.UNAVAILABLE, reason=f"it is of {claim.on}; {others}")
    return _of_tuning(claim, facts) if claim.how == "tune" else _of_value(claim, facts)


def span_of(expression: str, values: Mapping[str, float]) -> float:
    """Return the value of an expression of numbers, dotted names, `+ - * /` and brackets.

    Raises:
        KeyError: A name has no value; the name is the argument.
        ValueError: It is another kind of expression.
        ZeroDivisionError: As it says.
    """
    return _computed(ast.parse(expression, mode="eval").body, values)


def compare(claim: Claim, low: float, high: float) -> Verdict:
    """Return the verdict on a claim, of a value between `low` and `high`.

    A value that overlaps the claim confirms it, any other one refutes it. An effect (see
    `QUANTITIES`) may also be absent, or smaller than claimed; see `verdicts.against`.
    """
    claimed = (
        -math.inf if claim.low is None else claim.low,
        math.inf if claim.high is None else claim.high,
    )
    neutral = QUANTITIES[claim.quantity][1]
    if neutral is None:
        return Verdict.CONFIRMED if low <= claimed[1] and high >= claimed[0] else Verdict.REFUTED
    return against(claimed, low, high, neutral=neutral, width=RESOLVE * (abs(neutral) or 100.0))


def _of_value(claim: Claim, facts: Facts) -> Here:
    try:
        low = _value(claim.value or "", facts)
        high = low if claim.value_high is None else _value(claim.value_high, facts)
    except _NoValueError as error:
        return _without(str(error), facts)
    reason = facts.sources.get(claim.how) or _SOURCES.get(claim.how, claim.how)
    if claim.how == "plan":
        reason += (
            " of "
            f"{', '.join(dict.fromkeys(name.split('.')[1] for name in names_in(claim.value or '')))}"
        )
    return Here(verdict=compare(claim, low, high), reason=reason, low=low, high=high)


def _value(expression: str, facts: Facts) -> float:
    try:
        return span_of(expression, facts.values)
    except KeyError as error:
        raise _NoValueError(error.args[0]) from None
    except ZeroDivisionError:
        raise _NoValueError(expression) from None


def _without(name: str, facts: Facts) -> Here:
    """Return what to say of a name without a value."""
    parts = name.split(".")
    for known in (".".join(parts[:count]) for count in range(len(parts), 0, -1)):
        if known in facts.absent:
            return Here(verdict=Verdict.UNAVAILABLE, reason=facts.absent[known])
    if parts[0] == "run":
        return Here(
            verdict=Verdict.UNDECIDED,
            reason="no run has recorded it here",
            command=_RUN[not facts.on_card],
        )
    return Here(verdict=Verdict.UNAVAILABLE, reason=f"{name} is not known here")


def _of_tuning(claim: Claim, facts: Facts) -> Here:
    rows = facts.rows.get(claim.workload or "gpt", ())
    if not rows:
        return _unmeasured(claim, facts, f"no {claim.workload} was tuned here")
    arms = []
    for setting in (claim.setting, claim.against):
        found = _arm(claim, facts, setting)
        if found is None:
            return _unmeasured(
                claim,
                facts,
                f"the newest tuning of {claim.workload} has no {claim.lever}={setting}",
            )
        told = f"{found.lever}={found.setting}: {found.reason}"
        if found.verdict in {Verdict.BROKEN, Verdict.UNAVAILABLE}:
            return Here(verdict=found.verdict, reason=told)
        if found.speed_low is None or found.speed_high is None:
            return Here(verdict=Verdict.UNDECIDED, reason=told, command=_command(claim, facts))
        arms.append(found)
    arm, other = arms
    low = (arm.speed_low or 0.0) / (other.speed_high or 1.0)
    high = (arm.speed_high or 0.0) / (other.speed_low or 1.0)
    verdict = compare(claim, low, high)
    measured = [each for each in arms if each.reason]
    # The verdict of an arm whose objective differs is on its loss, and two arms are not compared
    # with the baseline.
    on_speed = [
        each
        for each in measured
        if len(measured) == 1 and each.parity_class != ParityClass.OBJECTIVE
    ]
    if any(each.verdict is Verdict.UNDECIDED for each in on_speed):
        verdict = Verdict.UNDECIDED  # the test over all levers together did not find it real
    return Here(
        verdict=verdict,
        reason="; ".join(f"{each.lever}={each.setting}: {each.reason}" for each in measured),
        low=low,
        high=high,
        command=_command(claim, facts) if verdict is Verdict.UNDECIDED else None,
    )


def _arm(claim: Claim, facts: Facts, setting: str | None) -> Row | None:
    """Return the row of a setting of the claim's lever.

    The baseline, which has none, is 1.0 by definition.
    """
    lever, wanted = claim.lever or "", (setting or "").lower()
    plain = facts.plain.get(claim.workload or "gpt", {}).get(lever)
    if setting is None or wanted == plain:
        return Row(
            lever=lever,
            setting=wanted,
            speed_low=1.0,
            speed_high=1.0,
            verdict=Verdict.CONFIRMED,
            reason="",
        )
    for row in facts.rows.get(claim.workload or "gpt", ()):
        # An arm that needs other keys beside its own says so: "0.5 with dropout 0.1".
        if row.lever == lever and row.setting.lower().split(" with ")[0] == wanted:
            return row
    return None


def _unmeasured(claim: Claim, facts: Facts, said: str) -> Here:
    if claim.rated is not None:
        with suppress(_NoValueError):
            said += f"; its card's data let expect {_value(claim.rated, facts):.2f}x"
    return Here(verdict=Verdict.UNDECIDED, reason=said, command=_command(claim, facts))


def _command(claim: Claim, facts: Facts) -> str:
    """Return what would measure it."""
    return _TUNE[claim.workload or "gpt"][not facts.on_card] + _BESIDE.get(claim.lever or "", "")


def _computed(node: ast.expr, values: Mapping[str, float]) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return float(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](
            _computed(node.left, values), _computed(node.right, values)
        )
    if isinstance(node, ast.Attribute):
        return values[_dotted(node)]
    raise ValueError(
        f"an expression may hold numbers, names and + - * /, not {ast.unparse(node)!r}"
    )


def _dotted(node: Any) -> str:  # noqa: ANN401 - any part of an expression
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    raise ValueError(f"a name has letters and dots, not {ast.unparse(node)!r}")
