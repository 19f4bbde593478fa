"""A workload with stages and a state between its steps, in the real engine under real caps.

What the workload `train` does with them in the engine is tested in `test_train_workload.py`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

from tests.engine.counting_steps import Counting, HardToUnpark, RunsOut, counted
from tests.engine.scene import events, own
from tests.in_child import InChild
from tests.scene import MIB, spec_of
from workers.messages import WorkerState
from workers.policy.adaptive import CONTRADICTIONS
from workers.settings import WorkerSpec


def spec(workload: type = Counting, **settings: int) -> WorkerSpec:
    usual = spec_of(name=own(workload), policy="adaptive", budget_bytes=160 * MIB, batch=8)
    return replace(usual, workload=replace(usual.workload, settings={"batch": 8, **settings}))


def test_the_policy_moves_along_the_stages_and_the_batch_stays(in_child: InChild) -> None:
    directives = [{}] * 12 + [{"lease_bytes": 11 * MIB}] * 6 + [{}] * 30
    reports, calls, samples = in_child(counted, spec(), directives)
    assert {report.batch for report in reports} <= {1, 2, 4, 8}
    before, squeezed, after = reports[11], reports[17], reports[-1]
    assert (before.batch, squeezed.batch, after.batch) == (8, 1, 8)
    levels = [level for name, level in calls if name == "level"]
    assert levels, "not even one sample fits at level 0"
    assert all(now != last for now, last in zip(levels, [0, *levels], strict=False)), (
        "told only when it changes"
    )
    assert set(range(8, sum(samples), 8)) <= set(accumulate(samples)), (
        "no micro-batch reaches over a boundary"
    )
    assert after.progress.train_step == sum(samples) // 8
    assert sum(report.counts.steps_ok for report in reports) == after.progress.train_step


def test_a_smaller_step_is_a_backoff_that_names_the_level(in_child: InChild) -> None:
    reports, calls, _ = in_child(counted, spec(RunsOut), [{}] * 30)
    assert sum(report.counts.steps_oom for report in reports) == CONTRADICTIONS + 1
    assert len(events(reports, "retry")) == CONTRADICTIONS
    assert ("shed", True) in calls, "the state stays"
    assert events(reports, "backoff")
    assert all("level" in event.detail for event in events(reports, "oom", "backoff"))
    assert {report.memory.kept_bytes for report in reports} == {None}, (
        "a state that is kept is no leak"
    )


def test_a_state_that_does_not_fit_yet_stays_parked(in_child: InChild) -> None:
    # The policy waits for ten seconds before it tries again what has failed.
    next_to_nothing = {"lease_bytes": 4 * MIB}
    directives = [{}] * 6 + [next_to_nothing] * 3 + [{"duration_s": 1.0}] * 13
    reports, calls, _ = in_child(counted, spec(HardToUnpark), directives)
    assert sum(report.counts.steps_oom for report in reports) == 1
    assert not [name for name, _ in calls if name == "shed"], "there is nothing on the device"
    assert [name for name, _ in calls if name.endswith("park")] == ["park", "unpark"], (
        "it was parked once"
    )
    assert reports[-1].state is WorkerState.RUNNING
    assert reports[-1].progress.train_step > reports[5].progress.train_step


def test_what_was_learned_under_other_settings_is_not_offered(in_child: InChild) -> None:
    settings = ({}, {"state_mib": 64}, {})
    found = [in_child(counted, spec(**each), [{}])[0] for each in settings]
    one, other, again = (report.learned.key.workload for (report,) in found)
    assert one == again != other
