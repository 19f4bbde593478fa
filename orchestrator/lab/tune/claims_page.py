"""The guides' tables with a column "here", as text and as JSON. Pure.

Does not judge: it words what `claims_verdict.py` found.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orchestrator.lab.tune.claims import NEEDS, QUANTITIES, Claim, Claims, Workload
from orchestrator.lab.tune.claims_verdict import Facts, Here, judge
from orchestrator.lab.tune.rows import Verdict
from orchestrator.lab.tune.verdicts import Claimed
from orchestrator.view.cells import aligned

SCHEMA = 1

_HEADINGS = ("line", "the guide says", "claimed", "here", "verdict", "why")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A claim and what this machine says of it."""

    claim: Claim
    here: Here


def judged(claims: Claims, facts: Facts) -> tuple[Judged, ...]:
    """Return every claim with its verdict, in the order of the guides."""
    return tuple(Judged(claim=claim, here=judge(claim, facts, NEEDS)) for claim in claims.all)


def page_text(claims: Claims, all_judged: Sequence[Judged]) -> str:
    """Return a table for each guide, how many claims got which verdict, and the commands that would
    measure more.
    """
    return "\n".join(_lines(claims, all_judged)) + "\n"


def page_json(all_judged: Sequence[Judged]) -> str:
    """Return the same as one JSON object; the keys are a promise to scripts."""
    rows = [_plain(each) for each in all_judged]
    return json.dumps(
        {"schema": SCHEMA, "claims": rows, "verdicts": _counts(all_judged)},
        indent=1,
        allow_nan=False,
    )


def guides_say(
    claims: Claims, workload: Workload | None, lever: str, setting: str, plain: Mapping[str, object]
) -> Claimed | None:
    """Return what guides claim of the speed of a lever at a setting, all of them together; `None`:
    nothing.

    Args:
        claims: The claims of all guides.
        workload: What was tuned.
        lever: As a row of `tune` names it.
        setting: The same.
        plain: The settings of the baseline, which the row is compared with.
    """
    setting, baseline = setting.split(" with ", maxsplit=1)[0], str(plain.get(lever)).lower()
    found = [
        each
        for each in claims.all
        if (each.workload, each.lever, each.setting) == (workload, lever, setting)
        and (each.against or baseline).lower() == baseline
    ]
    if not found:
        return None
    return Claimed(
        said=", ".join(
            dict.fromkeys(f"{_span(each.low, each.high, 'x')} ({each.seed})" for each in found)
        ),
        low=min(-math.inf if each.low is None else each.low for each in found),
        high=max(math.inf if each.high is None else each.high for each in found),
    )


def _lines(claims: Claims, all_judged: Sequence[Judged]) -> Iterator[str]:
    for guide in claims.guide:
        yield f"Guide {guide.seed}: {guide.title}"
        mine = [each for each in all_judged if each.claim.seed == guide.seed]
        yield from aligned(
            [_HEADINGS, *(_cells(each) for each in mine)], set(_HEADINGS[1:2] + _HEADINGS[4:])
        )
        yield ""
    yield f"{len(all_judged)} claims: " + ", ".join(
        f"{count} {name}" for name, count in _counts(all_judged).items()
    )
    commands = Counter(each.here.command for each in all_judged if each.here.command is not None)
    for command, count in commands.most_common():
        yield f"python -m orchestrator {command}    # would measure {count} more"


def _counts(all_judged: Sequence[Judged]) -> dict[str, int]:
    found = Counter(each.here.verdict for each in all_judged)
    return {verdict.value: found[verdict] for verdict in Verdict if found[verdict]}


def _cells(each: Judged) -> tuple[str, ...]:
    claim, here = each.claim, each.here
    unit = QUANTITIES[claim.quantity][0]
    return (
        str(claim.line),
        claim.says,
        _span(claim.low, claim.high, unit),
        _span(here.low, here.high, unit) if here.low is not None else "",
        here.verdict.value,
        here.reason,
    )


def _span(low: float | None, high: float | None, unit: str) -> str:
    if low is None or high is None:
        bound = f"<= {_number(high)}" if high is not None else f">= {_number(low or 0.0)}"
        return f"{bound} {unit}".rstrip()
    span = _number(low) if _number(low) == _number(high) else f"{_number(low)} to {_number(high)}"
    return f"{span} {unit}".rstrip()


def _number(value: float) -> str:
    """Return four digits, which tells 1.795 from 1.805."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _plain(each: Judged) -> dict[str, Any]:
    claim, here = each.claim, each.here
    return {
        "seed": claim.seed,
        "line": claim.line,
        "claim": claim.says,
        "how": claim.how,
        "lever": claim.lever,
        "setting": claim.setting,
        "quantity": claim.quantity,
        "low": claim.low,
        "high": claim.high,
        "here_low": here.low,
        "here_high": here.high,
        "verdict": here.verdict.value,
        "reason": here.reason,
        "command": here.command,
    }
