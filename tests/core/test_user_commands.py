"""The commands that a slot accepts in each state, and effects that the machine does not check."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.control.slots import Command, CommandRefusedError, Do, events_of
from orchestrator.core.placement import Target, plan_slots
from orchestrator.core.slot import (
    Abandon,
    Drain,
    Event,
    Held,
    Hold,
    NodeJoined,
    Phase,
    Place,
    Reinstated,
    SaveAsked,
    Tick,
    Unheld,
)
from tests.core.scene import Scene
from tests.factories import REFERENCE
from tests.scene import MIB
from workers.messages import Progress, Verdict, WorkerState
from workers.settings import CommandSpec

PLANS = {plan.spec.slot: plan for plan in plan_slots(REFERENCE, Target(device="cuda"))}
BUDGET_MIB = PLANS["pc1/0"].spec.budget_bytes // MIB


def slot_in(state: str) -> Scene:
    scene = Scene(max_deaths=1 if state == "quarantined" else 6)
    if state == "absent":
        return scene
    scene.work(progress=Progress(train_step=1) if state == "training" else None)
    if state == "held":
        hold(scene, Hold.PAUSE)
    if state in {"quarantined", "restarting"}:
        scene.feed(scene.end())
    if state == "done":
        scene.feed(scene.status(verdict=Verdict.DONE, state=WorkerState.DONE))
    return scene


def hold(scene: Scene, how: Hold) -> list[object]:
    """Hold a slot, and let its process report that it rests; return the last commands."""
    scene.feed(Held(hold=how))
    return list(scene.deeds(scene.status(steps_ok=3, is_held=True), later_s=1))


def event_for(state: str, do: Do, *, amount_mib: int | None = None, ending: bool = False) -> Event:
    amount_bytes = None if amount_mib is None else amount_mib * MIB
    command = Command(id="a", do=do, slots=("pc1/0", "pc1/0"), by="test", amount_bytes=amount_bytes)
    slots = {"pc1/0": slot_in(state).slot}
    ((name, event),) = events_of(command, slots, PLANS, is_ending=ending)
    assert name == "pc1/0"
    return event


#: The refusal of each command in each state, without the slot's name; `None`: the command is
#: accepted.
REFUSALS: dict[Do, dict[str, str | None]] = {
    Do.PAUSE: {
        "quarantined": "is QUARANTINED: `reinstate pc1/0` starts it again",
        "done": "has finished its work",
    },
    Do.DRAIN: {"quarantined": "is QUARANTINED: `reinstate", "done": "has finished its work"},
    Do.UNPAUSE: {
        "absent": "is STARTING, and not held",
        "running": "is RUNNING, and not held",
        "training": "is RUNNING, and not held",
        "restarting": "is RESTARTING, and not held",
        "quarantined": "is QUARANTINED: `reinstate",
        "done": "has finished its work",
    },
    Do.REINSTATE: {
        "absent": "is STARTING, not QUARANTINED",
        "running": "is RUNNING, not QUARANTINED: it needs no reinstating",
        "training": "is RUNNING, not QUARANTINED",
        "restarting": "is RESTARTING, not QUARANTINED",
        "held": "is HELD, not QUARANTINED: `unpause pc1/0` sends it work",
        "done": "has finished its work",
    },
    Do.CAP: {"done": "has finished its work"},
    Do.SAVE: {
        "absent": "has no process at work .STARTING.: wait until it runs",
        "running": "keeps no state that could be saved",
        "restarting": "has no process at work .RESTARTING.",
        "held": "is held and does no work that it could save: `unpause pc1/0` first",
        "quarantined": "is QUARANTINED: `reinstate",
        "done": "has finished its work",
    },
}
STATES = ("absent", "running", "training", "restarting", "held", "quarantined", "done")


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("do", Do)
def test_a_command_is_taken_or_refused_with_what_to_type_instead(do: Do, state: str) -> None:
    amount_mib = 512 if do is Do.CAP else None
    words = REFUSALS[do].get(state)
    if words is not None:
        with pytest.raises(CommandRefusedError, match=f"^pc1/0 {words}.*; nothing was changed$"):
            event_for(state, do, amount_mib=amount_mib)
        return
    scene = slot_in(state)
    scene.feed(event_for(state, do, amount_mib=amount_mib))  # which the table allows
    with pytest.raises(CommandRefusedError, match="the run is ending"):
        event_for(state, do, amount_mib=amount_mib, ending=True)


def test_a_cap_is_within_the_budget_which_lifts_it() -> None:
    assert event_for("running", Do.CAP, amount_mib=1).cap_bytes == MIB  # type: ignore[union-attr]
    assert event_for("running", Do.CAP, amount_mib=BUDGET_MIB).cap_bytes is None  # type: ignore[union-attr]
    with pytest.raises(
        CommandRefusedError, match=f"has a budget of {BUDGET_MIB} MiB: type an amount from 1MiB"
    ):
        event_for("running", Do.CAP, amount_mib=BUDGET_MIB + 1)
    classic = {
        "pc1/0": replace(PLANS["pc1/0"], spec=replace(PLANS["pc1/0"].spec, policy="classic"))
    }
    command = Command(id="a", do=Do.CAP, slots=("pc1/0",), by="test", amount_bytes=MIB)
    with pytest.raises(CommandRefusedError, match=r"run with --set memory\.policy=adaptive"):
        events_of(command, {"pc1/0": slot_in("running").slot}, classic)


def test_one_wrong_slot_keeps_the_others_as_they_are() -> None:
    slots = {
        "pc1/0": slot_in("running").slot,
        "pc1/1": replace(slot_in("quarantined").slot, slot="pc1/1"),
    }
    for name, words in (
        ("pc1/1", "pc1/1 is QUARANTINED"),
        ("pc9/1", "no slot 'pc9/1'; .*top --once"),
    ):
        command = Command(id="a", do=Do.PAUSE, slots=("pc1/0", name), by="test")
        with pytest.raises(CommandRefusedError, match=words):
            events_of(command, slots, PLANS)


@pytest.mark.parametrize(("how", "commands"), [(Hold.PAUSE, []), (Hold.DRAIN, [Abandon()])])
def test_a_process_that_hangs_before_its_hold_is_not_replaced(
    how: Hold, commands: list[object]
) -> None:
    scene = slot_in("running")
    scene.feed(Held(hold=how))
    assert scene.deeds(Tick(), later_s=1000) == commands
    assert (scene.slot.phase, scene.slot.restarts) == (Phase.HELD, 1)
    assert not scene.slot.runs
    scene.feed(Unheld())
    assert (scene.orders().incarnation, scene.orders().runs) == (1, True)


def test_a_process_that_ends_while_it_is_held_is_told_and_not_replaced() -> None:
    scene = slot_in("running")
    scene.feed(Held(hold=Hold.PAUSE))
    scene.feed(scene.status(is_held=True))
    assert (scene.slot.phase, scene.slot.runs) == (Phase.HELD, True)
    assert "keeps its memory" in scene.slot.reason
    scene.feed(scene.end())
    assert (scene.slot.phase, scene.slot.runs) == (Phase.HELD, False)
    assert "its process has ended" in scene.slot.reason


def test_a_quarantine_ends_a_hold_and_is_lifted_clean() -> None:
    scene = Scene.working(max_deaths=2)
    scene.die()
    scene.feed(Held(hold=Hold.PAUSE))
    scene.feed(scene.end())
    assert (scene.slot.phase, scene.slot.orders.hold) == (Phase.QUARANTINED, None)
    assert scene.deeds(Reinstated()) == []
    assert scene.deeds(NodeJoined()) == [Place()]
    assert scene.orders().incarnation == 2
    scene.feed(scene.status())
    scene.feed(scene.end())
    assert scene.slot.phase is Phase.PAUSING, "the deaths of before count no more"


@pytest.mark.parametrize(
    ("event", "phase"), [(Held(hold=Hold.PAUSE), Phase.HELD), (Drain(), Phase.STOPPED)]
)
def test_a_training_works_until_it_has_saved(event: Event, phase: Phase) -> None:
    for last in ({"save_due": False}, {"save_due": True, "state": WorkerState.PARKED}):
        scene = slot_in("training")
        trains = {"progress": Progress(train_step=1)}
        scene.feed(event)
        assert (scene.orders().saves, scene.orders().holds) == (1, True)
        for told in ({"is_held": True}, {"saves": 1}, {"saves": 1, "is_held": True}):
            scene.feed(scene.status(**trains, **told, save_due=True))
            assert scene.slot.phase is Phase.WORKING
        scene.feed(scene.status(**trains, saves=1, is_held=True, **last))
        assert scene.slot.phase is phase


def test_a_save_that_was_not_taken_in_is_not_asked_for_twice() -> None:
    scene = slot_in("training")
    for asked, taken in ((1, 0), (1, 1), (2, 1)):
        scene.feed(SaveAsked())
        assert scene.orders().saves == asked
        scene.feed(scene.status(progress=Progress(train_step=1), saves=taken))
    scene.die()
    assert scene.orders().saves == 0, "another process has nothing to save yet"


def test_a_program_is_not_told_to_save_alone() -> None:
    plan = PLANS["pc1/0"]
    plan = replace(plan, spec=replace(plan.spec, command=CommandSpec(argv=("true",))))
    command = Command(id="a", do=Do.SAVE, slots=("pc1/0",), by="test")
    slots = {"pc1/0": slot_in("training").slot}
    with pytest.raises(CommandRefusedError, match="saves when it ends: `drain pc1/0`"):
        events_of(command, slots, {"pc1/0": plan})
