"""The ordinary course of a slot: it joins, works, loses its node, pauses, and ends with its run.

One event in, the state and the commands that come out. What goes wrong is in
`test_lifecycle_faults.py`, any order of events, and how one begins, in `test_lifecycle_machine.py`.
"""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core.slot import (
    Abandon,
    Command,
    Phase,
    Tick,
)
from tests.core.scene import Scene
from workers.messages import Verdict, WorkerState


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
