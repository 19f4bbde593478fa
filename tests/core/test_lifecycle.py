"""The ordinary course of a slot: it joins, works, loses its node, pauses, and ends with its run.

One event in, the state and the commands that come out. What goes wrong is in
`test_lifecycle_faults.py`, any order of events, and how one begins, in `test_lifecycle_machine.py`.
"""

from __future__ import annotations

from itertools import product
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.core import lifecycle
from orchestrator.core.fleet import Told, Unreached
from orchestrator.core.lifecycle import IllegalEventError, advance
from orchestrator.core.slot import (
    Abandon,
    Assigned,
    Capped,
    CardQuarantined,
    Close,
    Command,
    Drain,
    EndRun,
    Event,
    HeadState,
    Held,
    Hold,
    Moment,
    NodeJoined,
    NodeLeft,
    NodeRefused,
    Note,
    Phase,
    Place,
    Reinstated,
    SaveAsked,
    Slot,
    Tick,
    Unheld,
)
from tests.core.scene import Scene
from tests.factories import RULES, counters, counters_of, status_of
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


def test_a_status_of_another_process_of_the_slot_changes_nothing() -> None:
    scene = Scene()
    scene.work(steps_ok=5)
    scene.die()
    for incarnation in (None, 0, 7):
        before = scene.slot
        assert scene.feed(scene.status(incarnation=incarnation, steps_ok=99)) == []
        assert scene.slot == before


def test_what_was_told_late_by_a_process_that_is_to_end_is_counted() -> None:
    scene = Scene(restart_backoff_s=5.0)
    scene.work(steps_ok=5)
    scene.die()
    scene.feed(scene.end())
    assert (scene.slot.phase, scene.orders().runs) == (Phase.PAUSING, False)
    scene.feed(scene.status(steps_ok=8, resume={"failures": 1}))
    assert (scene.slot.counts.steps_ok, scene.slot.resume) == (13, {"failures": 1})
    assert scene.slot.state is HeadState.RESTARTING


def test_a_draining_slot_that_loses_its_node_stops() -> None:
    scene = Scene.working()
    scene.feed(Drain())
    scene.feed(NodeLeft())
    assert (scene.slot.phase, scene.slot.state) == (Phase.STOPPED, HeadState.LOST)
    assert scene.feed(NodeJoined(), later_s=100) == []


def test_a_run_that_ends_waits_until_its_slot_rests() -> None:
    scene = Scene.working()
    scene.feed(Drain())
    assert scene.orders().holds
    scene.feed(scene.status(steps_ok=3))
    assert scene.slot.phase is Phase.WORKING
    scene.feed(scene.status(steps_ok=4, is_held=True))
    assert (scene.slot.phase, scene.slot.state) == (Phase.STOPPED, WorkerState.RUNNING)
    assert scene.slot.counts.steps_ok == 4


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


#: What the membership, the circuit breaker and the judge of commands never tell a slot of a phase.
#: Everything else may happen at any time.
ILLEGAL: set[tuple[Phase, type[Event]]] = {
    (Phase.ABSENT, NodeLeft),
    (Phase.ABSENT, CardQuarantined),
    (Phase.WORKING, NodeJoined),
    (Phase.WORKING, NodeRefused),
    (Phase.PAUSING, NodeJoined),
    (Phase.PAUSING, NodeRefused),
    (Phase.STOPPED, CardQuarantined),
    *(
        (Phase.HELD, event)
        for event in (NodeJoined, NodeRefused, CardQuarantined, Reinstated, SaveAsked)
    ),
    *(
        (phase, event)
        for phase in (Phase.STOPPED, Phase.DONE)
        for event in (Held, Unheld, Reinstated, Capped, SaveAsked)
    ),
    *((Phase.QUARANTINED, event) for event in (Held, Unheld, SaveAsked)),
    *((phase, Reinstated) for phase in (Phase.ABSENT, Phase.WORKING, Phase.PAUSING)),
    *((phase, Assigned) for phase in (Phase.WORKING, Phase.PAUSING, Phase.STOPPED)),
    *((phase, SaveAsked) for phase in (Phase.ABSENT, Phase.PAUSING)),
    (Phase.PAUSING, Unheld),
}

MOMENT = Moment(now_s=2000.0, rules=RULES, ends_at_s=None)

EVENTS: tuple[Event, ...] = (
    NodeJoined(),
    NodeLeft(),
    NodeRefused(reason="pc1 offers 4 CPUs"),
    CardQuarantined(reason="pc1's card: all 7 workers keep dying"),
    Told(status=status_of("pc1/0", 7)),
    Unreached(slot="pc1/0", text="gone"),
    Held(hold=Hold.DRAIN),
    Unheld(),
    Reinstated(node_is_there=True),
    Assigned(node_is_there=True),
    Capped(cap_bytes=1),
    SaveAsked(),
    Tick(),
    Drain(),
    Close(),
)
CELLS = list(product(Phase, EVENTS))


def in_phase(phase: Phase) -> Slot:
    scene = Scene(max_deaths=1 if phase is Phase.QUARANTINED else 6)
    if phase is not Phase.ABSENT:
        scene.work()
    if phase in {Phase.PAUSING, Phase.QUARANTINED}:
        scene.feed(scene.end())
    if phase is Phase.HELD:
        scene.feed(Held(hold=Hold.PAUSE))
        scene.feed(scene.status(is_held=True))
    if phase is Phase.DONE:
        done(scene)
    if phase is Phase.STOPPED:
        scene.feed(Close())
    assert scene.slot.phase is phase
    return scene.slot


def test_every_phase_and_event_is_handled_ignored_or_illegal() -> None:
    assert {type(event) for event in EVENTS} == set(get_args(Event)), (
        "the list above has one of each"
    )
    assert set(lifecycle._CELLS) == {(phase, type(event)) for phase, event in CELLS}
    assert {key for key, cell in lifecycle._CELLS.items() if cell is None} == ILLEGAL


@pytest.mark.parametrize(
    ("phase", "event"),
    CELLS,
    ids=[f"{phase.value}-{type(event).__name__}" for phase, event in CELLS],
)
def test_an_event_is_refused_ignored_or_leads_to_a_slot(phase: Phase, event: Event) -> None:
    slot = in_phase(phase)
    key = (phase, type(event))
    if key in ILLEGAL:
        with pytest.raises(
            IllegalEventError,
            match=f"pc1/0: {type(event).__name__} cannot happen while {phase.value}",
        ):
            advance(slot, event, MOMENT)
        return
    after, commands = advance(slot, event, MOMENT)
    if isinstance(lifecycle._CELLS[key], str):
        assert (after, commands) == (slot, ())
