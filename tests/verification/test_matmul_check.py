"""The check as matmul does it: between steps, in the types a device really uses, without memory of its own."""

from __future__ import annotations

import pytest
import torch

from tests.flips import flip_latest
from workers.workloads.base import WorkloadContext
from workers.workloads.matmul import Matmul, matrix_bytes

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = ["freivalds", "repeat"]


def stepped(dtype: torch.dtype, *, size: int = 128, places: float = 4.0, steps: int = 1) -> Matmul:
    """Return the workload after a few steps, with a ring of so many places."""
    workload = Matmul(WorkloadContext(device=CPU, dtype=dtype, seed=7))
    workload.hold(int((2 + places) * matrix_bytes(size, dtype)))
    for _ in range(steps):
        workload.step(size, 1)
    return workload


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("size", "places"), [(64, 9.3), (128, 2.0), (257, 5.0)])
def test_every_result_of_the_ring_passes_both_kinds(
    dtype: torch.dtype, size: int, places: float
) -> None:
    workload = stepped(dtype, size=size, places=places, steps=0)
    for seed in range(12):
        workload.step(size, 1)
        check = workload.check(seed)
        assert check.ok, check.detail
        assert check.kind == KINDS[seed % 2]
        assert check.worst < 1.0


@pytest.mark.parametrize("places", [1.5, 1.0])
def test_a_ring_of_one_place_gets_freivalds_if_there_is_room(places: float) -> None:
    workload = stepped(torch.float32, size=256, places=places)
    for seed in (0, 1):
        check = workload.check(seed)
        assert (check is not None) == (places > 1.0)
        assert check is None or (check.kind, check.ok) == ("freivalds", True)


def test_a_repeat_uses_the_result_up_and_freivalds_does_not() -> None:
    workload = stepped(torch.float32)
    assert [workload.check(0) is None for _ in range(3)] == [False] * 3
    assert [workload.check(1) is None for _ in range(3)] == [False, True, True]
    assert flip_latest(workload, 0) is None


@pytest.mark.parametrize("seed", [0, 1])
def test_a_check_leaves_memory_and_the_next_results_as_they_were(seed: int) -> None:
    checked, unchecked = (stepped(torch.float32, places=3.2, steps=2) for _ in range(2))
    block = checked._tensors._block.data_ptr()
    assert checked.check(seed) is not None
    for _ in range(4):
        results = []
        for workload in (checked, unchecked):
            workload.step(128, 1)
            results.append(workload._tensors.latest)
        assert torch.equal(*results)
    assert checked._tensors._block.data_ptr() == block
