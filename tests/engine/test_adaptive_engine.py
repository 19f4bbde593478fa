"""The adaptive policy in a real process against a real wall: every out-of-memory here is the kernel's.

Each scenario is a plain function that runs in a child process and returns reports; the tests judge them. Memory is
mapped and not touched, so that half a gigabyte costs nothing; the kernel's cap counts it all the same.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import pytest
import torch

from workers.engine.engine import Engine
from workers.messages import Directive, Report, ResumeState, Verdict, WorkerState
from workers.settings import Learned, StoredLimit, WorkerSpec
from workers.workloads.base import StepResult, Workload, WorkloadContext
from workers.workloads.matmul import matrix_bytes

InChild: TypeAlias = Callable[..., Any]
MakeSpec: TypeAlias = Callable[..., WorkerSpec]

MIB = 2**20

#: The guides' reference: 3.33 GiB / 16.
REHEARSAL_BUDGET_BYTES = 213 * MIB

ROOMY_BUDGET_BYTES = 512 * MIB

#: Of the cap, the part that a workload may count on: kernels of oneDNN and the like need a little beside it.
NEARLY_ALL = 0.97


class Rows(Workload):
    """Holds a fixed part and so many bytes for each row of its batch, until the next step; says nothing about it."""

    size_power = 0.0

    fixed_bytes: ClassVar[int] = 40 * MIB
    row_bytes: ClassVar[int] = 64 * 1024

    def __init__(self, context: WorkloadContext) -> None:
        super().__init__(context)
        self.held: list[torch.Tensor] = []

    def step(self, size: int, batch: int) -> StepResult:
        self.held = []
        self.held.append(torch.empty(type(self).fixed_bytes, dtype=torch.uint8))
        self.held.append(torch.empty(batch * type(self).row_bytes, dtype=torch.uint8))
        return StepResult(flop=1.0)

    def release(self) -> None:
        self.held = []


class Liar(Rows):
    """Says that it needs so many times what it takes."""

    times: ClassVar[float] = 1.0

    def needed_bytes(self, size: int, batch: int) -> int:
        return int(Liar.times * (self.fixed_bytes + batch * self.row_bytes))


class Squares(Workload):
    """Holds all of its claim as matmul does, and multiplies nothing."""

    fills_claim = True

    def __init__(self, context: WorkloadContext) -> None:
        super().__init__(context)
        self.claim_bytes = 0
        self.held: torch.Tensor | None = None

    def resize(self, claim_bytes: int) -> None:
        if claim_bytes != self.claim_bytes:
            self.claim_bytes = claim_bytes
            self.held = None

    def needed_bytes(self, size: int, batch: int) -> int:
        return 3 * matrix_bytes(size, torch.float32)

    def step(self, size: int, batch: int) -> StepResult:
        if self.held is None:
            self.held = torch.empty(max(self.claim_bytes, self.needed_bytes(size, batch)), dtype=torch.uint8)
        return StepResult(flop=1.0)

    def release(self) -> None:
        self.held = None


class Network(Workload):
    """Trains a small network, whose gradients live only while a step runs."""

    size_power = 0.0

    def __init__(self, context: WorkloadContext) -> None:
        super().__init__(context)
        self.model: torch.nn.Sequential | None = None
        self.rows: torch.Tensor | None = None

    def step(self, size: int, batch: int) -> StepResult:
        if self.model is None:
            self.model = torch.nn.Sequential(*(torch.nn.Linear(size, size) for _ in range(4)))
        self.rows = None
        self.rows = torch.ones(batch, size)
        self.model(self.rows).square().mean().backward()
        return StepResult(flop=1.0)

    def release(self) -> None:
        self.model = self.rows = None


def mine(workload: type) -> str:
    """Name a class of this module the way a user does."""
    return f"{Path(__file__).stem}:{workload.__name__}"


def slices(
    spec: WorkerSpec, count: int, leases_bytes: Sequence[int | None] = (), resume: ResumeState | None = None
) -> list[Report]:
    """Run slices of one good step each in a fresh engine, with a lease for each of the first."""
    engine = Engine(spec)
    return [
        engine.run_slice(
            Directive(
                incarnation=0,
                sequence=sequence,
                duration_s=0.0,
                resume=resume,
                lease_bytes=leases_bytes[sequence] if sequence < len(leases_bytes) else None,
            )
        )
        for sequence in range(count)
    ]


def names(reports: Sequence[Report]) -> list[str]:
    return [event.name for report in reports for event in report.events]


def failures(reports: Sequence[Report]) -> int:
    return sum(report.counts.oom_count for report in reports)


def share_held(report: Report) -> float:
    """Share of the cap in live tensors."""
    assert report.memory is not None
    assert report.device is not None
    return report.memory.allocated_bytes / report.device.cap_bytes


def all_is_well(reports: Sequence[Report]) -> bool:
    """Whether nothing failed and nothing waited."""
    return all(
        (report.verdict, report.state) == (Verdict.OK, WorkerState.RUNNING)
        and (report.counts.steps_oom, report.counts.oom_count, report.counts.emergency_count, report.counts.steps_error)
        == (0, 0, 0, 0)
        for report in reports
    )


# --- matmul, which fills its claim -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def far_too_large(make_spec: MakeSpec) -> WorkerSpec:
    return make_spec(policy="adaptive", budget_bytes=REHEARSAL_BUDGET_BYTES, size=65536, dtype="fp32")


@pytest.fixture(scope="module")
def filled(in_child: InChild, far_too_large: WorkerSpec) -> list[Report]:
    return in_child(slices, far_too_large, 5)


class TestFilling:
    """65536 where about 4100 fits: the guides' formula needs nine failures for that."""

    def test_nothing_fails_from_the_first_step_on(self, filled: list[Report]) -> None:
        assert all_is_well(filled)
        assert not {"oom", "backoff", "emergency"} & set(names(filled))

    def test_the_cap_is_really_held(self, filled: list[Report]) -> None:
        for report in filled:
            assert 0.95 <= share_held(report) <= 1.0

    def test_the_size_is_about_the_largest_that_fits_into_what_is_held(self, filled: list[Report]) -> None:
        for report in filled:
            assert report.size is not None
            assert report.claim_bytes is not None
            assert matrix_bytes(report.size, torch.float32) * 3 <= report.claim_bytes
            assert matrix_bytes(report.size + 256, torch.float32) * 3 > report.claim_bytes

    def test_it_settles(self, filled: list[Report]) -> None:
        assert len({report.claim_bytes for report in filled}) <= 4, "each change fills all of the memory anew"

    def test_another_process_goes_on_with_the_same_hold(
        self, in_child: InChild, far_too_large: WorkerSpec, filled: list[Report]
    ) -> None:
        resumed = in_child(slices, far_too_large, 2, (), filled[-1].resume)
        assert "resumed" in names(resumed)
        assert all_is_well(resumed)
        assert resumed[0].size == filled[-1].size
        assert resumed[0].claim_bytes == pytest.approx(filled[-1].claim_bytes, rel=0.02)


SQUEEZED = [*[None] * 2, *[80 * MIB] * 3, *[40 * MIB] * 3]


@pytest.fixture(scope="module")
def squares(make_spec: MakeSpec) -> WorkerSpec:
    return make_spec(name=mine(Squares), policy="adaptive", budget_bytes=REHEARSAL_BUDGET_BYTES, size=65536)


@pytest.fixture(scope="module")
def squeezed(in_child: InChild, squares: WorkerSpec) -> list[Report]:
    return in_child(slices, squares, 20, SQUEEZED)


class TestLease:
    """What the head lets a worker hold goes down and up again."""

    def test_it_gives_way_in_the_very_next_step_and_nothing_fails(self, squeezed: list[Report]) -> None:
        assert all_is_well(squeezed)
        for report, lease_bytes in zip(squeezed, SQUEEZED, strict=False):
            if lease_bytes is not None:
                assert report.claim_bytes is not None
                assert 0.7 * lease_bytes <= report.claim_bytes <= lease_bytes

    def test_the_size_follows(self, squeezed: list[Report]) -> None:
        for report in squeezed:
            assert matrix_bytes(report.size or 0, torch.float32) * 3 <= (report.claim_bytes or 0)
        assert squeezed[1].size > squeezed[4].size > squeezed[7].size

    def test_it_grows_back(self, squeezed: list[Report]) -> None:
        assert share_held(squeezed[-1]) >= 0.95

    def test_it_says_why_it_has_less(self, squeezed: list[Report]) -> None:
        assert all(report.reason == "" for report in squeezed[:2])
        assert all("share" in report.reason for report in squeezed[2:8])
        changes = [event for report in squeezed for event in report.events if event.name in {"gave_way", "grew"}]
        told = [event.detail["allowed_bytes"] if event.name == "gave_way" else None for event in changes]
        assert [allowed_bytes for allowed_bytes in told if allowed_bytes in {80 * MIB, 40 * MIB}] == [
            80 * MIB,
            40 * MIB,
        ]
        assert "grew" in [event.name for event in changes[told.index(40 * MIB) :]]

    def test_less_than_its_smallest_step_needs_is_an_emergency_that_ends(
        self, in_child: InChild, squares: WorkerSpec
    ) -> None:
        reports = in_child(slices, squares, 30, [None, MIB // 2, MIB // 2])
        states = [report.state for report in reports]
        assert states == ["RUNNING", "EMERGENCY", "EMERGENCY", *["RUNNING"] * 27]
        assert failures(reports) == 0
        assert all("the smallest" in report.reason for report in reports[1:3])
        assert share_held(reports[-1]) >= 0.9

    def test_rows_give_way_and_grow_back_too(self, in_child: InChild, make_spec: MakeSpec) -> None:
        leases = [*[None] * 20, *[200 * MIB] * 3, *[100 * MIB] * 3]
        reports = in_child(slices, rows(make_spec), 40, leases)
        assert all_is_well(reports)
        for report, lease_bytes in zip(reports, leases, strict=False):
            if lease_bytes is not None:
                assert taken_bytes(report) <= lease_bytes
        assert taken_bytes(reports[22]) >= 0.85 * 200 * MIB
        assert taken_bytes(reports[25]) >= 0.85 * 100 * MIB
        assert taken_bytes(reports[-1]) >= 0.97 * taken_bytes(reports[19])


# --- a user's own, which takes what its step takes ---------------------------------------------------------------


def rows(make_spec: MakeSpec, workload: type = Rows, **changes: Any) -> WorkerSpec:  # noqa: ANN401 - of make_spec
    settings: dict[str, Any] = {"batch": 16384, "budget_bytes": ROOMY_BUDGET_BYTES, **changes}
    return make_spec(name=mine(workload), policy="adaptive", **settings)


def taken_bytes(report: Report) -> int:
    assert report.batch is not None
    return Rows.fixed_bytes + report.batch * Rows.row_bytes


@pytest.fixture(scope="module")
def measured(in_child: InChild, make_spec: MakeSpec) -> list[Report]:
    return in_child(slices, rows(make_spec), 40)


class TestRows:
    def test_from_knowing_nothing_to_nearly_all_of_the_cap_without_a_failure(self, measured: list[Report]) -> None:
        assert all_is_well(measured)
        assert measured[0].batch <= 16384 / 64, "the first step of all is small"
        assert taken_bytes(measured[-1]) >= NEARLY_ALL * measured[-1].device.cap_bytes

    def test_most_of_it_after_a_few_steps(self, measured: list[Report]) -> None:
        assert taken_bytes(measured[6]) >= 0.85 * measured[6].device.cap_bytes

    def test_what_does_not_move_memory_stays_as_asked(self, measured: list[Report]) -> None:
        assert {report.size for report in measured} == {512}

    def test_a_fresh_process_goes_on_at_the_same_step(
        self, in_child: InChild, make_spec: MakeSpec, measured: list[Report]
    ) -> None:
        resumed = in_child(slices, rows(make_spec), 2, (), measured[-1].resume)
        assert "resumed" in names(resumed)
        assert all_is_well(resumed)
        assert taken_bytes(resumed[0]) >= 0.95 * taken_bytes(measured[-1])

    def test_a_damaged_state_starts_afresh_and_says_so(
        self, in_child: InChild, make_spec: MakeSpec, measured: list[Report]
    ) -> None:
        (report,) = in_child(slices, rows(make_spec), 1, (), {**measured[-1].resume, "units": -1})
        assert "resume_refused" in names([report])
        assert report.state is WorkerState.RUNNING
        assert report.batch == measured[0].batch

    @pytest.mark.parametrize("batch", [100, 5000, 1_000_000])
    def test_whatever_batch_is_asked_for_it_finds_the_largest(
        self, in_child: InChild, make_spec: MakeSpec, batch: int
    ) -> None:
        reports = in_child(slices, rows(make_spec, batch=batch), 40)
        assert all_is_well(reports)
        fits = int((0.95 * reports[-1].device.cap_bytes - Rows.fixed_bytes) / Rows.row_bytes)
        step = max(1, batch // 256)  # between two batches there are
        assert reports[-1].batch >= min(batch, fits - step)


def jumping(spec: WorkerSpec, more_bytes: int) -> list[Report]:
    engine = Engine(spec)
    reports = []
    for sequence in range(80):
        if sequence == 20:
            Rows.fixed_bytes += more_bytes
        if sequence == 40:
            time.sleep(5.5)  # for some seconds after a failure it is careful
        reports.append(engine.run_slice(Directive(incarnation=0, sequence=sequence, duration_s=0.0, resume=None)))
    return reports


class TestChange:
    @pytest.mark.parametrize("more_mib", [20, 150])
    def test_a_step_that_grows_in_the_middle_costs_a_failure_or_two(
        self, in_child: InChild, make_spec: MakeSpec, more_mib: int
    ) -> None:
        reports = in_child(jumping, rows(make_spec), more_mib * MIB)
        assert all_is_well(reports[:20])
        assert 1 <= failures(reports[20:]) <= 2
        assert all(report.state is WorkerState.RUNNING for report in reports)
        assert all(report.counts.steps_error == 0 for report in reports)
        held_bytes = taken_bytes(reports[-1]) + more_mib * MIB
        assert held_bytes >= 0.85 * reports[-1].device.cap_bytes

    def test_a_step_that_shrinks_is_followed_without_a_failure(self, in_child: InChild, make_spec: MakeSpec) -> None:
        reports = in_child(jumping, rows(make_spec), -30 * MIB)
        assert all_is_well(reports)
        assert taken_bytes(reports[-1]) - 30 * MIB >= 0.95 * reports[-1].device.cap_bytes


def lying(spec: WorkerSpec, times: float, count: int) -> list[Report]:
    Liar.times = times
    return slices(spec, count)


class TestLies:
    @pytest.mark.parametrize("times", [0.0, 0.9])
    def test_a_workload_that_needs_more_than_it_says_is_measured(
        self, in_child: InChild, make_spec: MakeSpec, times: float
    ) -> None:
        reports = in_child(lying, rows(make_spec, Liar), times, 40)
        assert failures(reports) <= 1
        assert all(report.state is WorkerState.RUNNING for report in reports)
        assert taken_bytes(reports[-1]) >= 0.95 * reports[-1].device.cap_bytes

    def test_a_workload_that_needs_less_than_it_says_is_believed(self, in_child: InChild, make_spec: MakeSpec) -> None:
        reports = in_child(lying, rows(make_spec, Liar), 2.0, 40)
        assert all_is_well(reports)
        assert 0.95 <= 2.0 * taken_bytes(reports[-1]) / reports[-1].device.cap_bytes <= 1.0

    def test_a_workload_that_says_nothing_fits_is_not_tried(self, in_child: InChild, make_spec: MakeSpec) -> None:
        for report in in_child(lying, rows(make_spec, Liar), 1000.0, 3):
            assert report.state is WorkerState.EMERGENCY
            assert "the smallest step" in report.reason
            assert (report.counts.steps_oom, report.counts.oom_count) == (0, 0)


def starving(spec: WorkerSpec) -> list[Report]:
    Rows.fixed_bytes = 10 * spec.budget_bytes
    return slices(spec, 40)


@pytest.mark.parametrize("allowed", [1, 3])
def test_no_more_failures_within_a_minute_than_allowed(in_child: InChild, make_spec: MakeSpec, allowed: int) -> None:
    reports = in_child(starving, rows(make_spec, failures_per_minute=allowed))
    assert sum(report.wall_s for report in reports) < 60, "the scenario was not over within a minute"
    assert 1 <= sum(report.counts.steps_oom for report in reports) <= allowed
    assert all(report.verdict is Verdict.OK for report in reports)
    assert reports[-1].state is WorkerState.EMERGENCY
    assert reports[-1].reason
    assert sum(names([report]).count("emergency") for report in reports) == 1


def test_a_network_whose_gradients_nobody_sees_stays_within_its_allowance(
    in_child: InChild, make_spec: MakeSpec
) -> None:
    """A CPU tells what a step leaves behind, and not what it held at its peak: there is more than that to find out."""
    spec = make_spec(
        name=mine(Network), policy="adaptive", size=64, batch=65536, budget_bytes=REHEARSAL_BUDGET_BYTES // 2
    )
    reports = in_child(slices, spec, 25)
    assert all(report.verdict is Verdict.OK and report.counts.steps_error == 0 for report in reports)
    assert failures(reports) <= 6
    # Slow steps may have used up the failures of a minute.
    assert reports[-1].state is WorkerState.RUNNING or "failures within a minute" in reports[-1].reason
    assert 4096 < reports[-1].batch < 65536


# --- what is learned ---------------------------------------------------------------------------------------------


class TestLearned:
    def test_it_is_told_under_the_circumstances_it_holds_in(self, make_spec: MakeSpec, measured: list[Report]) -> None:
        last = measured[-1]
        assert last.learned is not None
        key = last.learned.key
        assert key.card == last.device.name
        assert key.total_bytes == last.device.total_bytes
        assert key.driver is None
        assert key.torch == torch.__version__
        assert key.dtype == last.device.dtype == "fp32"
        version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
        assert key.workload == f"{mine(Rows)}@{version} batch=16384 size=512"
        assert key.cap_bytes == last.device.cap_bytes

    def test_it_is_what_was_measured(self, measured: list[Report]) -> None:
        stored = measured[-1].learned
        assert stored.learned.size == measured[-1].batch
        assert stored.learned.unit_bytes == pytest.approx(Rows.row_bytes, rel=0.01)
        assert stored.learned.fixed_bytes == pytest.approx(Rows.fixed_bytes, rel=0.1)
        assert stored.peak_bytes == pytest.approx(taken_bytes(measured[-1]), rel=0.02)

    def test_a_worker_that_is_sent_it_starts_there(
        self, in_child: InChild, make_spec: MakeSpec, measured: list[Report]
    ) -> None:
        spec = replace(rows(make_spec), learned=(measured[-1].learned,))
        reports = in_child(slices, spec, 2)
        assert names(reports).count("remembered") == 1
        assert all_is_well(reports)
        assert taken_bytes(reports[0]) >= 0.95 * taken_bytes(measured[-1])

    def test_what_was_learned_elsewhere_is_not_used(
        self, in_child: InChild, make_spec: MakeSpec, measured: list[Report]
    ) -> None:
        learned = measured[-1].learned
        elsewhere: list[dict[str, Any]] = [
            {"dtype": "bf16"},
            {"card": "another"},
            {"torch": "1.0"},
            {"driver": "570.1"},
            {"workload": "matmul@1 batch=16384 size=512"},
            {"cap_bytes": 2 * ROOMY_BUDGET_BYTES},
        ]
        known = tuple(replace(learned, key=replace(learned.key, **change)) for change in elsewhere)
        (report,) = in_child(slices, replace(rows(make_spec), learned=known), 1)
        assert "remembered" not in names([report])
        assert report.batch == measured[0].batch

    def test_of_a_workload_that_fills_its_claim_too(
        self, in_child: InChild, far_too_large: WorkerSpec, filled: list[Report]
    ) -> None:
        learned = filled[-1].learned
        assert learned.key.workload.startswith("matmul@")
        assert learned.learned.size == filled[-1].claim_bytes
        reports = in_child(slices, replace(far_too_large, learned=(learned,)), 2)
        assert "remembered" in names(reports)
        assert all_is_well(reports)
        assert all(share_held(report) >= 0.95 for report in reports)

    def test_what_was_learned_of_a_step_that_has_grown_since_is_unlearned(
        self, in_child: InChild, make_spec: MakeSpec, measured: list[Report]
    ) -> None:
        stored = measured[-1].learned
        small = Learned(size=stored.learned.size, fixed_bytes=0.0, unit_bytes=Rows.row_bytes / 2)
        reports = in_child(slices, replace(rows(make_spec), learned=(replace(stored, learned=small),)), 60)
        assert failures(reports) <= 4
        assert all(report.state is WorkerState.RUNNING for report in reports)
        assert taken_bytes(reports[-1]) >= 0.7 * reports[-1].device.cap_bytes
        assert reports[-1].learned.learned.unit_bytes > Rows.row_bytes / 2

    def test_the_guides_policy_learns_nothing_and_heeds_nothing(
        self, in_child: InChild, make_spec: MakeSpec, measured: list[Report]
    ) -> None:
        key = measured[-1].learned.key
        known = StoredLimit(key=key, learned=Learned(size=50), peak_bytes=None, learned_at_unix_s=0.0)
        spec = replace(rows(make_spec, batch=16384, budget_bytes=4 * ROOMY_BUDGET_BYTES), policy="classic")
        (report,) = in_child(slices, replace(spec, learned=(known,)), 1)
        assert report.batch == 16384
        assert report.learned is None
