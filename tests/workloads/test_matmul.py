"""The matmul workload against a real wall: it needs what it says, and its checks need nothing."""

from __future__ import annotations

import psutil
import pytest
import torch

from tests.in_child import InChild
from tests.scene import MIB, spec_of
from workers import oom
from workers.devices.cpu import CpuDevice
from workers.settings import FailureKind, WorkerSpec
from workers.workloads.base import WorkloadContext
from workers.workloads.matmul import Matmul, matrix_bytes

SIZE = 512


def ends_with(spec: WorkerSpec, spare_bytes: int) -> FailureKind | None:
    """Leave a step exactly what it says it needs, plus `spare_bytes`; return how it fails."""
    device = CpuDevice(spec)
    workload = Matmul(WorkloadContext(device=device.torch_device, dtype=device.torch_dtype, seed=0))
    needed_bytes = workload.needed_bytes(SIZE, 1) + spare_bytes
    ballast_bytes = device.info.cap_bytes - device.held_bytes() - needed_bytes
    with device.enforced():
        _ballast = torch.empty(ballast_bytes, dtype=torch.uint8)
        try:
            workload.step(SIZE, 1)
        except RuntimeError as error:
            return oom.classify(error).kind
    return None


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_needs_what_it_says_and_no_more(in_child: InChild, dtype: str) -> None:
    # The device keeps 2 MiB and 1 MiB a thread out of what it calls free, for the kernels' own
    # scratch.
    spare_bytes = 2 * MIB + torch.get_num_threads() * MIB
    spec = spec_of(budget_bytes=160 * MIB, dtype=dtype)
    assert in_child(ends_with, spec, spare_bytes) is None
    assert in_child(ends_with, spec, -128 * 1024) is FailureKind.DEFINITE


def checks_at_the_wall(spec: WorkerSpec) -> list[tuple[str, bool] | None]:
    """Fill the cap up to the device's margin, ring included, and do two checks of each kind."""
    device = CpuDevice(spec)
    workload = Matmul(WorkloadContext(device=device.torch_device, dtype=device.torch_dtype, seed=0))
    found: list[tuple[str, bool] | None] = []
    claim_bytes = 5 * matrix_bytes(SIZE, device.torch_dtype)
    workload.hold(claim_bytes)
    ballast_bytes = device.most_bytes - device.held_bytes() - claim_bytes
    with device.enforced():
        _ballast = torch.empty(ballast_bytes, dtype=torch.uint8)
    for seed in range(4):
        device.timed(lambda: workload.step(SIZE, 1))
        check, _ = device.timed(lambda seed=seed: workload.check(seed))
        found.append(None if check is None else (check.kind, check.ok))
    return found


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_check_needs_no_memory_of_its_own(in_child: InChild, dtype: str) -> None:
    found = in_child(checks_at_the_wall, spec_of(budget_bytes=96 * MIB, dtype=dtype))
    assert found[0::2] == [("freivalds", True)] * 2
    # A product without memory for its buffers may be summed in another order, and is then not
    # compared.
    assert set(found[1::2]) <= {("repeat", True), None}


def grown_bytes(spec: WorkerSpec) -> int:
    """Return how much more the process holds once it has a block of 128 MiB."""
    device, process = CpuDevice(spec), psutil.Process()
    workload = Matmul(WorkloadContext(device=device.torch_device, dtype=device.torch_dtype, seed=0))
    before_bytes = process.memory_info().rss
    workload.hold(128 * MIB)
    workload.prepared(SIZE)
    return int(process.memory_info().rss) - before_bytes


def test_a_block_is_resident_at_once(in_child: InChild) -> None:
    """Else it comes with the ring, long after the block has its size, and is taken for a leak."""
    grown = in_child(grown_bytes, spec_of(budget_bytes=256 * MIB))
    assert grown > 120 * MIB
