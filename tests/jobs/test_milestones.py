"""Which members of a sweep continue at a milestone, and which continue later."""

from __future__ import annotations

import math
from dataclasses import replace

from orchestrator.jobs.milestones import promotable, ranking
from orchestrator.jobs.model import Milestones

ASHA = Milestones(metric="loss", is_min=True, first=500, factor=3, last=13500)


def at_first(*values: float) -> list[tuple[str, int, float]]:
    """Return members `a`, `b`, ... with these values at the first milestone."""
    return [(chr(ord("a") + place), 500, value) for place, value in enumerate(values)]


def test_the_best_third_goes_on() -> None:
    assert promotable(ASHA, at_first(3.0, 2.0, 1.0), {"c"}) == "c"
    assert promotable(ASHA, at_first(1.0, 2.0, 3.0), {"c"}) is None


def test_a_paused_member_goes_on_when_more_have_arrived() -> None:
    reached = at_first(1.0, 2.0, 3.0)

    assert promotable(ASHA, reached[:2], {"a", "b"}) is None
    assert promotable(ASHA, reached, {"a", "b", "c"}) == "a"
    assert promotable(ASHA, reached, {"b", "c"}) is None


def test_the_member_that_came_furthest_goes_on_first() -> None:
    reached = at_first(1.0, 2.0, 3.0, 1.5, 2.5, 3.5)
    reached += [("b", 1500, 2.0), ("c", 1500, 3.0), ("e", 1500, 2.5)]

    assert promotable(ASHA, reached, {"a", "b", "c", "e"}) == "b"


def test_an_idle_card_takes_one_more_member_only() -> None:
    reached = at_first(1.0, 2.0, 3.0)

    assert promotable(ASHA, reached, {"b", "c"}, is_idle=True) == "b"
    assert promotable(ASHA, reached, {"c"}, is_idle=True) is None


def test_the_larger_value_is_better_where_the_rule_says_so() -> None:
    rule = replace(ASHA, is_min=False)

    assert ranking(rule, at_first(1.0, 3.0, 2.0), 500) == ("b", "c", "a")


def test_values_that_are_no_numbers_rank_last() -> None:
    reached = at_first(math.nan, -math.inf, 9.0, math.inf)

    assert ranking(ASHA, reached, 500)[0] == "c"
    assert ranking(replace(ASHA, is_min=False), reached, 500)[0] == "c"
