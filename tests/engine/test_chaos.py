"""`--chaos` inside a worker: real recoveries from injected failures, and strikes that really end a real process."""

from __future__ import annotations

import contextlib
import pickle
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import psutil
import pytest

from tests.engine.scene import events, names, own, slices, with_faults
from tests.fork_server import Child, ForkServer
from tests.in_child import InChild
from tests.scene import PATIENCE_S, spec_of
from workers.messages import Directive, FaultKind, Report, StruckDirective, Verdict, WorkerState
from workers.settings import FailureKind
from workers.workloads.base import StepResult, Workload, find_workload
from workers.workloads.chaos import EXIT_STATUS, Chaotic, perform


class Brief(Workload):
    """Steps of a millisecond that hold nothing, so that a slice has many."""

    def step(self, size: int, batch: int) -> StepResult:
        time.sleep(0.001)
        return StepResult(flop=1.0)

    def release(self) -> None:
        """Nothing to drop."""


class Long(Brief):
    """Steps of 0.2 s."""

    def step(self, size: int, batch: int) -> StepResult:
        time.sleep(0.2)
        return StepResult()


BRIEF = own(Brief)


def told(report: Report, kind: FaultKind) -> int:
    """How many faults of a kind a report tells of; one event for each kind at most."""
    counts = [
        event.detail["count"] for event in events(report, "chaos") if event.detail["kind"] == kind
    ]
    assert len(counts) <= 1
    return sum(counts)


class TestSteps:
    def test_a_rate_of_oom_is_survived_with_a_real_recovery(self, in_child: InChild) -> None:
        spec = with_faults(spec_of(size=512), oom_rate=0.3)
        reports: list[Report] = in_child(slices, spec, [*[{}] * 12, {"duration_s": 1.0}])
        assert all(report.verdict is Verdict.OK for report in reports)
        struck = [report for report in reports if told(report, FaultKind.OOM)]
        assert struck
        for report in reports:
            assert report.counts.steps_oom == told(report, FaultKind.OOM)
            assert report.counts.emergency_count >= report.counts.steps_oom, (
                "the device was proven alive each time"
            )
            assert names(report).count("oom") == report.counts.steps_oom
            assert report.error is None
        assert sum(report.counts.steps_ok for report in reports) > 0, "and went on working"
        assert "type torch.OutOfMemoryError" in {
            event.detail["evidence"] for event in events(struck, "oom")
        }

    def test_a_rate_is_met_and_repeats(self, in_child: InChild) -> None:
        spec = with_faults(spec_of(name=BRIEF), raise_rate=0.2)
        one, two = (in_child(slices, spec, [{}] * count) for count in (200, 40))
        failed = [report.counts.steps_error for report in one]
        assert failed[:40] == [report.counts.steps_error for report in two]
        assert sum(failed) / len(failed) == pytest.approx(0.2, abs=0.07)

    def test_so_many_after_so_many_to_the_step(self, in_child: InChild) -> None:
        spec = with_faults(
            spec_of(name=BRIEF, size=4096), oom_num=2, oom_skip=5, oom_kind=FailureKind.PROBABLE
        )
        reports = in_child(slices, spec, [{}] * 10)
        assert [report.counts.steps_oom for report in reports] == [0, 0, 0, 0, 0, 2, 0, 0, 0, 0]
        assert [told(report, FaultKind.OOM) for report in reports] == [0, 0, 0, 0, 0, 2, 0, 0, 0, 0]
        assert {event.detail["kind"] for event in events(reports, "oom")} == {"probable"}
        assert [report.counts.steps_ok for report in reports] == [1] * 10

    def test_a_raise_is_an_error_of_the_workload_and_ends_the_slice(
        self, in_child: InChild
    ) -> None:
        spec = with_faults(spec_of(name=BRIEF), raise_rate=1.0)
        for report in in_child(slices, spec, [{"duration_s": 1.0}] * 2):
            assert report.verdict is Verdict.OK
            assert report.counts.steps_ok == 0
            assert report.counts.steps_oom == 0
            assert report.counts.steps_error == 1
            assert told(report, FaultKind.RAISE) == 1
            assert report.state is WorkerState.BACKOFF
            assert "(injected)" in report.error


def test_chaos_is_a_subclass_of_the_workload() -> None:
    chaotic = find_workload("workers.workloads.chaos:matmul")
    assert issubclass(chaotic, find_workload("matmul"))
    added = {name for name in vars(Chaotic) if not name.startswith("_")}
    assert added == {"begin_slice", "step", "check"}


#: As the tests' other children, but its reports leave it one by one: it will not live to return
#: them.
STRUCK = """
import faulthandler, pickle, sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
faulthandler.enable()  # as Ray's own handlers do, it stands between a signal and the end
folder, given = sys.argv[1:]
sys.path.insert(0, folder)
from workers.engine.engine import Engine
spec, directives = pickle.loads(Path(given).read_bytes())
engine = Engine(spec)
for directive in directives:
    report = engine.run_slice(directive)
    print(report.sequence, report.verdict, flush=True)
"""

#: All that a process says which does not survive its second slice.
FIRST_SLICE = "0 ok\n"

Start: TypeAlias = Callable[[FaultKind], Child]


@pytest.fixture
def start(tmp_path: Path, fork_server: ForkServer) -> Iterator[Start]:
    """Start a child that runs three slices, the second with a strike."""
    children: list[Child] = []

    def run(kind: FaultKind) -> Child:
        spec = with_faults(spec_of(name=BRIEF))
        directives = [
            Directive(incarnation=0, sequence=0, duration_s=0.0, resume=None),
            StruckDirective(
                incarnation=0, sequence=1, duration_s=0.4, resume=None, kind=kind, at_share=0.5
            ),
            Directive(incarnation=0, sequence=2, duration_s=0.4, resume=None),
        ]
        given = tmp_path / "directives"
        given.write_bytes(pickle.dumps((spec, directives)))
        child = fork_server.start(STRUCK, str(Path(__file__).parent), str(given))
        children.append(child)
        return child

    yield run
    for child in children:
        child.close()


class TestStrikes:
    @pytest.mark.parametrize(
        ("kind", "status"),
        [
            (FaultKind.KILL, -signal.SIGKILL),
            (FaultKind.SEGV, -signal.SIGSEGV),
            (FaultKind.EXIT, EXIT_STATUS),
        ],
    )
    def test_a_strike_really_ends_the_process(
        self, start: Start, kind: FaultKind, status: int
    ) -> None:
        child = start(kind)
        assert child.wait(PATIENCE_S) == status, child.err
        assert child.out == FIRST_SLICE, "the struck slice gives no report"

    def test_a_hang_really_hangs(self, start: Start) -> None:
        child = start(FaultKind.HANG)
        while "\n" not in child.out:
            with contextlib.suppress(subprocess.TimeoutExpired):
                pytest.fail(f"it ended with {child.wait(0.05)}: {child.err}")
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(1.5)  # two slices of 0.4 s would be long over
        asleep = psutil.Process(child.pid)
        assert asleep.status() == psutil.STATUS_SLEEPING
        child.kill()
        assert child.wait(PATIENCE_S) == -signal.SIGKILL
        assert child.out == FIRST_SLICE, "it reported nothing more"

    def test_poison_leaves_a_report_and_a_process_that_does_no_more(
        self, in_child: InChild
    ) -> None:
        strike = {"duration_s": 0.4, "kind": FaultKind.POISON, "at_share": 0.5}
        good, struck, after = in_child(
            slices, with_faults(spec_of(name=BRIEF)), [{}, strike, {"duration_s": 0.4}]
        )
        assert good.verdict is Verdict.OK
        assert struck.verdict is after.verdict is Verdict.CONTEXT_CORRUPTED
        assert struck.counts.steps_ok > 0, "it struck in the middle of the slice"
        assert struck.wall_s >= 0.2
        assert "illegal memory access" in struck.reason
        assert after.counts.steps_ok == 0

    def test_a_strike_that_no_step_met_waits_for_the_next_slice(self, in_child: InChild) -> None:
        """The step takes longer than the slice, so that none begins after the strike's time."""
        late = {"duration_s": 0.1, "kind": FaultKind.POISON, "at_share": 0.9}
        reports = in_child(
            slices, with_faults(spec_of(name=own(Long))), [{}, late, {"duration_s": 0.1}]
        )
        assert [report.verdict for report in reports] == [
            Verdict.OK,
            Verdict.OK,
            Verdict.CONTEXT_CORRUPTED,
        ]
        assert reports[2].counts.steps_ok == 0, "at its first step"

    def test_what_is_no_strike_is_refused(self) -> None:
        with pytest.raises(ValueError, match="node is not a process fault"):
            perform(FaultKind.NODE)
