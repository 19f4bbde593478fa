"""Splits, learning rates and the order of the data: plain numbers, no torch."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.training import order, schedule


@given(st.integers(1, 500), st.integers(1, 500))
def test_a_batch_is_split_into_few_and_equal_parts(batch: int, limit: int) -> None:
    sizes: list[int] = []
    while (remaining := batch - sum(sizes)) > 0:
        sizes.append(schedule.next_part(remaining, limit))
    assert sum(sizes) == batch
    assert len(sizes) == -(-batch // limit)
    assert max(sizes) <= limit
    assert max(sizes) - min(sizes) <= 1


def test_the_learning_rate_rises_then_falls_to_a_tenth() -> None:
    rates = [schedule.rate_share(step, steps=100, warmup_steps=10) for step in range(101)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == rates[10] == 1.0
    assert all(later < earlier for earlier, later in pairwise(rates[10:]))
    assert rates[100] == pytest.approx(0.1)


@pytest.mark.parametrize("items", [1, 2, 3, 7, 64, 65, 1000])
def test_an_epoch_uses_each_item_once_in_its_own_order(items: int) -> None:
    used = order.samples(5, items, 0, 2 * items)
    first, second = [each.index for each in used[:items]], [each.index for each in used[items:]]
    assert sorted(first) == sorted(second) == list(range(items))
    assert {each.epoch for each in used[items:]} == {1}
    assert items < 64 or (first != second and first != list(range(items)))


@given(
    st.integers(0, 2**63),
    st.integers(1, 300),
    st.integers(0, 5000),
    st.integers(0, 40),
    st.integers(0, 40),
)
def test_the_order_does_not_depend_on_where_one_begins(
    seed: int, items: int, first: int, one: int, two: int
) -> None:
    together = order.samples(seed, items, first, one + two)
    assert together == order.samples(seed, items, first, one) + order.samples(
        seed, items, first + one, two
    )


def test_neighbours_do_not_stay_neighbours() -> None:
    places = [order.permuted(1, 0, 4096, place) for place in range(4096)]
    near = sum(abs(one - other) <= 4 for one, other in pairwise(places))
    assert near < 40, "8 of 4,096 by chance"
