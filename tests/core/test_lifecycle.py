"""The ordinary course of a slot: it joins, works, loses its node, pauses, and ends with its run.

One event in, the state and the commands that come out. What goes wrong is in
`test_lifecycle_faults.py`, any order of events, and how one begins, in `test_lifecycle_machine.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.slot import (
    Abandon,
    Command,
    EndRun,
    Event,
    HeadState,
    NodeJoined,
    Note,
    Phase,
    Place,
    Tick,
)
from tests.core.scene import Scene
from tests.factories import counters, counters_of
from workers.messages import Begin, EndCause, Orders, Verdict, WorkerState


def test_a_process_is_begun_once_its_actor_is_known() -> None:
    scene = Scene()
    assert scene.deeds(NodeJoined()) == [Place()]
    assert scene.orders() == Orders(), "which tells the name of the actor's process"
    scene.feed(scene.status(incarnation=None, is_up=False))
    assert scene.orders() == Orders(actor="pc1:1", begin=Begin())
    scene.feed(scene.status(is_up=False))
    assert scene.orders() == Orders(actor="pc1:1"), "it was begun"
    assert (scene.slot.ready, scene.slot.state) == (False, HeadState.STARTING)
    scene.feed(scene.status(news=3))
    assert scene.orders() == Orders(actor="pc1:1", heard=3)
    assert (scene.slot.ready, scene.slot.state) == (True, WorkerState.RUNNING)


def test_a_status_replaces_what_its_process_told_before() -> None:
    scene = Scene()
    scene.work(steps_ok=5)
    known = {"steps_ok": 7, "steps_oom": 2, "steps_error": 1, "oom_count": 3, "emergency_count": 4}
    counted = {**known, "verify_checks": 5, "verify_errors": 6, "work_flop": 1e12, "busy_s": 0.5}
    told = {"reason": "size 4096", "state": WorkerState.BACKOFF, "resume": {"failures": 2}}
    event = scene.status(**counted, **told)
    states = (("from_state", "RUNNING"), ("to_state", "BACKOFF"))
    fields = (*states, ("cause", "size 4096"), ("incarnation", 0))
    assert scene.feed(event, later_s=2) == [Note(name="state", fields=fields)]
    assert counters_of(scene.slot) == counters(**counted)
    assert scene.slot.status == event.status
    assert (scene.slot.state, scene.slot.reason) == (WorkerState.BACKOFF, "size 4096")
    assert scene.slot.heard_at_s == scene.now_s
    scene.die()
    assert scene.slot.counts.steps_ok == 7
    scene.feed(scene.status(steps_ok=2))
    assert counters_of(scene.slot) == counters(**{**counted, "steps_ok": 9}, restarts=1)


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


@settings(max_examples=30)
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
        # Seconds of a clock are differences here: they are exact to its rounding only.
        assert whole / 2 - 1e-6 <= pause <= whole + 1e-6
        assert pause <= most_s + 1e-6


def done(scene: Scene, **changes: object) -> list[Command]:
    """Let the process tell that all is done."""
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


@pytest.mark.parametrize("how", ["incompatible", "unbuildable", "process"])
def test_what_can_never_work_ends_the_run_or_its_slot_alone(how: str) -> None:
    for counts in (False, True):
        scene = Scene.joined(ends_at_s=5000.0 if counts else None)
        event: Event = scene.unreached(is_unbuildable=True)
        if how == "incompatible":
            event = scene.status(verdict=Verdict.INCOMPATIBLE, reason="pc1/0: worker died")
        if how == "process":
            event = scene.end("no module", EndCause.UNBUILDABLE)
        deeds = scene.deeds(event)
        assert [type(each) for each in deeds] == [Abandon if counts else EndRun]
        assert (scene.slot.phase is Phase.QUARANTINED) == counts
