"""Processes that do not report: which of them hang, and what is said of each."""

from __future__ import annotations

import pytest

from orchestrator.core.slot import Close, Phase, ProcessSeen, Restart, Tick
from tests.core.scene import Scene
from workers.messages import Activity, Progress

COMPUTES = Activity(interval_s=1.0, wanted_s=1.0, cpu_s=1.0)
#: One of ten beside other programs: it gets 3 % of a core.
STARVES = Activity(interval_s=1.0, wanted_s=1.0, cpu_s=0.03)
IDLE = Activity(interval_s=1.0, wanted_s=0.02, cpu_s=0.01)
ON_CARD = Activity(interval_s=1.0, wanted_s=0.02, cpu_s=0.01, on_card=True)


def watched(scene: Scene, activity: Activity | None, seconds: int) -> float | None:
    """Let the process be seen like this every second; return after how many it was ended."""
    for second in range(1, seconds + 1):
        scene.feed(ProcessSeen(activity=activity), later_s=1.0)
        if Restart() in scene.feed(Tick()):
            return second
    return None


def with_steps_of(longest_step_s: float) -> Scene:
    scene = Scene.working(hang_timeout_s=8.0, stale_after_s=4.0)
    scene.feed(scene.report(longest_step_s=longest_step_s))
    return scene


@pytest.mark.parametrize("activity", [COMPUTES, STARVES, ON_CARD])
def test_a_step_ten_times_as_long_is_not_a_hang(activity: Activity) -> None:
    scene = with_steps_of(12.0)
    assert watched(scene, activity, 115) is None
    assert scene.slot.reason.startswith("a long step: ")


@pytest.mark.parametrize("activity", [COMPUTES, ON_CARD])
def test_a_loop_without_end_is_a_hang_in_the_end(activity: Activity) -> None:
    scene = with_steps_of(12.0)
    ended_s = watched(scene, activity, 200)
    assert ended_s is not None
    assert 120 < ended_s < 125
    assert (
        "its process has computed for 121 s without ending a step, more than 120 s"
        in scene.slot.reason
    )


def test_a_process_that_does_nothing_is_a_hang() -> None:
    scene = with_steps_of(100.0)
    ended_s = watched(scene, IDLE, 60)
    assert ended_s is not None
    assert ended_s <= 11
    assert "its process used no CPU and no card" in scene.slot.reason


def test_work_before_a_deadlock_only_delays_its_end() -> None:
    scene = with_steps_of(100.0)
    assert watched(scene, COMPUTES, 30) is None
    assert watched(scene, IDLE, 7) is None
    assert watched(scene, IDLE, 4) is not None


def test_a_late_answer_is_waited_for_but_not_for_long() -> None:
    scene = with_steps_of(1.0)
    scene.feed(Tick(), later_s=7.0)
    assert watched(scene, None, 7) is None
    assert watched(scene, None, 5) is not None


@pytest.mark.parametrize(
    ("activity", "words"), [(None, "did not come up"), (IDLE, "no report for")]
)
def test_only_what_did_not_come_up_is_said_not_to(activity: Activity | None, words: str) -> None:
    scene = Scene.joined(start_timeout_s=20.0)
    if activity is None:
        scene.feed(Tick(), later_s=21.0)
    else:
        assert watched(scene, activity, 30) is not None
    assert words in scene.slot.reason


def test_a_first_step_may_compute_for_many_start_timeouts() -> None:
    scene = Scene.joined(start_timeout_s=20.0)
    assert watched(scene, COMPUTES, 195) is None
    assert watched(scene, COMPUTES, 10) is not None


@pytest.mark.parametrize(("activity", "is_stale"), [(COMPUTES, False), (IDLE, True)])
def test_a_run_that_ends_in_a_long_step_is_not_stale(activity: Activity, is_stale: bool) -> None:
    scene = with_steps_of(10.0)
    watched(scene, activity, 7)
    scene.feed(Close())
    assert scene.slot.phase is Phase.STOPPED
    assert scene.slot.ended_stale is is_stale


def test_deaths_with_newer_checkpoints_between_are_no_reason() -> None:
    scene = Scene.working(max_deaths=5)
    for saved_step in range(2, 62, 2):
        progress = Progress(train_step=saved_step + 1, saved_step=saved_step)
        scene.feed(scene.report(progress=progress))
        scene.feed(scene.failure(), later_s=20.0)
        assert scene.slot.phase is Phase.PAUSING
        scene.feed(Tick(), later_s=60.0)
        scene.feed(scene.report(steps_ok=1, progress=progress))
    for _ in range(4):  # the last of those above was followed by no progress
        assert scene.slot.phase is Phase.WORKING
        scene.feed(scene.failure(), later_s=20.0)
        scene.feed(Tick(), later_s=10.0)
    assert scene.slot.phase is Phase.QUARANTINED


def test_what_crashes_in_its_tenth_step_is_given_up() -> None:
    scene = Scene.working(max_deaths=5)
    for steps in (1, 4, 8, 2, 9):
        assert scene.slot.phase is Phase.WORKING
        scene.feed(scene.report(steps_ok=steps))
        scene.feed(scene.failure(), later_s=10.0)
        scene.feed(Tick(), later_s=10.0)
    assert scene.slot.phase is Phase.QUARANTINED
