"""What it costs a worker to look at its sensors and to check its results, timed as the acceptance
checks time it.

The sensors are those of the card, or a script's through the real nvidia-ml-py where there is none.
Each look and each check is timed by itself: a comparison of whole turns with and without them shows
only the noise of the turns.
"""

from __future__ import annotations

import statistics
import tempfile
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from acceptance.watching import look, work_and_check

from benches.common import Child, Result, lone_worker, progress, sized, spread
from workers.nvml.fake import load
from workers.nvml.fake.script import prepare
from workers.nvml.sensors import SAMPLE_EVERY_S
from workers.settings import FakeSensors, WorkerSpec

_SCRIPT: Final = Path(__file__).parent.parent / "heat.json"
_LOOKS: Final = 2000
_TARGET_SHARE: Final = 0.01


def run(rounds: int, seconds: float, size: int | None, device: str) -> Result:
    budget_bytes, size = sized(device, None, size)
    spec = lone_worker(budget_bytes=budget_bytes, device=device, size=size)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        fake = None if device == "cuda" else prepare(_SCRIPT, Path(folder))
        for number in range(rounds):
            with closing(Child("the worker", _measure, spec, seconds, fake)) as worker:
                rows.append({"round": number + 1, **worker.receive()})
            progress(
                f"{number + 1}/{rounds}  {rows[-1]['look_us']:.0f} us, checks "
                f"{rows[-1]['checks_share']:.2%}"
            )
    look_us = statistics.median(row["look_us"] for row in rows)
    look_share = look_us / 1e6 / SAMPLE_EVERY_S
    wrong = sum(row["wrong"] for row in rows)
    figures = {
        "device": device,
        "look_us": look_us,
        "look_share": look_share,
        "target_share": _TARGET_SHARE,
        "target_met": look_share < _TARGET_SHARE,
        **spread("checks_share", [row["checks_share"] for row in rows]),
        "rounds": rows,
    }
    return Result(
        bench="watching",
        figures=figures,
        broken=[f"{wrong} right results were called wrong"] * bool(wrong),
    )


def _measure(
    answer: Connection, spec: WorkerSpec, seconds: float, fake: FakeSensors | None
) -> None:
    if fake is not None:
        load(fake)
    looked, _ = look("cuda" if fake is not None else spec.device, "idle", _LOOKS)
    checked = work_and_check(spec, seconds)
    answer.send(
        {
            "look_us": 1e3 * looked["mean_ms"],
            "checks": checked["checks"],
            "wrong": checked["refused"],
            "checks_share": checked["cost_pct"] / 100.0,
            "checks_share_allowed": checked["cost_pct_allowed"] / 100.0,
        }
    )
