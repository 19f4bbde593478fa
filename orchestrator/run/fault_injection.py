"""Connects `core/chaos` to a run: keeps its state, and ends and starts nodes as it decides.

Decides nothing (`core/chaos` does). Faults inside a worker travel in its directive
(`workers/engine/fault_injection.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from orchestrator.core.chaos.injection import Chaos
from orchestrator.core.chaos.plan import ChaosPlan
from orchestrator.core.fleet import Fleet
from orchestrator.core.placement import SlotPlan
from orchestrator.core.slot import Slot
from orchestrator.record.events import EventLog
from orchestrator.run.clock import Clock
from workers.messages import Directive, ProcessFault


def with_faults(plans: Sequence[SlotPlan], plan: ChaosPlan | None) -> tuple[SlotPlan, ...]:
    """Return the slots with workers that know the faults; without them a worker injects nothing."""
    faults = None if plan is None else plan.step_faults()
    return tuple(replace(slot, spec=replace(slot.spec, step_faults=faults)) for slot in plans)


class FaultInjector:
    """Injects the faults of a plan into one run."""

    def __init__(
        self,
        plan: ChaosPlan,
        plans: Sequence[SlotPlan],
        head_node: str,
        events: EventLog,
        clock: Clock,
    ) -> None:
        """Prepare; nothing happens before `begin`.

        `plan` is checked against the cluster; the raylet of `head_node` carries the head and is
        left alone. `events` gets each fault of a process or node, and `clock` says at which time of
        the day a fault was injected.
        """
        homes = {slot.reservation.slot: slot.spec.node for slot in plans}
        self.chaos = Chaos(plan, homes, head_node)
        self._events = events
        self._clock = clock
        self._began_unix_s = clock.unix_s()

    def begin(self, now_s: float, ends_at_s: float) -> None:
        """The run begins to count, and so do the times of the plan."""
        self._began_unix_s = self._clock.unix_s()
        self.chaos.begin(now_s, ends_at_s)

    def process_fault(self, slot: Slot, submit: Directive, now_s: float) -> ProcessFault | None:
        """Return what the slice that is about to be sent carries, if anything."""
        process_fault = self.chaos.strike_for(slot, submit, now_s)
        if process_fault is not None:
            self._events.write(
                "chaos_strike",
                slot=slot.slot,
                kind=process_fault.kind.value,
                sequence=submit.sequence,
            )
        return process_fault

    def shake_nodes(self, fleet: Fleet, now_s: float) -> None:
        """End and start the nodes whose time has come."""
        for command in self.chaos.node_commands(now_s):
            if command.start:
                self._events.write("chaos_node_started", node=command.node)
                fleet.start_node(command.node)
            else:
                self._events.write("chaos_node_ended", node=command.node)
                fleet.end_node(command.node)

    def faults(self) -> list[dict[str, Any]]:
        """Every fault with what became of it, as JSON knows it."""
        return [
            {**asdict(fault), "at_unix_s": self._began_unix_s + fault.at_s}
            for fault in self.chaos.log.faults()
        ]

    def counts(self) -> list[dict[str, Any]]:
        """How many faults of each kind there were, also of those the list has no room for, and what
        became of them.
        """
        return self.chaos.log.tally(self.chaos.plan.kinds())
