"""The engine on a real card: caps, real out-of-memory, a poisoned context. Needs torch, psutil, NVML and pytest alone.

    python -m pytest tests/gpu          # where the project is installed; from a bare checkout:
    python -m pytest -c /dev/null --rootdir . --confcutdir tests/gpu --import-mode=importlib
    tests/gpu

Every scenario runs in a process of its own: a cap stays with its process, and a poisoned context
too. The process of the tests itself never makes a context, so that it holds nothing of the card.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

import pytest
import torch

from tests.engine.scene import begun, events, own, turn, turns
from tests.gpu.scene import BUDGET_BYTES, ON_A_CARD, spec_of
from tests.scene import MIB
from workers import oom
from workers.messages import Cause, ResumeState, Status, Verdict, WorkerState
from workers.settings import FailureKind, WorkerSpec
from workers.workloads.base import StepResult, Workload, WorkloadContext
from workers.workloads.matmul import Matmul, matrix_bytes

pytestmark = ON_A_CARD

Found: TypeAlias = dict[str, Any]

#: The caching allocator maps large blocks in multiples of this.
SEGMENT_BYTES = 2 * MIB


# --- the wall


def up_to_the_wall(spec: WorkerSpec) -> Found:
    from workers.devices.cuda import CudaDevice

    device = CudaDevice(spec)
    free_bytes = device.free_bytes()
    fraction = torch.cuda.get_per_process_memory_fraction(0)
    blocks = []
    failure = None
    while failure is None:
        try:
            blocks.append(torch.empty(8 * SEGMENT_BYTES, dtype=torch.uint8, device="cuda"))
        except RuntimeError as error:
            failure = oom.classify(error)
    before = (
        torch.cuda.memory_reserved(),
        torch.cuda.memory_allocated(),
        device.memory().alloc_retries,
    )
    for _ in range(20):
        device.emergency()
    after = (
        torch.cuda.memory_reserved(),
        torch.cuda.memory_allocated(),
        device.memory().alloc_retries,
    )
    memory = device.memory()
    del blocks
    device.release()
    torch.cuda.synchronize()
    return {
        "info": device.info,
        "fraction": fraction,
        "free_bytes": free_bytes,
        "failure": failure,
        "before": before,
        "after": after,
        "memory": memory,
        "reserved_after_release_bytes": torch.cuda.memory_reserved(),
        "free_again_bytes": device.free_bytes(),
    }


@pytest.fixture(scope="module")
def wall(in_child: Callable[..., Any]) -> Found:
    found: Found = in_child(up_to_the_wall, spec_of())
    return found


class TestWall:
    def test_the_cap_is_the_budget_less_the_context(self, wall: Found) -> None:
        info = wall["info"]
        assert info.cap_bytes + info.context_bytes == pytest.approx(BUDGET_BYTES, rel=0.01)

    def test_blocks_are_granted_up_to_the_cap_and_no_further(self, wall: Found) -> None:
        reserved_bytes, _, _ = wall["before"]
        assert (
            0.99 * wall["info"].cap_bytes - 8 * SEGMENT_BYTES
            <= reserved_bytes
            <= wall["info"].cap_bytes
        )

    def test_the_refusal_is_definite(self, wall: Found) -> None:
        assert wall["failure"].kind is FailureKind.DEFINITE
        assert "OutOfMemoryError" in wall["failure"].evidence

    def test_the_emergency_product_takes_nothing(self, wall: Found) -> None:
        assert wall["after"] == wall["before"]

    def test_what_it_reports_at_the_wall(self, wall: Found) -> None:
        memory = wall["memory"]
        assert memory.free_bytes <= 64 * MIB  # gaps in the allocator's small segments count as free
        assert memory.allocated_bytes <= memory.reserved_bytes <= wall["info"].cap_bytes
        assert memory.peak_bytes >= memory.allocated_bytes

    def test_everything_comes_back(self, wall: Found) -> None:
        # What stays is the emergency product's and cuBLAS's workspace.
        assert wall["reserved_after_release_bytes"] <= 128 * MIB
        assert wall["free_again_bytes"] >= wall["free_bytes"] - 8 * SEGMENT_BYTES


# --- the engine


def too_large(spec: WorkerSpec, resume: ResumeState | None) -> Found:
    engine = begun(spec, resume=resume)
    statuses = [turn(engine), turn(engine, duration_s=5.0)]  # the ring is filled in stages
    return {
        "statuses": statuses,
        "reserved_bytes": torch.cuda.memory_reserved(),
        "most_allocated_bytes": int(torch.cuda.memory_stats()["allocated_bytes.all.peak"]),
        "allocated_bytes": torch.cuda.memory_allocated(),
    }


@pytest.fixture(scope="module")
def shrunk(in_child: Callable[..., Any]) -> Found:
    found: Found = in_child(too_large, spec_of(size=65536), None)
    return found


class TestTooLarge:
    """65536 in fp16 needs 24 GiB for three matrices; 3.30 GiB are there."""

    def test_it_ends_running_at_the_size_of_the_formula(self, shrunk: Found) -> None:
        first, second = shrunk["statuses"]
        failures = next(
            count
            for count in itertools.count()
            if 3 * matrix_bytes(int(65536 * 0.7**count), torch.float16) <= first.claim_bytes
        )
        for status in (first, second):
            assert status.verdict is Verdict.OK
            assert status.state is WorkerState.RUNNING
            assert status.size == int(65536 * 0.7**failures)
            assert status.batch == max(32, 128 - 16 * failures)
        assert failures >= 3
        # One failure may be forgiven: where a size only just does not fit, it is tried once more.
        assert first.counts.steps_oom in {failures, failures + 1}
        assert (first.counts.steps_ok, first.counts.steps_error, first.error) == (1, 0, None)

    def test_every_failure_was_the_cards_own(self, shrunk: Found) -> None:
        first = shrunk["statuses"][0]
        ooms = events(first, "oom")
        assert len(ooms) == first.counts.steps_oom
        assert {event.detail["kind"] for event in ooms} == {"definite"}
        assert all("out of memory" in str(event.detail["text"]) for event in ooms)
        assert first.counts.emergency_count >= first.counts.steps_oom

    def test_the_ring_holds_what_it_was_given(self, shrunk: Found) -> None:
        status = shrunk["statuses"][1]
        cap_bytes = status.device.cap_bytes
        assert status.claim_bytes >= 0.95 * cap_bytes
        assert (
            0.95 * cap_bytes <= shrunk["allocated_bytes"] <= shrunk["reserved_bytes"] <= cap_bytes
        )
        assert 0.95 * cap_bytes <= shrunk["most_allocated_bytes"] <= cap_bytes

    def test_another_process_resumes_without_a_failure(
        self, in_child: Callable[..., Any], shrunk: Found
    ) -> None:
        learned = shrunk["statuses"][0]
        resumed = in_child(too_large, spec_of(size=65536), learned.resume)["statuses"][0]
        assert (resumed.size, resumed.batch) == (learned.size, learned.batch)
        assert (resumed.counts.oom_count, resumed.counts.steps_ok) == (0, 1)


# --- a broken context


class Asserting(Workload):
    """Reads past the end of a tensor on the card, from the second step on."""

    steps: ClassVar[int] = 0

    def step(self, size: int, batch: int) -> StepResult:
        Asserting.steps += 1
        table = torch.zeros(4, device=self.context.device)
        index = torch.tensor([0 if Asserting.steps == 1 else 1_000_000], device=self.context.device)
        table[index].sum()
        return StepResult()

    def release(self) -> None:
        """Nothing is kept."""


def asserting(spec: WorkerSpec) -> Found:
    return {"statuses": turns(spec, [{}] * 4), "steps": Asserting.steps}


def test_a_device_assert_poisons_the_process_for_good(in_child: Callable[..., Any]) -> None:
    found = in_child(asserting, spec_of(name=own(Asserting)))
    good, *bad = found["statuses"]
    assert good.verdict is Verdict.OK
    for status in bad:
        assert status.verdict is Verdict.CONTEXT_CORRUPTED
        assert status.verdict_cause is Cause.EXCEPTION, "the card is well"
        assert status.state is WorkerState.STOPPED
        assert "device-side assert" in status.reason
        assert status.resume == good.resume
    assert found["steps"] == 2, "nothing touched the broken context again"


# --- element types


def products(spec: WorkerSpec) -> float:
    """Return the largest error of one product relative to the largest element."""
    from workers.devices.cuda import CudaDevice

    device = CudaDevice(spec)
    workload = Matmul(WorkloadContext(device=device.torch_device, dtype=device.torch_dtype, seed=3))
    workload.hold(64 * MIB)
    for _ in range(3):
        workload.step(1024, 1)
    tensors = workload._tensors
    assert tensors is not None
    left, right = tensors._left.cpu().double(), tensors._right.cpu().double()
    reference = left @ right
    written = [result.cpu().double() for result in tensors._ring[:3]]
    return max(
        float((result - reference).abs().max() / reference.abs().max()) for result in written
    )


@pytest.fixture(scope="module")
def errors(in_child: Callable[..., Any]) -> dict[str, float]:
    return {dtype: in_child(products, spec_of(dtype=dtype)) for dtype in ("fp32", "tf32")}


def test_tf32_is_really_used_where_there_is_one(errors: dict[str, float]) -> None:
    """That products are right is for the checks of `test_card.py`."""
    assert errors["fp32"] < 1e-5
    name, *_ = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.cuda.get_device_capability()[0])"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    if int(name) < 8:
        pytest.skip("tf32 begins with Ampere")
    assert 10 * errors["fp32"] < errors["tf32"] <= 2e-3, (
        "as precise as fp32: it was not switched on"
    )


# --- what cannot work


def first_turn(spec: WorkerSpec) -> Status:
    return turn(begun(spec))


def test_a_budget_that_the_context_eats_names_the_key(in_child: Callable[..., Any]) -> None:
    status = in_child(first_turn, spec_of(budget_bytes=120 * MIB))
    assert (status.verdict, status.verdict_cause) == (Verdict.INCOMPATIBLE, Cause.OUT_OF_MEMORY)
    assert "nodes.pc1.vram_per_worker_gib" in status.reason


def test_budgets_beyond_the_real_card_are_refused_with_the_sum(
    in_child: Callable[..., Any],
) -> None:
    status = in_child(first_turn, spec_of(budget_bytes=2**40))
    assert status.verdict is Verdict.INCOMPATIBLE
    assert "1024.00 GiB in sum" in status.reason
