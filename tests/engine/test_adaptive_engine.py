"""The adaptive policy in a real process under a real cap: each out-of-memory error is the kernel's.

Each scenario is a plain function that runs in a child process and returns reports; the tests judge
the reports. The scenarios map memory without touching it, so that 0.5 GiB costs nothing; the cap of
the kernel still counts it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from tests.engine.scene import all_is_well, events, failures, names, own, turns
from tests.in_child import InChild
from tests.scene import MIB, spec_of
from workers.learned_limits import LimitKey, default_path
from workers.messages import Status, Verdict, WorkerState
from workers.settings import Learned, PolicyState, WorkerSpec
from workers.workloads.base import StepResult, Workload
from workers.workloads.matmul import Matmul, matrix_bytes

#: The guides' reference: 3.30 GiB / 16.
REHEARSAL_BUDGET_BYTES = 213 * MIB

ROOMY_BUDGET_BYTES = 512 * MIB

#: The share of the cap on which a workload may rely: kernels of oneDNN and other libraries need a
#: little memory too.
NEARLY_ALL = 0.97


class Rows(Workload):
    """Holds fixed memory and `row_bytes` for each row of its batch, until the next step.

    Does not state its need.
    """

    size_power = 0.0

    fixed_bytes: ClassVar[int] = 40 * MIB
    row_bytes: ClassVar[int] = 64 * 1024
    held: object = None

    def step(self, size: int, batch: int) -> StepResult:
        self.held = None
        fixed = torch.empty(self.fixed_bytes, dtype=torch.uint8)
        self.held = fixed, torch.empty(batch * self.row_bytes, dtype=torch.uint8)
        return StepResult(flop=1.0)

    def release(self) -> None:
        self.held = None


class Liar(Rows):
    """States a need of 90 % of the memory that it allocates."""

    def needed_bytes(self, size: int, batch: int) -> int:
        return int(0.9 * (self.fixed_bytes + batch * self.row_bytes))


class Squares(Matmul):
    """Holds the same memory as matmul, and multiplies nothing."""

    def step(self, size: int, batch: int) -> StepResult:
        self.prepared(size)
        return StepResult(flop=1.0)


def leases(*leases_bytes: int | None) -> list[dict[str, Any]]:
    return [{"lease_bytes": lease_bytes} for lease_bytes in leases_bytes]


def share_held(report: Status) -> float:
    """Return the share of the cap in live tensors."""
    return report.memory.allocated_bytes / report.device.cap_bytes


def test_it_holds_the_cap_from_the_first_step_on(in_child: InChild) -> None:
    """The size is 65536, and about 3400 fits: the guides' formula needs nine failures for that."""
    too_large = spec_of(policy="adaptive", budget_bytes=144 * MIB, size=65536, dtype="fp32")
    reports = in_child(turns, too_large, [{}] * 5)
    assert all_is_well(reports)
    assert not events(reports, "oom", "backoff", "emergency")
    assert len({report.claim_bytes for report in reports}) <= 4, (
        "each change fills all of the memory anew"
    )
    for report in reports:
        # The next size needs 4 % more; memory of a product beside its tensors depends on the CPU.
        assert 0.92 <= share_held(report) <= 1.0
        assert 3 * matrix_bytes(report.size, torch.float32) <= report.claim_bytes
        assert 3 * matrix_bytes(report.size + 256, torch.float32) > report.claim_bytes


SQUEEZED = [*[None] * 2, *[80 * MIB] * 3, *[40 * MIB] * 3]


ALL_SQUARES = spec_of(
    name=own(Squares), policy="adaptive", budget_bytes=REHEARSAL_BUDGET_BYTES, size=65536
)


def test_it_gives_way_in_the_next_step_and_grows_back(in_child: InChild) -> None:
    reports = in_child(turns, ALL_SQUARES, leases(*SQUEEZED, *[None] * 12))
    assert all_is_well(reports)
    for report, lease_bytes in zip(reports, SQUEEZED, strict=False):
        assert ("share" in report.reason) == (lease_bytes is not None), "it says why"
        if lease_bytes is not None:
            # Two cuts within 1 s look like a program that is loading: memory for a third cut is
            # reserved.
            assert 0.65 * lease_bytes <= report.claim_bytes <= lease_bytes
    assert all(
        3 * matrix_bytes(report.size, torch.float32) <= report.claim_bytes for report in reports
    )
    assert reports[1].size > reports[4].size > reports[7].size, "the size follows"
    assert share_held(reports[-1]) >= 0.95
    told = [
        (event.name, event.detail["allowed_bytes"]) for event in events(reports, "gave_way", "grew")
    ]
    last_cut = told.index(("gave_way", 40 * MIB))
    assert ("gave_way", 80 * MIB) in told[:last_cut]
    assert "grew" in dict(told[last_cut:])


def rows(workload: type = Rows, **changes: Any) -> WorkerSpec:
    settings: dict[str, Any] = {"batch": 16384, "budget_bytes": ROOMY_BUDGET_BYTES, **changes}
    return spec_of(name=own(workload), policy="adaptive", **settings)


def taken_bytes(report: Status) -> int:
    return Rows.fixed_bytes + report.batch * Rows.row_bytes


def test_from_nothing_to_nearly_the_cap_without_a_failure(in_child: InChild) -> None:
    measured = in_child(turns, rows(), [{}] * 40)
    assert all_is_well(measured)
    cap_bytes = measured[-1].device.cap_bytes
    assert measured[0].batch <= 16384 / 64, "the first step of all is small"
    assert taken_bytes(measured[6]) >= 0.85 * cap_bytes, "most of it after a few steps"
    assert taken_bytes(measured[-1]) >= NEARLY_ALL * cap_bytes
    assert {report.size for report in measured} == {512}, "what does not move memory stays as asked"


def test_a_workload_that_needs_more_than_it_says_is_measured(in_child: InChild) -> None:
    reports = in_child(turns, rows(Liar), [{}] * 40)
    assert failures(reports) <= 1
    assert all(report.state is WorkerState.RUNNING for report in reports)
    assert taken_bytes(reports[-1]) >= 0.95 * reports[-1].device.cap_bytes


class TestLearned:
    def test_what_was_learned_is_kept_and_the_next_run_starts_there(
        self, in_child: InChild
    ) -> None:
        spec = remembering(rows())
        *reports, held = in_child(turns, spec, [*[{}] * 40, {"holds": True}])
        device = held.device
        version = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
        key = LimitKey(
            card=device.name,
            driver=None,
            torch=str(torch.__version__),
            dtype="fp32",
            workload=f"{own(Rows)}@{version} batch=16384 size=512",
            cap_bytes=device.cap_bytes,
        )
        ((name, stored),) = kept().items()
        assert (name, stored["cap_bytes"]) == (key.name, key.cap_bytes)
        assert stored["learned"]["size"] == reports[-1].batch
        assert stored["learned"]["unit_bytes"] == pytest.approx(Rows.row_bytes, rel=0.01)
        assert stored["learned"]["fixed_bytes"] == pytest.approx(Rows.fixed_bytes, rel=0.1)
        following = in_child(turns, spec, [{}] * 2)
        assert names(following).count("remembered") == 1
        assert all_is_well(following)
        assert taken_bytes(following[0]) >= 0.95 * taken_bytes(reports[-1])

    def test_a_file_that_cannot_be_had_costs_an_event(
        self, in_child: InChild, state_dir: Path
    ) -> None:
        (state_dir / "limits.json").mkdir()
        reports = in_child(turns, remembering(rows()), [{}] * 3)
        reasons = [event.detail["reason"] for event in events(reports, "limits_unavailable")]
        assert [reason.partition(":")[0] for reason in reasons] == [
            "learned limits cannot be read",
            "learned limits cannot be written",
        ]
        assert all_is_well(reports)


def remembering(spec: WorkerSpec) -> WorkerSpec:
    return replace(spec, memory=replace(spec.memory, remember=True))


def kept() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(default_path().read_bytes())
    return found


def test_it_waits_for_its_share_and_gives_all_back(in_child: InChild) -> None:
    learned = Learned(size=320**2, fixed_bytes=0.0, unit_bytes=12.0)
    resume = PolicyState(learned=(learned,))
    orders = leases(0, 0, 40 * MIB, None, None, 0, None)
    first, second, leased, *free, waiting, last = in_child(
        turns, spec_of(policy="adaptive"), orders, {"resume": resume}
    )
    for report in (first, second, waiting):
        assert (report.verdict, report.state) == (Verdict.OK, WorkerState.WARMING)
        assert report.counts.steps_ok == 0
        assert "waits for its share" in report.reason
        assert report.memory.allocated_bytes < 2 * MIB, "nothing but an arena of Python is held"
        assert (report.counts.oom_count, report.counts.emergency_count) == (0, 0)
        assert report.claim_bytes is None
    assert second.resume.learned[0].size == 320**2, "what the slot had learned is not forgotten"
    assert (leased.state, leased.counts.oom_count) == (WorkerState.RUNNING, 0)
    assert "resumed" in names(first)
    assert leased.memory.allocated_bytes <= 40 * MIB
    assert min(report.memory.allocated_bytes for report in (free[-1], last)) > 20 * MIB
