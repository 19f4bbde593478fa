"""Follows the nodes of a run for the supervisor: compares the cluster with what is known, and writes events.

`core/membership.py` decides what a change of a node means; this keeps its state. It does not query the cluster.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from orchestrator.config.schema import Config
from orchestrator.core import membership
from orchestrator.core.fleet import NodeFact
from orchestrator.core.membership import Membership, NodeEvent
from orchestrator.core.placement import SlotPlan
from orchestrator.core.slot import NodeJoined, NodeLeft, NodeRefused, Slot
from orchestrator.watch.events import EventLog

#: A node whose worker reported so lately is there. Short enough for a lost node to be seen within 10 s.
_HEARD_WITHIN_S = 3.0


class NodeWatch:
    """Which nodes are there, and what has happened to each since the last look."""

    def __init__(self, config: Config, plans: Iterable[SlotPlan], events: EventLog) -> None:
        """Begin with no node there."""
        self._config = config
        self._events = events
        self._known = Membership()
        self._facts: list[NodeFact] = []
        self.slots: dict[str, list[str]] = {name: [] for name in config.nodes}
        """Node -> its slots."""
        for plan in plans:
            self.slots[plan.spec.node].append(plan.reservation.slot)

    def look(
        self, facts: Sequence[NodeFact], slots: Mapping[str, Slot], now_s: float
    ) -> tuple[tuple[str, NodeEvent], ...]:
        """Return what happened to which node; nothing at once if the cluster shows what it showed before."""
        # Workers outlive their raylet for some seconds, so a report overrules silence and not a refusal.
        seen = [replace(fact, answers=True) if self._is_heard(fact, slots, now_s) else fact for fact in facts]
        if seen == self._facts:
            return ()
        self._known, happened = membership.updated(self._known, self._config, seen)
        self._facts = seen
        for node, event in happened:
            match event:
                case NodeJoined():
                    self._events.write("node_joined", node=node, node_id=self._known.present[node])
                case NodeLeft(reason=reason):
                    self._events.write("node_left", node=node, reason=reason)
                case NodeRefused(reason=reason):
                    self._events.write("node_refused", node=node, reason=reason)
        return happened

    def seen(self) -> tuple[str, ...]:
        """Return the nodes that are in use, in the order of the configuration."""
        return tuple(name for name in self._config.nodes if name in self._known.present)

    def notices(self) -> list[str]:
        """Return a line for each node that is missing."""
        return membership.notices(self._known, self._config)

    def _is_heard(self, fact: NodeFact, slots: Mapping[str, Slot], now_s: float) -> bool:
        """Whether a worker on a silent node has just reported: then it is there, although it cannot be connected to."""
        if fact.answers or fact.refuses or fact.name is None:
            return False
        heard = (slots[name].heard_at_s for name in self.slots.get(fact.name, ()))
        return any(at_s is not None and at_s > now_s - _HEARD_WITHIN_S for at_s in heard)
