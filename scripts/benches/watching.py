"""What it costs a worker to look at its sensors and to check its results.

The sensors are those of the card, or scripted ones where there is none: then a look costs what the
tests' stub of nvidia-ml-py costs, too, which reads a file for each question.
Each look and each check is timed by itself: a comparison of whole turns with and without them shows
only the noise of the turns.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from benches.common import PATIENCE_S, Result, lone_worker, progress, sized, told_by
from tests.cards import STUB, script_cards, scripted_card
from workers.devices import open_device
from workers.nvml.sensors import SAMPLE_EVERY_S, open_sampler
from workers.settings import WorkerSpec
from workers.verification.check import CheckSchedule
from workers.workloads.base import WorkloadContext
from workers.workloads.matmul import Matmul

_LOOKS: Final = 2000
#: Of a worker's time, for looks and for checks.
_MOST_SHARE: Final = 0.01


def run(rounds: int, seconds: float, size: int | None, device: str) -> Result:
    budget_bytes, size = sized(device, None, size)
    spec = lone_worker(budget_bytes=budget_bytes, device=device, size=size)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        if device != "cuda":
            _script_a_card(Path(folder))
        for number in range(rounds):
            told = told_by("the worker", _measure, spec, seconds, within_s=seconds + PATIENCE_S)
            rows.append({"round": number + 1, **told})
            shares = f"{told['look_us']:.0f} us, checks {told['checks_share']:.2%}"
            progress(f"{number + 1}/{rounds}  {shares}")
    look_us = statistics.median(row["look_us"] for row in rows)
    look_share = look_us / 1e6 / SAMPLE_EVERY_S
    wrong = sum(row["wrong"] for row in rows)
    shares_of_checks = [row["checks_share"] for row in rows]
    figures = {
        "device": device, "look_us": look_us, "look_share": look_share,
        "target_share": _MOST_SHARE, "target_met": look_share < _MOST_SHARE,
        "checks_share_median": statistics.median(shares_of_checks),
        "checks_share_least": min(shares_of_checks), "checks_share_most": max(shares_of_checks),
        "rounds": rows,
    }  # fmt: skip
    broken = [f"{wrong} right results were called wrong"] * bool(wrong)
    return Result(bench="watching", figures=figures, broken=broken)


def _script_a_card(folder: Path) -> None:
    """Let processes that are started from now on find the stub of nvidia-ml-py, and a card."""
    variables = script_cards(folder / "cards.json", scripted_card())
    sys.path.insert(0, str(STUB))  # they get this path
    os.environ.update(variables, CUDA_VISIBLE_DEVICES="0")


def _measure(answer: Connection, spec: WorkerSpec, seconds: float) -> None:
    answer.send({"look_us": _look_us(), **_work_and_check(spec, seconds)})


def _look_us() -> float:
    """Sample as fast as it goes, on a clock that makes each one due; return the mean cost.

    What is asked every thirtieth second only is asked at every thirtieth of these. The first one,
    which opens NVML, does not count.
    """
    costs_s = []
    with closing(open_sampler("cuda")) as sampler:
        for number in range(_LOOKS + 1):
            began_s = time.perf_counter()
            reading = sampler.sample_if_due(number * SAMPLE_EVERY_S)
            costs_s.append(time.perf_counter() - began_s)
            if reading is None:
                raise RuntimeError("no sample was taken")
    return 1e6 * statistics.fmean(costs_s[1:])


def _work_and_check(spec: WorkerSpec, seconds: float) -> dict[str, Any]:
    device = open_device(spec)
    workload = Matmul(WorkloadContext(device=device.torch_device, dtype=device.torch_dtype, seed=0))
    workload.resize(device.free_bytes() // 2)
    size, batch = spec.workload.size, spec.workload.batch
    for _ in range(4):
        device.timed(lambda: workload.step(size, batch))  # finds out how many products make a step
    schedule = CheckSchedule(_MOST_SHARE)
    worked_s, wrong = 0.0, 0
    checks_s: list[float] = []
    began_s = time.perf_counter()
    while time.perf_counter() - began_s < seconds or not checks_s:
        _, took_s = device.timed(lambda: workload.step(size, batch))
        worked_s += took_s
        due = schedule.after_step(size, batch, took_s)
        if due is None:
            continue
        found, took_s = device.timed(lambda number=due: workload.check(number))  # type: ignore[misc]  # a default is how a loop's value is kept
        schedule.after_check(took_s)
        checks_s.append(took_s)
        wrong += found is not None and not found.ok
    all_s = worked_s + sum(checks_s)
    return {
        "checks": len(checks_s),
        "wrong": wrong,
        "checks_share": sum(checks_s) / all_s,
        # The first two checks of a size are in advance of what it earns, and the last one may be a
        # little.
        "checks_share_allowed": _MOST_SHARE + 3.0 * max(checks_s) / all_s,
    }
