"""The table of the lifecycle: each phase and event is handled, ignored for a reason, or illegal.

One of the three.
"""

from __future__ import annotations

from itertools import product
from typing import get_args, get_type_hints

import pytest

from orchestrator.core import lifecycle
from orchestrator.core.fleet import DeathCause, SliceFailed, SliceFailure, SliceReported
from orchestrator.core.lifecycle import IllegalEventError, advance
from orchestrator.core.slot import (
    Assigned,
    Capped,
    CardQuarantined,
    Close,
    DeathExplained,
    Drain,
    Event,
    Held,
    Hold,
    Moment,
    NodeJoined,
    NodeLeft,
    NodeRefused,
    Phase,
    ProcessSeen,
    Reinstated,
    SaveAsked,
    Slot,
    Tick,
    Unheld,
)
from tests.core.lifecycle_books import ILLEGAL
from tests.core.scene import Scene
from tests.factories import RULES, report_of
from workers.messages import Verdict, WorkerState

MOMENT = Moment(now_s=2000.0, rules=RULES, ends_at_s=None)

EVENTS: tuple[Event, ...] = (
    NodeJoined(),
    NodeLeft(),
    NodeRefused(reason="pc1 offers 4 CPUs"),
    CardQuarantined(reason="pc1's card: all 7 workers keep dying"),
    SliceReported(report=report_of("pc1/0", 7, 7)),
    SliceFailed(slot="pc1/0", incarnation=7, sequence=7, failure=SliceFailure.DIED, text="gone"),
    DeathExplained(cause=DeathCause(host_memory=True, text="RAM")),
    ProcessSeen(activity=None),
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
        scene.feed(scene.failure())
    if phase is Phase.HELD:
        scene.feed(Held(hold=Hold.PAUSE))
        scene.feed(scene.report())
        scene.feed(scene.report())
    if phase is Phase.DONE:
        scene.feed(scene.report(verdict=Verdict.DONE, state=WorkerState.DONE))
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


def test_each_handler_takes_the_event_of_its_key() -> None:
    for (phase, event), handler in lifecycle._CELLS.items():
        if callable(handler):
            assert list(get_type_hints(handler).values())[1] is event, (phase, event)


@pytest.mark.parametrize("phase", [Phase.QUARANTINED, Phase.STOPPED])
@pytest.mark.parametrize("event", [Drain(), Close()])
def test_the_end_of_a_run_does_not_change_how_a_slot_has_ended(phase: Phase, event: Event) -> None:
    slot = in_phase(phase)
    assert advance(slot, event, MOMENT) == (slot, ())


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
