"""What it costs a worker to look at its card and at its results: sensors, governor and checks off and on, in one run.

The sensors are those of the card, or a script's through the real nvidia-ml-py where there is none. The same engine
runs in three processes that take turns; beside their work per second, the cost of a single look is timed by itself,
because a share of a thousandth is lost in the noise of the turns.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

from benches.common import Result, lone_worker, progress, spread
from workers.messages import Directive, Report
from workers.nvml.fake.library import load
from workers.nvml.fake.prepare import prepare
from workers.nvml.sampler import SAMPLE_EVERY_S, open_sampler
from workers.policy.thermal.governor import SensorsRead, ThermalGovernor
from workers.settings import FakeSensors, ThermalSettings, WorkerSpec
from workers.units import MIB

_SCRIPT: Final = Path(__file__).parent.parent / "heat.json"
#: Of its cards, the one that stays cool: heat would slow the worker down, as it should.
_CARD: Final = 1
_LOOKS: Final = 2000
_TARGET_SHARE: Final = 0.01


def run(rounds: int, seconds: float, size: int, device: str) -> Result:
    """Let three workers take turns: nothing looked at, sensors and governor, and these with checks."""
    with tempfile.TemporaryDirectory() as folder:
        fake = None if device == "cuda" else prepare(_SCRIPT, Path(folder))
        budget_bytes = (3410 if device == "cuda" else 213) * MIB
        bare = lone_worker(budget_bytes=budget_bytes, device=device, dtype="fp32", size=size)
        sensing = replace(bare, thermal=ThermalSettings(), fake_sensors=fake, fake_card=_CARD)
        kinds = {"off": bare, "sensors": sensing, "sensors and checks": replace(sensing, check_share=0.01)}
        rows = []
        with (
            _worker(kinds["off"], looks=False) as off,
            _worker(kinds["sensors"]) as one,
            _worker(kinds["sensors and checks"]) as all_,
        ):
            workers = dict(zip(kinds, (off, one, all_), strict=True))
            for connection in workers.values():
                _turn(connection, 1.0)  # opens the device; not counted
            for number in range(rounds):
                order = list(workers) if number % 2 else list(reversed(workers))
                work = {kind: _turn(workers[kind], seconds) for kind in order}
                rates = {kind: report.counts.work_flop / report.wall_s for kind, report in work.items()}
                rows.append(
                    {
                        "round": number + 1,
                        "sensors_ratio": rates["sensors"] / rates["off"],
                        "checks_ratio": rates["sensors and checks"] / rates["off"],
                        "checks": work["sensors and checks"].counts.verify_checks,
                        "wrong": work["sensors and checks"].counts.verify_errors,
                    }
                )
                progress(f"{number + 1}/{rounds}  {rows[-1]['sensors_ratio']:.3f}  {rows[-1]['checks_ratio']:.3f}")
        look_s = _timed_looks(fake, device)
    wrong = sum(row["wrong"] for row in rows)
    figures: dict[str, Any] = {
        "device": device,
        "look_us": look_s * 1e6,
        "look_share": look_s / SAMPLE_EVERY_S,
        "target_share": _TARGET_SHARE,
        "target_met": look_s / SAMPLE_EVERY_S < _TARGET_SHARE,
        **{f"sensors_ratio_{key}": value for key, value in spread([row["sensors_ratio"] for row in rows]).items()},
        **{f"checks_ratio_{key}": value for key, value in spread([row["checks_ratio"] for row in rows]).items()},
        "rounds": rows,
    }
    return Result(
        bench="watching", figures=figures, broken=[f"{wrong} right results were called wrong"] if wrong else []
    )


def _timed_looks(fake: FakeSensors | None, device: str) -> float:
    """Return the seconds that a look at the sensors takes, with what the governor makes of it."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_look, args=(theirs, fake, device), daemon=True)
    process.start()
    seconds: float = mine.recv()
    process.join()
    return seconds


def _look(answers: Connection, fake: FakeSensors | None, device: str) -> None:
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
        state, _ = governor.decide(state, SensorsRead(at_s=number * SAMPLE_EVERY_S, reading=reading))
    answers.send((time.perf_counter() - started_s) / _LOOKS)


@contextmanager
def _worker(spec: WorkerSpec, *, looks: bool = True) -> Iterator[Connection]:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, spec, looks), daemon=True)
    process.start()
    try:
        yield mine
    finally:
        mine.send(None)
        process.join()


def _turn(connection: Connection, seconds: float) -> Report:
    connection.send(seconds)
    report: Report = connection.recv()
    return report


class _Eyeless:
    """In place of a sampler, which a worker has whatever is asked of it."""

    def sample_if_due(self, now_s: float) -> None:
        """Look at nothing."""

    def close(self) -> None:
        """Hold nothing."""


def _work(orders: Connection, spec: WorkerSpec, looks: bool) -> None:
    from workers.engine import thermal_control
    from workers.engine.engine import Engine

    if not looks:
        thermal_control.open_sampler = lambda *_: _Eyeless()  # type: ignore[assignment]  # this process measures the rest
    engine, sequence = Engine(spec), 0
    while (seconds := orders.recv()) is not None:
        orders.send(engine.run_slice(Directive(incarnation=0, sequence=sequence, duration_s=seconds, resume=None)))
        sequence += 1
