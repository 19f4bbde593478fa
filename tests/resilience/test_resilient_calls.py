"""The use of `resilient`: what it accepts, refuses and leaves unchanged.

Out-of-memory errors are real but cheap: no machine has the 1 EiB that `out_of_memory` requests, so
Python raises its `MemoryError` at once. `test_resilient.py` tests under a cap that memory is
freed.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import pickle
import threading
import traceback
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from tests.fork_server import ForkServer
from tests.scene import ROOT, python
from workers import OutOfBatchError, Retry, resilient
from workers import resilient as find_executable_batch_size
from workers.settings import FailureKind
from workers.testing import injected_error


def out_of_memory() -> None:
    bytearray(2**60)


def items(batch_size: int, fits: int = 10) -> int:
    """Return the batch size if it fits."""
    if batch_size > fits:
        out_of_memory()
    return batch_size


@resilient
def train(batch_size: int, model: str, rate: float = 0.1) -> tuple[int, str, float]:
    """Return all arguments."""
    return batch_size, model, rate


def test_the_function_loses_its_first_parameter_only() -> None:
    assert (train.__name__, train.__doc__) == ("train", "Return all arguments.")
    assert list(inspect.signature(train).parameters) == ["model", "rate"]
    assert pickle.loads(pickle.dumps(train)) is train  # noqa: S301 - by its name, as a function of a module


def test_whatever_can_be_called_can_be_wrapped() -> None:
    class Model:
        def __call__(self, batch_size: int) -> int:
            return batch_size

        def step(self, batch_size: int, add: int) -> int:
            return batch_size + add

    assert (
        resilient(items, starting_batch_size=8)()
        == resilient(function=items, starting_batch_size=8)()
        == 8
    )
    assert resilient(Model(), 4)() == 4
    assert resilient(Model().step, 4)(1) == 5
    assert resilient(functools.partial(items, fits=3), 4)() <= 3
    assert resilient(range, 4)() == range(4)
    assert resilient(lambda *args, **kwargs: (args, kwargs), 2)("a", "b", c=1) == (
        (2, "a", "b"),
        {"c": 1},
    )


def test_the_next_call_begins_where_the_last_one_ended() -> None:
    told: list[Retry] = []
    work = resilient(items, 64, on_retry=told.append)
    assert work.batch_size is None
    size = work(fits=10)
    assert 5 <= size <= 10
    assert work.batch_size == size
    assert told[0].batch_size == 64
    assert [retry.next_batch_size for retry in told] == [
        *(retry.batch_size for retry in told[1:]),
        size,
    ]
    assert all(retry.next_batch_size < retry.batch_size for retry in told)
    assert told[0].reason == "MemoryError"
    told.clear()
    assert work(fits=10) == size
    assert told == []
    work.reset()
    assert work.batch_size is None
    assert work(fits=64) == 64


def test_what_on_retry_raises_ends_the_call() -> None:
    def enough(retry: Retry) -> None:
        raise StopIteration(retry.next_batch_size)

    with pytest.raises(StopIteration):
        resilient(items, 64, on_retry=enough)(fits=10)


def test_where_nothing_fits_the_error_says_what_to_do() -> None:
    with pytest.raises(OutOfBatchError) as caught:
        resilient(items, 8, smallest_batch_size=2)(fits=0)
    error = caught.value
    assert (error.tried[0], error.tried[-1]) == (8, 2)
    assert str(error).startswith(
        "items ran out of memory at its smallest batch size too; tried 8, "
    )
    assert "2 (MemoryError). Free memory" in str(error)
    assert str(error).endswith("or lower smallest_batch_size=2")
    assert isinstance(error, RuntimeError), "an out-of-memory for whatever called"
    assert isinstance(error, MemoryError)
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    assert (type(copy), str(copy), copy.tried) == (OutOfBatchError, str(error), error.tried)
    # The error refers to nothing of the attempts.
    assert (error.__context__, error.__cause__) == (None, None)
    assert "items" not in [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def test_an_outer_function_shrinks_when_an_inner_one_fails() -> None:
    @resilient(starting_batch_size=8, smallest_batch_size=4)
    def inner(batch_size: int, taken: int) -> int:
        return items(batch_size, fits=20 - taken)

    @resilient(starting_batch_size=32)
    def outer(batch_size: int) -> tuple[int, int]:
        return batch_size, inner(batch_size)

    outer_size, inner_size = outer()
    assert outer_size <= 16
    assert inner_size <= 20 - outer_size


class BugError(ValueError):
    """An error class of the user."""


@pytest.mark.parametrize(
    "error",
    [
        BugError("a bug"),
        KeyboardInterrupt(),
        SystemExit(3),
        injected_error(FailureKind.OTHER),
        injected_error(FailureKind.CONTEXT_CORRUPTED),
    ],
    ids=lambda error: type(error).__name__,
)
def test_other_errors_pass_at_once_and_unchanged(error: BaseException) -> None:
    calls: list[int] = []

    @resilient
    def work(batch_size: int) -> None:
        calls.append(batch_size)
        raise error

    with pytest.raises(type(error)) as caught:
        work()
    assert caught.value is error
    assert caught.value.__context__ is None
    assert traceback.extract_tb(error.__traceback__)[-1].name == "work"
    assert calls == [128]


def test_a_bug_in_a_handler_of_out_of_memory_is_still_a_bug() -> None:
    """Python chains the out-of-memory error to the bug, and the chain is searched for it."""
    calls: list[int] = []

    @resilient
    def work(batch_size: int) -> None:
        calls.append(batch_size)
        try:
            {}["inner"]
        except KeyError as error:
            raise BugError("a bug") from error

    try:
        out_of_memory()
    except MemoryError:
        with pytest.raises(BugError) as caught:
            work()
    assert calls == [128]
    assert isinstance(caught.value.__cause__, KeyError)
    assert isinstance(caught.value.__cause__.__context__, MemoryError)  # as Python chained it


def test_a_batch_size_by_hand_is_refused() -> None:
    said = r"^train was given a batch size, .*; leave it out: train\(model, rate\)$"
    with pytest.raises(TypeError, match=said):
        train(64, "m", 0.1)  # type: ignore[call-arg, arg-type]
    with pytest.raises(TypeError, match=said):
        train(batch_size=64, model="m")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'model'"):
        train()  # type: ignore[call-arg]


def test_what_decorates_a_function_may_take_and_add_arguments() -> None:
    """Wrappers of gin and hydra, which look like the function that they wrap, do this."""

    def configured(function: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(function)
        def call(*args: int, quiet: bool) -> int:
            return function(*args, rate=3 if quiet else 4)

        return call

    @resilient(starting_batch_size=8)
    @configured
    def work(batch_size: int, rate: int) -> int:
        return batch_size * rate

    assert work(quiet=True) == 24


def takes_nothing() -> None: ...


def takes_names(*, batch_size: int) -> None: ...


class OfAClass:
    def no_size(self) -> None: ...


@pytest.mark.parametrize(
    ("function", "example"),
    [
        (takes_nothing, r"def takes_nothing\(batch_size\)"),
        (takes_names, r"def takes_names\(batch_size\)"),
        (OfAClass.no_size, r"def no_size\(self, batch_size\)"),
    ],
)
def test_a_function_without_room_for_a_batch_size_is_refused(
    function: Callable[..., object], example: str
) -> None:
    with pytest.raises(
        TypeError, match=f"takes no argument that could be its batch size.*{example}"
    ):
        resilient(function)


async def coroutine(batch_size: int) -> int:
    await asyncio.sleep(0)
    return batch_size


def generator(batch_size: int) -> Iterator[int]:
    yield batch_size


async def async_generator(batch_size: int) -> AsyncIterator[int]:
    yield batch_size


class Async:
    async def __call__(self, batch_size: int) -> int:
        return batch_size


@pytest.mark.parametrize("function", [coroutine, generator, async_generator, Async()])
def test_a_body_that_runs_later_is_refused(function: Callable[..., object]) -> None:
    with pytest.raises(TypeError, match="its body runs after the call has returned"):
        resilient(function)
    with pytest.raises(TypeError, match="decorate the plain function that does one step"):
        resilient(starting_batch_size=2)(function)


def test_an_option_in_the_functions_place_is_refused() -> None:
    with pytest.raises(TypeError, match=r"@resilient\(starting_batch_size=512\)"):
        resilient(64)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"starting_batch_size": 0}, "starting_batch_size of items must be at least 1, not 0"),
        ({"smallest_batch_size": 0}, "smallest_batch_size of items must be at least 1"),
        ({"multiple_of": -8}, "multiple_of of items must be at least 1"),
        ({"failures_per_minute": 0}, "failures_per_minute of items must be at least 1"),
        (
            {"smallest_batch_size": 129},
            r"\(129\) must not be above its starting_batch_size \(128\)",
        ),
        ({"max_wait_s": -1.0}, "max_wait_s of items must be 0 or more seconds"),
        ({"max_wait_s": float("nan")}, "max_wait_s of items must be 0 or more seconds"),
    ],
)
def test_options_that_leave_nothing_to_try_are_refused(
    options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        resilient(items, **options)


@pytest.mark.parametrize("size", [64.0, "64", True, None])
def test_a_size_must_be_a_whole_number(size: object) -> None:
    with pytest.raises(TypeError, match="starting_batch_size of resilient must be a whole number"):
        resilient(starting_batch_size=size)


class Trainer:
    def __init__(self, fits: int) -> None:
        self.fits = fits

    @resilient(starting_batch_size=64)
    def step(self, batch_size: int, add: int = 0) -> int:
        return items(batch_size, self.fits) + add

    @classmethod
    @resilient(starting_batch_size=32)
    def of_the_class(cls, batch_size: int) -> tuple[type, int]:
        return cls, batch_size

    @staticmethod
    @resilient(starting_batch_size=32)
    def on_its_own(batch_size: int, add: int) -> int:
        return batch_size + add


class TestMethods:
    def test_the_object_comes_first_and_the_batch_size_second(self) -> None:
        assert Trainer(fits=100).step() == 64
        assert Trainer(fits=100).step(1) == 65
        assert Trainer.step(Trainer(fits=100), add=2) == 66

    def test_each_object_learns_for_itself_until_all_are_reset(self) -> None:
        small, large = Trainer(fits=10), Trainer(fits=100)
        size = small.step()
        assert size <= 10
        assert large.step() == 64
        assert Trainer.step.batch_size == 64, "of the last call"
        assert small.step() == size
        small.fits = 100
        small.step.reset()
        assert small.step() == 64

    def test_class_methods_and_static_methods_go_above(self) -> None:
        assert Trainer.of_the_class() == (Trainer, 32)
        assert Trainer(fits=1).on_its_own(1) == 33
        for kind in (staticmethod, classmethod):
            with pytest.raises(TypeError, match=f"put @{kind.__name__} above @resilient"):
                resilient(kind(items))

    def test_no_object_is_kept_alive(self) -> None:
        trainer = Trainer(fits=10)
        trainer.step()
        gone = weakref.ref(trainer)
        del trainer
        gc.collect()
        assert gone() is None
        later = [(Trainer(fits=10).step(), Trainer(fits=100).step())[1] for _ in range(5)]
        assert later == [64] * 5, "nor does one at its address know what it learned"

    def test_an_object_that_cannot_be_followed_shares_what_is_known(self) -> None:
        class Slotted:
            __slots__ = ()

            @resilient(starting_batch_size=64)
            def step(self, batch_size: int) -> int:
                return items(batch_size)

        assert Slotted().step() == Slotted().step() <= 10


#: Ray sends functions of the main script by value, with all objects to which they refer.
BY_VALUE = """
import sys
from ray import cloudpickle
from workers import resilient

@resilient(starting_batch_size=64)
def work(batch_size):
    return bytearray(2**60 if batch_size > 10 else batch_size)

work()
copy = cloudpickle.loads(cloudpickle.dumps(work))
assert copy is not work and copy.batch_size == work.batch_size
assert len(copy()) <= 10
"""


def test_a_function_of_the_main_script_travels_by_value(fork_server: ForkServer) -> None:
    done = fork_server.run(BY_VALUE, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_threads_may_share_a_function() -> None:
    results: list[int] = []

    def many() -> None:
        results.extend(work(fits=10) for _ in range(50))

    work = resilient(items, 64, failures_per_minute=1000)
    threads = [threading.Thread(target=many) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 400
    assert max(results) <= 10


#: In a fresh process, since here all of it has been imported already.
LAZY = """
import sys
import workers
assert not {"torch", "ray", "workers.resilience.decorator", "workers.resilience.adaptive_size"} & set(sys.modules)
assert {"resilient", "AdaptiveSize", "OutOfBatchError", "Retry"} <= set(dir(workers))
import workers.resilience.decorator, workers.resilience.adaptive_size
for _ in range(2):
    from workers import AdaptiveSize, resilient
    assert resilient is workers.resilient is workers.resilience.decorator.resilient
    assert AdaptiveSize is workers.resilience.adaptive_size.AdaptiveSize
assert not {"torch", "ray"} & set(sys.modules)
assert not hasattr(workers, "unheard_of")
"""


def test_importing_the_package_loads_nothing() -> None:
    done = python("-c", LAZY, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def fits(batch_size: int, most: int, tried: list[int]) -> str:
    tried.append(batch_size)
    if batch_size > most:
        raise RuntimeError(
            "CUDA out of memory. Tried to allocate 2.00 GiB"
        )  # as torch says it; no card is needed
    return f"trained with {batch_size}"


@pytest.mark.parametrize("decorated", [False, True])
def test_where_no_size_is_left_the_error_is_accelerates(decorated: bool) -> None:
    tried: list[int] = []
    if decorated:
        train = find_executable_batch_size(starting_batch_size=16)(fits)
    else:
        train = find_executable_batch_size(fits, 16)
    with pytest.raises(
        RuntimeError, match=r"No executable batch size found, reached zero\.$"
    ) as caught:
        train(0, tried)
    assert isinstance(caught.value, OutOfBatchError)
    assert tried[-1] == 1
    assert caught.value.tried == tuple(tried)
    # It is not final: memory may be free later.
    assert train(1, tried) == "trained with 1"
