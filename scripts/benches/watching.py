"""What it costs a worker to look at its card and at its results: sensors, governor and checks off and on, in one run.

The sensors are those of the card, or a script's through the real nvidia-ml-py where there is none. One engine in each
of three processes that take turns; the cost of a single look, lost in the noise of the turns, is timed by itself.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

from benches.bodies import Turn, serve_engine
from benches.common import Child, Result, in_turn, lone_worker, progress, sized, spread
from workers.nvml.fake.library import load
from workers.nvml.fake.prepare import prepare
from workers.nvml.sampler import SAMPLE_EVERY_S, open_sampler
from workers.policy.thermal.governor import ThermalGovernor
from workers.settings import FakeSensors, ThermalSettings, WorkerSpec

_SCRIPT: Final = Path(__file__).parent.parent / "heat.json"
#: Of its cards, the one that stays cool: heat would slow the worker down, as it should.
_CARD: Final = 1
_LOOKS: Final = 2000
_TARGET_SHARE: Final = 0.01


def run(rounds: int, seconds: float, size: int | None, device: str) -> Result:
    """Let three workers take turns: nothing looked at, sensors and governor, and these with checks."""
    rows = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as workers:
        fake = None if device == "cuda" else prepare(_SCRIPT, Path(folder))
        budget_bytes, size = sized(device, None, size)
        bare = lone_worker(budget_bytes=budget_bytes, device=device, size=size)
        sensing = replace(bare, thermal=ThermalSettings(), fake_sensors=fake, fake_card=_CARD)
        specs = {"off": bare, "sensors": sensing, "checks": replace(sensing, check_share=0.01)}
        sides = {
            kind: workers.enter_context(
                closing(Child(kind, serve_engine if kind != "off" else _serve_blind_engine, spec, {}))
            )
            for kind, spec in specs.items()
        }
        for side in sides.values():
            _turn(side, 1.0)  # opens the device; not counted
        for number in range(rounds):
            work = in_turn(number, {kind: partial(_turn, side, seconds) for kind, side in sides.items()})
            rates = {kind: turn.flop_per_s for kind, turn in work.items()}
            rows.append(
                {
                    "round": number + 1,
                    "sensors_ratio": rates["sensors"] / rates["off"],
                    "checks_ratio": rates["checks"] / rates["off"],
                    "checks": work["checks"].counts.verify_checks,
                    "wrong": work["checks"].counts.verify_errors,
                }
            )
            progress(f"{number + 1}/{rounds}  {rows[-1]['sensors_ratio']:.3f}  {rows[-1]['checks_ratio']:.3f}")
        with closing(Child("the look", _look, fake, device)) as one:
            look_s = one.receive()
    wrong = sum(row["wrong"] for row in rows)
    figures: dict[str, Any] = {
        "device": device,
        "look_us": look_s * 1e6,
        "look_share": look_s / SAMPLE_EVERY_S,
        "target_share": _TARGET_SHARE,
        "target_met": look_s / SAMPLE_EVERY_S < _TARGET_SHARE,
        **spread("sensors_ratio", [row["sensors_ratio"] for row in rows]),
        **spread("checks_ratio", [row["checks_ratio"] for row in rows]),
        "rounds": rows,
    }
    broken = [f"{wrong} right results were called wrong"] if wrong else []
    return Result(bench="watching", figures=figures, broken=broken)


def _look(answer: Connection, fake: FakeSensors | None, device: str) -> None:
    """Send the seconds that a look at the sensors takes, with what the governor makes of it."""
    if fake is not None:
        load(fake)
    sampler = open_sampler("cuda", str(_CARD)) if fake is not None else open_sampler(device)
    governor = ThermalGovernor(ThermalSettings())
    state = governor.initial()
    started_s = time.perf_counter()
    for number in range(_LOOKS):
        # As if a second had passed: everything that is asked rarely is asked as rarely as in a worker.
        reading = sampler.sample_if_due(number * SAMPLE_EVERY_S)
        assert reading is not None, "a second has passed"  # noqa: S101 - of this bench
        state, _ = governor.after_reading(state, reading, number * SAMPLE_EVERY_S)
    answer.send((time.perf_counter() - started_s) / _LOOKS)


def _turn(worker: Child, seconds: float) -> Turn:
    worker.send((seconds, 0.0))
    turn: Turn = worker.receive()
    return turn


def _serve_blind_engine(orders: Connection, spec: WorkerSpec, environment: Mapping[str, str]) -> None:
    from workers.engine import thermal_control

    # In place of a sampler, which a worker always has.
    blind: Any = SimpleNamespace(sample_if_due=lambda _now_s: None, close=lambda: None)
    thermal_control.open_sampler = lambda *_: blind  # type: ignore[attr-defined]  # this process measures the rest
    serve_engine(orders, spec, environment)
