"""The lifecycle of a slot as a table: (phase, event type) -> handler. Events in, a new state and
commands out.

    ABSENT ──NodeJoined──> WORKING <──Tick at wake_at_s── PAUSING
       ^                    │   │                            ^
       └──────NodeLeft──────┘   ├──slice failed or overdue───┘   (too often: QUARANTINED)
                                ├──Drain, last report──> STOPPED
                                └──report that all is done──> DONE

    WORKING or PAUSING ──Held──> HELD ──Unheld──> WORKING     QUARANTINED ──Reinstated──> WORKING

Rules:

1. A slot is its own identity. Processes come and go in it (incarnations); its counters only grow,
   and its policy state is that of the last report, whichever process sent it.
2. Two slices are under way in a working slot, one running and one queued, so that a card never
   waits for the head.
3. A slice counts when its report arrives, once. A report of another incarnation, or of a slice not
   under way, is refused: the slot has given that slice up, and its work may have been done again
   (`slices.py`).
4. A slot that is neither working, held, quarantined, stopped nor done waits for its node or has a
   time to wake up.
5. Quarantine is final until the user reinstates the slot, starts a new run, or `run --resume`.
6. The first slice of a process is one step. More is sent only after its report, so that a process
   that does not come up has at most one step to lose.
7. A slot whose workload is finished is done: it gets no slice and no process any more, also not by
   `run --resume`.
8. A held slot gets no slice, whatever happens to its process or its node, until the user undoes
   that. What was sent before runs to its end. `Held`, `Unheld`, `Reinstated`, `Capped` and
   `SaveAsked` are the user's (`user_commands.py`).
9. A training that is to rest or to end gets slices until it has saved: that is possible between two
   optimiser steps.

Every pair of phase and event is in `_TABLE`: handled, ignored for a reason, or illegal. An illegal
one means that the supervisor or the membership is wrong about what it does, and `advance` raises
`IllegalEventError`.

Pure: no clock (every event comes with the time), no I/O, no randomness but a hash of a seed. What
the end of a slice or of a process leads to is in `slice_results.py`, what is sent in `slices.py`,
what the user orders in `user_commands.py`. Does not place slots (`placement.py`) and does not
perform commands (`run/supervisor.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from orchestrator.core import silence, slice_results, slices, user_commands
from orchestrator.core.fleet import SliceFailed, SliceReported
from orchestrator.core.slot import (
    Assigned,
    Capped,
    CardQuarantined,
    Close,
    DeathExplained,
    Drain,
    Event,
    Forget,
    HeadState,
    Held,
    Moment,
    NodeJoined,
    NodeLeft,
    NodeRefused,
    Note,
    Phase,
    ProcessSeen,
    Reinstated,
    Restart,
    SaveAsked,
    Slot,
    Tick,
    Transition,
    Unheld,
)

#: Deaths this shortly before a node is seen to have left are the node's, not the slot's. Ray tells
#: of a dead raylet seconds after its actors have failed (seen: 3 to 10 s; its health check allows 5
#: x 3 s and more).
_NODE_BLAME_S = 60.0


class IllegalEventError(RuntimeError):
    """An event that no rule allows in the phase of its slot: a defect of the caller."""

    def __init__(self, slot: Slot, event: Event) -> None:
        super().__init__(
            f"{slot.slot}: {type(event).__name__} cannot happen while {slot.phase.value}"
        )
        self.slot = slot.slot
        self.phase = slot.phase
        self.event = type(event).__name__


def advance(slot: Slot, event: Event, moment: Moment) -> Transition:
    """Return the slot after `event`, and what to do about it in this order.

    Slices are cut to fit the end of the run, once that is known.

    Raises:
        IllegalEventError: The event cannot happen in the slot's phase.
    """
    handler = _CELLS[slot.phase, type(event)]
    if handler is None:
        raise IllegalEventError(slot, event)
    if isinstance(handler, str):
        return slot, ()
    after, commands = handler(slot, event, moment)
    if after.state is not slot.state:
        states = (("from_state", slot.state.value), ("to_state", after.state.value))
        fields = (*states, ("cause", after.reason), ("incarnation", after.incarnation))
        commands = (*commands, Note(name="state", fields=fields))
    return after, commands


def _node_joined(slot: Slot, _: NodeJoined, moment: Moment) -> Transition:
    if slot.orders.hold is not None:
        return slice_results.at_rest(replace(slot, ready=False), moment)
    return slice_results.start(slot, moment)


def _node_left(slot: Slot, event: NodeLeft, moment: Moment) -> Transition:
    lost = replace(
        slices.all_lost(slot),
        phase=Phase.STOPPED if slot.draining else Phase.ABSENT,
        state=HeadState.LOST,
        reason=event.reason,
        wake_at_s=None,
        working_since_s=None,
        silent_since_s=None,
        deaths_at_s=tuple(at for at in slot.deaths_at_s if at < moment.now_s - _NODE_BLAME_S),
    )
    return user_commands.shown_without_node(lost, moment), (Forget(),)


def _node_refused(slot: Slot, event: NodeRefused, _: Moment) -> Transition:
    return replace(slot, reason=event.reason), ()


def _card_quarantined(slot: Slot, event: CardQuarantined, _: Moment) -> Transition:
    return slice_results.quarantine(slot, event.reason)


def _death_explained(slot: Slot, event: DeathExplained, _: Moment) -> Transition:
    return slice_results.explained(slot, event.cause), ()


def _time_passed_while_pausing(slot: Slot, _: Tick, moment: Moment) -> Transition:
    if slot.wake_at_s is None or moment.now_s < slot.wake_at_s:
        return slot, ()
    # Silent: the same process is still awaited.
    slot, command = slices.begin(slot, moment, new_process=slot.silent_since_s is None)
    return slot, (command,)


def _time_passed_while_working(slot: Slot, _: Tick, moment: Moment) -> Transition:
    overdue_s = slices.overdue_s(slot, moment.now_s)
    why = silence.why_hung(
        slot.silence,
        is_ready=slot.ready,
        overdue_s=overdue_s,
        patience_s=slices.silence_s(slot, moment.rules),
        longest_step_s=slot.longest_step_s,
        now_s=moment.now_s,
    )
    if why is not None:
        return slice_results.died(slot, why, moment, before=(Restart(),))
    if slot.ready and overdue_s > moment.rules.stale_after_s:
        return _stale(slot, overdue_s, moment), ()
    return slot, ()


def _process_seen(slot: Slot, event: ProcessSeen, moment: Moment) -> Transition:
    return replace(slot, silence=silence.observe(slot.silence, event.activity, moment.now_s)), ()


def _drain(slot: Slot, _: Drain, moment: Moment) -> Transition:
    slot = replace(slot, draining=True)
    if slot.in_flight and slot.ready:
        # The queued slice runs too: Ray cannot take it back. It would run nevertheless, and its
        # report be lost.
        return user_commands.saved_before_rest(slot), ()
    if (
        slot.phase is Phase.WORKING and slot.ready
    ):  # its last slice has ended with the time of the run
        slot = user_commands.saved_before_rest(slot)
        if slot.orders.save:
            return slices.last(slot, moment)
    return _stopped(slot)  # nothing runs, or it is not known whether anything does


def _close(slot: Slot, _: Close, moment: Moment) -> Transition:
    overdue_s = slices.overdue_s(slot, moment.now_s)
    if slot.ready and overdue_s > moment.rules.stale_after_s:
        slot = _stale(slot, overdue_s, moment)
        slot = replace(
            slot,
            ended_stale=not silence.is_active(
                slot.silence, moment.now_s, moment.rules.stale_after_s
            ),
        )
    return _stopped(slot)


def _not_awaited(slot: Slot) -> Transition:
    return slice_results.done(slices.all_lost(slot)) if slot.in_flight else (slot, ())


def _node_left_when_done(slot: Slot, _: NodeLeft, __: Moment) -> Transition:
    return _not_awaited(slot)


def _close_when_done(slot: Slot, _: Close, __: Moment) -> Transition:
    return _not_awaited(slot)


def _stale(slot: Slot, overdue_s: float, moment: Moment) -> Slot:
    if silence.is_active(slot.silence, moment.now_s, moment.rules.stale_after_s):
        computed_s = slot.silence.computed_s
        return replace(
            slot,
            reason=f"a long step: {overdue_s:.0f} s overdue, and computing ({computed_s:.0f} s of "
            "CPU)",
        )
    return replace(slot, reason=f"STALE: its slice is {overdue_s:.0f} s overdue")


def _stopped(slot: Slot) -> Transition:
    return replace(slices.all_lost(slot), phase=Phase.STOPPED, wake_at_s=None), (Forget(),)


# The event's type is that of the table's key, which a dict cannot say; a test compares them.
Handler: TypeAlias = Callable[[Slot, Any, Moment], Transition]

_NOT_A_TIME = "the slot waits for its node, not for a time"
_AWAY = "the slot's reason is that its node is away"
_ONE_SAID_IT = "slices of one process fail together, and the first failure gave up the others"
_NOT_AWAITED = "the answer came too late: nothing is awaited any more"
_RULE_5 = "rule 5"
_FINAL = "the slot has ended; the supervisor still tells every slot"
_RULE_7 = "rule 7"
_RULE_8 = "rule 8"

#: What an event does to a slot by its phase: its handler, or why it changes nothing. What is not
#: here is illegal.
_TABLE: Mapping[type[Event], Mapping[Phase, Handler | str]] = {
    NodeJoined: {
        Phase.ABSENT: _node_joined,
        Phase.QUARANTINED: _RULE_5,
        Phase.STOPPED: _FINAL,
        Phase.DONE: _RULE_7,
    },
    NodeLeft: {
        **dict.fromkeys((Phase.WORKING, Phase.PAUSING, Phase.HELD), _node_left),
        Phase.QUARANTINED: _RULE_5,
        Phase.STOPPED: _FINAL,
        Phase.DONE: _node_left_when_done,
    },
    NodeRefused: {
        Phase.ABSENT: _node_refused,
        Phase.QUARANTINED: _RULE_5,
        Phase.STOPPED: _FINAL,
        Phase.DONE: _RULE_7,
    },
    CardQuarantined: {
        **dict.fromkeys((Phase.WORKING, Phase.PAUSING), _card_quarantined),
        Phase.QUARANTINED: _RULE_5,
        Phase.DONE: _RULE_7,
    },
    SliceReported: {
        **dict.fromkeys(Phase, slice_results.refused),
        Phase.WORKING: slice_results.reported,
        Phase.DONE: slice_results.reported_when_done,
    },
    SliceFailed: {
        **dict.fromkeys(Phase, _ONE_SAID_IT),
        Phase.WORKING: slice_results.failed,
        Phase.DONE: slice_results.failed_when_done,
    },
    DeathExplained: {
        Phase.ABSENT: _AWAY,
        **dict.fromkeys((Phase.WORKING, Phase.PAUSING, Phase.QUARANTINED), _death_explained),
        Phase.HELD: _RULE_8,
        Phase.STOPPED: _FINAL,
        Phase.DONE: _RULE_7,
    },
    ProcessSeen: {**dict.fromkeys(Phase, _NOT_AWAITED), Phase.WORKING: _process_seen},
    Held: {
        Phase.ABSENT: user_commands.held_without_node,
        Phase.WORKING: user_commands.held_at_work,
        **dict.fromkeys((Phase.PAUSING, Phase.HELD), user_commands.held_at_once),
    },
    Unheld: {
        Phase.ABSENT: user_commands.unheld_without_node,
        Phase.WORKING: user_commands.unheld_at_work,
        Phase.HELD: user_commands.unheld,
    },
    Reinstated: {Phase.QUARANTINED: user_commands.reinstated},
    Assigned: dict.fromkeys(
        (Phase.ABSENT, Phase.HELD, Phase.QUARANTINED, Phase.DONE), user_commands.assigned
    ),
    Capped: dict.fromkeys(set(Phase) - {Phase.STOPPED, Phase.DONE}, user_commands.capped),
    SaveAsked: {Phase.WORKING: user_commands.save_asked},
    Tick: {
        Phase.ABSENT: _NOT_A_TIME,
        Phase.WORKING: _time_passed_while_working,
        Phase.PAUSING: _time_passed_while_pausing,
        Phase.HELD: _RULE_8,
        Phase.QUARANTINED: _RULE_5,
        Phase.STOPPED: _FINAL,
        Phase.DONE: _RULE_7,
    },
    Drain: {
        **dict.fromkeys(Phase, _drain),
        Phase.QUARANTINED: _FINAL,
        Phase.STOPPED: _FINAL,
        Phase.DONE: _RULE_7,
    },
    Close: {
        **dict.fromkeys(Phase, _close),
        Phase.QUARANTINED: _FINAL,
        Phase.STOPPED: _FINAL,
        Phase.DONE: _close_when_done,
    },
}
_CELLS = {(phase, event): row.get(phase) for event, row in _TABLE.items() for phase in Phase}
