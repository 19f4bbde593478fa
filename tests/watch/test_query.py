"""Filters choose and orders sort: unknown values last, equal ones by slot."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core.slot import HeadState
from orchestrator.record.model import FIELDS
from orchestrator.view.query import Order, QueryError, field_of, order_of, parse, select
from orchestrator.view.slots import COLUMNS
from tests.factories import GIB, make_row
from workers.messages import WorkerState

ROWS = (
    make_row(slot="pc1/10", temperature_c=71.0, oom_count=3, steps_ok=90, steps_oom=10),
    make_row(
        slot="pc1/2", temperature_c=None, cap_bytes=4 * GIB, reason="memory ran out: 3.1 GiB asked"
    ),
    make_row(
        slot="pc2/0",
        node="pc2",
        state=HeadState.LOST,
        reason="its node has left",
        temperature_c=80.0,
    ),
    make_row(
        slot="pc2/1",
        node="pc2",
        state=WorkerState.EMERGENCY,
        gpu_name="NVIDIA RTX 3070",
        temperature_c=80.0,
    ),
)


def chosen(text: str) -> list[str]:
    return [row.slot for row in ROWS if parse(text).matches(row)]


@pytest.mark.parametrize(
    ("text", "slots"),
    [
        ("", ["pc1/10", "pc1/2", "pc2/0", "pc2/1"]),
        ("state:lost", ["pc2/0"]),
        ("node:pc2 !state:lost", ["pc2/1"]),
        ("temp>75", ["pc2/0", "pc2/1"]),
        ("temp<=71", ["pc1/10"]),
        ("!temp>75", ["pc1/10", "pc1/2"]),
        ("cap>3GiB", ["pc1/2"]),
        ("cap_bytes<=2.7g", ["pc1/10", "pc2/0", "pc2/1"]),
        ("success<95", ["pc1/10"]),
        ("oom!=0", ["pc1/10"]),
        ("3070", ["pc2/1"]),
        ('"node has"', ["pc2/0"]),
        ('reason:"ran out"', ["pc1/2"]),
        ("/1", ["pc1/10", "pc2/1"]),
        ("!PC1", ["pc2/0", "pc2/1"]),
    ],
)
def test_a_filter_keeps_rows_that_meet_all_terms(text: str, slots: list[str]) -> None:
    assert chosen(text) == slots


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("colour:red", "nothing is called 'colour'"),
        ("cap>3", "write a unit"),
        ("temp>warm", "compared with a number"),
        ("temp>75W", "has the unit C"),
        ("state:", "lacks what to compare with"),
        ('"open', "not closed"),
        ("x" * 501, "at most 500"),
        ("steps_>1", "write more of it"),
    ],
)
def test_a_senseless_filter_is_refused_in_a_sentence(text: str, told: str) -> None:
    with pytest.raises(QueryError, match=told):
        parse(text)


@given(st.text(max_size=60))
def test_any_text_is_a_filter_or_is_refused(text: str) -> None:
    try:
        wanted = parse(text)
    except QueryError:
        return
    assert wanted.matches(ROWS[0]) in {True, False}


@pytest.mark.parametrize("reverse", [False, True])
def test_unknown_values_are_last_and_equal_ones_by_slot(reverse: bool) -> None:
    mixed = (ROWS[2], ROWS[0], ROWS[3], ROWS[1])
    slots = [row.slot for row in select(mixed, parse(""), order_of("temp", reverse=reverse))]
    known = ["pc2/0", "pc2/1", "pc1/10"] if not reverse else ["pc1/10", "pc2/0", "pc2/1"]
    assert slots == [*known, "pc1/2"]


def test_words_ascend_numbers_descend_no_order_is_worst_first() -> None:
    def slots(order: Order) -> list[str]:
        return [row.slot for row in select(ROWS, parse(""), order)]

    assert slots(order_of("slot")) == ["pc1/2", "pc1/10", "pc2/0", "pc2/1"]
    assert slots(order_of("oom"))[0] == "pc1/10"
    assert slots(Order())[:2] == ["pc2/0", "pc2/1"]


def test_a_column_is_found_by_its_name_title_or_beginning() -> None:
    assert all(field_of(column.name).key == column.key for column in COLUMNS)
    assert field_of("good").key == "success_rate"
    assert field_of("temper").key == "temperature_c"
    assert field_of("heart").key == "heartbeat_age_s"
    assert all(len(select(ROWS, parse(""), order_of(key))) == len(ROWS) for key in FIELDS)
