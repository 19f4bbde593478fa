"""Small sums of the engine: threads of a worker, and what a report says of memory."""

from __future__ import annotations

import pytest

from workers.devices.threads import threads_for, threads_per_worker
from workers.messages import MemoryInfo


@pytest.mark.parametrize(("cores", "workers", "threads"), [(16, 7, 2), (4, 8, 1), (1, 1, 1), (16, 1, 16), (10, 10, 1)])
def test_threads_never_exceed_the_cores_unless_workers_do(cores: int, workers: int, threads: int) -> None:
    assert threads_per_worker(cores, workers) == threads


def test_more_workers_than_any_machine_has_cores_get_one_thread_each() -> None:
    assert threads_for(100_000) == 1


def memory(*, total: int | None, used: int | None, allocated: int, reserved: int) -> MemoryInfo:
    return MemoryInfo(
        device_total_bytes=total,
        device_used_bytes=used,
        free_bytes=0,
        allocated_bytes=allocated,
        reserved_bytes=reserved,
        peak_bytes=allocated,
        alloc_retries=0,
    )


def test_fragmentation_is_the_share_of_what_is_reserved_that_no_tensor_uses() -> None:
    assert memory(total=100, used=60, allocated=30, reserved=40).fragmentation == pytest.approx(0.25)
    assert memory(total=100, used=60, allocated=0, reserved=0).fragmentation is None


def test_utilisation_is_everybodys_share_of_the_device_and_unknown_where_it_is() -> None:
    assert memory(total=100, used=60, allocated=30, reserved=40).utilisation == pytest.approx(0.6)
    assert memory(total=None, used=60, allocated=30, reserved=40).utilisation is None
    assert memory(total=100, used=None, allocated=30, reserved=40).utilisation is None
