"""What the supervisor relies on, with real Ray: slots, slices, and files of another PC.

One cluster serves all of these tests; each has a slot of its own. What a fleet may do in two ways is
written down as two allowed outcomes.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from orchestrator.cluster.local_cluster import rehearsed
from orchestrator.cluster.raylets import RayletPlan
from orchestrator.core.fleet import (
    Fleet,
    SliceEnded,
    SliceFailed,
    SliceFailure,
    SliceReported,
)
from orchestrator.errors import NoClusterError, UsageError
from tests.scene import ROOT, Patience, spec_of
from workers.learned_limits import STATE_DIR_VARIABLE
from workers.messages import Directive, Report, ResumeState, Verdict
from workers.settings import WorkerSpec
from workers.workloads.base import StepResult, Workload

pytestmark = pytest.mark.ray

#: With room for all slots, and with room for one.
NODE, NARROW = "pc1", "pc2"


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


@dataclass
class Cluster:
    """Two nodes of this machine."""

    owned: Fleet
    """Has started them."""
    joined: Fleet
    """Takes them for the user's."""
    state: Path
    """Where their workers keep what they learn."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        # Ray's workers import the workloads; the raylet hands its environment on to them.
        for folder in (ROOT, Path(__file__).parent):
            patch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
        nodes = [RayletPlan(name=NODE, cpus=32, gpus=0), RayletPlan(name=NARROW, cpus=1, gpus=0)]
        with rehearsed(nodes) as owned:
            from orchestrator.cluster.ray_fleet import RayFleet

            joined = RayFleet(owned.address(), None)
            with contextlib.closing(joined):
                yield Cluster(owned, joined, Path(os.environ[STATE_DIR_VARIABLE]))


class Stage:
    """A fleet, and slots on one of its nodes."""

    def __init__(self, fleet: Fleet, node: str) -> None:
        self.fleet, self.node = fleet, node
        self._slots: list[str] = []

    def place(self, slot: str, workload: type[Workload] = Steady) -> str:
        """Place a slot of this name; return the name."""
        name, spec = f"{self.node}/{slot}", spec_of()
        module = f"{Path(__file__).stem}:{workload.__name__}"
        settings = replace(spec.workload, name=module, size=64)
        return self.place_as(name, replace(spec, slot=name, node=self.node, workload=settings))

    def place_as(self, name: str, spec: WorkerSpec) -> str:
        """Place a slot with a specification of its own."""
        self._slots.append(name)
        self.fleet.place(spec, num_cpus=1.0, num_gpus=0.0)
        return name

    def submit(
        self,
        slot: str,
        *sequences: int,
        incarnation: int = 0,
        duration_s: float = 0.0,
        resume: ResumeState | None = None,
    ) -> None:
        """Ask a slot for slices."""
        for sequence in sequences:
            directive = Directive(
                incarnation=incarnation, sequence=sequence, duration_s=duration_s, resume=resume
            )
            self.fleet.submit(slot, directive)

    def wait(self, count: int) -> list[SliceEnded]:
        """Wait until so many slices have ended."""
        ended: list[SliceEnded] = []
        patience = Patience(lambda: len(ended))
        while len(ended) < count:
            assert not patience.is_over(), f"{len(ended)} of {count} slices ended: {ended}"
            ended += self.fleet.wait(1.0)
        assert len(ended) == count, ended
        return ended

    def reports(self, count: int) -> list[Report]:
        """Wait until so many slices have ended, all of them with a report."""
        ended = self.wait(count)
        reports = [each.report for each in ended if isinstance(each, SliceReported)]
        assert len(reports) == count, ended
        assert all(report.verdict is not Verdict.INCOMPATIBLE for report in reports), reports
        return reports

    def report_of_new_process(
        self, slot: str, sequence: int, resume: ResumeState | None = None
    ) -> Report:
        """Ask for a slice until a process reports, as the lifecycle does: the old one may still take some with it."""
        patience = Patience()
        while not patience.is_over():
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


@pytest.fixture
def stage(cluster: Cluster) -> Iterator[Stage]:
    with contextlib.closing(Stage(cluster.joined, NODE)) as made:
        yield made


def names(report: Report) -> list[str]:
    """The names of what happened in a slice."""
    return [event.name for event in report.events]


def process_of(report: Report) -> int:
    assert report.device is not None
    return report.device.pid


def test_it_shows_its_nodes_and_ends_none_of_the_users(stage: Stage) -> None:
    nodes = {node.name: node for node in stage.fleet.nodes()}
    assert set(nodes) == {NODE, NARROW}
    assert all(each.answers and not each.refuses and each.address for each in nodes.values())
    assert nodes[NODE].cpus == 32
    assert stage.fleet.count_cards(NODE) >= 0
    assert stage.fleet.wait(0.1) == (), "nothing is under way"
    for change in (stage.fleet.end_node, stage.fleet.start_node):
        with pytest.raises(UsageError, match=NODE):
            change(NODE)
    assert len(stage.fleet.nodes()) == 2


def test_slices_run_in_order_in_one_process_for_each_slot(stage: Stage) -> None:
    slot, other = stage.place("ordered"), stage.place("other")
    stage.submit(slot, 7, incarnation=3)
    stage.submit(slot, 8, incarnation=3, duration_s=0.2)
    stage.submit(other, 0)
    reports = stage.reports(3)
    first, second = (report for report in reports if report.slot == slot)
    (of_other,) = (report for report in reports if report.slot == other)
    assert [(report.incarnation, report.sequence) for report in (first, second)] == [(3, 7), (3, 8)]
    assert (first.verdict, first.error) == (Verdict.OK, None), first.reason
    assert process_of(first) == process_of(second) != process_of(of_other)
    assert [names(report).count("device_opened") for report in (first, second, of_other)] == [
        1,
        0,
        1,
    ]
    assert second.wall_s >= 0.2
    assert stage.fleet.why_ended(slot) is None, "its process has not ended"


def test_a_step_that_fails_is_a_report_and_no_failure(stage: Stage) -> None:
    slot = stage.place("failing", Faulty)
    stage.submit(slot, 0, 1)
    for report in stage.reports(2):
        assert report.verdict is Verdict.OK
        assert "no such column" in str(report.error)


def test_an_engine_that_cannot_be_made_is_unbuildable(stage: Stage) -> None:
    name = f"{NODE}/unbuildable"
    spec = SimpleNamespace(slot=name, node=NODE, device="cpu", command=None)
    stage.submit(stage.place_as(name, cast("WorkerSpec", spec)), 0)
    (ended,) = stage.wait(1)
    assert isinstance(ended, SliceFailed)
    assert (ended.slot, ended.incarnation, ended.sequence) == (name, 0, 0)
    assert ended.failure is SliceFailure.UNBUILDABLE
    assert "AttributeError" in ended.text


def test_of_what_was_given_up_no_failure_is_told(stage: Stage) -> None:
    slot = stage.place("forgotten", Slow)
    stage.submit(slot, 0)
    stage.reports(1)
    stage.submit(slot, 1, 2)
    stage.fleet.forget(slot)
    stage.submit(slot, 3)
    sequences: list[int] = []
    while 3 not in sequences:
        sequences += [report.sequence for report in stage.reports(1)]
    assert sequences in ([3], [1, 3], [2, 3], [1, 2, 3]), (
        "a report that comes all the same may be told"
    )


def test_a_restarted_slot_answers_from_a_fresh_engine(stage: Stage) -> None:
    """With the same specification, also after its device broke."""
    slot = stage.place("broken", BreaksDevice)
    stage.submit(slot, 0, 1)
    good, bad = stage.reports(2)
    assert (good.verdict, bad.verdict) == (Verdict.OK, Verdict.CONTEXT_CORRUPTED)
    stage.fleet.forget(slot)
    stage.fleet.restart(slot)
    after = stage.report_of_new_process(slot, 2, good.resume)
    assert (after.slot, after.incarnation, after.verdict) == (slot, 1, Verdict.OK)
    assert {"device_opened", "resumed"} <= set(names(after))
    assert (after.size, after.batch) == (good.size, good.batch)


def test_an_abandoned_slot_is_gone_until_it_is_placed_again(stage: Stage) -> None:
    """And the others work."""
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


def test_checkpoints_come_in_pieces_from_their_node(cluster: Cluster, tmp_path: Path) -> None:
    """They come whole, while their files are replaced."""
    from orchestrator.cluster.checkpoint_copy import copied

    run, slot, pattern = "20260101-000000-abcd", f"{NODE}/0", "generation-?.pt"
    place = cluster.state / "state" / run / slot
    place.mkdir(parents=True)
    content = {"generation-0.pt": secrets.token_bytes(20 * 2**20), "generation-1.pt": b"short"}
    for name, data in content.items():
        (place / name).write_bytes(data)
    (place / "generation-0.pt.77.new").write_bytes(b"being written")
    paths = copied(NODE, run, slot, pattern, tmp_path)
    assert {path.name: path.read_bytes() for path in paths} == content
    assert copied(NODE, run, f"{NODE}/1", pattern, tmp_path) == []
    with pytest.raises(NoClusterError, match="no node pc9 is in the cluster"):
        copied("pc9", run, "pc9/0", pattern, tmp_path)
