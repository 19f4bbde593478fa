"""A worker and its card: heat slows and pauses it, and a wrong result is found and remembered."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from tests.cards import script_cards, scripted_card
from tests.engine.scene import begun, events, own, turn, turns
from tests.in_child import InChild
from tests.scene import spec_of
from workers.messages import Cause, Status, Verdict, WorkerState
from workers.readings import Throttle
from workers.settings import FailureKind, ThermalSettings, WorkerSpec
from workers.testing import injected_error
from workers.workloads.base import Workload

HALF = {"duration_s": 0.5}


#: Gives the processes of a test a scripted card.
Scripts: TypeAlias = Callable[..., None]


@pytest.fixture
def card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scripts:
    def scripted(**card: Any) -> None:
        variables = script_cards(tmp_path / "cards.json", scripted_card(**card))
        for name, value in {**variables, "CUDA_VISIBLE_DEVICES": "0"}.items():
            monkeypatch.setenv(name, value)

    return scripted


#: A worker that heat slows down.
HEEDS_HEAT = replace(spec_of(), thermal=ThermalSettings())


def until(
    spec: WorkerSpec, then: dict[str, Any], reached: Callable[[Status], bool]
) -> list[Status]:
    """Run turns until a status is as requested; the card changes after the first turn."""
    engine = begun(spec)
    reports = [turn(engine, duration_s=0.5)]
    script_cards(Path(os.environ["NVML_SCRIPT"]), then)
    while not reached(reports[-1]):
        reports.append(turn(engine, duration_s=0.5))
    return reports


def works(report: Status) -> bool:
    return report.counts.steps_ok > 0


def sleeps(report: Status) -> bool:
    """Return whether the worker rested between steps."""
    return report.counts.busy_s < 0.95 * report.wall_s


def is_lost(report: Status) -> bool:
    return report.sensors is not None and report.sensors.lost


class TestHeat:
    def test_a_critical_card_pauses_it_until_it_is_cool_again(
        self, in_child: InChild, card: Scripts
    ) -> None:
        card(temperature_c=86)
        paused, *later = reports = in_child(
            until, HEEDS_HEAT, scripted_card(temperature_c=60), works
        )
        assert (paused.verdict, paused.state) == (Verdict.OK, WorkerState.PAUSED)
        assert paused.counts.steps_ok == 0, "it pauses before the first step"
        assert "paused at 86 C, resumes below 75 C" in paused.reason
        assert [event.detail["band"] for event in events(reports, "thermal_band")] == ["NORMAL"]
        assert works(later[-1])

    def test_a_complaint_of_the_hardware_is_an_alarm_and_slows(
        self, in_child: InChild, card: Scripts
    ) -> None:
        complaining = scripted_card(temperature_c=65, throttle=int(Throttle.HARDWARE_THERMAL))
        card(**complaining)
        reports = in_child(until, HEEDS_HEAT, complaining, sleeps)
        (raised,) = events(reports, "alarm_raised")
        assert raised.detail["alarm"] == "thermal slowdown by the hardware"
        assert reports[-1].state is WorkerState.THROTTLED
        assert "thermal slowdown by the hardware" in reports[-1].reason
        assert reports[-1].sensors.throttle_pct == 100

    def test_a_lost_card_is_an_alarm_and_no_crash(self, in_child: InChild, card: Scripts) -> None:
        card(temperature_c=65)
        reports = in_child(until, HEEDS_HEAT, scripted_card(lost=True), is_lost)
        assert all(
            report.verdict is Verdict.OK and report.counts.steps_ok > 0 for report in reports
        )
        assert [event.detail["alarm"] for event in events(reports, "alarm_raised")] == ["card lost"]
        assert "card lost" in reports[-1].reason


class TestMps:
    def test_a_client_without_a_daemon_is_refused_with_what_to_type(
        self, in_child: InChild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
        (report,) = in_child(turns, replace(spec_of(), mps=True, thread_share=0.6), [{}])
        assert report.verdict_cause is Cause.DRIVER
        assert f"no MPS control daemon answers in {tmp_path}" in report.reason
        assert "type there: nvidia-cuda-mps-control -d" in report.reason

    def test_a_client_has_its_share_and_its_budget_as_limits(
        self, in_child: InChild, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
        with socket.socket(socket.AF_UNIX) as daemon:
            daemon.bind(str(tmp_path / "control"))
            daemon.listen()
            limits = in_child(mps_limits, replace(spec_of(), mps=True, thread_share=0.6))
        assert limits == ("60", "0=96M")


def mps_limits(spec: WorkerSpec) -> tuple[str | None, str | None]:
    """Run a turn; return the MPS limits that CUDA would read."""
    turn(begun(spec), duration_s=0.1)
    names = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
    return os.environ.get(names[0]), os.environ.get(names[1])


class TestResults:
    def test_right_results_are_checked_now_and_then(self, in_child: InChild) -> None:
        reports = in_child(turns, replace(spec_of(), check_share=0.2), [HALF] * 2)
        assert sum(report.counts.verify_checks for report in reports) >= 1
        assert [report.counts.verify_errors for report in reports] == [0, 0]
        assert reports[-1].state is WorkerState.RUNNING

    def test_a_flipped_bit_is_found_and_never_forgotten(self, in_child: InChild) -> None:
        spec = replace(spec_of(name="tests.flips:Flipping"), check_share=0.3)
        reports = in_child(turns, spec, [HALF] * 3)
        assert sum(report.counts.verify_errors for report in reports) >= 2
        assert reports[-1].state is WorkerState.CORRUPT
        assert reports[-1].counts.steps_ok > 0, "it goes on, and goes on being checked"
        assert spec.slot in reports[-1].reason
        assert "wrong result" in reports[-1].reason
        found = events(reports, "corrupt")
        assert len(found) == sum(report.counts.verify_errors for report in reports)
        assert all(spec.slot in str(event.detail["where"]) for event in found)


class Raises(Workload):
    def step(self, size: int, batch: int) -> None:
        return None

    def release(self) -> None:
        """Nothing to drop."""

    def check(self, seed: int) -> None:
        raise KeyError("a bug of the user's")


class RunsOut(Raises):
    def check(self, seed: int) -> None:
        raise injected_error(FailureKind.DEFINITE)


@pytest.mark.parametrize(
    ("workload", "kind", "told"), [(Raises, "other", 1), (RunsOut, "definite", None)]
)
def test_a_check_that_cannot_run_costs_the_worker_nothing(
    in_child: InChild, workload: type, kind: str, told: int | None
) -> None:
    spec = replace(spec_of(name=own(workload)), check_share=0.2)
    reports = in_child(turns, spec, [{"duration_s": 0.2}] * 2)
    failed = events(reports, "check_failed")
    assert {event.detail["kind"] for event in failed} == {kind}
    assert told is None or len(failed) == told, "a bug is told once"
    assert all(
        report.state is WorkerState.RUNNING and report.counts.steps_ok > 0 for report in reports
    )
    assert [
        (r.counts.oom_count, r.counts.steps_oom, r.counts.steps_error, r.counts.verify_checks)
        for r in reports
    ] == [(0, 0, 0, 0)] * 2
