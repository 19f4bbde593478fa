"""`resilient` under a real cap: the kernel refuses, torch raises, and memory comes back before the next attempt."""

from __future__ import annotations

import gc
import inspect
import re
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers import OutOfBatchError, Retry, resilient
from workers.devices.cpu import CpuDevice
from workers.learned_limits.store import LimitStore
from workers.resilience.batches import Rules
from workers.resilience.card_memory import Peak, look
from workers.resilience.retry import Attempts
from workers.settings import WorkerSpec

InChild: TypeAlias = Callable[..., Any]
MakeSpec: TypeAlias = Callable[..., WorkerSpec]
Found: TypeAlias = dict[str, Any]

MIB = 2**20
BUDGET_BYTES = 160 * MIB


@pytest.fixture(autouse=True, scope="module")
def _collect_only_what_is_new() -> Iterator[None]:
    """Each recovery collects garbage, and all that torch has loaded makes it a long search."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def vm_data_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData:"))


def block(size_mib: int) -> torch.Tensor:
    return torch.empty(size_mib * MIB, dtype=torch.uint8)


class Clock:
    """A clock that goes on by itself a little whenever it is looked at, and by all that is slept."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.slept_s = 0.0

    def __call__(self) -> float:
        self.now_s += 0.001
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.slept_s += seconds


# --- shrinking under the cap -------------------------------------------------------------------------------------


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
    return {"cap": device.info.cap_bytes, "told": told, "failures": failures, "first": first, "second": second}


class TestShrinking:
    @pytest.fixture(scope="module")
    @staticmethod
    def found(in_child: InChild, make_spec: MakeSpec) -> Found:
        return in_child(two_calls, make_spec(budget_bytes=BUDGET_BYTES))

    def test_it_ends_at_a_size_that_fits_and_is_no_less_than_half_of_what_would(self, found: Found) -> None:
        fits = found["cap"] // MIB
        assert 0.45 * fits <= found["first"] <= fits

    def test_the_failures_were_torchs_own(self, found: Found) -> None:
        assert found["told"][0].batch_size == 512
        assert all("DefaultCPUAllocator: can't allocate memory" in retry.reason for retry in found["told"])

    def test_the_second_call_begins_there_without_a_failure(self, found: Found) -> None:
        assert found["failures"] == len(found["told"]) > 0
        assert found["second"] >= found["first"]


# --- what a failed attempt held is gone before the next one begins -----------------------------------------------


class Model:
    """Holds memory and, like many a model, itself: only the collector finds that it is garbage."""

    def __init__(self, size_mib: int) -> None:
        self.weights = block(size_mib)
        self.myself = self


def held_at_each_attempt(spec: WorkerSpec) -> Found:
    gc.disable()  # nobody else shall tidy up
    device = CpuDevice(spec)
    models: list[weakref.ref[Model]] = []
    seen: list[tuple[int, int]] = []

    @resilient(starting_batch_size=200)
    def work(batch_size: int) -> int:
        alive = sum(model() is not None for model in models)
        seen.append((alive, (vm_data_bytes() - opened_bytes) // MIB))
        model = Model(60)
        models.append(weakref.ref(model))
        return model.weights.nbytes // MIB + block(batch_size).nbytes // MIB

    with device.enforced():
        opened_bytes = vm_data_bytes()
        got = work()
    return {"seen": seen, "got": got, "cap": device.info.cap_bytes // MIB}


def test_memory_of_a_failed_attempt_is_released_before_the_next(in_child: InChild, make_spec: MakeSpec) -> None:
    """Fails if the recovery happens inside the handler: there the traceback keeps the frames, and they the model."""
    found = in_child(held_at_each_attempt, make_spec(budget_bytes=BUDGET_BYTES))
    assert len(found["seen"]) >= 2
    assert all(alive == 0 for alive, _ in found["seen"])
    assert all(held_mib <= 1 for _, held_mib in found["seen"])
    assert 60 < found["got"] <= found["cap"]


def nothing_fits(spec: WorkerSpec) -> Found:
    gc.disable()
    device = CpuDevice(spec)
    models: list[weakref.ref[Model]] = []

    @resilient(starting_batch_size=600, smallest_batch_size=300)
    def work(batch_size: int) -> None:
        model = Model(60)
        models.append(weakref.ref(model))
        block(batch_size)

    with device.enforced():
        opened_bytes = vm_data_bytes()
        try:
            work()
        except OutOfBatchError as error:
            alive = sum(model() is not None for model in models)
            return {"tried": error.tried, "alive": alive, "held": (vm_data_bytes() - opened_bytes) // MIB}
    raise AssertionError("there was room for 300 MiB")


def test_the_final_error_keeps_nothing_alive(in_child: InChild, make_spec: MakeSpec) -> None:
    found = in_child(nothing_fits, make_spec(budget_bytes=BUDGET_BYTES))
    assert found["tried"][0] == 600
    assert found["tried"][-1] == 300
    assert (found["alive"], found["held"]) == (0, 0)


def to_the_last_byte(spec: WorkerSpec) -> list[int]:
    device = CpuDevice(spec)
    tried: list[int] = []

    @resilient(starting_batch_size=4)
    def work(batch_size: int) -> int:
        tried.append(batch_size)
        kept: object = None
        # Small things as well as large ones, and no list that would be refused first: little is left to judge it with.
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


def test_it_survives_when_python_has_nothing_left_either(in_child: InChild, make_spec: MakeSpec) -> None:
    tried = in_child(to_the_last_byte, make_spec(budget_bytes=BUDGET_BYTES))
    assert tried[0] == 4
    assert tried[-1] == 1


def one_in_the_other(spec: WorkerSpec) -> Found:
    device = CpuDevice(spec)
    sizes: list[tuple[int, int]] = []

    @resilient(starting_batch_size=128, smallest_batch_size=64)
    def inner(batch_size: int) -> int:
        return block(batch_size).nbytes // MIB

    @resilient(starting_batch_size=140)
    def outer(batch_size: int) -> None:
        held = block(batch_size)
        sizes.append((held.nbytes // MIB, inner()))

    with device.enforced():
        outer()
    return {"sizes": sizes, "cap": device.info.cap_bytes // MIB}


def test_an_inner_function_that_finds_no_size_makes_the_outer_one_smaller(
    in_child: InChild, make_spec: MakeSpec
) -> None:
    found = in_child(one_in_the_other, make_spec(budget_bytes=BUDGET_BYTES))
    ((outer, inner),) = found["sizes"]
    assert inner >= 64
    assert outer + inner <= found["cap"]


# --- growing back ------------------------------------------------------------------------------------------------


def room_comes_back(spec: WorkerSpec) -> Found:
    device = CpuDevice(spec)
    clock = Clock()
    attempts = Attempts(Rules(name="work", starting_batch_size=256, clock=clock, sleep=clock.sleep))

    def work(batch_size: int) -> int:
        clock.now_s += 1.0
        return block(batch_size).nbytes // MIB

    with device.enforced():
        others = block(90)
        crowded = [attempts.run(work) for _ in range(100)]
        del others
        alone = [attempts.run(work) for _ in range(200)]
    return {"crowded": crowded[-1], "alone": alone[-1], "cap": device.info.cap_bytes // MIB}


def test_it_grows_back_when_memory_returns(in_child: InChild, make_spec: MakeSpec) -> None:
    found = in_child(room_comes_back, make_spec(budget_bytes=BUDGET_BYTES))
    assert found["crowded"] <= found["cap"] - 90
    assert 0.9 * found["cap"] <= found["alone"] <= found["cap"]


# --- a call ends, and does not fail too often --------------------------------------------------------------------


def refused_above(fits: int, clock: Clock, failed_at_s: list[float]) -> Callable[[int], int]:
    """Make a function that Python refuses an exbibyte if the size is above `fits`."""

    def work(batch_size: int) -> int:
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
def test_every_call_ends_with_a_size_that_fits_if_the_smallest_does(
    starting: int, smallest_share: float, multiple_of: int, failures_per_minute: int, fits: list[int]
) -> None:
    clock = Clock()
    smallest = max(1, int(smallest_share * starting))
    rules = Rules(
        name="work",
        starting_batch_size=starting,
        smallest_batch_size=smallest,
        multiple_of=multiple_of,
        failures_per_minute=failures_per_minute,
        clock=clock,
        sleep=clock.sleep,
    )
    attempts = Attempts(rules)
    for room in fits:  # calls one after the other, as memory comes and goes
        slept_s, failed_at_s = clock.slept_s, list[float]()
        work = refused_above(room, clock, failed_at_s)
        if room < smallest:
            with pytest.raises(OutOfBatchError) as caught:
                attempts.run(work)
            assert caught.value.tried[-1] == smallest
        else:
            size = attempts.run(work)
            assert smallest <= size <= min(room, starting)
            assert size in {smallest, starting} or size % multiple_of == 0
        assert clock.slept_s - slept_s <= rules.max_wait_s
        assert len(failed_at_s) <= 64


@given(starting=st.integers(64, 100_000), failures_per_minute=st.integers(1, 6), calls=st.integers(1, 5))
def test_failures_are_rationed(starting: int, failures_per_minute: int, calls: int) -> None:
    clock = Clock()
    rules = Rules(
        name="work",
        starting_batch_size=starting,
        failures_per_minute=failures_per_minute,
        max_wait_s=3600.0,
        clock=clock,
        sleep=clock.sleep,
    )
    attempts, failed_at_s = Attempts(rules), list[float]()
    for call in range(calls):
        assert attempts.run(refused_above(64 >> call, clock, failed_at_s)) <= 64
    for first, last in zip(failed_at_s, failed_at_s[failures_per_minute:], strict=False):
        assert last - first >= 59.9


def test_who_calls_again_after_the_final_error_does_not_wait() -> None:
    """He may have made room, as an outer resilient function does."""
    clock, failed_at_s = Clock(), list[float]()
    attempts = Attempts(Rules(name="work", starting_batch_size=2, clock=clock, sleep=clock.sleep))
    with pytest.raises(OutOfBatchError):
        attempts.run(refused_above(0, clock, failed_at_s))
    assert attempts.run(refused_above(1, clock, failed_at_s)) == 1
    assert clock.slept_s == 0.0


def test_who_calls_again_and_again_waits_for_the_allowance() -> None:
    clock, failed_at_s = Clock(), list[float]()
    rules = Rules(name="work", starting_batch_size=1, failures_per_minute=3, clock=clock, sleep=clock.sleep)
    attempts = Attempts(rules)
    for _ in range(12):
        with pytest.raises(OutOfBatchError):
            attempts.run(refused_above(0, clock, failed_at_s))
    assert all(later - first >= 59.9 for first, later in zip(failed_at_s, failed_at_s[3:], strict=False))


def test_without_patience_the_smallest_size_is_the_last_resort() -> None:
    clock = Clock()
    rules = Rules(
        name="work",
        starting_batch_size=1000,
        failures_per_minute=2,
        max_wait_s=0.0,
        clock=clock,
        sleep=clock.sleep,
    )
    failed_at_s: list[float] = []
    assert Attempts(rules).run(refused_above(100, clock, failed_at_s)) == 1
    assert (len(failed_at_s), clock.slept_s) == (2, 0.0)


def test_a_call_that_waits_says_so(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    rules = Rules(name="work", starting_batch_size=1000, failures_per_minute=2, clock=clock, sleep=clock.sleep)
    Attempts(rules).run(refused_above(100, clock, []))
    assert "work waits for memory, 120 s at the most: " in caplog.text
    assert 0 < clock.slept_s <= 120


# --- the document --------------------------------------------------------------------------------------------------


def example(spec: WorkerSpec, source: str) -> Found:
    device = CpuDevice(spec)
    scope: Found = {}
    with device.enforced():
        exec(source, scope)  # noqa: S102 - our own document
    return {name: value for name, value in scope.items() if isinstance(value, int | float | list)} | {
        "train": getattr(scope.get("train"), "batch_size", None)
    }


class TestDocument:
    @pytest.fixture(scope="module")
    @staticmethod
    def examples() -> list[str]:
        document = Path(__file__).parents[2] / "docs" / "resilient.md"
        return re.findall(r"^```python\n(.*?)^```", document.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)

    def test_the_function_survives(self, examples: list[str], in_child: InChild, make_spec: MakeSpec) -> None:
        found = in_child(example, make_spec(budget_bytes=BUDGET_BYTES), examples[0])
        assert 1024 <= found["train"] < 16384
        assert found["loss"] < 2.0

    def test_the_loop_does_all_its_work(self, examples: list[str], in_child: InChild, make_spec: MakeSpec) -> None:
        found = in_child(example, make_spec(budget_bytes=BUDGET_BYTES), examples[1])
        assert sum(found["steps"]) == 20_000
        assert max(found["steps"]) > found["steps"][0]

    def test_every_option_is_in_the_table(self) -> None:
        document = (Path(__file__).parents[2] / "docs" / "resilient.md").read_text(encoding="utf-8")
        options = inspect.signature(resilient).parameters
        for name, parameter in list(options.items())[1:]:
            default = f"{parameter.default:g}" if isinstance(parameter.default, float) else str(parameter.default)
            assert re.search(rf"^\| `{name}` \| `?{default}`? \|", document, re.MULTILINE), name


# --- signals and memory across processes -------------------------------------------------------------------------


def test_where_there_is_no_card_there_is_nothing_to_measure() -> None:
    if torch.cuda.is_initialized():
        pytest.skip("this process uses a card")
    assert look() is None
    with Peak(None) as peak:
        block(1)
    assert peak.bytes is None


class TestRemembering:
    @pytest.fixture
    @staticmethod
    def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LimitStore:
        monkeypatch.setenv("ORCHESTRATOR_STATE_DIR", str(tmp_path / "state"))
        return LimitStore()

    def test_a_second_process_begins_at_the_learned_size_without_a_failure(
        self, store: LimitStore, in_child: InChild, make_spec: MakeSpec
    ) -> None:
        first = in_child(remembered, make_spec(budget_bytes=BUDGET_BYTES), True)
        second = in_child(remembered, make_spec(budget_bytes=BUDGET_BYTES), True)
        assert first[0] == 512
        assert second == first[-1:]

    def test_nothing_is_kept_unless_asked_for(self, store: LimitStore, in_child: InChild, make_spec: MakeSpec) -> None:
        assert in_child(remembered, make_spec(budget_bytes=BUDGET_BYTES), False)[0] == 512
        assert not store.path.parent.exists()

    def test_a_name_of_ones_own(self, store: LimitStore) -> None:
        tried: list[int] = []

        def work(batch_size: int) -> None:
            tried.append(batch_size)
            if batch_size > 10:
                bytearray(2**60)

        resilient(work, 64, remember="my job")()
        (limit,) = store.all(_now_unix_s(store))
        assert (limit.key.workload, limit.learned.size) == ("my job", tried[-1])
        fresh = resilient(work, 64, remember="my job")
        fresh()
        assert tried[-1] == tried[-2]
        assert tried.count(64) == 1
        fresh.reset()
        fresh()
        assert tried.count(64) == 2
        resilient(work, 64, remember="another job")()
        assert tried.count(64) == 3

    def test_a_size_that_no_longer_holds_is_only_where_it_begins(self, store: LimitStore) -> None:
        resilient(lambda batch_size: batch_size, 64, remember="my job")()
        work = resilient(lambda batch_size: bytearray(2**60 if batch_size > 10 else 1), 64, remember="my job")
        work()
        assert work.batch_size is not None
        assert work.batch_size <= 10

    def test_a_store_that_cannot_be_written_is_told_once(
        self, store: LimitStore, caplog: pytest.LogCaptureFixture
    ) -> None:
        store.path.parent.mkdir()
        store.path.mkdir()
        work = resilient(lambda batch_size: batch_size, 64, remember="my job")
        assert [work(), work()] == [64, 64]
        assert caplog.text.count("learned limits cannot be") == 1


def _now_unix_s(store: LimitStore) -> float:
    return store.path.stat().st_mtime


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
