"""The books of a slot: how many steps a slice may do, and that each slice is under way, counted or lost, and once."""

from __future__ import annotations

import math
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.core import slices
from orchestrator.core.fleet import SliceReported
from orchestrator.core.slot import Slot
from orchestrator.core.training import NO_TRAINING, follow
from tests.core.scene import Scene
from tests.factories import report_of
from workers.messages import Progress, StepCounts, Verdict, WorkerState

rates = st.floats(0.01, 1e6)
slices_s = st.floats(0.1, 60)


def slot_after(steps_ok: int, wall_s: float) -> Slot:
    return Slot(slot="pc1/0", report=report_of("pc1/0", 0, 0, steps_ok=steps_ok, wall_s=wall_s))


def worked(rate: float, duration_s: float, step_limit: int) -> tuple[int, float]:
    """Do steps of 1/rate seconds as a worker does: until the time is over or the limit is reached."""
    steps = min(step_limit, max(1, math.ceil(duration_s * rate)))
    return steps, steps / rate


@pytest.mark.parametrize("slot", [Slot(slot="pc1/0"), slot_after(1000, 1.0)], ids=["new", "fast"])
@pytest.mark.parametrize("duration_s", [0.0, -1.0])
def test_a_slice_of_no_duration_may_do_one_step(slot: Slot, duration_s: float) -> None:
    assert slices.step_limit(slot, duration_s) == 1


def test_a_slot_that_knows_no_speed_may_do_four_steps() -> None:
    assert slices.step_limit(Slot(slot="pc1/0"), 60.0) == 4
    assert slices.step_limit(slot_after(10, 0.0), 60.0) == 4


@given(steps_ok=st.integers(0, 10**9), wall_s=st.floats(1e-6, 1e6), duration_s=slices_s)
def test_the_bound_is_at_most_twice_what_is_likely_and_five_more(
    steps_ok: int, wall_s: float, duration_s: float
) -> None:
    likely = duration_s * steps_ok / wall_s
    limit = slices.step_limit(slot_after(steps_ok, wall_s), duration_s)
    assert max(4, 2 * likely) <= limit * (1 + 1e-9)
    assert limit <= (2 * likely + 5) * (1 + 1e-9)


@given(rate=rates, duration_s=slices_s)
def test_a_worker_of_steady_speed_is_never_limited(rate: float, duration_s: float) -> None:
    """Nor is one whose last slice was of another length, such as the first slice of a process."""
    for last_s in (0.0, duration_s / 10, duration_s):
        steps, wall_s = worked(rate, last_s, 10**9)
        limit = slices.step_limit(slot_after(steps, wall_s), duration_s)
        assert limit > math.ceil(duration_s * rate)


@pytest.mark.parametrize("name", StepCounts.__slots__)
def test_each_counter_is_added_to_its_own_sum_and_to_no_other(name: str) -> None:
    before = StepCounts(**{field.name: index for index, field in enumerate(fields(StepCounts))})
    more = StepCounts(**{name: 100})
    expected = replace(before, **{name: getattr(before, name) + 100})
    assert before + more == more + before == StepCounts.total((before, more)) == expected


@pytest.mark.parametrize(
    ("told_s", "counted_s"),
    [(1.0, 1.0), (1e300, 2.5), (math.inf, 2.5), (-5.0, 0.0), (math.nan, 0.0)],
)
def test_seconds_of_a_report_are_at_most_those_since_its_slice(
    told_s: float, counted_s: float
) -> None:
    scene = Scene.working()
    sent = scene.slot.in_flight[0]
    before_s = scene.slot.counts.busy_s
    counts = {"wall_s": told_s, "busy_s": told_s, "steps_ok": 1}
    report = report_of("pc1/0", scene.slot.incarnation, sent.sequence, **counts)
    scene.feed(SliceReported(report=report), later_s=sent.submitted_at_s + 2.0 - scene.now_s)
    assert scene.slot.report is not None
    assert scene.slot.report.wall_s == counted_s
    assert scene.slot.counts.busy_s - before_s == counted_s


def test_a_gap_in_a_full_pipeline_counts_as_worked() -> None:
    """On a loaded PC the threads of a worker begin the next slice late."""
    scene = Scene.working(ends_at_s=1e6)
    before_s = scene.slot.worked_s
    scene.feed(scene.report(wall_s=1.0), later_s=9.0)
    assert scene.slot.worked_s == before_s + 9.0
    starved = scene.report(wall_s=1.0, busy_s=0.25, state=WorkerState.EMERGENCY, verdict=Verdict.OK)
    scene.feed(starved, later_s=9.0)
    assert scene.slot.worked_s == before_s + 9.25


def redone(*reports: tuple[int, int | None, int | None, int | None]) -> int | None:
    """Follow reports of an incarnation, its step, its saved step, and the steps that it says it did again."""
    training = NO_TRAINING
    for sequence, (incarnation, step, saved, own) in enumerate(reports):
        told = (
            None if step is None else Progress(train_step=step, saved_step=saved, redone_steps=own)
        )
        training = follow(training, report_of("pc1/0", incarnation, sequence, progress=told))
    return training.progress.redone_steps


@pytest.mark.parametrize(
    ("reports", "expected"),
    [
        ([(0, 1, None, None), (0, 30, 20, None)], 0),
        ([(0, 30, 20, None), (1, 20, 20, None), (1, 40, 40, None)], 10),
        ([(0, 30, 20, None), (1, 23, 20, None)], 10),  # its first report came after three steps
        ([(0, 30, None, None), (1, 1, None, None)], 29),
        ([(0, 30, 20, None), (1, 20, 20, None), (2, 20, 20, None), (3, 35, 30, None)], 10),
        (
            [(0, 30, 20, None), (1, None, None, None), (2, 20, 20, None)],
            10,
        ),  # one that never told anything
        (
            [(0, 30, 20, 4), (0, 40, 20, 7), (1, 20, 20, 0), (1, 50, 20, 2)],
            29,
        ),  # each counts its own from 0
        ([(0, 30, 30, None), (1, 45, 30, None)], 0),
        ([(0, None, None, None)], None),
    ],
)
def test_steps_done_again(
    reports: list[tuple[int, int | None, int | None, int | None]], expected: int | None
) -> None:
    assert redone(*reports) == expected
