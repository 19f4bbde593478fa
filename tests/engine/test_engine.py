"""The engine against a real wall: every out-of-memory here is the kernel's, or torch's own type from an injector.

Each scenario is a plain function that runs in a child process and returns reports; the tests judge them.
"""

from __future__ import annotations

import gc
import itertools
import resource
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import pytest
import torch

from workers.engine.engine import Engine
from workers.engine.oom_recovery import MAX_PROBABLE_IN_A_ROW
from workers.messages import Directive, Report, ResumeState, Verdict, WorkerState
from workers.oom import classify
from workers.policy.classic import PRESSURES_PER_BLIND_TRY
from workers.settings import FailureKind, WorkerSpec
from workers.testing import OomInjector
from workers.workloads.base import StepResult, Workload, WorkloadContext
from workers.workloads.matmul import Matmul, matrix_bytes

InChild: TypeAlias = Callable[..., Any]
MakeSpec: TypeAlias = Callable[..., WorkerSpec]
Found: TypeAlias = dict[str, Any]

MIB = 2**20

#: The guides' reference: 3.33 GiB / 16.
REHEARSAL_BUDGET_BYTES = 213 * MIB


def slice_of(
    engine: Engine,
    sequence: int = 0,
    *,
    duration_s: float = 0.0,
    incarnation: int = 0,
    resume: ResumeState | None = None,
) -> Report:
    return engine.run_slice(Directive(incarnation=incarnation, sequence=sequence, duration_s=duration_s, resume=resume))


def vm_data_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData:"))


def above_bytes() -> int:
    """What the kernel would still allow."""
    return resource.getrlimit(resource.RLIMIT_DATA)[0] - vm_data_bytes()


def names(report: Report) -> list[str]:
    return [event.name for event in report.events]


# --- workloads ---------------------------------------------------------------------------------------------------


class Hungry(Workload):
    """Needs as many bytes as the class attribute says; keeps them until released."""

    need_bytes: ClassVar[int] = 0
    says_its_need: ClassVar[bool] = True

    def __init__(self, context: WorkloadContext) -> None:
        super().__init__(context)
        self.held: torch.Tensor | None = None

    def step(self, size: int, batch: int) -> StepResult:
        self.held = None
        self.held = torch.empty(type(self).need_bytes, dtype=torch.uint8)
        return StepResult()

    def release(self) -> None:
        self.held = None

    def needed_bytes(self, size: int, batch: int) -> int | None:
        return type(self).need_bytes if type(self).says_its_need else None


class Probing(Matmul):
    """The product's own, which also looks how much the kernel would still allow after each step."""

    above_bytes: ClassVar[int] = 0

    def step(self, size: int, batch: int) -> StepResult:
        result = super().step(size, batch)
        Probing.above_bytes = above_bytes()
        return result


class Deep(Workload):
    """Fails with a large tensor in a local variable of a deep frame, and looks whether it is gone in time."""

    block_bytes: ClassVar[int] = 0
    witness: ClassVar[weakref.ref[torch.Tensor] | None] = None
    alive_in_recovery: ClassVar[list[bool]] = []
    good_steps: ClassVar[int] = 0
    above_bytes: ClassVar[int] = 0

    def step(self, size: int, batch: int) -> StepResult:
        if Deep.witness is None:
            self.descend(20)
        Deep.above_bytes = above_bytes()
        torch.empty(Deep.block_bytes, dtype=torch.uint8)
        Deep.good_steps += 1
        return StepResult()

    def descend(self, depth: int) -> None:
        if depth:
            self.descend(depth - 1)
            return
        local = torch.empty(Deep.block_bytes, dtype=torch.uint8)
        Deep.witness = weakref.ref(local)
        torch.empty(Deep.block_bytes, dtype=torch.uint8)  # the kernel refuses: only one of them fits

    def release(self) -> None:
        self.look()

    def resize(self, claim_bytes: int) -> None:
        self.look()

    def look(self) -> None:
        if Deep.witness is not None:
            Deep.alive_in_recovery.append(Deep.witness() is not None)


class Injected(Workload):
    """Fails when its injector does."""

    injector: ClassVar[OomInjector] = OomInjector(num=0)
    sizes: ClassVar[list[int]] = []

    def step(self, size: int, batch: int) -> StepResult:
        Injected.injector.check()
        Injected.sizes.append(size)
        return StepResult(flop=1.0)

    def release(self) -> None:
        """Nothing to drop."""


class Buggy(Injected):
    def step(self, size: int, batch: int) -> StepResult:
        raise ValueError("the labels are missing")


class Busy(Injected):
    """Keeps the processor busy for a moment."""

    def step(self, size: int, batch: int) -> StepResult:
        until_s = time.perf_counter() + 0.02
        while time.perf_counter() < until_s:
            pass
        return StepResult(flop=1.0)


class Loss(Injected):
    """Returns what users return from a step: a loss."""

    def step(self, size: int, batch: int) -> StepResult:
        return torch.zeros(())  # type: ignore[return-value]


class Clumsy(Injected):
    """Runs out of memory, and cannot even let go."""

    def step(self, size: int, batch: int) -> StepResult:
        raise MemoryError

    def release(self) -> None:
        raise KeyError("optimizer")


class Unbuildable(Injected):
    def __init__(self, context: WorkloadContext) -> None:
        raise LookupError("the dataset is not on this disk")


class NoWorkload:
    """Has none of the methods."""


def mine(workload: type) -> str:
    """Name a class of this module the way a user does."""
    return f"{Path(__file__).stem}:{workload.__name__}"


# --- a wall that is really there ---------------------------------------------------------------------------------


def fitting(spec: WorkerSpec) -> Found:
    engine = Engine(spec)
    reports = [slice_of(engine), slice_of(engine, 1, duration_s=0.3)]
    return {"reports": reports, "above_bytes": Probing.above_bytes}


@pytest.fixture(scope="module")
def fits(in_child: InChild, make_spec: MakeSpec) -> Found:
    return in_child(fitting, make_spec(name=mine(Probing), budget_bytes=REHEARSAL_BUDGET_BYTES))


class TestFits:
    def test_the_claim_reaches_almost_all_of_the_cap_without_a_failure(self, fits: Found) -> None:
        for report in fits["reports"]:
            assert report.verdict is Verdict.OK
            assert report.state is WorkerState.RUNNING
            assert (
                report.counts.oom_count,
                report.counts.steps_oom,
                report.counts.steps_error,
                report.counts.emergency_count,
            ) == (0, 0, 0, 0)
            assert 0.95 * report.device.cap_bytes <= report.claim_bytes <= report.device.cap_bytes

    def test_the_claim_is_held_in_live_tensors(self, fits: Found) -> None:
        report = fits["reports"][1]
        assert 0.9 * report.claim_bytes <= report.memory.allocated_bytes <= report.device.cap_bytes

    def test_no_duration_ends_with_the_first_good_step(self, fits: Found) -> None:
        assert fits["reports"][0].counts.steps_ok == 1

    def test_a_duration_is_filled(self, fits: Found) -> None:
        report = fits["reports"][1]
        assert report.counts.steps_ok > 1
        assert report.counts.work_flop > 0
        assert 0 < report.counts.busy_s <= report.wall_s

    def test_the_cap_is_what_the_kernel_enforces(self, fits: Found) -> None:
        report = fits["reports"][1]
        assert report.device.cap_bytes + report.device.context_bytes == pytest.approx(REHEARSAL_BUDGET_BYTES, abs=4096)
        # What the kernel still allows, and what the worker says it holds, make up the cap.
        assert fits["above_bytes"] + report.memory.allocated_bytes == pytest.approx(report.device.cap_bytes, rel=0.01)

    def test_the_device_is_told_once(self, fits: Found) -> None:
        first, second = fits["reports"]
        assert "device_opened" in names(first)
        assert "device_opened" not in names(second)


def first_slice(spec: WorkerSpec, resume: ResumeState | None = None) -> Report:
    return slice_of(Engine(spec), resume=resume)


def another_incarnation(spec: WorkerSpec, resume: ResumeState) -> list[Report]:
    engine = Engine(spec)
    return [
        slice_of(engine),
        slice_of(engine, 1, incarnation=1, resume=resume),
        slice_of(engine, 2, incarnation=2, resume={"policy": "another"}),
    ]


@pytest.fixture(scope="module")
def too_large(make_spec: MakeSpec) -> WorkerSpec:
    return make_spec(budget_bytes=REHEARSAL_BUDGET_BYTES, size=16384, dtype="fp32")


@pytest.fixture(scope="module")
def shrunk(in_child: InChild, too_large: WorkerSpec) -> Report:
    return in_child(first_slice, too_large)


class TestTooLarge:
    """16384 where about 4200 fits: the guides' formula must find its way down on the kernel's own refusals."""

    def test_it_ends_running_at_the_size_of_the_formula(self, shrunk: Report) -> None:
        failures = next(
            count
            for count in itertools.count()
            if 3 * matrix_bytes(int(16384 * 0.7**count), torch.float32) <= shrunk.claim_bytes
        )
        assert shrunk.state is WorkerState.RUNNING
        assert (shrunk.size, shrunk.batch) == (int(16384 * 0.7**failures), 128 - 16 * failures)
        assert (shrunk.counts.steps_oom, shrunk.counts.steps_ok) == (failures, 1)

    def test_every_failure_was_real_and_survived(self, shrunk: Report) -> None:
        ooms = [event for event in shrunk.events if event.name == "oom"]
        assert shrunk.counts.steps_oom == len(ooms) == shrunk.counts.oom_count >= 3
        assert shrunk.counts.emergency_count >= 1
        assert {event.detail["kind"] for event in ooms} == {"definite"}
        assert all("DefaultCPUAllocator" in str(event.detail["text"]) for event in ooms)
        assert all(event.detail["needed_bytes"] > event.detail["free_bytes"] for event in ooms)
        assert shrunk.verdict is Verdict.OK
        assert shrunk.counts.steps_error == 0
        assert shrunk.error is None

    def test_another_process_resumes_at_the_learned_size(
        self, in_child: InChild, too_large: WorkerSpec, shrunk: Report
    ) -> None:
        resumed = in_child(first_slice, too_large, shrunk.resume)
        assert resumed.size == shrunk.size
        assert resumed.batch == shrunk.batch
        assert (resumed.counts.oom_count, resumed.counts.steps_ok) == (0, 1)
        assert "resumed" in names(resumed)

    def test_a_living_engine_adopts_what_another_incarnation_has_learned(
        self, in_child: InChild, make_spec: MakeSpec, shrunk: Report
    ) -> None:
        spec = make_spec(size=2048, dtype="fp32")
        learned = {**shrunk.resume, "failures": 2}
        first, second, third = in_child(another_incarnation, spec, learned)
        assert first.size == 2048
        assert second.size == int(2048 * 0.7**2)
        assert second.resume["failures"] == 2
        assert "resume_refused" in names(third), "a state of another policy starts afresh, and says so"
        assert third.size == 2048


def memory_returns(spec: WorkerSpec, says_its_need: bool) -> dict[str, list[Report]]:
    Hungry.says_its_need = says_its_need
    Hungry.need_bytes = 4 * spec.budget_bytes
    engine = Engine(spec)
    starved = [slice_of(engine, n) for n in range(PRESSURES_PER_BLIND_TRY + 2)]
    Hungry.need_bytes = spec.budget_bytes // 2
    fed = []
    for _ in range(PRESSURES_PER_BLIND_TRY + 1):
        fed.append(slice_of(engine, len(starved) + len(fed)))
        if fed[-1].state is WorkerState.RUNNING:
            break
    return {"starved": starved, "fed": fed}


@pytest.fixture(scope="module", params=[True, False], ids=["tells its need", "does not tell"])
def starved_then_fed(request: pytest.FixtureRequest, in_child: InChild, make_spec: MakeSpec) -> Found:
    return in_child(memory_returns, make_spec(name=mine(Hungry)), request.param)


class TestEmergency:
    def test_where_nothing_fits_every_slice_says_emergency(self, starved_then_fed: Found) -> None:
        for report in starved_then_fed["starved"]:
            assert report.state is WorkerState.EMERGENCY
            assert report.verdict is Verdict.OK
            assert "smallest step" in report.reason
            assert report.counts.emergency_count >= 1, "each slice proves that the device answers"
            assert report.counts.steps_ok == 0
            assert report.error is None

    def test_it_is_announced_once(self, starved_then_fed: Found) -> None:
        assert sum(names(report).count("emergency") for report in starved_then_fed["starved"]) == 1

    def test_it_shrank_to_the_floor_first(self, starved_then_fed: Found) -> None:
        assert starved_then_fed["starved"][0].size == 256
        ooms = [event.detail for event in starved_then_fed["starved"][0].events if event.name == "oom"]
        steps = [(detail["size"], detail["batch"]) for detail in ooms]
        # 512 reaches its floor after two failures, the batch of 128 after six; the seventh failure is at the floor.
        assert steps == [(max(256, int(512 * 0.7**n)), 128 - 16 * n) for n in range(7)]

    def test_when_memory_returns_it_runs_again(self, starved_then_fed: Found) -> None:
        last = starved_then_fed["fed"][-1]
        assert last.state is WorkerState.RUNNING
        assert last.counts.steps_ok == 1
        assert last.counts.steps_oom == 0

    def test_a_workload_that_tells_its_need_waits_for_no_blind_try(
        self, in_child: InChild, make_spec: MakeSpec
    ) -> None:
        found = in_child(memory_returns, make_spec(name=mine(Hungry)), True)
        assert len(found["fed"]) == 1
        assert all(report.counts.steps_oom == 0 for report in found["starved"][1:]), "no attempt that must fail"


# --- nothing is kept -------------------------------------------------------------------------------------------


def deep_failure(spec: WorkerSpec) -> Found:
    gc.disable()  # the frames must let go by themselves: a collector that happens to run would hide a cycle
    engine = Engine(spec)
    Deep.block_bytes = int(0.7 * spec.budget_bytes)
    report = slice_of(engine)
    return {
        "report": report,
        "alive": list(Deep.alive_in_recovery),
        "good_steps": Deep.good_steps,
        "above_bytes": Deep.above_bytes,
    }


@pytest.fixture(scope="module")
def deep(in_child: InChild, make_spec: MakeSpec) -> Found:
    return in_child(deep_failure, make_spec(name=mine(Deep), budget_bytes=REHEARSAL_BUDGET_BYTES))


class TestNothingIsKept:
    def test_recovery_begins_after_the_traceback_has_let_go(self, deep: Found) -> None:
        assert deep["alive"], "the workload was never asked to release: the scenario did not happen"
        assert not any(deep["alive"])

    def test_the_next_step_has_the_memory_again(self, deep: Found) -> None:
        assert deep["good_steps"] == 1
        assert deep["report"].counts.steps_oom == 1
        assert deep["report"].state is WorkerState.RUNNING

    def test_what_was_free_in_recovery_is_all_of_it(self, deep: Found) -> None:
        report = deep["report"]
        (oom,) = [event for event in report.events if event.name == "oom"]
        assert oom.detail["free_bytes"] >= 0.95 * report.device.cap_bytes
        assert report.claim_bytes >= 0.95 * report.device.cap_bytes

    def test_recovery_does_not_raise_the_cap(self, deep: Found) -> None:
        assert deep["above_bytes"] <= 1.01 * deep["report"].device.cap_bytes


# --- failures that are not memory ------------------------------------------------------------------------------


def several(spec: WorkerSpec, slices: int, injector: OomInjector | None = None) -> list[Report]:
    if injector is not None:
        Injected.injector = injector
    engine = Engine(spec)
    return [slice_of(engine, n) for n in range(slices)]


class TestWorkloadErrors:
    def test_a_bug_ends_the_slice_and_nothing_else(self, in_child: InChild, make_spec: MakeSpec) -> None:
        for report in in_child(several, make_spec(name=mine(Buggy)), 3):
            assert report.verdict is Verdict.OK
            assert (report.counts.steps_error, report.counts.steps_ok, report.counts.steps_oom) == (1, 0, 0)
            assert report.state is WorkerState.BACKOFF
            assert "the labels are missing" in report.reason
            assert report.error.startswith("Traceback")
            assert "in step" in report.error
            assert report.error.rstrip().endswith("ValueError: the labels are missing")
            assert report.size == 512, "a bug is no reason to shrink"

    def test_a_bug_that_passes_leaves_no_trace(self, in_child: InChild, make_spec: MakeSpec) -> None:
        injector = OomInjector(num=1, kind=FailureKind.OTHER)
        first, second = in_child(several, make_spec(name=mine(Injected)), 2, injector)
        assert (first.counts.steps_error, second.counts.steps_error) == (1, 0)
        assert second.state is WorkerState.RUNNING
        assert second.error is None

    def test_a_step_that_returns_something_else_is_an_error_and_not_the_end(
        self, in_child: InChild, make_spec: MakeSpec
    ) -> None:
        (report,) = in_child(several, make_spec(name=mine(Loss)), 1)
        assert report.verdict is Verdict.OK
        assert report.counts.steps_error == 1
        assert "StepResult" in report.reason

    def test_a_bug_outside_the_step_is_reported_like_one_inside(self, in_child: InChild, make_spec: MakeSpec) -> None:
        for report in in_child(several, make_spec(name=mine(Clumsy)), 2):
            assert report.verdict is Verdict.OK
            assert report.counts.steps_error == 1
            assert report.state is WorkerState.BACKOFF
            assert "outside its step" in report.reason
            assert "KeyError: 'optimizer'" in report.error

    def test_probable_memory_is_believed_twice_in_a_row(self, in_child: InChild, make_spec: MakeSpec) -> None:
        injector = OomInjector(num=4, kind=FailureKind.PROBABLE)
        first, second, third = in_child(several, make_spec(name=mine(Injected), size=2048), 3, injector)
        assert first.counts.steps_oom == MAX_PROBABLE_IN_A_ROW
        assert first.size == int(2048 * 0.7**MAX_PROBABLE_IN_A_ROW)
        assert first.counts.steps_error == 1
        assert "CUBLAS_STATUS_ALLOC_FAILED" in first.error
        assert (second.counts.steps_oom, second.counts.steps_error) == (0, 1), "still the same row"
        assert third.state is WorkerState.RUNNING

    def test_a_good_step_ends_the_row(self, in_child: InChild, make_spec: MakeSpec) -> None:
        spec = make_spec(name=mine(Injected), size=4096)
        reports = in_child(rows_of_two, spec)
        assert [report.counts.steps_error for report in reports] == [0, 0, 0]
        assert [report.counts.steps_oom for report in reports] == [2, 2, 2]

    def test_a_poisoned_device_ends_the_process_for_good(self, in_child: InChild, make_spec: MakeSpec) -> None:
        injector = OomInjector(num=1, skip=1, kind=FailureKind.CONTEXT_CORRUPTED)
        good, *bad = in_child(several, make_spec(name=mine(Injected)), 4, injector)
        assert good.verdict is Verdict.OK
        for report in bad:
            assert report.verdict is Verdict.CONTEXT_CORRUPTED
            assert report.state is WorkerState.STOPPED
            assert "illegal memory access" in report.reason
            assert report.counts.steps_ok == 0, "nothing may touch the device again"
            assert report.resume == good.resume, "a fresh process goes on where this one stood"


def rows_of_two(spec: WorkerSpec) -> list[Report]:
    engine = Engine(spec)
    reports = []
    for sequence in range(3):
        Injected.injector = OomInjector(num=2, kind=FailureKind.PROBABLE)
        reports.append(slice_of(engine, sequence))
    return reports


def injected_storm(spec: WorkerSpec, seed: int) -> tuple[list[Report], list[int]]:
    Injected.injector = OomInjector(num=12, skip=3, seed=seed)
    Injected.sizes.clear()
    engine = Engine(spec)
    reports = [slice_of(engine, n) for n in range(40)]
    return reports, list(Injected.sizes)


def test_a_seeded_storm_of_failures_is_survived_and_repeats(in_child: InChild, make_spec: MakeSpec) -> None:
    spec = make_spec(name=mine(Injected), size=8192)
    reports, sizes = in_child(injected_storm, spec, 3)
    assert sum(report.counts.steps_oom for report in reports) == 12
    assert all(report.verdict is Verdict.OK and report.counts.steps_error == 0 for report in reports)
    assert reports[-1].state is WorkerState.RUNNING
    assert sizes == sorted(sizes, reverse=True), "classic never grows"
    assert in_child(injected_storm, spec, 3)[1] == sizes


# --- directives that can never work ----------------------------------------------------------------------------


class TestMisfits:
    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("no_such_module_anywhere:Thing", "cannot be loaded on this machine"),
            ("no_such_workload", "cannot be loaded on this machine"),
            (mine(NoWorkload), "is not a subclass of workers.workloads.base.Workload"),
            (mine(Unbuildable), "LookupError: the dataset is not on this disk"),
        ],
    )
    def test_a_workload_that_cannot_be_made(
        self, in_child: InChild, make_spec: MakeSpec, name: str, words: str
    ) -> None:
        (report,) = in_child(several, make_spec(name=name), 1)
        assert report.verdict is Verdict.INCOMPATIBLE
        assert report.state is WorkerState.STOPPED
        assert words in report.reason

    def test_a_budget_too_small_names_the_key(self, in_child: InChild, make_spec: MakeSpec) -> None:
        (report,) = in_child(several, make_spec(budget_bytes=8 * MIB, floor_bytes=100 * MIB), 1)
        assert report.verdict is Verdict.INCOMPATIBLE
        assert "nodes.pc1.vram_per_worker_gib" in report.reason
        assert "8.0 MiB" in report.reason

    def test_an_unknown_policy_lists_those_there_are(self, in_child: InChild, make_spec: MakeSpec) -> None:
        (report,) = in_child(several, make_spec(policy="brave"), 1)
        assert report.verdict is Verdict.INCOMPATIBLE
        assert "classic" in report.reason


# --- duty ------------------------------------------------------------------------------------------------------


def dutiful(spec: WorkerSpec) -> list[Report]:
    engine = Engine(spec)
    slice_of(engine)
    return [slice_of(engine, 1 + n, duration_s=0.4) for n in range(5)]


@pytest.mark.parametrize(("duty", "low", "high"), [(0.5, 0.35, 0.62), (None, 0.85, 1.0)])
def test_duty_is_the_share_of_time_the_device_is_busy(
    in_child: InChild, make_spec: MakeSpec, duty: float | None, low: float, high: float
) -> None:
    reports = in_child(dutiful, make_spec(name=mine(Busy), duty=duty))
    busy_s, wall_s = sum(report.counts.busy_s for report in reports), sum(report.wall_s for report in reports)
    assert low <= busy_s / wall_s <= high


# --- the injector itself ---------------------------------------------------------------------------------------


class TestInjector:
    @pytest.mark.parametrize("kind", list(FailureKind))
    def test_raises_what_is_classified_as_asked(self, kind: FailureKind) -> None:
        with pytest.raises(RuntimeError) as caught:
            OomInjector(num=1, kind=kind).check()
        assert classify(caught.value).kind is kind

    def test_skips_then_fails_then_is_quiet(self) -> None:
        injector = OomInjector(num=2, skip=3)
        assert [fails(injector) for _ in range(8)] == [False] * 3 + [True] * 2 + [False] * 3
        assert (injector.checks, injector.injected) == (8, 2)

    def test_a_seed_spreads_the_failures_and_repeats_them(self) -> None:
        runs = [[fails(injector) for _ in range(60)] for injector in (OomInjector(9, 4, seed=1) for _ in range(2))]
        assert runs[0] == runs[1]
        assert sum(runs[0]) == 9
        assert not any(runs[0][:4])
        assert runs[0][4:13] != [True] * 9, "with a seed they do not come in a row"

    def test_refuses_what_makes_no_sense(self) -> None:
        with pytest.raises(ValueError, match="must not be negative"):
            OomInjector(num=-1)


def fails(injector: OomInjector) -> bool:
    try:
        injector.check()
    except torch.OutOfMemoryError:
        return True
    return False
