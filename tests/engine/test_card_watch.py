"""A worker and its card: heat slows it down and pauses it, a wrong result is found and never forgotten."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from workers.engine.engine import Engine
from workers.engine.slice_stats import SliceStats
from workers.engine.thermal_control import open_thermal_control
from workers.messages import Directive, Report, Verdict, WorkerState
from workers.nvml.fake.prepare import prepare
from workers.settings import THERMAL_OFF, FakeSensors, StepFaults, ThermalSettings, WorkerSpec

InChild: TypeAlias = Callable[..., Any]
MakeSpec: TypeAlias = Callable[..., WorkerSpec]


def slices(spec: WorkerSpec, count: int, duration_s: float) -> list[Report]:
    engine = Engine(spec)
    return [
        engine.run_slice(Directive(incarnation=0, sequence=sequence, duration_s=duration_s, resume=None))
        for sequence in range(count)
    ]


def until_it_works(spec: WorkerSpec, folder: Path) -> list[Report]:
    """Run slices under a card that is hot for the first ten seconds."""
    spec = hot(spec, sensors(folder, temperature_c=[[0, 90], [10, 90], [10.001, 60]]))
    engine, reports = Engine(spec), []
    while not reports or reports[-1].counts.steps_ok == 0:
        sequence = len(reports)
        directive = Directive(incarnation=0, sequence=sequence, duration_s=0.5, resume=None)
        reports.append(engine.run_slice(directive))
    return reports


def sensors(folder: Path, **card: Any) -> FakeSensors:  # noqa: ANN401 - of a script's card
    script = folder / "script.json"
    plain = {"name": "NVIDIA GeForce RTX 3090", "uuid": "GPU-3090f00d-0000-4000-8000-000000003090"}
    script.write_text(json.dumps({"cards": [{**plain, "total_bytes": 2**34, **card}]}))
    return prepare(script, folder)


def hot(spec: WorkerSpec, fake: FakeSensors, thermal: ThermalSettings | None = None) -> WorkerSpec:
    return replace(spec, fake_sensors=fake, thermal=thermal or ThermalSettings())


def named(reports: Sequence[Report], name: str) -> list[Any]:
    return [event for report in reports for event in report.events if event.name == name]


class TestHeat:
    def test_readings_travel_with_the_report(self, in_child: InChild, make_spec: MakeSpec, tmp_path: Path) -> None:
        fake = sensors(tmp_path, temperature_c=61, power_w=205, throttle=[[0, ["POWER_CAP"]]])
        (report,) = in_child(slices, hot(make_spec(), fake), 1, 0.0)
        assert report.state is WorkerState.RUNNING
        assert report.sensors is not None
        assert (report.sensors.temperature_c, report.sensors.power_w) == (61, 205)
        assert report.sensors.memory_temperature_c is None
        assert report.sensors.throttle_pct == 0

    def test_a_critical_card_pauses_it_before_the_first_step(
        self, in_child: InChild, make_spec: MakeSpec, tmp_path: Path
    ) -> None:
        reports = in_child(slices, hot(make_spec(), sensors(tmp_path, temperature_c=86)), 2, 0.3)
        for report in reports:
            assert (report.verdict, report.state, report.counts.steps_ok) == (Verdict.OK, WorkerState.PAUSED, 0)
            assert "paused at 86 C, goes on below 75 C" in report.reason

    def test_it_goes_on_when_the_card_is_cool_again(
        self, in_child: InChild, make_spec: MakeSpec, tmp_path: Path
    ) -> None:
        reports = in_child(until_it_works, make_spec(), tmp_path)
        assert reports[0].state is WorkerState.PAUSED
        assert reports[-1].counts.steps_ok > 0
        assert [event.detail["band"] for event in named(reports, "thermal_band")] == ["NORMAL"]

    def test_without_thresholds_nothing_is_done_about_it(
        self, in_child: InChild, make_spec: MakeSpec, tmp_path: Path
    ) -> None:
        fake = sensors(tmp_path, temperature_c=99)
        (report,) = in_child(slices, hot(make_spec(), fake, THERMAL_OFF), 1, 0.0)
        assert (report.state, report.counts.steps_ok) == (WorkerState.RUNNING, 1)
        assert report.sensors is not None
        assert report.sensors.temperature_c == 99

    def test_what_the_hardware_complains_of_is_an_alarm_and_slows_it_down(
        self, in_child: InChild, make_spec: MakeSpec, tmp_path: Path
    ) -> None:
        fake = sensors(tmp_path, temperature_c=65, throttle=[[0, ["HARDWARE_THERMAL"]]])
        reports = in_child(slices, hot(make_spec(), fake), 6, 1.0)
        (raised,) = named(reports, "alarm_raised")
        assert raised.detail["alarm"] == "thermal slowdown by the hardware"
        assert reports[-1].state is WorkerState.THROTTLED
        assert "thermal slowdown by the hardware" in reports[-1].reason
        assert reports[-1].counts.busy_s / reports[-1].wall_s < 0.95, "it sleeps between steps"
        assert reports[-1].sensors is not None
        assert reports[-1].sensors.throttle_pct == 100

    def test_a_lost_card_of_a_script_is_an_alarm_and_no_crash(
        self, in_child: InChild, make_spec: MakeSpec, tmp_path: Path
    ) -> None:
        fake = sensors(tmp_path, temperature_c=65, lost_after_calls=0)
        reports = in_child(slices, hot(make_spec(), fake), 2, 0.5)
        assert all(report.verdict is Verdict.OK and report.counts.steps_ok > 0 for report in reports)
        assert [event.detail["alarm"] for event in named(reports, "alarm_raised")] == ["card lost"]
        assert reports[-1].sensors is not None
        assert reports[-1].sensors.lost
        assert "card lost" in reports[-1].reason

    def test_sensors_that_cannot_be_had_are_a_misfit_in_words(self, in_child: InChild, make_spec: MakeSpec) -> None:
        nowhere = FakeSensors(library_path="/nowhere/libnvidia-ml.so.1", script_path="/nowhere/script")
        (report,) = in_child(slices, hot(make_spec(), nowhere), 1, 0.0)
        assert report.verdict is Verdict.INCOMPATIBLE
        assert "/nowhere/libnvidia-ml.so.1" in report.reason


def looked_at(spec: WorkerSpec) -> tuple[str, bool]:
    stats = SliceStats(slot=spec.slot, directive=Directive(incarnation=0, sequence=0, duration_s=0.0, resume=None))
    heat = open_thermal_control(spec, None)
    heat.sample(stats)
    assert heat.reading is not None
    return heat.reason, heat.reading.of_processor


def test_a_hot_processor_is_no_cause_for_alarm(make_spec: MakeSpec) -> None:
    reason, of_processor = looked_at(replace(make_spec(), thermal=ThermalSettings()))
    assert of_processor
    assert reason == "thermal limits are off"


class TestResults:
    def test_right_results_are_checked_now_and_then(self, in_child: InChild, make_spec: MakeSpec) -> None:
        reports = in_child(slices, replace(make_spec(), check_share=0.2), 3, 0.5)
        assert sum(report.counts.verify_checks for report in reports) >= 1
        assert [report.counts.verify_errors for report in reports] == [0, 0, 0]
        assert reports[-1].state is WorkerState.RUNNING

    def test_a_share_of_nothing_checks_nothing(self, in_child: InChild, make_spec: MakeSpec) -> None:
        (report,) = in_child(slices, make_spec(), 1, 0.5)
        assert report.counts.verify_checks == 0

    def test_a_flipped_bit_is_found_and_never_forgotten(self, in_child: InChild, make_spec: MakeSpec) -> None:
        spec = replace(make_spec(), check_share=0.3, step_faults=StepFaults(seed=1, flip_rate=1.0))
        reports = in_child(slices, spec, 3, 0.5)
        assert sum(report.counts.verify_errors for report in reports) >= 2
        assert reports[-1].state is WorkerState.CORRUPT
        assert reports[-1].counts.steps_ok > 0, "it goes on, and goes on being checked"
        assert spec.slot in reports[-1].reason
        assert "wrong result" in reports[-1].reason
        found = named(reports, "corrupt")
        assert len(found) == sum(report.counts.verify_errors for report in reports)
        assert all(spec.slot in str(event.detail["where"]) for event in found)


CHECKS = """
from workers.verification.check import Check
from workers.workloads.base import Workload


class Raises(Workload):
    def step(self, size, batch):
        return None

    def release(self):
        pass

    def check(self, seed):
        raise KeyError("a bug of the user's")


class RunsOut(Raises):
    def check(self, seed):
        import torch

        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
"""


@pytest.mark.parametrize(("name", "kind", "told"), [("Raises", "other", 1), ("RunsOut", "definite", None)])
def test_a_check_that_cannot_run_costs_the_worker_nothing(
    in_child: InChild,
    make_spec: MakeSpec,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    kind: str,
    told: int | None,
) -> None:
    (tmp_path / "checks_of_mine.py").write_text(CHECKS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    spec = replace(make_spec(name=f"checks_of_mine:{name}"), check_share=0.2)
    reports = in_child(slices, spec, 2, 0.2)
    failed = named(reports, "check_failed")
    assert {event.detail["kind"] for event in failed} == {kind}
    assert told is None or len(failed) == told, "a bug is told once"
    assert all(report.state is WorkerState.RUNNING and report.counts.steps_ok > 0 for report in reports)
    assert [
        (r.counts.oom_count, r.counts.steps_oom, r.counts.steps_error, r.counts.verify_checks) for r in reports
    ] == [(0, 0, 0, 0)] * 2
