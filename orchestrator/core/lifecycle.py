"""The lifecycle of a slot as a table: (phase, event type) -> handler. A handler returns the new
slot and commands.

    ABSENT ──NodeJoined──> WORKING <──Tick at wake_at_s── PAUSING
       ^                    │   │                            ^
       └──────NodeLeft──────┘   ├──process died or hangs─────┘   (too often: QUARANTINED)
                                ├──Drain, process at rest──> STOPPED
                                └──work done──> DONE

    WORKING or PAUSING ──Held──> HELD ──Unheld──> WORKING     QUARANTINED ──Reinstated──> ABSENT

Rules:

1. A slot outlives its processes (incarnations). Its counters only grow, and its policy state is
   that of the last status of any of its processes.
2. The slot defines the orders for its process (`orders_of`); statuses report how the process is.
   A status counts from the start of its process, so a lost status costs nothing.
3. A status of another incarnation changes nothing: that process is about to be ended. A status from
   another process of the actor means that the actor's process before, and its program, have ended.
4. A slot that is neither working, held, quarantined, stopped nor done waits for its node or for
   `wake_at_s`.
5. Quarantine lasts until the user reinstates the slot, starts a new run, or types `run --resume`.
6. A slot whose workload is finished is DONE once the head has all of its state. It gets no further
   process, not even with `run --resume`.
7. A held slot does no work, whatever happens to its process or its node, until the user releases
   it. `Held`, `Unheld`, `Reinstated`, `Capped` and `SaveAsked` come from the user.
8. A training that must rest or end continues until it has saved, which is possible only between two
   optimiser steps.

Every pair of phase and event is in `_TABLE`: handled, ignored for a reason, or illegal. An illegal
pair is a defect of the supervisor or of `run/node_watch.py`: `advance` raises `IllegalEventError`.

Pure: no clock (`Moment` has the time), no I/O, no randomness except a seeded hash. `processes.py`
handles statuses and ends of processes, `silence.py` detects processes that hang. Does not judge
commands (`control/slots.py`), place slots (`placement.py`) or perform the commands that it returns
(`run/supervisor.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeAlias

from orchestrator.core import processes, silence
from orchestrator.core.fleet import ActorUnreachable, StatusReceived
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

#: Deaths within this time before a node is reported to have left do not count against the slot. Ray
#: reports a dead raylet seconds after its actors have failed (measured: 3 to 10 s; its health check
#: allows 5 x 3 s and more).
_NODE_BLAME_S = 60.0


class IllegalEventError(RuntimeError):
    """An event that is illegal in the phase of its slot: a defect of the caller."""

    def __init__(self, slot: Slot, event: Event) -> None:
        super().__init__(
            f"{slot.slot}: {type(event).__name__} cannot happen while {slot.phase.value}"
        )
        self.phase = slot.phase
        self.event = type(event).__name__


def advance(slot: Slot, event: Event, moment: Moment) -> Transition:
    """Return the slot after `event`, and the commands to perform, in order.

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
    """Return the orders for the process of a slot that has an actor, without files and team.

    Orders are complete, so orders that arrive twice, or are lost, do no harm. `begin` is sent to
    the process when it starts.
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
    return _with_hold_shown(lost, moment), ()


def _node_refused(slot: Slot, event: NodeRefused, _: Moment) -> Transition:
    return replace(slot, reason=event.reason), ()


def _card_quarantined(slot: Slot, event: CardQuarantined, _: Moment) -> Transition:
    is_host_memory = slot.failure is Cause.HOST_MEMORY  # not a fault of the card
    failure = Cause.HOST_MEMORY if is_host_memory else Cause.DRIVER
    return processes.quarantine(slot, failure, event.reason)


def _time_passed_while_pausing(slot: Slot, _: Tick, moment: Moment) -> Transition:
    if slot.wake_at_s is None or moment.now_s < slot.wake_at_s:
        return slot, ()
    return processes.begin(slot, moment), ()


def _time_passed_while_working(slot: Slot, _: Tick, moment: Moment) -> Transition:
    if slot.unreached_since_s is not None:
        return processes.while_unreachable(slot, slot.unreached_since_s, moment)
    if slot.has_reported and slot.status is not None and slot.status.verdict is Verdict.DONE:
        return slot, ()  # done, but the head does not have all of its state yet
    why = silence.why_hung(slot, moment)
    if why is not None:
        failure = Cause.DIED if slot.ready else Cause.NOT_STARTED
        return processes.died(slot, failure, why, moment)
    silent = silence.why_silent(slot, moment)
    return (slot if silent is None else replace(slot, reason=silent[0])), ()


def _held_without_node(slot: Slot, event: Held, moment: Moment) -> Transition:
    """Hold a slot whose node is away; it starts no process when the node returns."""
    return _with_hold_shown(_with_hold(slot, event), moment), ()


def _held_at_work(slot: Slot, event: Held, _: Moment) -> Transition:
    """Order the process to rest; the slot is held once the process reports that it rests."""
    return _saved_before_rest(_with_hold(slot, event)), ()


def _held_at_once(slot: Slot, event: Held, moment: Moment) -> Transition:
    """Hold a slot that pauses before a restart, or is already held by the other `Hold`."""
    return processes.at_rest(_with_hold(slot, event), moment)


def _with_hold_shown(slot: Slot, moment: Moment) -> Slot:
    """Set the state to HELD if the slot's node is away and the user holds the slot."""
    if slot.orders.hold is None or slot.phase is not Phase.ABSENT:
        return slot
    since_s = moment.now_s if slot.held_since_s is None else slot.held_since_s
    reason = slot.orders.why or f"it gets no work until `unpause`; {slot.reason}"
    return replace(slot, state=HeadState.HELD, reason=reason, held_since_s=since_s)


def _unheld_without_node(slot: Slot, _: Unheld, moment: Moment) -> Transition:
    """Release a slot whose node is away; it waits for the node again."""
    slot = _without_hold(slot, moment)
    if slot.placed:
        return replace(slot, state=HeadState.LOST, reason=NodeLeft().reason), ()
    return replace(slot, state=HeadState.STARTING, reason=Slot(slot=slot.slot).reason), ()


def _unheld_at_work(slot: Slot, _: Unheld, moment: Moment) -> Transition:
    """Release a slot whose process has not come to rest yet; the process continues."""
    return _without_hold(slot, moment), ()


def _unheld(slot: Slot, _: Unheld, moment: Moment) -> Transition:
    """Release a held slot: its process continues if it was kept, else a new one starts."""
    slot = _without_hold(slot, moment)
    if not slot.ready or slot.status is None:
        return processes.start(slot, moment)
    again = replace(slot, phase=Phase.WORKING, state=slot.status.state, reason=slot.status.reason)
    return replace(again, heard_at_s=moment.now_s, news_at_s=moment.now_s, quiet=None), ()


def _assigned(slot: Slot, event: Assigned, moment: Moment) -> Transition:
    """Prepare a slot without a process for another attempt at its work, and end its hold."""
    # The actor of a lost node would return together with the node.
    commands: tuple[Abandon, ...] = (Abandon(),) if slot.placed else ()
    slot = processes.without_actor(slot) if slot.placed else slot
    slot = replace(slot, orders=NOTHING_ASKED, held_since_s=None, status=None)
    return _awaiting_node(slot, event, moment)[0], commands


def _awaiting_node(slot: Slot, _: Reinstated | Assigned, __: Moment) -> Transition:
    """Clear the failure and deaths of a slot, and wait for its node. The slot has no actor any
    more, so it is like one that was never placed.
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
    """Bound the memory that the worker may hold."""
    return replace(slot, orders=replace(slot.orders, cap_bytes=event.cap_bytes)), ()


def _save_asked(slot: Slot, _: SaveAsked, __: Moment) -> Transition:
    """Order the process to save the state of its training."""
    return _with_save_asked(slot), ()


def _saved_before_rest(slot: Slot) -> Slot:
    """Order a slot that trains to save before it rests or ends.

    A slot that runs a program always reports a progress, possibly empty; for it, to save is to end.
    """
    trains = slot.ready and slot.status is not None and slot.status.progress is not None
    return _with_save_asked(slot) if trains else slot


def _with_save_asked(slot: Slot) -> Slot:
    """Ask for one more save; no change while the process has not acknowledged the last request."""
    acknowledged = 0 if slot.status is None or not slot.has_reported else slot.status.saves
    return replace(slot, saves=acknowledged + 1)


def _with_hold(slot: Slot, event: Held) -> Slot:
    return replace(slot, orders=replace(slot.orders, hold=event.hold, why=event.why))


def _without_hold(slot: Slot, moment: Moment) -> Slot:
    """End the hold. The held time counts as worked, as do the pauses that the duty requires."""
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
    return _stopped(slot)  # no process works, or its state is unknown


def _close(slot: Slot, _: Close, moment: Moment) -> Transition:
    if slot.phase is Phase.WORKING and (silent := silence.why_silent(slot, moment)) is not None:
        slot = replace(slot, reason=silent[0], ended_stale=silent[1])
    return _stopped(slot)


def _stopped(slot: Slot) -> Transition:
    return replace(slot, phase=Phase.STOPPED, wake_at_s=None), ()


# `Any`: the type of the event follows from the key in the table, which a dict cannot express.
Handler: TypeAlias = Callable[[Slot, Any, Moment], Transition]

_NOT_A_TIME = "the slot waits for its node, not for a time"
_NOT_AWAITED = "no process is awaited"
_RULE_5 = "rule 5"
_FINAL = "the slot has ended; the supervisor sends events to every slot"
_RULE_6 = "rule 6"
_RULE_7 = "rule 7"
#: Ended slots ignore nodes, time, and the end of the run.
_OVER = {Phase.QUARANTINED: _RULE_5, Phase.STOPPED: _FINAL, Phase.DONE: _RULE_6}

#: The handler of an event in a phase, or the reason why the event is ignored there. A pair that is
#: not here is illegal.
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
    StatusReceived: {
        Phase.ABSENT: processes.on_status_without_node,
        Phase.WORKING: processes.on_status,
        **dict.fromkeys((Phase.PAUSING, Phase.HELD, Phase.STOPPED), processes.on_status_at_rest),
        Phase.QUARANTINED: _RULE_5,
        Phase.DONE: _RULE_6,
    },
    ActorUnreachable: {
        **dict.fromkeys(Phase, _NOT_AWAITED),
        Phase.WORKING: processes.on_unreachable,
    },
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
    Reinstated: {Phase.QUARANTINED: _awaiting_node},
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
