"""The cursor stays with its slot and on the screen, whatever frames and keys come."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.record.model import STATES_WORST_FIRST, Row
from orchestrator.record.query import WORST_FIRST, Order, parse
from orchestrator.view.top.view import SORTS, View, follow, move, sort_by_next
from tests.factories import make_row
from workers.messages import WorkerState

frames = st.lists(
    st.builds(
        lambda number, state, heat: make_row(slot=f"pc1/{number}", state=state, temperature_c=heat),
        st.integers(0, 30),
        st.sampled_from(STATES_WORST_FIRST),
        st.none() | st.floats(20, 90),
    ),
    max_size=30,
    unique_by=lambda row: row.slot,
)
orders = st.builds(Order, st.sampled_from(SORTS), st.booleans())


@given(
    st.lists(st.tuples(frames, orders, st.integers(1, 12)), min_size=1, max_size=12),
    st.integers(-40, 40),
)
def test_the_cursor_stays_with_its_slot_on_the_screen(
    looks: list[tuple[list[Row], Order, int]], by: int
) -> None:
    view = View()
    for index, (rows, order, height) in enumerate(looks):
        before = view.slot
        view = View(order=order, slot=view.slot, line=view.line, first=view.first)
        shown = view.rows(rows)
        view = follow(view, shown, height)
        if index == 0:
            view = move(view, shown, by, height)
        elif before in {row.slot for row in rows}:
            assert view.slot == before
        if not shown:
            assert view.slot is None
            continue
        assert shown[view.line].slot == view.slot
        assert view.first <= view.line < view.first + height
        assert view.first == 0 or view.first + height <= len(shown), "no line is left empty below"


def test_every_column_sorts_and_the_round_ends_at_worst_first() -> None:
    view = View()
    seen = []
    for _ in SORTS:
        seen.append(view.order.key)
        view = sort_by_next(view, 1)
    assert tuple(seen) == SORTS
    assert view.order == WORST_FIRST
    assert sort_by_next(view, -1).order.key == SORTS[-1]


def test_the_cursor_goes_to_a_neighbour_of_a_filtered_row() -> None:
    rows = [make_row(slot=f"pc1/{number}", state=WorkerState.RUNNING) for number in range(9)]
    view = move(View(), View().rows(rows), 5, 4)
    assert (view.slot, view.first) == ("pc1/5", 2)
    narrow = View(wanted=parse("!pc1/5"), slot=view.slot, line=view.line, first=view.first)
    assert follow(narrow, narrow.rows(rows), 4).slot == "pc1/6"
