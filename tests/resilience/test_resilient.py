"""`resilient` under a real cap: after a refusal, memory is freed before the next attempt."""

from __future__ import annotations

import gc
import inspect
import json
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.in_child import InChild
from tests.scene import MIB, ROOT, spec_of, vm_data_bytes
from workers import OutOfBatchError, Retry, resilient
from workers.devices.cpu import CpuDevice
from workers.resilience.attempts import Attempts, RetryRules
from workers.settings import WorkerSpec

Found: TypeAlias = dict[str, Any]

BUDGET_BYTES = 160 * MIB


def block(size_mib: int) -> torch.Tensor:
    return torch.empty(size_mib * MIB, dtype=torch.uint8)


class Clock:
    """A clock that advances a little at each reading, and by each sleep."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept_s = 0.0

    def __call__(self) -> float:
        self.now_s += 0.001
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.slept_s += seconds


def attempts_of(clock: Clock, starting: int, **rules: Any) -> Attempts:
    return Attempts(
        RetryRules(
            name="work", starting_batch_size=starting, clock=clock, sleep=clock.sleep, **rules
        )
    )


def two_calls(spec: WorkerSpec) -> Found:
    device = CpuDevice(spec)
    told: list[Retry] = []

    @resilient(starting_batch_size=512, on_retry=told.append)
    def work(batch_size: int) -> int:
        return block(batch_size).nbytes // MIB

    with device.enforced():
        first = work()
        failures = len(told)
        second = work()
    return {
        "cap": device.info.cap_bytes,
        "told": told,
        "failures": failures,
        "first": first,
        "second": second,
    }


def test_it_shrinks_to_what_fits_and_the_next_call_begins_there(in_child: InChild) -> None:
    found = in_child(two_calls, spec_of(budget_bytes=BUDGET_BYTES))
    fits = found["cap"] // MIB
    assert 0.45 * fits <= found["first"] <= fits
    assert found["told"][0].batch_size == 512
    assert all(
        "DefaultCPUAllocator: can't allocate memory" in retry.reason for retry in found["told"]
    )
    assert found["failures"] == len(found["told"]) > 0, "the second call did not fail"
    assert found["second"] >= found["first"]


class Model:
    """Holds memory and a reference to itself, so that only the garbage collector can free it."""

    def __init__(self, size_mib: int) -> None:
        self.weights = block(size_mib)
        self.myself = self


def held_at_each_attempt(spec: WorkerSpec, starting: int, smallest: int) -> Found:
    gc.disable()  # so that only the recovery collects
    device = CpuDevice(spec)
    models: list[weakref.ref[Model]] = []
    seen: list[tuple[int, int]] = []

    def held() -> tuple[int, int]:
        return sum(model() is not None for model in models), (vm_data_bytes() - opened_bytes) // MIB

    @resilient(starting_batch_size=starting, smallest_batch_size=smallest)
    def work(batch_size: int) -> int:
        seen.append(held())
        model = Model(60)
        models.append(weakref.ref(model))
        return model.weights.nbytes // MIB + block(batch_size).nbytes // MIB

    with device.enforced():
        opened_bytes = vm_data_bytes()
        try:
            return {"got": work(), "seen": seen, "cap": device.info.cap_bytes // MIB}
        except OutOfBatchError as error:
            return {"tried": error.tried, "kept": held()}


def test_memory_of_a_failed_attempt_is_released_before_the_next(in_child: InChild) -> None:
    """This fails if the recovery is inside the handler, whose traceback keeps the model alive."""
    found = in_child(held_at_each_attempt, spec_of(budget_bytes=BUDGET_BYTES), 200, 1)
    assert len(found["seen"]) >= 2
    assert all(alive == 0 for alive, _ in found["seen"])
    assert all(held_mib <= 1 for _, held_mib in found["seen"])
    assert 60 < found["got"] <= found["cap"]


def test_the_final_error_keeps_nothing_alive(in_child: InChild) -> None:
    found = in_child(held_at_each_attempt, spec_of(budget_bytes=BUDGET_BYTES), 600, 300)
    assert found["tried"][0] == 600
    assert found["tried"][-1] == 300
    assert found["kept"] == (0, 0)


def to_the_last_byte(spec: WorkerSpec) -> list[int]:
    device = CpuDevice(spec)
    tried: list[int] = []

    @resilient(starting_batch_size=4)
    def work(batch_size: int) -> int:
        tried.append(batch_size)
        kept: object = None
        # Small things as well as large ones, and no list that would be refused first: little is
        # left to judge it with.
        for size in (MIB, 64 * 1024, 4096, *range(512, 0, -16)):
            try:
                while batch_size > 1:
                    kept = (bytes(size), kept)
            except MemoryError:
                continue
        while batch_size > 1:
            kept = (kept,)
        return batch_size

    with device.enforced():
        work()
    return tried


def test_it_survives_when_python_has_nothing_left_either(in_child: InChild) -> None:
    tried = in_child(to_the_last_byte, spec_of(budget_bytes=BUDGET_BYTES))
    assert tried[0] == 4
    assert tried[-1] == 1


def room_comes_back(spec: WorkerSpec) -> Found:
    device = CpuDevice(spec)
    clock = Clock()
    attempts = attempts_of(clock, 256)

    def work(batch_size: int) -> int:
        clock.now_s += 1.0
        return block(batch_size).nbytes // MIB

    with device.enforced():
        others = block(90)
        crowded = [attempts.run(work) for _ in range(100)]
        del others
        alone = [attempts.run(work) for _ in range(200)]
    return {"crowded": crowded[-1], "alone": alone[-1], "cap": device.info.cap_bytes // MIB}


def test_it_grows_back_when_memory_returns(in_child: InChild) -> None:
    found = in_child(room_comes_back, spec_of(budget_bytes=BUDGET_BYTES))
    assert found["crowded"] <= found["cap"] - 90
    assert 0.9 * found["cap"] <= found["alone"] <= found["cap"]


def refused_above(
    fits: int, clock: Clock, failed_at_s: list[float], tried: list[int] | None = None
) -> Callable[[int], int]:
    """Return a function that requests 1 EiB, which Python refuses, if the size is above `fits`."""

    def work(batch_size: int) -> int:
        if tried is not None:
            tried.append(batch_size)
        if batch_size > fits:
            failed_at_s.append(clock.now_s)
            bytearray(2**60)
        return batch_size

    return work


@given(
    starting=st.integers(1, 100_000),
    smallest_share=st.floats(0, 1),
    multiple_of=st.integers(1, 64),
    failures_per_minute=st.integers(1, 10),
    fits=st.lists(st.integers(0, 100_000), min_size=1, max_size=4),
)
def test_every_call_ends_with_a_size_that_fits(
    starting: int,
    smallest_share: float,
    multiple_of: int,
    failures_per_minute: int,
    fits: list[int],
) -> None:
    clock = Clock()
    smallest = max(1, int(smallest_share * starting))
    tried: list[int] = []
    attempts = attempts_of(
        clock,
        starting,
        smallest_batch_size=smallest,
        multiple_of=multiple_of,
        failures_per_minute=failures_per_minute,
    )
    for room in fits:  # calls one after the other, while free memory changes
        slept_s, failed_at_s = clock.slept_s, list[float]()
        work = refused_above(room, clock, failed_at_s, tried)
        if room < smallest:
            with pytest.raises(OutOfBatchError) as caught:
                attempts.run(work)
            assert caught.value.tried[-1] == smallest
        else:
            size = attempts.run(work)
            assert smallest <= size <= min(room, starting)
        assert clock.slept_s - slept_s <= 120.0
        assert len(failed_at_s) <= 64
    assert tried[0] == starting
    assert all(size in {smallest, starting} or size % multiple_of == 0 for size in tried)


def test_without_patience_the_smallest_size_is_the_last_resort() -> None:
    clock, failed_at_s = Clock(), list[float]()
    attempts = attempts_of(clock, 1000, failures_per_minute=2, max_wait_s=0.0)
    assert attempts.run(refused_above(100, clock, failed_at_s)) == 1
    assert (len(failed_at_s), clock.slept_s) == (2, 0.0)


def test_a_call_that_waits_says_so(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    attempts_of(clock, 1000, failures_per_minute=2).run(refused_above(100, clock, []))
    assert "work waits for memory, 120 s at the most: " in caplog.text
    assert 0 < clock.slept_s <= 120


DOCUMENT = ROOT / "docs" / "resilient.md"


def example(spec: WorkerSpec, source: str) -> Found:
    device = CpuDevice(spec)
    scope: Found = {}
    with device.enforced():
        exec(source, scope)  # noqa: S102 - our own document
    return {
        name: value for name, value in scope.items() if isinstance(value, int | float | list)
    } | {"train": getattr(scope.get("train"), "batch_size", None)}


class TestDocument:
    @pytest.fixture(scope="module")
    @staticmethod
    def examples() -> list[str]:
        return re.findall(
            r"^```python\n(.*?)^```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
        )

    def test_the_function_survives(self, examples: list[str], in_child: InChild) -> None:
        found = in_child(example, spec_of(budget_bytes=BUDGET_BYTES), examples[0])
        assert 1024 <= found["train"] < 16384
        assert found["loss"] < 2.0

    def test_the_loop_does_all_its_work(self, examples: list[str], in_child: InChild) -> None:
        found = in_child(example, spec_of(budget_bytes=BUDGET_BYTES), examples[1])
        assert sum(found["steps"]) == 20_000
        assert max(found["steps"]) > found["steps"][0]

    def test_every_option_is_in_the_table(self) -> None:
        document = DOCUMENT.read_text(encoding="utf-8")
        options = inspect.signature(resilient).parameters
        for name, parameter in list(options.items())[1:]:
            default = (
                f"{parameter.default:g}"
                if isinstance(parameter.default, float)
                else str(parameter.default)
            )
            assert re.search(rf"^\| `{name}` \| `?{default}`? \|", document, re.MULTILINE), name


class TestRemembering:
    def test_a_second_process_begins_at_the_learned_size(self, in_child: InChild) -> None:
        first = in_child(remembered, spec_of(budget_bytes=BUDGET_BYTES), True)
        second = in_child(remembered, spec_of(budget_bytes=BUDGET_BYTES), True)
        assert first[0] == 512
        assert second == first[-1:]

    def test_nothing_is_kept_unless_asked_for(self, state_dir: Path, in_child: InChild) -> None:
        assert in_child(remembered, spec_of(budget_bytes=BUDGET_BYTES), False)[0] == 512
        assert list(state_dir.iterdir()) == []

    def test_a_name_of_ones_own(self, state_dir: Path) -> None:
        tried: list[int] = []
        work = refused_above(10, Clock(), [], tried)
        resilient(work, 64, remember="my job")()
        ((name, limit),) = json.loads((state_dir / "limits.json").read_bytes()).items()
        assert (name.endswith(" my job"), limit["learned"]["size"]) == (True, tried[-1])
        fresh = resilient(work, 64, remember="my job")
        fresh()
        assert tried[-1] == tried[-2]
        assert tried.count(64) == 1
        fresh.reset()
        fresh()
        assert tried.count(64) == 2
        resilient(work, 64, remember="another job")()
        assert tried.count(64) == 3


def remembered(spec: WorkerSpec, remember: bool) -> list[int]:
    device = CpuDevice(spec)
    tried: list[int] = []

    @resilient(starting_batch_size=512, remember=remember)
    def work(batch_size: int) -> None:
        tried.append(batch_size)
        block(batch_size)

    with device.enforced():
        work()
    return tried
