"""Slots whose process dies, hangs, loses its device, leaks or cannot start: restarts, pauses and
quarantine; and slots whose work is done.

Each test checks state and commands after one event; `test_lifecycle_machine.py` has any order.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.slot import Abandon, Command, HeadState, Phase, Tick
from tests.core.scene import Scene, notes
from tests.factories import CPU, MEMORY, RULES, counters, counters_of
from tests.scene import MIB
from workers.messages import Cause, Verdict, WorkerState
from workers.settings import PolicyState


def test_a_process_that_ended_has_died_in_the_words_of_its_actor() -> None:
    scene = Scene.working()
    text = "its process was ended by SIGKILL"
    assert scene.deeds(scene.end(text, Cause.HOST_MEMORY)) == []
    assert (scene.slot.phase, scene.slot.state) == (Phase.PAUSING, HeadState.RESTARTING)
    assert scene.slot.reason == f"{text}: the PC's RAM was nearly full"
    assert scene.slot.failure is Cause.HOST_MEMORY
    assert (scene.slot.restarts, scene.slot.deaths_at_s) == (1, (scene.now_s,))
    assert not scene.orders().runs
    scene.feed(scene.end(text))
    assert scene.slot.restarts == 1, "it is told again until the next process begins"
    scene.feed(Tick())
    wanted = scene.orders()
    assert (wanted.incarnation, wanted.runs, wanted.begin is None) == (1, True, False)


def test_deaths_further_apart_than_the_window_are_not_added_up() -> None:
    scene = Scene.working(max_deaths=2)
    for _ in range(5):
        assert scene.die() == 0
        scene.feed(scene.status(), later_s=RULES.death_window_s)
    assert scene.slot.restarts == 5


@pytest.mark.parametrize("ready", [False, True])
def test_an_unreachable_actor_is_quarantined_after_its_time(ready: bool) -> None:
    scene = Scene.working() if ready else Scene.joined()
    for _ in range(240):
        scene.feed(scene.unreached())
        scene.feed(Tick(), later_s=0.5)
    assert scene.slot.phase is Phase.WORKING
    assert scene.deeds(Tick(), later_s=0.1) == [Abandon()]
    assert scene.slot.reason == "no process came up in 120 s"
    assert scene.slot.failure is Cause.NOT_STARTED


def test_a_process_that_tells_nothing_is_stale_until_it_does() -> None:
    scene = Scene.working()
    scene.feed(scene.quiet(9), later_s=1)
    scene.feed(Tick(), later_s=1)
    assert scene.slot.reason == "steady"
    scene.feed(Tick(), later_s=2)
    assert scene.slot.state == WorkerState.RUNNING
    assert scene.slot.reason == "STALE: no report for 12 s"
    scene.feed(scene.quiet(14, idle_s=0.5, computed_s=9.0), later_s=2)
    scene.feed(Tick())
    assert scene.slot.reason == "a long step: 14 s so far, and computing (9 s of CPU)"
    scene.feed(scene.status(), later_s=1)
    scene.feed(Tick())
    assert scene.slot.reason == "steady"


@pytest.mark.parametrize("ready", [False, True], ids=["start", "step"])
@pytest.mark.parametrize("slow_step_s", [30.0, 600.0])
@pytest.mark.parametrize("answers", [False, True])
def test_a_step_that_may_be_slow_is_waited_for(
    ready: bool, slow_step_s: float, answers: bool
) -> None:
    begin = Scene.working if ready else Scene.joined
    scene = begin(slow_step_s=slow_step_s)
    limit_s = max(slow_step_s, RULES.hang_timeout_s if ready else RULES.start_timeout_s)
    for seconds, restarts in ((limit_s, 0), (limit_s + 1.0, 1)):
        if answers:
            scene.feed(scene.quiet(seconds))
        scene.feed(Tick(), later_s=0.0 if answers else seconds - (limit_s if restarts else 0.0))
        assert scene.slot.restarts == restarts


@pytest.mark.parametrize(
    "full", [{}, {"device": CPU, "oom_count": 1}], ids=["", "out of memory on an open device"]
)
def test_a_poisoned_process_is_replaced_and_its_status_counts(full: dict[str, object]) -> None:
    scene = Scene.working()
    status = scene.status(
        verdict=Verdict.CONTEXT_CORRUPTED,
        reason="illegal access",
        steps_ok=2,
        resume=PolicyState(failures=1),
        **full,
    )
    assert scene.deeds(status) == []
    assert not scene.orders().runs
    assert (scene.slot.phase, scene.slot.state) == (Phase.PAUSING, HeadState.RESTARTING)
    assert scene.slot.reason == "illegal access"
    assert scene.slot.failure is Cause.DRIVER
    assert counters_of(scene.slot) == counters(steps_ok=2, restarts=1, oom_count=len(full) // 2)
    assert scene.slot.resume == PolicyState(failures=1)
    assert len(scene.slot.deaths_at_s) == 1


def test_a_card_too_full_for_a_context_is_no_death() -> None:
    scene = Scene.joined()
    full = scene.status(
        verdict=Verdict.CONTEXT_CORRUPTED, device=None, oom_count=1, reason="out of memory"
    )
    assert scene.deeds(full) == []
    assert (scene.slot.phase, scene.slot.state) == (Phase.PAUSING, WorkerState.EMERGENCY)
    assert scene.slot.deaths_at_s == ()
    assert scene.slot.wake_at_s is not None
    pause_s = scene.slot.wake_at_s - scene.now_s
    # With jitter: the workers of a full card must not all restart at the same moment.
    assert RULES.restart_backoff_max_s / 2 <= pause_s <= RULES.restart_backoff_max_s
    assert scene.slot.restarts == 1


class Leaking(Scene):
    """A slot whose worker reports its memory."""

    def hold(self, mib: int, **changes: object) -> list[dict[str, Any]]:
        """Report resident memory of `mib` MiB; return the notes of a leak."""
        self.now_s += 1
        event = self.status(**{"rss_bytes": mib * MIB, "device": CPU, "memory": MEMORY, **changes})
        self.commands = self.feed(event)
        return notes(self.commands, "leak")

    def settle(self) -> None:
        """Report until more memory is growth: one begins, three settle, five are the base."""
        for _ in range(9):
            assert self.hold(100) == []

    def grow(self, mib: int) -> list[dict[str, Any]]:
        """Report five times `mib` MiB more; return the notes of a leak."""
        return [note for _ in range(5) for note in self.hold(100 + mib)]


def test_a_leak_up_to_the_limit_is_a_fresh_process_and_no_death() -> None:
    scene = Leaking.joined(leak_flag_mib=30, leak_limit_mib=60)
    scene.settle()
    scene.grow(59)
    assert scene.slot.phase is Phase.WORKING
    for _ in range(5):
        assert scene.slot.phase is Phase.WORKING
        scene.hold(160)
    assert not scene.orders().runs
    assert (scene.slot.phase, scene.slot.state) == (Phase.PAUSING, HeadState.RESTARTING)
    assert scene.slot.wake_at_s == scene.now_s
    assert (
        scene.slot.reason
        == "its process keeps 60 MiB that its work does not need; its process was replaced"
    )
    assert scene.slot.deaths_at_s == ()
    assert counters_of(scene.slot) == counters(restarts=1)
    scene.feed(Tick())
    assert scene.orders().incarnation == 1
    scene.settle()
    assert scene.slot.phase is Phase.WORKING


def keeping(mib: int) -> dict[str, Any]:
    """Return fields of a worker that kept `mib` MiB after a release, each at another size."""
    return {"memory": replace(MEMORY, kept_bytes=mib * MIB), "size": 64 * mib}


def test_what_stays_after_a_release_is_a_leak_at_any_size() -> None:
    """The cap is 200 MiB: a sixth is reported, a third is too much."""
    scene = Leaking.joined(leak_flag_mib=256, leak_limit_mib=1024)
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
    scene = Leaking.joined(leak_flag_mib=256, leak_limit_mib=1024)
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
    """Otherwise a slot could do nothing but start processes all night."""
    scene = Leaking.joined(leak_limit_mib=1024)
    assert scene.hold(100, **keeping(150)) == [{"growth_bytes": 150 * MIB}]
    assert (scene.slot.state, len(scene.slot.deaths_at_s)) == (HeadState.RESTARTING, 1)
    assert "drop every tensor in the workload's `release`" in scene.slot.reason


def test_a_late_status_counts_as_worked() -> None:
    """On a loaded PC the threads of a worker run late."""
    scene = Scene.working(ends_at_s=1e6)
    before_s = scene.slot.worked_s
    scene.feed(scene.status(wall_s=1.5), later_s=9.0)
    assert scene.slot.worked_s == before_s + 9.0
    starved = {"busy_s": 0.25, "state": WorkerState.EMERGENCY}
    scene.feed(scene.status(wall_s=2.5, **starved), later_s=9.0)
    assert scene.slot.worked_s == before_s + 9.25
    scene.feed(scene.status(wall_s=2.5, **starved), later_s=9.0)
    assert scene.slot.worked_s == before_s + 9.25, "it told nothing new"


def pauses_s(deaths: int, **scene: Any) -> list[float]:
    acted = Scene(**{"max_deaths": deaths + 1, "death_window_s": 1e9, **scene})
    acted.work()
    return [acted.die() for _ in range(deaths)]


def test_workers_that_die_together_do_not_come_back_together() -> None:
    second_pauses_s = [
        pauses_s(2, slot=f"pc1/{index}", restart_backoff_s=60.0, restart_backoff_max_s=60.0)[1]
        for index in range(50)
    ]
    assert max(second_pauses_s) - min(second_pauses_s) > 20
    assert len({round(pause, 3) for pause in second_pauses_s}) == 50


@settings(max_examples=10)
@given(
    seed=st.integers(0, 2**32 - 1),
    slot=st.text(min_size=1, max_size=12),
    first_s=st.floats(0.001, 100),
    most_s=st.floats(0.001, 1000),
)
def test_a_pause_is_between_half_and_whole_of_its_time(
    seed: int, slot: str, first_s: float, most_s: float
) -> None:
    waited_s = pauses_s(
        7, seed=seed, slot=slot, restart_backoff_s=first_s, restart_backoff_max_s=most_s
    )
    assert waited_s[0] == 0
    for doublings, pause in enumerate(waited_s[1:]):
        whole = min(first_s * 2**doublings, most_s)
        # The pauses are differences of clock times, and so exact only up to rounding.
        assert whole / 2 - 1e-6 <= pause <= whole + 1e-6
        assert pause <= most_s + 1e-6


def done(scene: Scene, **changes: object) -> list[Command]:
    """Let the process report that its work is done."""
    told = {"verdict": Verdict.DONE, "state": WorkerState.DONE, "reason": "all is done"}
    return scene.deeds(scene.status(**told, **changes))


def test_a_slot_is_done_once_the_head_has_all_of_its_state() -> None:
    scene = Scene.working()
    assert done(scene, steps_ok=7, save_due=True) == []
    assert scene.slot.state is WorkerState.DONE
    assert scene.deeds(Tick(), later_s=1000) == []
    assert done(scene, steps_ok=7) == [Abandon()]
    assert (scene.slot.phase, scene.slot.restarts) == (Phase.DONE, 0)
    assert (scene.slot.counts.steps_ok, scene.slot.reason) == (7, "all is done")
