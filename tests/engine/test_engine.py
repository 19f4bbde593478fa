"""The engine under a real cap: out-of-memory errors come from the kernel, or are injected.

Each scenario is a plain function that runs in a child process and returns reports; the tests judge
the reports.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, ClassVar, TypeAlias

import pytest
import torch

from tests.engine.scene import all_is_well, begun, events, names, own, turn, turns
from tests.in_child import InChild
from tests.scene import MIB, spec_of
from workers.messages import Status, Verdict, WorkerState
from workers.policy.base import Stages
from workers.policy.classic import CHECKS_PER_BLIND_TRY
from workers.settings import FailureKind, WorkerSpec
from workers.testing import injected_error
from workers.workloads.base import StepResult, Workload, WorkloadContext
from workers.workloads.matmul import matrix_bytes

Found: TypeAlias = dict[str, Any]

#: The guides' reference: 3.30 GiB / 16.
REHEARSAL_BUDGET_BYTES = 213 * MIB


class Hungry(Workload):
    """Allocates `need_bytes`, and keeps them until released."""

    need_bytes: ClassVar[int] = 0
    says_its_need: ClassVar[bool] = True
    held: torch.Tensor | None = None

    def step(self, size: int, batch: int) -> StepResult:
        self.held = None
        self.held = torch.empty(self.need_bytes, dtype=torch.uint8)
        return StepResult()

    def release(self) -> None:
        self.held = None

    def needed_bytes(self, size: int, batch: int) -> int | None:
        return self.need_bytes if self.says_its_need else None


class Injected(Workload):
    """Fails `fails` more times."""

    fails: ClassVar[int] = 0
    kind: ClassVar[FailureKind]

    def step(self, size: int, batch: int) -> StepResult:
        if Injected.fails:
            Injected.fails -= 1
            raise injected_error(Injected.kind)
        return StepResult(flop=1.0)

    def release(self) -> None:
        """Nothing to drop."""


class Buggy(Injected):
    def step(self, size: int, batch: int) -> StepResult:
        raise ValueError("the labels are missing")


class Busy(Injected):
    """Keeps the processor busy for a moment."""

    step_s: ClassVar[float] = 0.02

    def step(self, size: int, batch: int) -> StepResult:
        until_s = time.perf_counter() + self.step_s
        while time.perf_counter() < until_s:
            pass
        return StepResult(flop=1.0)


class Attended(Busy):
    """Counts the calls that report that the slot is working."""

    step_s = 0.3
    times = 0

    def attend(self) -> None:
        self.times += 1
        self.metrics = {"times": float(self.times)}


class Loss(Injected):
    """Returns a loss from its step, as users do."""

    def step(self, size: int, batch: int) -> StepResult:
        return torch.zeros(())  # type: ignore[return-value]


class Starved(Injected):
    """Never has enough memory."""

    def step(self, size: int, batch: int) -> StepResult:
        raise MemoryError


class Clumsy(Starved):
    """Fails in `release` as well."""

    def release(self) -> None:
        raise KeyError("optimizer")


class TellsText(Injected):
    """Its progress is no `Progress`."""

    def progress(self) -> Any:
        return "half of it"


class Descending(Injected):
    """Its batches are in the wrong order."""

    def stages(self) -> Stages:
        return Stages(batches=(2, 1))


class Unbuildable(Injected):
    def __init__(self, context: WorkloadContext) -> None:
        raise LookupError("the dataset is not on this disk")


class NoWorkload:
    """Has none of the methods."""


def test_what_fits_fills_its_cap_and_its_time_without_a_failure(in_child: InChild) -> None:
    spec = spec_of(budget_bytes=REHEARSAL_BUDGET_BYTES)
    first, *climb, second, third = reports = in_child(
        turns, spec, [*[{}] * 5, {"duration_s": 0.3}, {"duration_s": 0.1}]
    )
    assert all_is_well(reports)
    shares = [each.claim_bytes / each.device.cap_bytes for each in (first, *climb)]
    assert shares == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0], abs=0.05), "in stages"
    for report in (second, third):
        assert 0.95 * report.device.cap_bytes <= report.claim_bytes <= report.device.cap_bytes
    assert first.counts.steps_ok == 1, "no duration ends with the first good step"
    assert second.wall_s >= 0.3, "a turn with a duration takes all of it"
    assert second.counts.work_flop > 0
    assert 0 < second.counts.busy_s <= second.wall_s
    assert 0.9 * second.claim_bytes <= second.memory.allocated_bytes <= second.device.cap_bytes
    assert second.device.cap_bytes + second.device.context_bytes == pytest.approx(
        REHEARSAL_BUDGET_BYTES, abs=4096
    )
    assert ["device_opened" in names(report) for report in reports] == [True, *[False] * 6]


TOO_LARGE = spec_of(size=16384, dtype="fp32")


@pytest.fixture(scope="module")
def shrunk(in_child: InChild) -> Status:
    (report,) = in_child(turns, TOO_LARGE, [{}])
    return report


class TestTooLarge:
    """The size is 16384, and about 2700 fits: the guides' formula shrinks it after each refusal."""

    def test_every_failure_was_real_and_survived(self, shrunk: Status) -> None:
        ooms = events(shrunk, "oom")
        assert shrunk.counts.steps_oom == len(ooms) == shrunk.counts.oom_count >= 3
        assert (shrunk.counts.steps_oom_probe, shrunk.counts.success_rate) == (len(ooms), 1.0)
        assert shrunk.counts.emergency_count >= 1
        assert {event.detail["kind"] for event in ooms} == {"definite"}
        assert all("DefaultCPUAllocator" in str(event.detail["text"]) for event in ooms)
        assert all(event.detail["needed_bytes"] > event.detail["free_bytes"] for event in ooms)
        assert (shrunk.verdict, shrunk.state) == (Verdict.OK, WorkerState.RUNNING)
        assert (shrunk.counts.steps_ok, shrunk.counts.steps_error, shrunk.error) == (1, 0, None)
        assert shrunk.size == int(16384 * 0.7 ** len(ooms))
        assert shrunk.batch == max(32, 128 - 16 * len(ooms))
        assert 3 * matrix_bytes(shrunk.size, torch.float32) <= shrunk.claim_bytes

    def test_an_engine_adopts_what_another_has_learned(
        self, in_child: InChild, shrunk: Status
    ) -> None:
        known = replace(shrunk.resume, failures=2)
        spec = spec_of(size=1024, dtype="fp32")
        (first, _), (second, later) = [
            in_child(turns, spec, [{}] * 2, {"resume": resume}) for resume in (None, known)
        ]
        assert first.size == 1024
        assert second.size == int(1024 * 0.7**2)
        assert second.resume.failures == 2
        assert "resumed" in names(second)
        assert names(later) == [], "it is read once"


def memory_returns(spec: WorkerSpec, says_its_need: bool) -> dict[str, list[Status]]:
    Hungry.says_its_need = says_its_need
    Hungry.need_bytes = 4 * spec.budget_bytes
    engine = begun(spec)
    starved = [turn(engine) for _ in range(CHECKS_PER_BLIND_TRY + 2)]
    Hungry.need_bytes = spec.budget_bytes // 2
    fed = []
    for _ in range(CHECKS_PER_BLIND_TRY + 1):
        fed.append(turn(engine))
        if fed[-1].state is WorkerState.RUNNING:
            break
    Hungry.need_bytes = 4 * spec.budget_bytes
    return {"starved": starved, "fed": fed, "again": [turn(engine), turn(engine)]}


@pytest.fixture(scope="module", params=[True, False], ids=["tells its need", "does not tell"])
def starved_then_fed(request: pytest.FixtureRequest, in_child: InChild) -> Found:
    return in_child(memory_returns, spec_of(name=own(Hungry)), request.param) | {
        "told": request.param
    }


class TestEmergency:
    def test_where_nothing_fits_every_turn_says_emergency(self, starved_then_fed: Found) -> None:
        for report in starved_then_fed["starved"]:
            assert report.verdict == Verdict.OK
            assert report.state == WorkerState.EMERGENCY
            assert report.error is None
            assert "smallest step" in report.reason
            assert report.counts.emergency_count >= 1, "each turn proves that the device answers"
            assert report.counts.steps_ok == 0
        assert names(starved_then_fed["starved"]).count("emergency") == 1, "it is announced once"
        assert names(starved_then_fed["again"]).count("emergency") == 1, "and so is the next one"

    def test_when_memory_returns_a_told_need_runs_at_once(self, starved_then_fed: Found) -> None:
        last = starved_then_fed["fed"][-1]
        assert last.state == WorkerState.RUNNING
        assert last.counts.steps_ok == 1
        assert last.counts.steps_oom == 0
        attempts = sum(report.counts.steps_oom for report in starved_then_fed["starved"][1:])
        if starved_then_fed["told"]:
            assert len(starved_then_fed["fed"]) == 1
            assert attempts == 0, "no attempt that must fail"
        else:
            assert attempts > 0, "a blind try now and then"


def injected(spec: WorkerSpec, kind: FailureKind, *failures: int) -> list[Status]:
    """Run a turn for each number of failures."""
    engine, Injected.kind, reports = begun(spec), kind, list[Status]()
    for Injected.fails in failures:
        reports.append(turn(engine))
    return reports


def test_an_out_of_memory_says_what_became_smaller(in_child: InChild) -> None:
    reports = in_child(
        turns, spec_of(name=own(Starved), size=300, batch=64), [{"duration_s": 1e-6}] * 2
    )
    first, second = [report.reason for report in reports]
    assert first == "out of memory at size 300, batch 64; down to size 256 and batch 48"
    assert second == "out of memory at size 256, batch 48; down to batch 32"


class TestWorkloadErrors:
    @pytest.mark.parametrize(
        ("workload", "reason", "error"),
        [
            (Buggy, "the labels are missing", "ValueError: the labels are missing"),
            (Loss, "StepResult", "TypeError"),
            (Clumsy, "outside its step", "KeyError: 'optimizer'"),
            (TellsText, "progress must return a Progress or None, not str", "TypeError"),
        ],
    )
    def test_a_bug_ends_the_turn_and_nothing_else(
        self, in_child: InChild, workload: type, reason: str, error: str
    ) -> None:
        for report in in_child(turns, spec_of(name=own(workload)), [{}] * 2):
            assert (report.verdict, report.state) == (Verdict.OK, WorkerState.BACKOFF)
            assert report.counts.steps_error == 1
            assert reason in report.reason
            assert report.error.startswith("Traceback")
            assert error in report.error
            assert report.size == 512 or workload is Clumsy, "a bug is no reason to shrink"

    def test_errors_in_a_row_are_counted_until_a_good_turn(self, in_child: InChild) -> None:
        spec = spec_of(name=own(Injected))
        reports = in_child(injected, spec, FailureKind.OTHER, 0, 1, 1, 0)
        assert [report.counts.steps_error for report in reports] == [0, 1, 1, 0]
        assert [report.errors_in_a_row for report in reports] == [0, 1, 2, 0]
        assert reports[-1].state is WorkerState.RUNNING

    def test_a_poisoned_device_ends_the_process_for_good(self, in_child: InChild) -> None:
        spec = spec_of(name=own(Injected))
        good, *bad = in_child(injected, spec, FailureKind.CONTEXT_CORRUPTED, 0, 1, 0, 0)
        assert good.verdict is Verdict.OK
        for report in bad:
            assert report.verdict is Verdict.CONTEXT_CORRUPTED
            assert report.state is WorkerState.STOPPED
            assert "illegal memory access" in report.reason
            assert report.counts.steps_ok == 0, "nothing may touch the device again"
            assert report.resume == good.resume, "a fresh process goes on where this one stood"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"name": "no_such_workload"}, ["cannot be loaded on this machine"]),
        ({"name": own(NoWorkload)}, ["is not a subclass of workers.workloads.base.Workload"]),
        ({"name": own(Unbuildable)}, ["LookupError: the dataset is not on this disk"]),
        (
            {"budget_bytes": 8 * MIB, "floor_bytes": 100 * MIB},
            ["nodes.pc1.vram_per_worker_gib", "budget of 8.0 MiB", "floor of 100.0 MiB"],
        ),
        ({"policy": "brave"}, ["classic"]),
        ({"name": own(Descending), "policy": "adaptive"}, ["must ascend from 1", "(2, 1)"]),
        ({"name": own(Descending)}, ["needs memory.policy: adaptive"]),
    ],
)
def test_what_can_never_work_is_told_in_words(
    in_child: InChild, wrong: dict[str, Any], words: list[str]
) -> None:
    (report,) = in_child(turns, spec_of(**wrong), [{}])
    assert report.verdict is Verdict.INCOMPATIBLE
    assert report.state is WorkerState.STOPPED
    assert all(word in report.reason for word in words)


def test_a_workload_knows_that_it_rests_and_not_that_it_is_held(in_child: InChild) -> None:
    spec, turn = spec_of(name=own(Attended), duty=0.001), {"duration_s": 0.1}
    first, *_, resting, _, held = in_child(
        turns, spec, [{}, *[turn] * 5, *[{**turn, "holds": True}] * 2]
    )
    assert (first.counts.steps_ok, resting.counts.steps_ok) == (1, 0)
    assert held.metrics["times"] == resting.metrics["times"] == 6.0


def busy_share(spec: WorkerSpec) -> float:
    """Return the busy share of the time when it is about 0.5, or after many turns: on a loaded
    machine a step or a rest may take longer than planned.
    """
    engine, busy_s, wall_s, number = begun(spec), 0.0, 0.0, 0
    turn(engine)
    while number < 4 or (number < 200 and not 0.35 <= busy_s / wall_s <= 0.62):
        report, number = turn(engine, duration_s=0.4), number + 1
        busy_s, wall_s = busy_s + report.counts.busy_s, wall_s + report.wall_s
    return busy_s / wall_s


def test_duty_is_the_share_of_time_the_device_is_busy(in_child: InChild) -> None:
    assert 0.35 <= in_child(busy_share, spec_of(name=own(Busy), duty=0.5)) <= 0.62
