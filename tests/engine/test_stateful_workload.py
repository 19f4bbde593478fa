"""A workload with rungs, a state between its steps, progress and an end, in the real engine under real caps."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from tests.engine.counting_steps import (
    Counting,
    HardToUnpark,
    RunsOutTwice,
    Stateless,
    TellsText,
    Unordered,
    counted,
    counted_in,
)
from tests.engine.scene import events, names, own
from tests.in_child import InChild
from tests.scene import MIB, spec_of
from workers.messages import Verdict, WorkerState
from workers.settings import WorkerSpec

#: Too little for a state and the smallest step.
NEXT_TO_NOTHING = {"lease_bytes": 4 * MIB}


def spec(
    workload: type = Counting,
    *,
    run_id: str | None = None,
    policy: str = "adaptive",
    **settings: int,
) -> WorkerSpec:
    usual = spec_of(name=own(workload), policy=policy, budget_bytes=160 * MIB, batch=8)
    told = {"batch": 8, "steps": 1000, **settings}
    return replace(usual, run_id=run_id, workload=replace(usual.workload, settings=told))


def test_settings_slot_and_folder_reach_the_workload(in_child: InChild) -> None:
    *_, (context,) = in_child(counted, spec(steps=3, run_id="run-7"), [{}])
    assert context.settings == {"batch": 8, "steps": 3}
    assert context.slot == "pc1/0"
    assert context.fresh is True
    assert context.state_dir is not None
    assert context.state_dir.parts[-4:] == ("state", "run-7", "pc1", "0")
    *_, (context,) = in_child(counted, spec(), [{"incarnation": 1}])
    assert (context.fresh, context.state_dir) == (False, None)


def test_the_policy_moves_along_the_rungs_and_the_batch_stays(in_child: InChild) -> None:
    directives = [{}] * 12 + [{"lease_bytes": 14 * MIB}] * 6 + [{}] * 30
    reports, calls, samples, _ = in_child(counted, spec(), directives)
    assert {report.batch for report in reports} <= {1, 2, 4, 8}
    before, squeezed, after = reports[11], reports[17], reports[-1]
    assert (before.batch, squeezed.batch, after.batch) == (8, 1, 8)
    levels = [level for name, level in calls if name == "level"]
    assert levels, "the first rung has level 1"
    assert all(now != last for now, last in zip(levels, [0, *levels], strict=False)), (
        "told only when it changes"
    )
    assert {report.progress.memory_level for report in reports} == {0, 1}
    assert set(range(8, sum(samples), 8)) <= set(accumulate(samples)), (
        "no micro-batch reaches over a boundary"
    )
    done = after.progress
    assert done.train_step == sum(samples) // 8
    assert sum(report.counts.steps_ok for report in reports) == len(samples)


def test_a_smaller_step_is_a_backoff_that_names_the_level(in_child: InChild) -> None:
    reports, calls, *_ = in_child(counted, spec(RunsOutTwice), [{}] * 30)
    assert sum(report.counts.steps_oom for report in reports) == 2
    assert ("shed", True) in calls, "the state stays"
    assert events(reports, "backoff")
    assert all("level" in event.detail for event in events(reports, "oom", "backoff"))
    assert {report.memory.kept_bytes for report in reports} == {None}, (
        "a state that is kept is no leak"
    )


def test_without_memory_the_state_is_parked_until_there_is(in_child: InChild) -> None:
    directives = [{}] * 6 + [NEXT_TO_NOTHING] * 4 + [{}] * 8
    reports, calls, *_ = in_child(counted, spec(state_mib=32), directives)
    parked = reports[7:10]
    assert [report.state for report in parked] == [WorkerState.PARKED] * 3
    assert all(
        report.reason.startswith("32 MiB of its state wait in host memory: ") for report in parked
    )
    held = [report.memory.allocated_bytes for report in parked]
    assert max(held) < 8 * MIB, held
    assert reports[5].memory.allocated_bytes >= 32 * MIB
    assert names(reports).count("parked") == 1
    assert [name for name, _ in calls if name.endswith("park")] == ["park", "unpark"]
    assert [report.state for report in reports[-4:]] == [WorkerState.RUNNING] * 4
    assert (
        reports[-1].progress.train_step
        > reports[9].progress.train_step
        >= reports[5].progress.train_step
        > 0
    )
    assert sum(report.counts.steps_oom + report.counts.steps_error for report in reports) == 0


def test_a_process_that_may_hold_nothing_parks_too(in_child: InChild) -> None:
    reports, calls, *_ = in_child(counted, spec(), [{}, {"lease_bytes": 0}, {"lease_bytes": 0}, {}])
    states = [report.state for report in reports]
    assert states == [
        WorkerState.RUNNING,
        WorkerState.PARKED,
        WorkerState.PARKED,
        WorkerState.RUNNING,
    ]
    assert [name for name, _ in calls if name.endswith("park")] == ["park", "unpark"]


def test_a_state_that_does_not_fit_yet_stays_parked(in_child: InChild) -> None:
    # The policy waits for ten seconds before it tries again what has failed.
    directives = [{}] * 6 + [NEXT_TO_NOTHING] * 3 + [{"duration_s": 1.0}] * 13
    reports, calls, *_ = in_child(counted, spec(HardToUnpark), directives)
    assert sum(report.counts.steps_oom for report in reports) == 1
    assert not [name for name, _ in calls if name == "shed"], "there is nothing on the device"
    assert [name for name, _ in calls if name.endswith("park")] == ["park", "unpark"], (
        "it was parked once"
    )
    assert reports[-1].state is WorkerState.RUNNING
    assert reports[-1].progress.train_step > reports[5].progress.train_step


def test_without_a_state_worth_parking_it_is_an_emergency(in_child: InChild) -> None:
    reports, *_ = in_child(counted, spec(Stateless), [{}] * 6 + [NEXT_TO_NOTHING] * 4)
    assert reports[-1].state is WorkerState.EMERGENCY
    assert "parked" not in names(reports)


def test_a_finished_workload_says_so_once_and_does_no_more_steps(in_child: InChild) -> None:
    reports, _, samples, _ = in_child(counted, spec(steps=2), [{"duration_s": 60.0}] * 3)
    assert [(report.verdict, report.state) for report in reports] == [
        (Verdict.DONE, WorkerState.DONE)
    ] * 3
    assert [report.counts.steps_ok for report in reports] == [len(samples), 0, 0]
    assert sum(samples) == 16
    assert {report.progress.weights_sha256 for report in reports} == {"0" * 64}


def test_another_process_goes_on_from_the_folder(in_child: InChild, tmp_path: Path) -> None:
    def run(incarnation: int, steps: int) -> tuple[Any, list[int]]:
        directives = [{"duration_s": 60.0, "incarnation": incarnation}]
        (report,), _, samples, _ = in_child(
            counted_in, str(tmp_path), spec(steps=steps, run_id="r"), directives
        )
        return report, samples

    report, samples = run(0, 2)
    assert (report.progress.saved_step, sum(samples)) == (2, 16)
    report, samples = run(1, 5)
    assert (report.progress.train_step, sum(samples)) == (5, 24)
    report, samples = run(2, 5)
    assert (report.verdict, samples) == (Verdict.DONE, [])
    report, samples = run(0, 1)
    assert sum(samples) == 8, "a fresh run begins anew"


def test_progress_of_a_wrong_type_is_an_error_of_the_workload(in_child: InChild) -> None:
    (report,), *_ = in_child(counted, spec(TellsText), [{}])
    assert (report.verdict, report.state) == (Verdict.OK, WorkerState.BACKOFF)
    assert "progress must return a Progress or None, not str" in report.reason


@pytest.mark.parametrize(
    ("workload", "policy", "said"),
    [
        (Unordered, "adaptive", "must have ascending units from 1 up, not (32, 16, 8, 4, 2)"),
        (Counting, "classic", "needs memory.policy: adaptive"),
    ],
)
def test_rungs_that_no_policy_can_use_are_refused_in_words(
    in_child: InChild, workload: type, policy: str, said: str
) -> None:
    (report,), *_ = in_child(counted, spec(workload, policy=policy), [{}])
    assert report.verdict is Verdict.INCOMPATIBLE
    assert said in report.reason


def test_what_was_learned_under_other_settings_is_not_offered(in_child: InChild) -> None:
    (one,), *_ = in_child(counted, spec(), [{}])
    (other,), *_ = in_child(counted, spec(state_mib=64), [{}])
    (again,), *_ = in_child(counted, spec(), [{}])
    keys = [report.learned.key.workload for report in (one, other, again)]
    assert keys[0] == keys[2] != keys[1]
