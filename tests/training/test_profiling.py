"""Where a training's time goes: shares, a trace, and a pass of the profiler."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.scene import CPU, GPT, replay, settings, task
from workers.training.profiling import Part, StepProfile, TimeShares, trace_shares
from workers.training.trainer import Trainer


def test_what_fails_is_timed_too() -> None:
    shares = TimeShares(CPU)
    assert shares.pct(Part.COPIES) is None
    began_s = time.perf_counter()

    def fail() -> None:
        with shares.timing(Part.COPIES):
            time.sleep(0.02)
            raise ValueError("cut off")

    with pytest.raises(ValueError, match="cut off"):
        fail()
    copies = shares.pct(Part.COPIES)
    assert copies is not None
    assert 100 * 0.02 / (time.perf_counter() - began_s) <= copies <= 100
    assert shares.pct(Part.OPTIMIZER) == 0


def test_an_optimiser_that_takes_half_of_the_time_is_seen() -> None:
    began_s = time.perf_counter()

    class Slow(torch.optim.SGD):
        def step(self, *keys: Any, **more: Any) -> None:  # type: ignore[override]
            super().step(*keys, **more)
            time.sleep(time.perf_counter() - began_s)  # as long as all before it

    chosen = settings(steps=3)
    run = Trainer(replace(task(GPT), optimizer=lambda some: Slow(some, lr=0.01)), chosen, CPU, 7)
    replay(run, [[12, 0, 3]])
    told = run.progress()
    assert told.optimizer_pct is not None
    assert told.copies_pct is not None
    assert told.data_wait_pct is not None
    assert 45 <= told.optimizer_pct <= 100
    assert 0 < told.copies_pct < told.optimizer_pct
    assert told.copies_pct + told.optimizer_pct + told.data_wait_pct <= 101


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
    assert told == {
        "duration_s": pytest.approx(1e-3),
        "kernels_pct": pytest.approx(70),
        "copies_pct": pytest.approx(10),  # the other half is hidden
        "synchronisations_pct": pytest.approx(5),
        "idle_pct": pytest.approx(15),
        "host_waits_pct": pytest.approx(35),
        "longest": "gemm 60 %, gelu 20 %",
    }


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
    assert told["kernels_pct"] == pytest.approx(82)
    assert told["copies_pct"] == pytest.approx(8)
    assert told["idle_pct"] == pytest.approx(10)
    assert told["synchronisations_pct"] == 0
    assert told["longest"] == "aten::linear 40 %, aten::mm 40 %, aten::to 10 %"


def test_of_a_trace_without_work_nothing_is_told() -> None:
    assert trace_shares([event("user_annotation", "step", 0, 10)]) == {}


def test_a_pass_that_is_given_up_is_made_later(tmp_path: Path) -> None:
    one = StepProfile(2, CPU, tmp_path)
    for step in (5, 6, 7):
        one.begin(step)
        assert one.end(step, finished=False) is None
    one.abandon()
    with torch.profiler.profile():  # there is but one in a process
        torch.ones(4).sum()
    told = []
    for step in (3, 4, 5, 6, 7, 8):
        one.begin(step)
        torch.ones(4).sum()
        told.append(one.end(step + 1, finished=False))
    assert [each is not None for each in told] == [False, False, False, True, False, False]
    assert told[3] is not None
    assert (told[3]["steps"], told[3]["trace"]) == (2, str(tmp_path / "trace.json.gz"))
    assert [each.name for each in tmp_path.iterdir()] == ["trace.json.gz"]


def test_a_training_that_ends_first_has_a_shorter_pass(tmp_path: Path) -> None:
    short = StepProfile(10, CPU, None)
    (tmp_path / "file").touch()
    nowhere = StepProfile(1, CPU, tmp_path / "file")
    for one, step in ((short, 0), (short, 2)):
        one.begin(step)
        torch.ones(4).sum()
    told = short.end(4, finished=True)
    assert told is not None
    assert told["steps"] == 2
    assert "trace" not in told
    nowhere.begin(0)
    nowhere.begin(2)
    with pytest.raises(FileExistsError):
        nowhere.end(3, finished=False)
    nowhere.begin(4)
    assert nowhere.end(9, finished=True) is None
