"""Code written for accelerate's `find_executable_batch_size` runs with `resilient` in its place."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from tests.resilience.test_resilient import Clock, attempts_of, refused_above
from workers import OutOfBatchError
from workers import resilient as find_executable_batch_size


def smaller_by(step: int, start: int) -> Callable[[], int]:
    """Return a function that counts down, as people pass it to accelerate: it keeps the size by itself."""
    size = start

    def reduce() -> int:
        nonlocal size
        size -= step
        return size

    return reduce


def fits(batch_size: int, most: int, tried: list[int]) -> str:
    tried.append(batch_size)
    if batch_size > most:
        raise RuntimeError(
            "CUDA out of memory. Tried to allocate 2.00 GiB"
        )  # as torch says it; no card is needed
    return f"trained with {batch_size}"


def test_a_function_may_come_first_later_or_by_name() -> None:
    tried: list[int] = []
    assert find_executable_batch_size(fits)(128, tried) == "trained with 128"
    assert find_executable_batch_size(fits, 64)(most=64, tried=tried) == "trained with 64"
    decorate = find_executable_batch_size(starting_batch_size=32)
    assert isinstance(decorate, functools.partial)
    assert decorate(fits)(32, tried) == decorate(function=fits)(32, tried) == "trained with 32"
    assert decorate(fits, starting_batch_size=16)(32, tried) == "trained with 16"
    assert tried == [128, 64, 32, 32, 16]


@pytest.mark.parametrize("decorated", [False, True])
def test_the_callers_own_function_chooses_every_smaller_size(decorated: bool) -> None:
    """Accelerate 1.15 forgets it in the second form."""
    tried: list[int] = []
    reduce = smaller_by(10, 100)
    if decorated:
        train = find_executable_batch_size(starting_batch_size=100, reduce_batch_size_fn=reduce)(
            fits
        )
    else:
        train = find_executable_batch_size(fits, 100, reduce)
    assert train(75, tried) == "trained with 70"
    assert train(75, tried) == "trained with 70"
    assert train(55, tried) == "trained with 50"
    assert tried == [100, 90, 80, 70, 70, 70, 60, 50]
    train.reset()
    assert train(100, tried) == "trained with 100"


def test_a_call_with_its_own_sizes_does_not_wait() -> None:
    clock, failed_at_s = Clock(), list[float]()
    attempts = attempts_of(clock, 128, reduce_batch_size_fn=smaller_by(1, 128))
    assert attempts.run(refused_above(28, clock, failed_at_s)) == 28
    assert (len(failed_at_s), clock.slept_s) == (100, 0.0)


@pytest.mark.parametrize(
    ("reduce", "last"),
    [
        pytest.param(None, 1, id="by default"),
        pytest.param(smaller_by(8, 16), 8, id="down to zero"),
        pytest.param(lambda: 4, 4, id="the same size again"),
    ],
)
def test_where_no_size_is_left_the_error_is_accelerates(
    reduce: Callable[[], int] | None, last: int
) -> None:
    tried: list[int] = []
    train = find_executable_batch_size(fits, 16, reduce)
    with pytest.raises(
        RuntimeError, match=r"No executable batch size found, reached zero\.$"
    ) as caught:
        train(0, tried)
    assert isinstance(caught.value, OutOfBatchError)
    assert tried[-1] == last
    assert caught.value.tried == tuple(tried)
    # It is not final: memory may be free later.
    assert train(last, tried) == f"trained with {last}"


def test_an_error_of_the_callers_own_function_passes() -> None:
    def broken() -> int:
        raise KeyError("size")

    with pytest.raises(KeyError, match="size"):
        find_executable_batch_size(fits, 16, broken)(8, [])
