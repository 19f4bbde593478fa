"""Connects `core/chaos` to a run: keeps its state, and ends and starts nodes as it decides.

Decides nothing (`core/chaos` does). Faults inside a worker travel in its directive
(`workers/engine/fault_injection.py`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from orchestrator.core.chaos import outcomes, schedule, state
from orchestrator.core.chaos.plan import ChaosPlan
from orchestrator.core.chaos.state import EndNode, Fault
from orchestrator.core.fleet import Fleet
from orchestrator.core.placement import SlotPlan
from orchestrator.core.slot import Slot, Submit
from orchestrator.watch.events import EventLog
from workers.messages import ProcessFault, Report


def with_faults(plans: Sequence[SlotPlan], plan: ChaosPlan | None) -> tuple[SlotPlan, ...]:
    """Return the slots with workers that know the faults; without them a worker injects nothing."""
    faults = None if plan is None else plan.step_faults()
    return tuple(replace(slot, spec=replace(slot.spec, step_faults=faults)) for slot in plans)


class FaultInjector:
    """Injects the faults of a plan into one run."""

    def __init__(self, plan: ChaosPlan, plans: Sequence[SlotPlan], head_node: str, events: EventLog) -> None:
        """Prepare; nothing happens before `begin`.

        Args:
            plan: Checked against the cluster.
            plans: Every slot of the run.
            head_node: Its raylet carries the head and is left alone.
            events: Gets each strike and each node fault.
        """
        homes = {slot.reservation.slot: slot.spec.node for slot in plans}
        self._book = schedule.open_book(plan, homes, head_node)
        self._events = events
        self._began_unix_s = time.time()

    def begin(self, now_s: float, ends_at_s: float) -> None:
        """The run begins to count, and so do the times of the plan."""
        self._began_unix_s = time.time()
        self._book = schedule.begin(self._book, now_s, ends_at_s)

    def watch(self, before: Slot, after: Slot, accepted: Report | None, now_s: float) -> None:
        """Take in what an event made of a slot."""
        self._book = outcomes.watch(self._book, before, after, accepted, now_s)

    def process_fault(self, slot: Slot, submit: Submit, now_s: float) -> ProcessFault | None:
        """Return what the slice that is about to be sent carries, if anything."""
        self._book, process_fault = schedule.strike_for(self._book, slot, submit, now_s)
        if process_fault is not None:
            self._events.write("chaos_strike", slot=slot.slot, kind=process_fault.kind.value, sequence=submit.sequence)
        return process_fault

    def shake_nodes(self, fleet: Fleet, now_s: float) -> None:
        """End and start the nodes whose time has come."""
        self._book, commands = schedule.node_commands(self._book, now_s)
        for command in commands:
            if isinstance(command, EndNode):
                self._events.write("chaos_node_ended", node=command.node)
                fleet.end_node(command.node)
            else:
                self._events.write("chaos_node_started", node=command.node)
                fleet.start_node(command.node)

    def close(self, now_s: float) -> None:
        """The run is over: every fault gets its final outcome."""
        self._book = outcomes.ended(self._book, now_s)

    def faults(self) -> list[dict[str, Any]]:
        """Every fault with what became of it, as JSON knows it."""
        return [self._told(fault) for fault in state.faults(self._book)]

    def counts(self) -> list[dict[str, Any]]:
        """How many faults of each kind there were, also of those the list has no room for, and what became of them."""
        return [{"kind": kind.value, **asdict(counts)} for kind, counts in state.tally(self._book).items()]

    def _told(self, fault: Fault) -> dict[str, Any]:
        return {
            "number": fault.number,
            "at_s": fault.at_s,
            "at_unix_s": self._began_unix_s + fault.at_s,
            "kind": fault.kind.value,
            "target": fault.target,
            "count": fault.count,
            "fate": fault.fate.value,
            "became": fault.became,
            "detail": fault.detail,
            "recovered_s": fault.recovered_s,
        }
