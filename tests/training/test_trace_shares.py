"""What a trace says of a device's time; the events are as libkineto writes them."""

from __future__ import annotations

from typing import Any

import pytest

from workers.training.profiling import TraceShares, trace_shares


def event(kind: str, name: str, first_us: float, last_us: float, thread: int = 1) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": kind,
        "name": name,
        "ts": first_us,
        "dur": last_us - first_us,
        "tid": thread,
    }


def test_each_moment_of_a_card_counts_once() -> None:
    told = trace_shares(
        [
            {"ph": "M", "name": "process_name"},
            event("user_annotation", "step", -500, 5000),
            event("cpu_op", "aten::mm", 0, 900),
            event("cuda_runtime", "cudaLaunchKernel", 10, 20),
            event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 0, 200),
            event("kernel", "gemm", 100, 500, 7),
            event("kernel", "gelu", 400, 600, 8),  # beside it, in another stream
            event("cuda_runtime", "cudaStreamSynchronize", 300, 650),
            event("kernel", "gemm", 800, 1000, 7),
        ]
    )
    assert told == TraceShares(
        duration_s=pytest.approx(1e-3),
        kernels_pct=pytest.approx(70),
        copies_pct=pytest.approx(10),  # the other half is hidden
        synchronisations_pct=pytest.approx(5),
        idle_pct=pytest.approx(15),
        host_waits_pct=pytest.approx(35),
        longest="gemm 60 %, gelu 20 %",
    )


def test_on_a_cpu_operators_are_the_kernels() -> None:
    told = trace_shares(
        [
            event("cpu_op", "aten::linear", 0, 400),
            event("cpu_op", "aten::addmm", 50, 350),
            event("cpu_op", "aten::to", 500, 600),
            event("cpu_op", "aten::copy_", 520, 600),
            event("cpu_op", "aten::mm", 600, 1000, 2),
        ]
    )
    assert told is not None
    assert told.kernels_pct == pytest.approx(82)
    assert told.copies_pct == pytest.approx(8)
    assert told.idle_pct == pytest.approx(10)
    assert told.synchronisations_pct == 0
    assert told.longest == "aten::linear 40 %, aten::mm 40 %, aten::to 10 %"


def test_of_a_trace_without_work_nothing_is_told() -> None:
    assert trace_shares([event("user_annotation", "step", 0, 10)]) is None
