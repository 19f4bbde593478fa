"""When checks are due: soon after a start and a change, then for their share of the time, in turns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.verification.check import CheckSchedule


def checks_of(
    schedule: CheckSchedule, steps: list[tuple[int, float]], check_s: float
) -> tuple[list[int], float]:
    """Run steps of (size, seconds).

    Return the numbers of the checks that were due, and what they took.
    """
    numbers = []
    for size, seconds in steps:
        number = schedule.after_step(size, 1, seconds)
        if number is not None:
            numbers.append(number)
            schedule.after_check(check_s)
    return numbers, len(numbers) * check_s


def test_a_new_size_or_batch_is_checked_at_once() -> None:
    schedule = CheckSchedule(0.01)
    checks_of(schedule, [(512, 0.1)] * 5, check_s=0.1)
    assert schedule.after_step(512, 1, 0.1) is None
    assert schedule.after_step(256, 1, 0.1) == 2
    schedule.after_check(0.1)
    assert schedule.after_step(256, 2, 0.1) == 3


def test_a_check_that_was_not_done_stays_due() -> None:
    schedule = CheckSchedule(0.5)
    assert [schedule.after_step(512, 1, 0.1) for _ in range(3)] == [0, 0, 0]
    schedule.after_check(0.01)
    assert schedule.after_step(512, 1, 0.1) == 1


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5])
@pytest.mark.parametrize("check_s", [0.001, 2.0])
def test_checks_take_their_share(share: float, check_s: float) -> None:
    step_s = 0.1
    # Long enough for what the first two took to be earned many times over.
    steps = round(100 * check_s / step_s / max(share, 0.01)) + 100
    numbers, took_s = checks_of(CheckSchedule(share), [(512, step_s)] * steps, check_s)
    if share == 0.0:
        assert numbers == []
        return
    fitting = min(share, check_s / (check_s + step_s))  # no more than one after each step
    assert took_s / (took_s + steps * step_s) == pytest.approx(fitting, rel=0.1)
    assert numbers == list(range(len(numbers)))


@given(
    share=st.floats(0.0, 0.9),
    steps=st.lists(
        st.tuples(st.sampled_from([64, 128]), st.floats(0.0, 10.0), st.floats(1e-3, 10.0)),
        max_size=60,
    ),
)
def test_never_more_than_the_share_and_the_advance(
    share: float, steps: list[tuple[int, float, float]]
) -> None:
    schedule = CheckSchedule(share)
    stepped_s = checked_s = longest_s = 0.0
    due = 0
    for size, step_s, check_s in steps:
        stepped_s += step_s
        if schedule.after_step(size, 1, step_s) is None:
            continue
        due += 1
        checked_s += check_s
        longest_s = max(longest_s, check_s)
        schedule.after_check(check_s)
        # A check may take longer than was expected of it, and so may the first two; the ones after
        # it wait.
        assert checked_s <= stepped_s * share / (1.0 - share) + 60.0 * share + 2 * longest_s + 1e-6
    assert due >= min(2, len(steps)) or share == 0.0
