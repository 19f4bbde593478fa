"""The lifecycle of a slot as a table: (phase, event type) -> handler. Events in, a new state and
commands out.

    ABSENT ──NodeJoined──> WORKING <──Tick at wake_at_s── PAUSING
       ^                    │   │                            ^
       └──────NodeLeft──────┘   ├──process died or hangs─────┘   (too often: QUARANTINED)
                                ├──Drain, told that it rests──> STOPPED
                                └──told that all is done──> DONE

    WORKING or PAUSING ──Held──> HELD ──Unheld──> WORKING     QUARANTINED ──Reinstated──> ABSENT

Rules:

1. A slot is its own identity. Processes come and go in it (incarnations); its counters only grow,
   and its policy state is that of the last status, whichever process told it.
2. The slot says what is wanted of its process (`orders_of`), and statuses say how the process is.
   Counters of a status are those of the process since it began, so that a lost one costs nothing.
3. A status of another incarnation changes nothing: that process is about to be ended. One of
   another process of the actor means that the process before it has ended, and its program with it.
4. A slot that is neither working, held, quarantined, stopped nor done waits for its node or has a
   time to wake up.
5. Quarantine is final until the user reinstates the slot, starts a new run, or `run --resume`.
6. A slot whose workload is finished is done, once the head has all of its state: it gets no process
   any more, also not by `run --resume`.
7. A held slot does no work, whatever happens to its process or its node, until the user undoes
   that. `Held`, `Unheld`, `Reinstated`, `Capped` and `SaveAsked` are the user's.
8. A training that is to rest or to end works on until it has saved: that is possible between two
   optimiser steps.

Every pair of phase and event is in `_TABLE`: handled, ignored for a reason, or illegal. An illegal
one means that the supervisor or the membership is wrong about what it does, and `advance` raises
`IllegalEventError`.

Pure: no clock (every event comes with the time), no I/O, no randomness but a hash of a seed. What a
status or the end of a process leads to is in `processes.py`, when a process hangs in `silence.py`.
Does not judge commands (`control/slots.py`), place slots (`placement.py`) or perform what follows
(`run/supervisor.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from orchestrator.core import processes, silence
from orchestrator.core.fleet import Told, Unreached
from orchestrator.core.slot import (
    NOTHING_ASKED,
    Abandon,
    Assigned,
    Capped,
    CardQuarantined,
    Close,
    Drain,
    Event,
    HeadState,
    Held,
    Moment,
    NodeJoined,
    NodeLeft,
    NodeRefused,
    Note,
    Phase,
    Reinstated,
    SaveAsked,
    Slot,
    Tick,
    Transition,
    Unheld,
)
from workers.messages import Begin, Cause, Orders, Verdict

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
        self.phase = slot.phase
        self.event = type(event).__name__


def advance(slot: Slot, event: Event, moment: Moment) -> Transition:
    """Return the slot after `event`, and what to do about it in this order.

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


def orders_of(slot: Slot, lease_bytes: int | None, begin: Begin | None) -> Orders:
    """Return what is wanted of the process of a slot that has an actor, as the slot stands.

    All of it but for files and the team, so that orders that come twice, or not at all, change
    nothing. `begin` is what the process is told when it starts.
    """
    return Orders(
        actor=slot.actor,
        incarnation=slot.incarnation,
        begin=begin if slot.needs_begin else None,
        runs=slot.runs,
        holds=slot.draining or slot.orders.hold is not None,
        saves=slot.saves,
        lease_bytes=lease_bytes,
        heard=slot.heard,
    )


def _node_joined(slot: Slot, _: NodeJoined, moment: Moment) -> Transition:
    if slot.orders.hold is not None:
        return processes.at_rest(slot, moment)
    return processes.start(slot, moment)


def _node_left(slot: Slot, event: NodeLeft, moment: Moment) -> Transition:
    lost = replace(
        slot,
        phase=Phase.STOPPED if slot.draining else Phase.ABSENT,
        state=HeadState.LOST,
        reason=event.reason,
        runs=False,
        actor=None,
        heard=0,
        wake_at_s=None,
        working_since_s=None,
        unreached_since_s=None,
        deaths_at_s=tuple(at for at in slot.deaths_at_s if at < moment.now_s - _NODE_BLAME_S),
    )
    return _shown_without_node(lost, moment), ()


def _node_refused(slot: Slot, event: NodeRefused, _: Moment) -> Transition:
    return replace(slot, reason=event.reason), ()


def _card_quarantined(slot: Slot, event: CardQuarantined, _: Moment) -> Transition:
    is_host_memory = slot.failure is Cause.HOST_MEMORY  # the card is well
    failure = Cause.HOST_MEMORY if is_host_memory else Cause.DRIVER
    return processes.quarantine(slot, failure, event.reason)


def _time_passed_while_pausing(slot: Slot, _: Tick, moment: Moment) -> Transition:
    if slot.wake_at_s is None or moment.now_s < slot.wake_at_s:
        return slot, ()
    return processes.begin(slot, moment), ()


def _time_passed_while_working(slot: Slot, _: Tick, moment: Moment) -> Transition:
    if slot.unreached_since_s is not None:
        return processes.still_unreached(slot, slot.unreached_since_s, moment)
    if slot.has_told and slot.status is not None and slot.status.verdict is Verdict.DONE:
        return slot, ()  # it waits for the head to have all of its state
    why = silence.why_hung(slot, moment)
    if why is not None:
        failure = Cause.DIED if slot.ready else Cause.NOT_STARTED
        return processes.died(slot, failure, why, moment)
    silent = silence.told_nothing(slot, moment)
    return (slot if silent is None else replace(slot, reason=silent[0])), ()


def _held_without_node(slot: Slot, event: Held, moment: Moment) -> Transition:
    """Hold a slot whose node is away; nothing is begun when that returns."""
    return _shown_without_node(_ordered(slot, event), moment), ()


def _held_at_work(slot: Slot, event: Held, _: Moment) -> Transition:
    """Have the process come to rest; the slot is held once it tells that it does."""
    return _saved_before_rest(_ordered(slot, event)), ()


def _held_at_once(slot: Slot, event: Held, moment: Moment) -> Transition:
    """Hold a slot that waits for a time, or is held already, perhaps in the other way."""
    return processes.at_rest(_ordered(slot, event), moment)


def _shown_without_node(slot: Slot, moment: Moment) -> Slot:
    """Show a slot whose node is away as held, if it is."""
    if slot.orders.hold is None or slot.phase is not Phase.ABSENT:
        return slot
    since_s = moment.now_s if slot.held_since_s is None else slot.held_since_s
    reason = slot.orders.why or f"it gets no work until `unpause`; {slot.reason}"
    return replace(slot, state=HeadState.HELD, reason=reason, held_since_s=since_s)


def _unheld_without_node(slot: Slot, _: Unheld, moment: Moment) -> Transition:
    """Let a slot wait for its node again."""
    slot = _let_go(slot, moment)
    if slot.placed:
        return replace(slot, state=HeadState.LOST, reason=NodeLeft().reason), ()
    return replace(slot, state=HeadState.STARTING, reason=Slot(slot=slot.slot).reason), ()


def _unheld_at_work(slot: Slot, _: Unheld, moment: Moment) -> Transition:
    """Let the process work on, if the slot was to be held."""
    return _let_go(slot, moment), ()


def _unheld(slot: Slot, _: Unheld, moment: Moment) -> Transition:
    """Let the process work that the slot has kept, or start one."""
    slot = _let_go(slot, moment)
    if not slot.ready or slot.status is None:
        return processes.start(slot, moment)
    again = replace(slot, phase=Phase.WORKING, state=slot.status.state, reason=slot.status.reason)
    return replace(again, heard_at_s=moment.now_s, news_at_s=moment.now_s, quiet=None), ()


def _assigned(slot: Slot, event: Assigned, moment: Moment) -> Transition:
    """Begin another attempt at the work of a slot without a process. It is held no more."""
    # Of a node that was lost, the actor would come back with it.
    commands: tuple[Abandon, ...] = (Abandon(),) if slot.placed else ()
    slot = processes.without_actor(slot) if slot.placed else slot
    slot = replace(slot, orders=NOTHING_ASKED, held_since_s=None, status=None)
    return _anew(slot, event, moment)[0], commands


def _anew(slot: Slot, _: Reinstated | Assigned, __: Moment) -> Transition:
    """Forget what the slot was given up for, and have it wait for its node like one that was never
    placed: its actor has ended.
    """
    slot = replace(
        slot,
        phase=Phase.ABSENT,
        state=HeadState.STARTING,
        reason=Slot(slot=slot.slot).reason,
        wake_at_s=None,
        failure=None,
        deaths_at_s=(),
    )
    return slot, ()


def _capped(slot: Slot, event: Capped, _: Moment) -> Transition:
    """Bound what the worker may hold."""
    return replace(slot, orders=replace(slot.orders, cap_bytes=event.cap_bytes)), ()


def _save_asked(slot: Slot, _: SaveAsked, __: Moment) -> Transition:
    """Have the process save what the slot trains."""
    return _to_save(slot), ()


def _saved_before_rest(slot: Slot) -> Slot:
    """Have a slot that trains anything save it before it rests or ends.

    One that runs a program always tells a progress, if only an empty one: to save means to end.
    """
    trains = slot.ready and slot.status is not None and slot.status.progress is not None
    return _to_save(slot) if trains else slot


def _to_save(slot: Slot) -> Slot:
    """Ask once more, unless the process has not yet taken in that it was asked."""
    taken = 0 if slot.status is None or not slot.has_told else slot.status.saves
    return replace(slot, saves=taken + 1)


def _ordered(slot: Slot, event: Held) -> Slot:
    return replace(slot, orders=replace(slot.orders, hold=event.hold, why=event.why))


def _let_go(slot: Slot, moment: Moment) -> Slot:
    """Undo the hold. Its time counts as worked, as rests that the duty asks for do."""
    since_s, worked_s = slot.held_since_s, slot.worked_s
    if since_s is not None and slot.first_work_s is not None and moment.ends_at_s is not None:
        worked_s += moment.now_s - since_s
    return replace(
        slot, orders=replace(slot.orders, hold=None, why=None), held_since_s=None, worked_s=worked_s
    )


def _drain(slot: Slot, _: Drain, __: Moment) -> Transition:
    slot = replace(slot, draining=True)
    if slot.phase is Phase.WORKING and slot.ready:
        return _saved_before_rest(slot), ()
    return _stopped(slot)  # nothing works, or it is not known whether anything does


def _close(slot: Slot, _: Close, moment: Moment) -> Transition:
    if slot.phase is Phase.WORKING and (silent := silence.told_nothing(slot, moment)) is not None:
        slot = replace(slot, reason=silent[0], ended_stale=silent[1])
    return _stopped(slot)


def _stopped(slot: Slot) -> Transition:
    return replace(slot, phase=Phase.STOPPED, wake_at_s=None), ()


# The event's type is that of the table's key, which a dict cannot say.
Handler: TypeAlias = Callable[[Slot, Any, Moment], Transition]

_NOT_A_TIME = "the slot waits for its node, not for a time"
_NOT_AWAITED = "no process is awaited"
_RULE_5 = "rule 5"
_FINAL = "the slot has ended; the supervisor still tells every slot"
_RULE_6 = "rule 6"
_RULE_7 = "rule 7"
#: What is over stays so, whatever nodes, time and the run do.
_OVER = {Phase.QUARANTINED: _RULE_5, Phase.STOPPED: _FINAL, Phase.DONE: _RULE_6}

#: What an event does to a slot by its phase: its handler, or why it changes nothing. What is not
#: here is illegal.
_TABLE: Mapping[type[Event], Mapping[Phase, Handler | str]] = {
    NodeJoined: {Phase.ABSENT: _node_joined, **_OVER},
    NodeLeft: {
        **dict.fromkeys((Phase.WORKING, Phase.PAUSING, Phase.HELD), _node_left),
        **_OVER,
    },
    NodeRefused: {Phase.ABSENT: _node_refused, **_OVER},
    CardQuarantined: {
        **dict.fromkeys((Phase.WORKING, Phase.PAUSING), _card_quarantined),
        Phase.QUARANTINED: _RULE_5,
        Phase.DONE: _RULE_6,
    },
    Told: {
        Phase.ABSENT: processes.told_away,
        Phase.WORKING: processes.told,
        **dict.fromkeys((Phase.PAUSING, Phase.HELD, Phase.STOPPED), processes.told_aside),
        Phase.QUARANTINED: _RULE_5,
        Phase.DONE: _RULE_6,
    },
    Unreached: {**dict.fromkeys(Phase, _NOT_AWAITED), Phase.WORKING: processes.unreached},
    Held: {
        Phase.ABSENT: _held_without_node,
        Phase.WORKING: _held_at_work,
        **dict.fromkeys((Phase.PAUSING, Phase.HELD), _held_at_once),
    },
    Unheld: {
        Phase.ABSENT: _unheld_without_node,
        Phase.WORKING: _unheld_at_work,
        Phase.HELD: _unheld,
    },
    Reinstated: {Phase.QUARANTINED: _anew},
    Assigned: dict.fromkeys((Phase.ABSENT, Phase.HELD, Phase.QUARANTINED, Phase.DONE), _assigned),
    Capped: dict.fromkeys(set(Phase) - {Phase.STOPPED, Phase.DONE}, _capped),
    SaveAsked: {Phase.WORKING: _save_asked},
    Tick: {
        Phase.ABSENT: _NOT_A_TIME,
        Phase.WORKING: _time_passed_while_working,
        Phase.PAUSING: _time_passed_while_pausing,
        Phase.HELD: _RULE_7,
        **_OVER,
    },
    Drain: {**dict.fromkeys(Phase, _drain), **_OVER},
    Close: {**dict.fromkeys(Phase, _close), **_OVER},
}
_CELLS = {(phase, event): row.get(phase) for event, row in _TABLE.items() for phase in Phase}
