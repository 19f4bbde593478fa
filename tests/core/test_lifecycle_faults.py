"""What a slot does and loses when its process dies, hangs, is poisoned, leaks or cannot be: restarts and quarantine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from orchestrator.core.fleet import DeathCause, SliceFailure
from orchestrator.core.slot import (
    Abandon,
    DeathExplained,
    Forget,
    HeadState,
    NodeJoined,
    NodeLeft,
    Phase,
    Restart,
    Tick,
)
from tests.core.scene import Scene, notes, sequences, submits
from tests.factories import CPU, MEMORY, RULES, counters, counters_of
from tests.scene import MIB
from workers.messages import Verdict, WorkerState

#: Steps that a slice may do whose slot knows no speed yet.
LEAST = 4


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (SliceFailure.DIED, "its process ended: killed, or crashed"),
        (SliceFailure.UNAVAILABLE, "its process ended: Ray lost the connection to it"),
        (SliceFailure.UNBUILDABLE, "its process failed outside a step: worker died"),
    ],
)
def test_a_failed_slice_is_a_death_in_its_own_words(failure: SliceFailure, words: str) -> None:
    scene = Scene.working()
    scene.feed(scene.failure(failure))
    assert scene.slot.phase == Phase.PAUSING
    assert scene.slot.state == HeadState.RESTARTING
    assert scene.slot.reason == words
    assert (scene.slot.restarts, scene.slot.deaths_at_s) == (1, (scene.now_s,))


FULL_RAM = DeathExplained(cause=DeathCause(host_memory=True, text="NODE_OUT_OF_MEMORY: …"))


@pytest.mark.parametrize("now", ["pauses", "starts again", "was given up"])
def test_a_death_by_full_ram_is_explained_and_one_death(now: str) -> None:
    scene = Scene.working(max_deaths=1 if now == "was given up" else 6)
    scene.feed(scene.failure())
    if now == "starts again":
        scene.feed(Tick())
    before = scene.slot
    words = "Ray ended its process because the PC's RAM was nearly full"
    reason = f"{before.reason}; {words}" if now == "was given up" else words
    for _ in range(2):
        assert scene.feed(FULL_RAM, later_s=1) == []
        assert scene.slot == replace(before, reason=reason)


def test_deaths_further_apart_than_the_window_are_not_added_up() -> None:
    scene = Scene.working(max_deaths=2)
    for _ in range(5):
        assert scene.die() == 0
        scene.feed(scene.report(), later_s=RULES.death_window_s)
    assert scene.slot.restarts == 5


def test_an_unreachable_restarted_actor_has_not_died_again() -> None:
    scene = Scene.working()
    scene.feed(scene.failure())
    scene.feed(Tick())
    for _ in range(10):
        assert scene.deeds(scene.failure(SliceFailure.UNAVAILABLE)) == [Forget()]
        assert (scene.slot.phase, scene.slot.state) == (Phase.PAUSING, HeadState.RESTARTING)
        assert scene.feed(Tick(), later_s=0.15) == []
        assert len(sequences(scene.feed(Tick(), later_s=0.1))) == 1
        # The same process is still awaited.
        assert scene.slot.incarnation == 1
    # Each try may have done the one step of its first slice.
    assert counters_of(scene.slot) == counters(restarts=1, steps_lost_upper_bound=2 * LEAST + 10)
    scene.feed(scene.report())
    assert scene.slot.state is WorkerState.RUNNING


def test_a_process_that_dies_in_its_first_step_has_died() -> None:
    scene = Scene.joined()
    for deaths in range(1, RULES.max_deaths):
        # What fails at once was sent to the process before.
        scene.feed(scene.failure(SliceFailure.DIED), later_s=0.1)
        assert scene.slot.restarts == deaths - 1
        scene.feed(Tick(), later_s=0.3)
        scene.feed(scene.failure(SliceFailure.DIED), later_s=1.0)
        assert scene.slot.restarts == deaths
        assert scene.slot.state is HeadState.RESTARTING
        scene.feed(Tick(), later_s=RULES.restart_backoff_max_s)
    assert scene.deeds(scene.failure(SliceFailure.DIED), later_s=1.0) == [Abandon()]


def test_an_unreachable_actor_is_quarantined_after_its_time() -> None:
    scene = Scene.joined()
    for _ in range(240):
        scene.feed(scene.failure(SliceFailure.UNAVAILABLE))
        scene.feed(Tick(), later_s=0.5)
    assert scene.slot.phase is Phase.WORKING
    assert scene.deeds(scene.failure(SliceFailure.UNAVAILABLE), later_s=0.1) == [Abandon()]
    assert scene.slot.reason == "no process came up in 120 s"


def test_the_back_off_is_no_part_of_the_start_timeout() -> None:
    scene = Scene.working(
        restart_backoff_s=600.0, restart_backoff_max_s=600.0, death_window_s=3600.0
    )
    scene.die()
    scene.feed(scene.failure())
    scene.feed(Tick(), later_s=600)
    scene.feed(scene.failure(SliceFailure.UNAVAILABLE))
    assert scene.slot.phase is Phase.PAUSING


def test_a_slot_that_never_comes_up_is_given_up() -> None:
    scene = Scene.joined(max_deaths=4)
    for _ in range(4):
        assert scene.slot.phase is Phase.WORKING
        scene.feed(Tick(), later_s=121)
        scene.feed(Tick(), later_s=5)
    assert scene.slot.phase is Phase.QUARANTINED
    # The deaths are at 121, 121 + 126, 121 + 2 x 126 and 121 + 3 x 126 seconds.
    assert scene.slot.reason.startswith(
        "4 deaths in 378 s without progress; the last: its process did not come up for 121 s"
    )


def test_an_overdue_slice_is_stale_until_its_report_comes() -> None:
    scene = Scene.working()
    scene.feed(Tick(), later_s=11)
    assert scene.slot.reason == "steady"
    scene.feed(Tick(), later_s=1)
    assert scene.slot.state == WorkerState.RUNNING
    assert scene.slot.reason == "STALE: its slice is 11 s overdue"
    scene.feed(scene.report(), later_s=1)
    assert scene.slot.reason == "steady"


@pytest.mark.parametrize("ready", [False, True], ids=["first step", "later step"])
@pytest.mark.parametrize("slow_step_s", [30.0, 600.0])
def test_a_step_that_may_be_slow_is_waited_for(ready: bool, slow_step_s: float) -> None:
    begin = Scene.working if ready else Scene.joined
    scene = begin(slow_step_s=slow_step_s)
    limit_s = max(slow_step_s, RULES.hang_timeout_s if ready else RULES.start_timeout_s)
    slice_s = RULES.slice_s if ready else 0.0
    assert Restart() not in scene.deeds(Tick(), later_s=slice_s + limit_s)
    assert scene.slot.restarts == 0
    assert Restart() in scene.deeds(Tick(), later_s=1.0)
    assert scene.slot.restarts == 1


@pytest.mark.parametrize(
    "full", [{}, {"device": CPU, "oom_count": 1}], ids=["", "out of memory on an open device"]
)
def test_a_poisoned_process_is_replaced_and_its_report_counts(full: dict[str, object]) -> None:
    scene = Scene.working()
    report = scene.report(
        verdict=Verdict.CONTEXT_CORRUPTED,
        reason="illegal access",
        steps_ok=2,
        resume={"failures": 1},
        **full,
    )
    assert scene.deeds(report) == [Forget(), Restart()]
    assert scene.slot.phase == Phase.PAUSING
    assert scene.slot.state == HeadState.RESTARTING
    assert scene.slot.reason == "illegal access"
    counted = counters(
        steps_ok=2, restarts=1, steps_lost_upper_bound=LEAST, oom_count=len(full) // 2
    )
    assert counters_of(scene.slot) == counted
    assert scene.slot.resume == {"failures": 1}
    assert len(scene.slot.deaths_at_s) == 1


def test_a_card_too_full_for_a_context_is_no_death() -> None:
    scene = Scene.joined()
    full = scene.report(
        verdict=Verdict.CONTEXT_CORRUPTED, device=None, oom_count=1, reason="out of memory"
    )
    assert scene.deeds(full) == [Forget(), Restart()]
    assert (scene.slot.phase, scene.slot.state) == (Phase.PAUSING, WorkerState.EMERGENCY)
    assert scene.slot.deaths_at_s == ()
    assert scene.slot.wake_at_s is not None
    pause_s = scene.slot.wake_at_s - scene.now_s
    # With jitter: the workers of a full card must not all come back at the same moment.
    assert RULES.restart_backoff_max_s / 2 <= pause_s <= RULES.restart_backoff_max_s
    assert scene.slot.restarts == 1


@pytest.mark.parametrize("deaths", [0, 1])
def test_errors_in_a_row_end_in_quarantine_also_over_a_death(deaths: int) -> None:
    scene = Scene.working()
    for _ in range(2):
        assert (
            len(
                sequences(
                    scene.feed(scene.report(error="Traceback …", reason="boom", steps_error=1))
                )
            )
            == 1
        )
    for _ in range(deaths):
        scene.feed(scene.failure())
        scene.feed(Tick())
    assert scene.deeds(scene.report(error="Traceback …", reason="boom", steps_error=1)) == [
        Abandon()
    ]
    assert scene.slot.reason == "3 times in a row: boom"
    lost = LEAST if deaths == 0 else 2 * LEAST
    assert counters_of(scene.slot) == counters(
        steps_error=3, restarts=deaths, steps_lost_upper_bound=lost
    )


def test_a_good_slice_forgives_workload_errors() -> None:
    scene = Scene.working()
    for _ in range(5):
        scene.feed(scene.report(error="Traceback …"))
        scene.feed(scene.report(error="Traceback …"))
        scene.feed(scene.report())
    assert scene.slot.phase is Phase.WORKING


@pytest.mark.parametrize(("died_before_s", "blamed"), [(59, True), (61, False)])
def test_deaths_just_before_a_node_leaves_are_the_nodes(died_before_s: float, blamed: bool) -> None:
    scene = Scene.working(max_deaths=2)
    scene.feed(scene.failure())
    scene.feed(NodeLeft(), later_s=died_before_s)
    scene.feed(NodeJoined(), later_s=1)
    scene.feed(scene.report())
    scene.feed(scene.failure())
    assert (scene.slot.phase is Phase.PAUSING) == blamed


class Leaking(Scene):
    """A slot whose worker says what memory it holds."""

    def hold(self, mib: int, **changes: object) -> list[dict[str, Any]]:
        """Report so much resident memory; return the notes of a leak."""
        event = self.report(
            **{"rss_bytes": mib * MIB, "device": CPU, "memory": MEMORY, "wall_s": 0.1, **changes}
        )
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
        assert scene.slot.reason == "LEAK: its process keeps 30 MiB that its work does not need"
        assert scene.grow(40) == []
        assert scene.slot.reason == "LEAK: its process keeps 40 MiB that its work does not need"
        scene.feed(scene.failure())
        scene.feed(Tick(), later_s=10)
    assert scene.slot.restarts == 2


def test_a_leak_up_to_the_limit_is_a_fresh_process_and_no_death() -> None:
    scene = Leaking.joined(leak_flag_bytes=30 * MIB, leak_limit_bytes=60 * MIB)
    scene.settle()
    scene.grow(59)
    assert scene.slot.phase is Phase.WORKING
    for _ in range(5):
        assert scene.slot.phase is Phase.WORKING
        queued = scene.slot.in_flight[1]
        scene.hold(160)
    assert [command for command in scene.commands if isinstance(command, Forget | Restart)] == [
        Forget(),
        Restart(),
    ]
    assert submits(scene.commands) == []
    assert scene.slot.phase == Phase.PAUSING
    assert scene.slot.state == HeadState.RESTARTING
    assert scene.slot.wake_at_s == scene.now_s
    assert (
        scene.slot.reason
        == "its process keeps 60 MiB that its work does not need; its process was replaced"
    )
    assert (scene.slot.deaths_at_s, scene.slot.in_flight) == ((), ())
    assert counters_of(scene.slot) == counters(restarts=1, steps_lost_upper_bound=queued.step_limit)
    assert [(submit.incarnation, submit.step_limit) for submit in submits(scene.feed(Tick()))] == [
        (1, 1)
    ]
    scene.settle()
    assert scene.slot.phase is Phase.WORKING


def keeping(mib: int) -> dict[str, Any]:
    """Report fields of a worker whose process kept so much after a release, at a size of its own."""
    return {"memory": replace(MEMORY, kept_bytes=mib * MIB), "size": 64 * mib}


def test_what_stays_after_a_release_is_a_leak_at_any_size() -> None:
    """The cap is 200 MiB: a sixth is told, a third is too much."""
    scene = Leaking.joined(leak_flag_bytes=256 * MIB, leak_limit_bytes=1024 * MIB)
    assert [scene.hold(100, **keeping(mib)) for mib in (1, 10, 33)] == [[], [], []]
    assert scene.hold(100, **keeping(34)) == [{"growth_bytes": 34 * MIB}]
    assert scene.slot.reason == "LEAK: its process keeps 34 MiB that its work does not need"
    scene.hold(100, **keeping(66))
    assert scene.slot.phase is Phase.WORKING
    scene.hold(100, **keeping(67))
    assert scene.slot.state == HeadState.RESTARTING
    assert scene.slot.deaths_at_s == ()
    assert scene.slot.restarts == 1
    assert (
        scene.slot.reason
        == "its process keeps 67 MiB that its work does not need; its process was replaced"
    )


def test_at_rest_an_eighth_of_the_cap_is_too_much() -> None:
    scene = Leaking.joined(leak_flag_bytes=256 * MIB, leak_limit_bytes=1024 * MIB)
    for _ in range(6):
        scene.hold(100)
    scene.hold(100, **keeping(24), state=WorkerState.EMERGENCY)
    scene.hold(100, **keeping(25))
    assert scene.slot.phase is Phase.WORKING
    assert scene.hold(100, **keeping(25), state=WorkerState.EMERGENCY) == [
        {"growth_bytes": 25 * MIB}
    ]
    assert (scene.slot.state, scene.slot.deaths_at_s) == (HeadState.RESTARTING, ())


def test_a_process_that_keeps_too_much_at_once_counts_as_a_death() -> None:
    """Or a slot would be busy with nothing but new processes for the whole night."""
    scene = Leaking.joined(leak_limit_bytes=1024 * MIB)
    assert scene.hold(100, **keeping(150)) == [{"growth_bytes": 150 * MIB}]
    assert (scene.slot.state, len(scene.slot.deaths_at_s)) == (HeadState.RESTARTING, 1)
    assert "drop every tensor in the workload's `release`" in scene.slot.reason
