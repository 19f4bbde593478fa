"""What a slot loses when a slice gives no report, and what it does about a worker whose memory grows."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.core.fleet import SliceFailure
from orchestrator.core.slot import (
    CardQuarantined,
    Close,
    Drain,
    Event,
    Forget,
    HeadState,
    NodeLeft,
    Phase,
    Restart,
    Tick,
)
from tests.core.scene import CPU, MEMORY, MIB, Scene, notes, submits
from tests.counting import counters, counters_of
from workers.messages import Verdict, WorkerState

#: One step in 10 ms: a full slice may do 204.
FAST = {"steps_ok": 1, "wall_s": 0.01}
FULL = 204


@pytest.mark.parametrize(
    ("how", "lost"),
    [
        ("dies", 2 * FULL),
        ("cannot be reached", 2 * FULL),
        ("unbuildable", 2 * FULL),
        ("node left", 2 * FULL),
        ("hangs", 2 * FULL),
        ("card quarantined", 2 * FULL),
        ("closed", 2 * FULL),
        ("poisoned", FULL),
        ("no room", FULL),
        ("incompatible", FULL),
        ("too many errors", FULL),
    ],
)
@pytest.mark.parametrize("max_deaths", [6, 1], ids=["restarts", "is quarantined"])
def test_every_slice_that_ends_without_a_report_adds_its_limit_to_what_is_lost_and_once(
    how: str, lost: int, max_deaths: int
) -> None:
    scene = Scene(max_deaths=max_deaths, max_workload_errors=1)
    scene.work(**FAST)
    events: dict[str, Event] = {
        "dies": scene.failure(),
        "cannot be reached": scene.failure(SliceFailure.UNAVAILABLE),
        "unbuildable": scene.failure(SliceFailure.UNBUILDABLE),
        "node left": NodeLeft(),
        "hangs": Tick(),
        "card quarantined": CardQuarantined(reason="sick"),
        "closed": Close(),
        "poisoned": scene.report(verdict=Verdict.CONTEXT_CORRUPTED),
        "no room": scene.report(verdict=Verdict.CONTEXT_CORRUPTED, oom_count=1),
        "incompatible": scene.report(verdict=Verdict.INCOMPATIBLE),
        "too many errors": scene.report(error="Traceback …"),
    }
    scene.feed(events[how], later_s=62)
    assert scene.slot.in_flight == ()
    assert (scene.slot.counts.steps_ok, scene.slot.steps_lost_upper_bound) == (1, lost)
    scene.feed(Close())
    assert scene.slot.steps_lost_upper_bound == lost


class Leaking(Scene):
    """A slot whose worker says what memory it holds."""

    def hold(self, mib: int, **changes: object) -> list[dict[str, Any]]:
        """Report so much resident memory; return the notes of a leak."""
        event = self.report(**{"rss_bytes": mib * MIB, "device": CPU, "memory": MEMORY, "wall_s": 0.1, **changes})
        self.commands = self.feed(event, later_s=1)
        return notes(self.commands, "leak")

    def settle(self) -> None:
        """Report until what comes next counts as growth: one begins, three settle, five are the base."""
        for _ in range(9):
            assert self.hold(100) == []

    def grow(self, mib: int) -> list[dict[str, Any]]:
        """Report five times so much more."""
        return [note for _ in range(5) for note in self.hold(100 + mib)]


def test_a_leak_is_told_once_for_each_process() -> None:
    scene = Leaking.joined(leak_flag_bytes=30 * MIB)
    for incarnation in range(2):
        assert scene.slot.incarnation == incarnation
        scene.settle()
        assert scene.grow(29) == []
        assert scene.slot.reason == "steady"
        assert scene.grow(30) == [{"growth_bytes": 30 * MIB}]
        assert scene.slot.reason == "LEAK: its memory grew by 30 MiB while its work stayed the same"
        assert scene.grow(40) == []
        assert scene.slot.reason == "LEAK: its memory grew by 40 MiB while its work stayed the same"
        scene.feed(scene.failure())
        scene.feed(Tick(), later_s=10)
    assert scene.slot.restarts == 2


def test_a_leak_does_not_hide_why_a_worker_is_not_running() -> None:
    scene = Leaking.joined(leak_flag_bytes=30 * MIB)
    scene.settle()
    scene.grow(30)
    scene.hold(130, state=WorkerState.BACKOFF, reason="size 4096")
    assert scene.slot.reason == "size 4096"


def test_a_leak_up_to_the_limit_is_a_fresh_process_and_no_death() -> None:
    scene = Leaking.joined(leak_flag_bytes=30 * MIB, leak_limit_bytes=60 * MIB)
    scene.settle()
    scene.grow(59)
    assert scene.slot.phase is Phase.WORKING
    for _ in range(5):
        assert scene.slot.phase is Phase.WORKING
        queued = scene.slot.in_flight[1]
        scene.hold(160)
    assert [command for command in scene.commands if isinstance(command, Forget | Restart)] == [Forget(), Restart()]
    assert submits(scene.commands) == []
    assert (scene.slot.phase, scene.slot.state, scene.slot.wake_at_s) == (
        Phase.PAUSING,
        HeadState.RESTARTING,
        scene.now_s,
    )
    assert scene.slot.reason == "its memory grew by 60 MiB while its work stayed the same; its process was replaced"
    assert (scene.slot.deaths_at_s, scene.slot.in_flight) == ((), ())
    assert counters_of(scene.slot) == counters(restarts=1, steps_lost_upper_bound=queued.step_limit)
    assert [(submit.incarnation, submit.step_limit) for submit in submits(scene.feed(Tick()))] == [(1, 1)]
    scene.settle()
    assert scene.slot.phase is Phase.WORKING


def test_a_fresh_process_that_has_measured_nothing_yet_is_not_replaced_for_what_the_last_one_held() -> None:
    scene = Leaking.joined(leak_limit_bytes=60 * MIB)
    scene.settle()
    scene.grow(60)
    scene.feed(Tick())
    scene.feed(scene.report(rss_bytes=None))
    assert (scene.slot.phase, scene.slot.incarnation) == (Phase.WORKING, 1)


def test_a_draining_worker_is_not_replaced_for_its_leak() -> None:
    scene = Leaking.joined(leak_limit_bytes=60 * MIB)
    scene.settle()
    for _ in range(4):
        scene.hold(160)
    scene.feed(Drain())
    scene.hold(160)
    assert scene.slot.phase is Phase.WORKING
    scene.hold(160)
    assert (scene.slot.phase, scene.slot.restarts) == (Phase.STOPPED, 0)
