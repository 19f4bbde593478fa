"""`--chaos` inside a worker: real recoveries from injected failures, and strikes that really end a real process."""

from __future__ import annotations

import contextlib
import pickle
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import pytest

from tests.fork_server import Child, ForkServer
from workers.engine.engine import Engine
from workers.engine.fault_injection import EXIT_STATUS, ChaoticWorkload, perform
from workers.messages import Directive, FaultKind, ProcessFault, Report, Verdict, WorkerState
from workers.settings import FailureKind, StepFaults, WorkerSpec
from workers.workloads.base import StepResult, Workload

InChild: TypeAlias = Callable[..., Any]
MakeSpec: TypeAlias = Callable[..., WorkerSpec]

pytestmark = pytest.mark.torch


class Brief(Workload):
    """Steps of a millisecond that hold nothing, so that a slice has many."""

    def step(self, size: int, batch: int) -> StepResult:
        time.sleep(0.001)
        return StepResult(flop=1.0)

    def release(self) -> None:
        """Nothing to drop."""


BRIEF = f"{Path(__file__).stem}:{Brief.__name__}"


def with_faults(spec: WorkerSpec, **faults: Any) -> WorkerSpec:  # noqa: ANN401 - whatever the field takes
    return replace(spec, step_faults=StepFaults(seed=7, **faults))


def slices(spec: WorkerSpec, durations_s: list[float], strikes: dict[int, ProcessFault]) -> list[Report]:
    """Run slices one after the other, as one process."""
    engine = Engine(spec)
    return [
        engine.run_slice(
            Directive(
                incarnation=0,
                sequence=sequence,
                duration_s=duration_s,
                resume=None,
                process_fault=strikes.get(sequence),
            )
        )
        for sequence, duration_s in enumerate(durations_s)
    ]


def told(report: Report, kind: FaultKind) -> int:
    """How many faults of a kind a report tells of; one event for each kind at most."""
    counts = [
        event.detail["count"] for event in report.events if event.name == "chaos" and event.detail["kind"] == kind
    ]
    assert len(counts) <= 1
    return sum(counts)


# --- failures of steps ---------------------------------------------------------------------------------------------


class TestSteps:
    def test_a_rate_of_out_of_memory_is_survived_with_a_real_recovery(
        self, in_child: InChild, make_spec: MakeSpec
    ) -> None:
        spec = with_faults(make_spec(size=512), oom_rate=0.3)
        reports: list[Report] = in_child(slices, spec, [0.0] * 12 + [1.0], {})
        assert all(report.verdict is Verdict.OK for report in reports)
        struck = [report for report in reports if told(report, FaultKind.OOM)]
        assert struck
        for report in reports:
            assert report.counts.steps_oom == told(report, FaultKind.OOM)
            assert report.counts.emergency_count >= report.counts.steps_oom, "the device was proven alive each time"
            assert sum(event.name == "oom" for event in report.events) == report.counts.steps_oom
            assert report.error is None
        assert sum(report.counts.steps_ok for report in reports) > 0, "and went on working"
        assert "type torch.OutOfMemoryError" in {
            event.detail["evidence"] for report in struck for event in report.events if event.name == "oom"
        }

    def test_a_rate_is_met_and_repeats(self, in_child: InChild, make_spec: MakeSpec) -> None:
        spec = with_faults(make_spec(name=BRIEF), raise_rate=0.2)
        one, two = (in_child(slices, spec, [0.0] * 300, {}) for _ in range(2))
        failed = [report.counts.steps_error for report in one]
        assert failed == [report.counts.steps_error for report in two]
        assert sum(failed) / len(failed) == pytest.approx(0.2, abs=0.07)

    def test_so_many_after_so_many_to_the_step(self, in_child: InChild, make_spec: MakeSpec) -> None:
        spec = with_faults(make_spec(name=BRIEF, size=4096), oom_num=3, oom_skip=5)
        reports = in_child(slices, spec, [0.0] * 10, {})
        assert [report.counts.steps_oom for report in reports] == [0, 0, 0, 0, 0, 3, 0, 0, 0, 0]
        assert [told(report, FaultKind.OOM) for report in reports] == [0, 0, 0, 0, 0, 3, 0, 0, 0, 0]
        assert [report.counts.steps_ok for report in reports] == [1] * 10

    def test_probable_ones_are_told_as_such(self, in_child: InChild, make_spec: MakeSpec) -> None:
        spec = with_faults(make_spec(name=BRIEF, size=4096), oom_num=1, oom_kind=FailureKind.PROBABLE)
        (report,) = in_child(slices, spec, [0.0], {})
        assert (report.counts.steps_oom, told(report, FaultKind.OOM)) == (1, 1)
        assert [event.detail["kind"] for event in report.events if event.name == "oom"] == ["probable"]

    def test_a_raise_is_an_error_of_the_workload_and_ends_the_slice(
        self, in_child: InChild, make_spec: MakeSpec
    ) -> None:
        spec = with_faults(make_spec(name=BRIEF), raise_rate=1.0)
        for report in in_child(slices, spec, [1.0, 1.0], {}):
            assert report.verdict is Verdict.OK
            assert (report.counts.steps_ok, report.counts.steps_oom, report.counts.steps_error) == (0, 0, 1)
            assert told(report, FaultKind.RAISE) == 1
            assert report.state is WorkerState.BACKOFF
            assert "(injected)" in report.error

    def test_rates_of_nothing_change_nothing(self, in_child: InChild, make_spec: MakeSpec) -> None:
        (report,) = in_child(slices, with_faults(make_spec(name=BRIEF)), [0.3], {})
        assert (report.counts.steps_oom, report.counts.steps_error) == (0, 0)
        assert report.counts.steps_ok > 0
        assert not [event for event in report.events if event.name == "chaos"]


def wrapped(spec: WorkerSpec) -> bool:
    engine = Engine(spec)
    engine.run_slice(Directive(incarnation=0, sequence=0, duration_s=0.0, resume=None))
    assert engine._session is not None
    return isinstance(engine._session.workload, ChaoticWorkload)


def test_without_chaos_nothing_is_wrapped(in_child: InChild, make_spec: MakeSpec) -> None:
    assert not in_child(wrapped, make_spec(name=BRIEF))
    assert in_child(wrapped, with_faults(make_spec(name=BRIEF)))


def test_all_that_a_workload_can_be_asked_is_handed_on() -> None:
    """A hook that is added to `Workload` must be added to the wrapper, or chaos would test another workload."""
    hooks = {name for name, value in vars(Workload).items() if callable(value) and not name.startswith("_")}
    assert hooks <= vars(ChaoticWorkload).keys()


# --- strikes -------------------------------------------------------------------------------------------------------

#: As the tests' other children, but its reports leave it one by one: it will not live to return them.
STRUCK = """
import faulthandler, importlib, pickle, sys, warnings
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
    print(report.sequence, report.verdict, report.counts.steps_ok, flush=True)
"""

Start: TypeAlias = Callable[[FaultKind], Child]


@pytest.fixture
def start(tmp_path: Path, make_spec: MakeSpec, fork_server: ForkServer) -> Iterator[Start]:
    """Start a child that runs three slices, the second with a strike."""
    children: list[Child] = []

    def run(kind: FaultKind) -> Child:
        spec = with_faults(make_spec(name=BRIEF))
        process_fault = ProcessFault(kind=kind, at_share=0.5)
        directives = [
            Directive(incarnation=0, sequence=0, duration_s=0.0, resume=None),
            Directive(incarnation=0, sequence=1, duration_s=0.4, resume=None, process_fault=process_fault),
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
        [(FaultKind.KILL, -signal.SIGKILL), (FaultKind.SEGV, -signal.SIGSEGV), (FaultKind.EXIT, EXIT_STATUS)],
    )
    def test_a_strike_really_ends_the_process(self, start: Start, kind: FaultKind, status: int) -> None:
        child = start(kind)
        assert child.wait(60) == status, child.err
        assert [line.split()[:2] for line in child.out.splitlines()] == [["0", "ok"]], (
            "the struck slice gives no report"
        )

    def test_a_hang_really_hangs(self, start: Start) -> None:
        child = start(FaultKind.HANG)
        while "\n" not in child.out:
            with contextlib.suppress(subprocess.TimeoutExpired):
                pytest.fail(f"it ended with {child.wait(0.05)}: {child.err}")
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(3.0)  # two slices of 0.4 s would be long over
        asleep = psutil.Process(child.pid)
        assert asleep.status() == psutil.STATUS_SLEEPING
        child.kill()
        assert child.wait(10) == -signal.SIGKILL
        assert [line.split()[:2] for line in child.out.splitlines()] == [["0", "ok"]], "it reported nothing more"

    def test_poison_leaves_a_report_and_a_process_that_does_no_more(
        self, in_child: InChild, make_spec: MakeSpec
    ) -> None:
        process_fault = ProcessFault(kind=FaultKind.POISON, at_share=0.5)
        good, struck, after = in_child(slices, with_faults(make_spec(name=BRIEF)), [0.0, 0.4, 0.4], {1: process_fault})
        assert good.verdict is Verdict.OK
        assert struck.verdict is after.verdict is Verdict.CONTEXT_CORRUPTED
        assert struck.counts.steps_ok > 0, "it struck in the middle of the slice"
        assert struck.wall_s >= 0.2
        assert "illegal memory access" in struck.reason
        assert after.counts.steps_ok == 0

    def test_a_strike_that_no_step_met_waits_for_the_next_slice(self, in_child: InChild, make_spec: MakeSpec) -> None:
        """The step takes longer than the slice, so that none begins after the strike's time."""
        late = ProcessFault(kind=FaultKind.POISON, at_share=0.9)
        spec = with_faults(make_spec(name=f"{Path(__file__).stem}:{Long.__name__}"))
        reports = in_child(slices, spec, [0.0, 0.1, 0.1], {1: late})
        assert [report.verdict for report in reports] == [Verdict.OK, Verdict.OK, Verdict.CONTEXT_CORRUPTED]
        assert reports[2].counts.steps_ok == 0, "at its first step"

    def test_what_is_no_strike_is_refused(self) -> None:
        with pytest.raises(ValueError, match="node is not a process fault"):
            perform(FaultKind.NODE)


class Long(Brief):
    """Steps of 0.2 s."""

    def step(self, size: int, batch: int) -> StepResult:
        time.sleep(0.2)
        return StepResult()
