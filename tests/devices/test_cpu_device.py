"""The CPU device: its cap is the kernel's, and what is released really goes back to the kernel."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from tests.in_child import InChild
from tests.scene import MIB, spec_of, vm_data_bytes
from workers import oom
from workers.devices import cpu
from workers.devices.base import EmergencyProduct, threads_for
from workers.devices.cpu import CpuDevice
from workers.messages import ContextCorruptedError
from workers.settings import FailureKind, WorkerSpec

Found: TypeAlias = dict[str, Any]

BUDGET_BYTES = 160 * MIB

#: malloc's header page for each mapping, and what Python takes for itself meanwhile.
SLACK_BYTES = MIB


def block(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8)


def fill(block_bytes: int) -> tuple[list[torch.Tensor], oom.Failure]:
    """Take blocks until one is refused; does not end where no cap is enforced."""
    blocks: list[torch.Tensor] = []
    while True:
        try:
            blocks.append(block(block_bytes))
        except RuntimeError as error:
            return blocks, oom.classify(error)


def limit_bytes() -> int:
    return resource.getrlimit(resource.RLIMIT_DATA)[0]


# --- the wall


def up_to_the_wall(spec: WorkerSpec) -> Found:
    lifted_bytes = limit_bytes()
    device = CpuDevice(spec)
    free_bytes = device.allowed_bytes(0)
    with device.enforced():
        opened_bytes = vm_data_bytes()
        blocks, failure = fill(MIB)
        refused_at_bytes = vm_data_bytes()
        enforced_bytes = limit_bytes()
    memory = device.memory()
    with contextlib.suppress(MemoryError), device.enforced():
        blocks.append(blocks)  # garbage, until it is collected
        del blocks
        raise MemoryError  # as a step that fails does
    device.release()
    return {
        "info": device.info,
        "free_bytes": free_bytes,
        "obtained_bytes": refused_at_bytes - opened_bytes,
        "failure": failure,
        "memory": memory,
        "above_bytes": enforced_bytes - opened_bytes,
        "lifted_again": limit_bytes() == lifted_bytes,
        "free_again_bytes": device.allowed_bytes(0) - device.held_bytes(),
        "all_left_bytes": device.allowed_bytes(2**62),
        "later": [device.memory().peak_bytes for _ in range(2)],
    }


@pytest.fixture(scope="module")
def wall(in_child: InChild) -> Found:
    return in_child(up_to_the_wall, spec_of(budget_bytes=BUDGET_BYTES))


class TestWall:
    def test_the_kernel_refuses_at_the_cap_and_not_before(self, wall: Found) -> None:
        cap_bytes = wall["info"].cap_bytes
        # A block is refused when it would pass the cap, so the last one may be missing.
        assert 0.99 * cap_bytes - MIB <= wall["obtained_bytes"] <= cap_bytes

        assert cap_bytes == pytest.approx(wall["above_bytes"], abs=SLACK_BYTES), (
            "read back from the kernel"
        )
        assert wall["failure"].kind is FailureKind.DEFINITE
        assert "DefaultCPUAllocator" in wall["failure"].text

    def test_what_it_calls_free_is_the_cap_less_the_margin(self, wall: Found) -> None:
        margin_bytes = 2 * MIB + wall["info"].threads * MIB
        assert wall["free_bytes"] == pytest.approx(
            wall["info"].cap_bytes - margin_bytes, abs=SLACK_BYTES
        )
        assert wall["all_left_bytes"] == 0
        assert wall["free_again_bytes"] == pytest.approx(wall["free_bytes"], abs=SLACK_BYTES)
        assert wall["lifted_again"], "between steps the kernel's limit is lifted"

    def test_what_it_reports_at_the_wall(self, wall: Found) -> None:
        memory = wall["memory"]
        assert memory.allocated_bytes == pytest.approx(wall["obtained_bytes"], abs=SLACK_BYTES)
        assert memory.reserved_bytes == memory.allocated_bytes
        assert memory.peak_bytes >= memory.allocated_bytes
        assert wall["later"] == [memory.peak_bytes, pytest.approx(0, abs=SLACK_BYTES)], (
            "the peak since it was asked for last"
        )


# --- giving back


def give_and_take(spec: WorkerSpec, block_bytes: int) -> Found:
    device = CpuDevice(spec)
    # Several times: glibc raises its threshold after the first large block is freed, unless it was
    # told not to, and what a thousand tensor objects take on the small heaps comes with the first
    # rounds.
    seen = []
    for _ in range(6):
        with device.enforced():
            before_bytes = vm_data_bytes()
            blocks = [block(block_bytes) for _ in range(64 * MIB // block_bytes)]
            held_bytes = vm_data_bytes()
            # Every second one first: what lies between living blocks must go back too.
            del blocks[::2]
            half_bytes = vm_data_bytes()
            del blocks
        device.release()
        left_bytes = vm_data_bytes() - before_bytes
        seen.append(
            {
                "taken": held_bytes - before_bytes,
                "half": half_bytes - before_bytes,
                "left": left_bytes,
            }
        )
    return {"seen": seen}


@pytest.mark.parametrize("block_bytes", [64 * 1024, 64 * MIB // 3])
def test_released_memory_goes_back_to_the_kernel(in_child: InChild, block_bytes: int) -> None:
    whole_bytes = 64 * MIB // block_bytes * block_bytes
    # A mapping of its own costs a block at most two pages: the header's, and the rest of the last.
    overhead_bytes = 64 * MIB // block_bytes * 8192 + SLACK_BYTES
    *_, seen = in_child(give_and_take, spec_of(budget_bytes=BUDGET_BYTES), block_bytes)["seen"]
    assert whole_bytes <= seen["taken"] <= whole_bytes + overhead_bytes
    assert seen["half"] <= seen["taken"] * 0.55 + SLACK_BYTES
    assert seen["left"] <= SLACK_BYTES


# --- the emergency product


def emergency_at_the_wall(spec: WorkerSpec) -> Found:
    device = CpuDevice(spec)
    with device.enforced():
        blocks = [block(MIB)]
        # Nothing here may need memory of its own: a few pages are left, and Python gets no more
        # either.
        for block_bytes in (MIB, 64 * 1024):
            try:
                while True:
                    blocks.append(block(block_bytes))
            except (RuntimeError, MemoryError):
                continue
        before_bytes = vm_data_bytes()
        for _ in range(50):
            device.emergency()
        after_bytes = vm_data_bytes()
        allowed_bytes = limit_bytes() - before_bytes
        del blocks
    return {"before": before_bytes, "after": after_bytes, "room": allowed_bytes}


def test_the_emergency_product_runs_at_the_wall(in_child: InChild) -> None:
    found = in_child(emergency_at_the_wall, spec_of(budget_bytes=BUDGET_BYTES))
    assert found["room"] < 128 * 1024, "this was not the wall"
    assert found["after"] == found["before"]


def test_a_wrong_product_is_noticed_and_so_is_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    product = EmergencyProduct(128, torch.device("cpu"))
    product.run()
    product._left.mul_(1.5)
    with pytest.raises(ContextCorruptedError, match="emergency product gave 384"):
        product.run()
    monkeypatch.setattr(torch, "mm", lambda *_, out: out)
    with pytest.raises(ContextCorruptedError, match="emergency product gave 0"):
        product.run()


# --- element types


def opened_with(spec: WorkerSpec) -> tuple[str, str, float]:
    device = CpuDevice(spec)
    left = torch.ones((64, 64), dtype=device.torch_dtype)
    return device.info.dtype, str(device.torch_dtype), float((left @ left)[0, 0])


@pytest.mark.parametrize(
    ("asked", "given"),
    [("fp32", {"fp32"}), ("tf32", {"fp32"}), ("bf16", {"bf16"}), ("fp16", {"bf16", "fp32"})],
)
def test_says_which_type_it_really_uses(in_child: InChild, asked: str, given: set[str]) -> None:
    name, torch_name, value = in_child(opened_with, spec_of(dtype=asked))
    assert name in given
    assert torch_name == {"fp32": "torch.float32", "bf16": "torch.bfloat16"}[name]
    assert value == 64.0


# --- a process that grows


def peaks(spec: WorkerSpec, clear: str) -> Found:
    cpu._CLEAR = Path(clear)  # in a process of its own
    device = CpuDevice(spec)
    device.timed(lambda: torch.ones(64 * MIB, dtype=torch.uint8).numel())
    return {"bytes": device.step_peak_bytes(), "source": device.info.peak_source}


@pytest.mark.parametrize(
    ("clear", "says", "least_bytes", "most_bytes"),
    [
        ("/proc/self/clear_refs", "measured", 63 * MIB, 72 * MIB),
        ("/proc/self/refused/clear_refs", "not measured", 0, MIB),
    ],
    ids=["reset", "refused"],
)
def test_the_peak_of_a_step_is_measured_or_said_why_not(
    in_child: InChild, clear: str, says: str, least_bytes: int, most_bytes: int
) -> None:
    found = in_child(peaks, spec_of(budget_bytes=BUDGET_BYTES), clear)
    assert least_bytes <= found["bytes"] <= most_bytes
    assert found["source"].startswith(says)


@pytest.mark.parametrize(
    ("cores", "workers", "threads"), [(16, 7, 2), (4, 8, 1), (1, 1, 1), (16, 1, 16), (10, 10, 1)]
)
def test_threads_never_exceed_the_cores_unless_workers_do(
    cores: int, workers: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert threads_for(100_000) == 1, "no machine has so many cores"
    monkeypatch.setattr("psutil.cpu_count", lambda *, logical: None if logical else cores)
    assert threads_for(workers) == threads
