"""What holds for any fleet, one scenario each, and the workloads that they run. Knows no implementation.

Each scenario has a slot of its own. What a fleet may do in two ways is written down here as two
allowed outcomes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias, cast

import pytest
import torch

from orchestrator.core.fleet import Fleet, SliceEnded, SliceFailed, SliceFailure, SliceReported
from orchestrator.errors import UsageError
from tests.scene import PATIENCE_S
from workers.messages import Directive, Report, ResumeState, Verdict
from workers.settings import WorkerSpec
from workers.workloads.base import StepResult, Workload


class Steady(Workload):
    """Each step does the same."""

    def step(self, size: int, batch: int) -> StepResult:
        torch.ones(64, 64) @ torch.ones(64, 64)
        return StepResult(flop=2.0 * 64**3)

    def release(self) -> None:
        pass


class Slow(Steady):
    """A step takes a quarter of a second."""

    def step(self, size: int, batch: int) -> StepResult:
        time.sleep(0.25)
        return super().step(size, batch)


class Faulty(Steady):
    """Every step has a bug."""

    def step(self, size: int, batch: int) -> StepResult:
        raise ValueError("no such column")


class BreaksDevice(Steady):
    """After the second step, the device of this engine answers no more."""

    steps = 0

    def step(self, size: int, batch: int) -> StepResult:
        self.steps += 1
        if self.steps == 2:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return super().step(size, batch)


class Stage:
    """A fleet of one node, and slots on it."""

    def __init__(self, fleet: Fleet, node: str, spec: WorkerSpec) -> None:
        self.fleet, self.node, self.spec = fleet, node, spec
        self._slots: list[str] = []

    def place(self, slot: str, workload: type[Workload] = Steady) -> str:
        """Place a slot of this name; return the name."""
        name = f"{self.node}/{slot}"
        module = Path(__file__).stem
        settings = replace(self.spec.workload, name=f"{module}:{workload.__name__}", size=64)
        self.place_as(name, replace(self.spec, slot=name, node=self.node, workload=settings))
        return name

    def place_as(self, name: str, spec: WorkerSpec) -> None:
        """Place a slot with a specification of its own."""
        self._slots.append(name)
        self.fleet.place(spec, num_cpus=1.0, num_gpus=0.0)

    def submit(
        self,
        slot: str,
        sequence: int,
        *,
        incarnation: int = 0,
        duration_s: float = 0.0,
        resume: ResumeState | None = None,
    ) -> None:
        """Ask a slot for a slice."""
        self.fleet.submit(
            slot,
            Directive(
                incarnation=incarnation, sequence=sequence, duration_s=duration_s, resume=resume
            ),
        )

    def wait(self, count: int) -> list[SliceEnded]:
        """Wait until so many slices have ended."""
        ended: list[SliceEnded] = []
        deadline_s = time.monotonic() + PATIENCE_S
        while len(ended) < count:
            assert time.monotonic() < deadline_s, f"{len(ended)} of {count} slices ended: {ended}"
            ended += self.fleet.wait(1.0)
        assert len(ended) == count, ended
        return ended

    def reports(self, count: int) -> list[Report]:
        """Wait until so many slices have ended, all of them with a report."""
        ended = self.wait(count)
        assert all(isinstance(each, SliceReported) for each in ended), ended
        reports = [each.report for each in ended if isinstance(each, SliceReported)]
        assert all(report.verdict is not Verdict.INCOMPATIBLE for report in reports), reports[
            0
        ].reason
        return reports

    def report_of_new_process(
        self, slot: str, sequence: int, resume: ResumeState | None = None
    ) -> Report:
        """Ask for a slice until a process reports, as the lifecycle does: the old one may still take some with it."""
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            self.submit(slot, sequence, incarnation=1, resume=resume)
            (ended,) = self.wait(1)
            if isinstance(ended, SliceReported):
                if "device_opened" in names(ended.report):
                    return ended.report
            else:
                assert ended.failure is not SliceFailure.UNBUILDABLE, ended
            sequence += 1
            time.sleep(0.2)
        raise AssertionError(f"{slot} has no new process")

    def close(self) -> None:
        """End the slots that are left."""
        for slot in self._slots:
            self.fleet.abandon(slot)


def names(report: Report) -> list[str]:
    """The names of what happened in a slice."""
    return [event.name for event in report.events]


def it_shows_its_nodes(stage: Stage) -> None:
    (node,) = stage.fleet.nodes()
    assert node.name == stage.node
    assert node.cpus >= 1
    assert node.answers
    assert not node.refuses
    assert node.address
    assert stage.fleet.address()
    assert stage.fleet.count_cards(stage.node) >= 0
    assert stage.fleet.wait(0.1) == (), "nothing is under way"


def a_slice_is_answered_by_a_report_of_its_name(stage: Stage) -> None:
    slot = stage.place("answered")
    stage.submit(slot, 7, incarnation=3)
    (ended,) = stage.wait(1)
    assert isinstance(ended, SliceReported), ended
    report = ended.report
    assert (ended.slot, report.slot, report.incarnation, report.sequence) == (slot, slot, 3, 7)
    assert (report.verdict, report.error) == (Verdict.OK, None), report.reason
    assert report.device is not None
    assert report.device.kind == "cpu"
    assert "device_opened" in names(report)


def two_slices_run_in_order_in_one_process(stage: Stage) -> None:
    slot = stage.place("ordered")
    stage.submit(slot, 0)
    stage.submit(slot, 1, duration_s=0.2)
    first, second = stage.reports(2)
    assert (first.sequence, second.sequence) == (0, 1)
    assert first.device is not None
    assert second.device is not None
    assert first.device.pid == second.device.pid
    assert "device_opened" not in names(second)
    assert second.wall_s >= 0.2


def two_slots_do_not_share_an_engine(stage: Stage) -> None:
    one, other = stage.place("one"), stage.place("other")
    stage.submit(one, 0)
    stage.submit(other, 0)
    reports = {report.slot: report for report in stage.reports(2)}
    assert set(reports) == {one, other}
    assert all("device_opened" in names(report) for report in reports.values())


def a_step_that_fails_is_a_report_and_no_failure(stage: Stage) -> None:
    slot = stage.place("failing", Faulty)
    for sequence in range(2):
        stage.submit(slot, sequence)
        (report,) = stage.reports(1)
        assert report.verdict is Verdict.OK
        assert report.error is not None
        assert "no such column" in report.error


def an_engine_that_cannot_be_made_is_unbuildable(stage: Stage) -> None:
    slot = f"{stage.node}/unbuildable"
    stage.place_as(
        slot,
        cast(
            "WorkerSpec",
            SimpleNamespace(slot=slot, node=stage.node, device="cpu", command=None),
        ),
    )
    stage.submit(slot, 0)
    (ended,) = stage.wait(1)
    assert isinstance(ended, SliceFailed)
    assert (ended.slot, ended.incarnation, ended.sequence) == (slot, 0, 0)
    assert ended.failure is SliceFailure.UNBUILDABLE
    assert "AttributeError" in ended.text


def of_what_was_given_up_no_failure_is_told(stage: Stage) -> None:
    slot = stage.place("forgotten", Slow)
    stage.submit(slot, 0)
    stage.reports(1)
    stage.submit(slot, 1)
    stage.submit(slot, 2)
    stage.fleet.forget(slot)
    stage.submit(slot, 3)
    sequences: list[int] = []
    while 3 not in sequences:
        sequences += [report.sequence for report in stage.reports(1)]
    assert sequences in ([3], [1, 3], [2, 3], [1, 2, 3]), (
        "a report that comes all the same may be told"
    )


def a_restarted_slot_answers_from_a_fresh_engine_with_the_same_specification(stage: Stage) -> None:
    slot = stage.place("restarted")
    stage.submit(slot, 0)
    (before,) = stage.reports(1)
    assert before.resume is not None
    stage.fleet.forget(slot)
    stage.fleet.restart(slot)
    after = stage.report_of_new_process(slot, 1, before.resume)
    assert (after.slot, after.incarnation) == (slot, 1)
    assert {"device_opened", "resumed"} <= set(names(after))
    assert (after.size, after.batch) == (before.size, before.batch)


def a_broken_engine_says_so_and_a_fresh_one_works(stage: Stage) -> None:
    slot = stage.place("broken", BreaksDevice)
    stage.submit(slot, 0)
    stage.submit(slot, 1)
    good, bad = stage.reports(2)
    assert (good.verdict, bad.verdict) == (Verdict.OK, Verdict.CONTEXT_CORRUPTED)
    stage.fleet.forget(slot)
    stage.fleet.restart(slot)
    assert stage.report_of_new_process(slot, 2).verdict is Verdict.OK


def an_abandoned_slot_is_gone_until_it_is_placed_again_and_the_others_work(stage: Stage) -> None:
    gone, stays = stage.place("gone", Slow), stage.place("stays")
    stage.submit(gone, 0)
    stage.reports(1)
    stage.submit(gone, 1)
    stage.submit(stays, 0)
    stage.fleet.abandon(gone)
    stage.fleet.abandon(gone)
    with pytest.raises(KeyError):
        stage.submit(gone, 2)
    answered: list[object] = []
    while stays not in answered:
        answered += [report.slot for report in stage.reports(1)]
    assert set(answered) <= {gone, stays}, "a report that comes all the same may be told"
    stage.place("gone")
    stage.submit(gone, 0, incarnation=1)
    while (gone, 1) not in answered:
        answered += [(report.slot, report.incarnation) for report in stage.reports(1)]


def the_end_of_a_process_that_did_not_end_has_no_cause(stage: Stage) -> None:
    slot = stage.place("living")
    stage.submit(slot, 0)
    stage.reports(1)
    assert stage.fleet.why_ended(slot) is None


def nodes_that_are_not_ours_are_not_ended(stage: Stage) -> None:
    for change in (stage.fleet.end_node, stage.fleet.start_node):
        with pytest.raises(UsageError, match=stage.node):
            change(stage.node)
    assert [node.name for node in stage.fleet.nodes()] == [stage.node]


Scenario: TypeAlias = Callable[[Stage], Any]

SCENARIOS: tuple[Scenario, ...] = (
    it_shows_its_nodes,
    a_slice_is_answered_by_a_report_of_its_name,
    two_slices_run_in_order_in_one_process,
    two_slots_do_not_share_an_engine,
    a_step_that_fails_is_a_report_and_no_failure,
    an_engine_that_cannot_be_made_is_unbuildable,
    of_what_was_given_up_no_failure_is_told,
    a_restarted_slot_answers_from_a_fresh_engine_with_the_same_specification,
    a_broken_engine_says_so_and_a_fresh_one_works,
    an_abandoned_slot_is_gone_until_it_is_placed_again_and_the_others_work,
    the_end_of_a_process_that_did_not_end_has_no_cause,
    nodes_that_are_not_ours_are_not_ended,
)


def play(fleet: Fleet, node: str, spec: WorkerSpec, scenario: str) -> None:
    """Play one scenario by its name, and end its slots."""
    stage = Stage(fleet, node, spec)
    try:
        next(each for each in SCENARIOS if each.__name__ == scenario)(stage)
    finally:
        stage.close()


def play_in_process(spec: WorkerSpec, scenario: str) -> None:
    """Play one scenario without Ray; in a process of its own, because the engine works in it."""
    from tests.fleet.in_process import in_process

    with in_process("here", cpus=4, gpus=0) as fleet:
        play(fleet, "here", spec, scenario)
