"""Every numeric claim of the guides has a row, and what is said of it follows from facts alone."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import typer.main

from orchestrator.cli.app import app
from orchestrator.lab.tune import claims as data
from orchestrator.lab.tune.claims import NEEDS, QUANTITIES, Claim
from orchestrator.lab.tune.claims_page import guides_say, judged, page_json, page_text
from orchestrator.lab.tune.claims_verdict import Facts, judge, span_of
from orchestrator.lab.tune.rows import Row, Verdict

GUIDE_LINES = Path(__file__).with_name("guide_lines.txt")
CLAIMS = data.load()
NO_CLAIM = {
    "setting", "heading", "number", "name", "code", "file", "date", "count", "baseline", "advice", "symptom", "scale",
}  # fmt: skip
DECIDING = {Verdict.CONFIRMED, Verdict.PARTLY, Verdict.NO_EFFECT, Verdict.REFUTED, Verdict.BROKEN}


def guide_lines() -> dict[tuple[str, int], tuple[list[str], str]]:
    """Return each listed line with its numbers, and how many claims it has or why it has none."""
    found = {}
    for line in GUIDE_LINES.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            where, _, told = line.partition("|")
            seed, number, *numbers = where.split()
            found[seed, int(number)] = (numbers, told.strip())
    return found


def of(how: str) -> list[Claim]:
    return [claim for claim in CLAIMS.all if claim.how == how]


def test_each_line_of_the_guides_with_a_number_has_its_claims_or_the_reason_why_it_has_none() -> (
    None
):
    listed = guide_lines()
    assert len(listed) > 400
    counted = Counter((claim.seed, claim.line) for claim in CLAIMS.all)
    expected = {where: int(told) for where, (_, told) in listed.items() if told.isdigit()}
    assert counted == expected
    assert len(expected) > 150
    assert {told for _, told in listed.values() if not told.isdigit()} == NO_CLAIM


def test_each_claim_repeats_a_number_of_its_line() -> None:
    listed = guide_lines()
    for claim in CLAIMS.all:
        numbers = {float(number) for number in listed[claim.seed, claim.line][0]}
        said = {float(number) for number in re.findall(r"\d+(?:\.\d+)?", claim.says)}
        assert not numbers or numbers & said, claim


def test_no_row_holds_a_verdict() -> None:
    text = Path(data.__file__).with_name("claims.toml").read_text(encoding="utf-8")
    assert not [verdict for verdict in Verdict if verdict.value in text]


def test_without_any_fact_only_the_guides_own_numbers_decide() -> None:
    for claim in CLAIMS.all:
        here = judge(claim, Facts(), NEEDS)
        own_numbers = claim.how == "sum" and not data.names_in(claim.value or "")
        assert (here.verdict in DECIDING) == own_numbers, claim
        assert here.reason


def row(
    claim: Claim,
    low: float,
    high: float,
    verdict: Verdict = Verdict.CONFIRMED,
    *,
    against: bool = False,
) -> Row:
    """Return a made row of `tune` for the setting that is claimed, or for the one that it is compared with."""
    setting = claim.against if against else claim.setting
    assert claim.lever
    assert setting
    measured = {"speed_ratio": (low + high) / 2, "speed_low": low, "speed_high": high}
    return Row(lever=claim.lever, setting=setting, verdict=verdict, reason="made", **measured)


@pytest.mark.parametrize(
    "claim", of("tune"), ids=lambda claim: f"{claim.seed}-{claim.line}-{claim.lever}"
)
def test_the_verdict_on_a_speed_follows_the_rows_of_the_tuning(claim: Claim) -> None:
    assert claim.workload

    def verdict(made: Row, *more: Row) -> Verdict:
        return judge(claim, Facts(rows={claim.workload or "gpt": (made, *more)}), NEEDS).verdict

    low, high = claim.low or 1.0, claim.high or 10.0
    other = [] if claim.against is None else [row(claim, 1.0, 1.0, against=True)]
    middle, wrong = (low + high) / 2, 1.3 if high < 1 else 0.7
    assert verdict(row(claim, middle, middle), *other) is Verdict.CONFIRMED
    assert verdict(row(claim, wrong, wrong), *other) is Verdict.REFUTED
    assert verdict(row(claim, 0.998, 1.003), *other) is Verdict.NO_EFFECT
    if low > 1.1:
        assert verdict(row(claim, 1.04, 1.05), *other) is Verdict.PARTLY
    for reported in (Verdict.BROKEN, Verdict.UNAVAILABLE):
        assert verdict(row(claim, middle, middle, reported), *other) is reported
    if high > 1:
        assert verdict(row(claim, 20.0, 20.0), *other) is Verdict.CONFIRMED  # more of a gain
    else:
        assert verdict(row(claim, 0.1, 0.1), *other) is Verdict.REFUTED  # more of a cost
    assert (
        verdict(row(claim, 0.5 * min(low, 1), 2 * max(high, 1)), *other) is Verdict.UNDECIDED
    )  # too wide to tell
    unmeasured = replace(row(claim, wrong, wrong, Verdict.REFUTED), speed_low=None, speed_high=None)
    assert verdict(unmeasured, *other) is Verdict.UNDECIDED
    if not other:
        assert verdict(row(claim, wrong, wrong, Verdict.UNDECIDED)) is Verdict.UNDECIDED
    else:
        alone = judge(claim, Facts(rows={claim.workload: (row(claim, middle, middle),)}), NEEDS)
        assert (alone.verdict, str(claim.against) in alone.reason) == (Verdict.UNDECIDED, True)
        plain = Facts(
            rows={claim.workload: (row(claim, middle, middle),)},
            plain={claim.workload: {claim.lever or "": str(claim.against)}},
        )
        assert judge(claim, plain, NEEDS).verdict is Verdict.CONFIRMED
    nothing = judge(claim, Facts(), NEEDS)
    assert (nothing.verdict, bool(nothing.command)) == (Verdict.UNDECIDED, True)


FROM_FACTS = [
    claim for claim in CLAIMS.all if claim.value is not None and data.names_in(claim.value)
]


@pytest.mark.parametrize(
    "claim", FROM_FACTS, ids=lambda claim: f"{claim.seed}-{claim.line}-{claim.how}"
)
def test_the_verdict_on_a_value_follows_the_facts(claim: Claim) -> None:
    assert claim.value is not None
    first, *others = dict.fromkeys(data.names_in(claim.value))

    def value(x: float) -> float:
        return span_of(claim.value or "", {first: x, **dict.fromkeys(others, 1.0)})

    bounds = [bound for bound in (claim.low, claim.high) if bound is not None]
    inside = sum(bounds) / len(bounds)
    outside = [
        bound + way * (10 + abs(bound))
        for bound, way in ((claim.low, -1), (claim.high, 1))
        if bound is not None
    ]
    facts = Facts(cards=frozenset({claim.on or "any"}))
    for wanted, is_confirmed in ((inside, True), *((each, False) for each in outside)):
        x = solved(value, wanted)
        here = judge(claim, replace(facts, values={first: x, **dict.fromkeys(others, 1.0)}), NEEDS)
        assert here.low == pytest.approx(wanted)
        is_more = QUANTITIES[claim.quantity][1] is not None and wanted > inside
        assert (here.verdict is Verdict.CONFIRMED) == (is_confirmed or is_more), (wanted, here)
    absent = judge(claim, replace(facts, absent={first.split(".")[0]: "made reason"}), NEEDS)
    assert (absent.verdict, absent.reason) == (Verdict.UNAVAILABLE, "made reason")


def solved(value: object, wanted: float) -> float:
    """Return where a function that is linear, or one over a linear one, has a value."""
    assert callable(value)
    at_1, at_2, at_3 = value(1.0), value(2.0), value(3.0)
    if at_3 - at_2 == pytest.approx(at_2 - at_1):
        return 1 + (wanted - at_1) / (at_2 - at_1)
    return 1 + (1 / wanted - 1 / at_1) / (1 / at_2 - 1 / at_1)


def test_a_claim_on_the_guides_own_numbers_is_computed_and_not_believed() -> None:
    sums = [claim for claim in of("sum") if not data.names_in(claim.value or "")]
    assert len(sums) > 20
    for claim in sums:
        here = judge(claim, Facts(), NEEDS)
        assert here.low is not None
        assert here.high is not None
        right = claim.model_copy(update={"low": here.low, "high": here.high})
        wrong = claim.model_copy(update={"low": here.high + 1, "high": here.high + 2})
        assert judge(right, Facts(), NEEDS).verdict is Verdict.CONFIRMED
        assert judge(wrong, Facts(), NEEDS).verdict in {Verdict.REFUTED, Verdict.PARTLY}


def test_what_cannot_be_tested_says_what_is_missing_and_no_longer_when_it_is_there() -> None:
    assert {need for claim in CLAIMS.all for need in claim.needs} == set(NEEDS)
    for claim in of("none"):
        here = judge(claim, Facts(), NEEDS)
        assert here.verdict is Verdict.UNAVAILABLE
        assert all(NEEDS[need] in here.reason for need in claim.needs)
        assert judge(claim, Facts(), {}).verdict is Verdict.UNDECIDED


def test_a_claim_of_another_card_is_not_judged_by_this_one() -> None:
    (claim,) = (
        claim for claim in CLAIMS.all if (claim.seed, claim.line, claim.how) == ("004", 15, "here")
    )
    values = {"here.power_limit_w": 170.0}
    assert (
        judge(claim, Facts(values=values, cards=frozenset({"rtx-3060"})), NEEDS).verdict
        is Verdict.CONFIRMED
    )
    elsewhere = judge(claim, Facts(values=values, cards=frozenset({"h200"})), NEEDS)
    assert (elsewhere.verdict, "h200" in elsewhere.reason) == (Verdict.UNAVAILABLE, True)


def test_what_a_run_would_record_is_undecided_until_there_is_one() -> None:
    for on_card, command in ((True, "burn --local"), (False, "burn --rehearse")):
        here = judge(of("run")[0], Facts(on_card=on_card), NEEDS)
        assert (here.verdict, here.command) == (Verdict.UNDECIDED, command)


@pytest.mark.parametrize(
    "expression", ["__import__('os')", "2 ** 100", "[1]", "'a'", "plan.a.b()", "-1"]
)
def test_an_expression_holds_arithmetic_only(expression: str) -> None:
    with pytest.raises(ValueError, match=r"may hold|letters and dots"):
        span_of(expression, {"plan.a.b": 1.0})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"quantity": "luck"}, "no quantity"),
        ({"low": None, "high": None}, "no number"),
        ({"lever": "compile"}, "belong to how: tune"),
        ({"needs": ["sharding"]}, "belongs to how: none"),
        ({"value": None}, "a value belongs"),
        ({"value": "run.power_w"}, "knows no run"),
    ],
)
def test_a_row_that_could_not_be_computed_is_refused(changed: dict[str, object], said: str) -> None:
    whole = {
        "seed": "000",
        "line": 1,
        "says": "1",
        "how": "sum",
        "quantity": "pct",
        "low": 1,
        "value": "1",
    }
    Claim.model_validate(whole)
    with pytest.raises(ValueError, match=said):
        Claim.model_validate({**whole, **changed})


def test_the_page_has_every_claim_and_says_what_would_measure_more() -> None:
    shown = judged(CLAIMS, Facts())
    text = page_text(CLAIMS, shown)
    assert all(claim.says in text for claim in CLAIMS.all)
    assert f"{len(CLAIMS.all)} claims: " in text
    assert "python -m orchestrator tune --rehearse --preset cnn-small" in text
    told = json.loads(page_json(shown))
    assert len(told["claims"]) == len(CLAIMS.all) == sum(told["verdicts"].values())
    assert list(told["claims"][0]) == [
        "seed", "line", "claim", "how", "lever", "setting", "quantity", "low", "high", "here_low", "here_high",
        "verdict", "reason", "command",
    ]  # fmt: skip


def test_a_row_of_a_tuning_says_what_guides_claim_of_it_against_the_same_baseline() -> None:
    def said(lever: str, setting: str, workload: data.Workload = "gpt") -> str | None:
        found = guides_say(
            CLAIMS, workload, lever, setting, {"optimizer": "adamw-foreach", "attention": "auto"}
        )
        return None if found is None else found.said

    assert said("precision", "bf16") == "1.5 to 2 x (003)"
    assert said("optimizer", "adamw-fused") == "1.05 to 1.1 x (003)"
    assert said("r_drop", "0.5 with dropout 0.1") == "0.5 to 0.75 x (004)"
    assert said("attention", "flash") is None  # the guide compares with another baseline: math
    assert said("channels_last", "true") is None  # of CNNs alone
    both = guides_say(CLAIMS, "matmul", "dtype", "tf32", {"dtype": "fp32"})
    assert both is not None
    assert (both.said, both.low, both.high) == ("1.2 to 1.3 x (003), 2 to 3 x (004)", 1.2, 3.0)


def test_each_command_that_is_named_can_be_typed() -> None:
    verbs = typer.main.get_command(app)
    assert isinstance(verbs, typer.core.TyperGroup)
    named = {
        judge(claim, Facts(on_card=on_card), NEEDS).command
        for claim in CLAIMS.all
        for on_card in (True, False)
    }
    for command in named - {None}:
        verb, *words = str(command).split()
        known = {option for each in verbs.commands[verb].params for option in each.opts}
        assert {word for word in words if word.startswith("--")} <= known, command
