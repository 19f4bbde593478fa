"""Follows the nodes of a run: which joined, which left, which cannot be used; and writes that into
the event log.

A node is known by its label, and by its node id for as long as that lives: a raylet that was
started again is the same node with another id. Decides nothing about a slot (`lifecycle.py`) and
queries nothing (`supervisor.py` does).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from orchestrator.config.schema import Config
from orchestrator.core.fleet import NodeFact
from orchestrator.core.placement import Missing, SlotPlan, refusals
from orchestrator.core.slot import NodeJoined, NodeLeft, NodeRefused, Slot
from orchestrator.record.events import EventLog

NodeEvent: TypeAlias = NodeJoined | NodeLeft | NodeRefused

_SILENT = "its node does not answer"

#: A node whose worker reported so lately is there. Short enough for a lost node to be seen within
#: 10 s.
_HEARD_WITHIN_S = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """What is known of the nodes of a run."""

    present: Mapping[str, str] = field(default_factory=dict)
    """Nodes in use -> their node ids."""
    seen: frozenset[str] = frozenset()
    refused: Mapping[str, str] = field(default_factory=dict)
    """Nodes that are there and cannot be used -> why."""


def updated(
    before: Membership, config: Config, facts: Sequence[NodeFact]
) -> tuple[Membership, tuple[tuple[str, NodeEvent], ...]]:
    """Compare the live nodes with what is known; return what is known now, and what happened to
    which node.

    A node that does not answer counts as gone, even if Ray still lists it: Ray is slower to notice.
    """
    answering = [fact for fact in facts if fact.answers and fact.name in config.nodes]
    refused: dict[str, str] = {}
    for refusal in refusals(config, answering):
        if refusal.missing is not Missing.NODE:
            said = refused.get(refusal.node)
            refused[refusal.node] = refusal.text if said is None else f"{said}; {refusal.text}"
    ids = {fact.node_id for fact in answering}
    events: list[tuple[str, NodeEvent]] = []
    present = dict(before.present)
    for name, node_id in before.present.items():
        if node_id not in ids:
            del present[name]
            silent = any(fact.node_id == node_id for fact in facts)
            events.append((name, NodeLeft(reason=_SILENT) if silent else NodeLeft()))
    for fact in answering:
        joined = fact.name
        if joined is not None and joined not in present and joined not in refused:
            present[joined] = fact.node_id
            events.append((joined, NodeJoined()))
    events.extend(
        (name, NodeRefused(reason=text))
        for name, text in refused.items()
        if name not in present and before.refused.get(name) != text
    )
    gone = before.refused.keys() - refused.keys() - present.keys()
    events.extend(
        (name, NodeRefused(reason=NodeLeft().reason)) for name in config.nodes if name in gone
    )
    unused = {name: text for name, text in refused.items() if name not in present}
    return Membership(present=present, seen=before.seen | present.keys(), refused=unused), tuple(
        events
    )


def notices(before: Membership, config: Config) -> list[str]:
    """Return a line for each node that is missing: what a person may want to do something about."""
    absent = {
        name: "has left" if name in before.seen else "has not joined" for name in config.nodes
    }
    absent |= {name: f"cannot be used: {why}" for name, why in before.refused.items()}
    return [f"{name} {what}" for name, what in absent.items() if name not in before.present]


class NodeWatch:
    """Which nodes are there, and what has happened to each since the last look."""

    def __init__(self, config: Config, plans: Mapping[str, SlotPlan], events: EventLog) -> None:
        """Watch the nodes of these slots, which may become more, and may move."""
        self._config = config
        self._plans = plans
        self._events = events
        self._known = Membership()
        self._facts: list[NodeFact] = []

    def slots(self, node: str | None) -> list[str]:
        """Return the slots on a node."""
        return [name for name, plan in self._plans.items() if plan.spec.node == node]

    def look(
        self, facts: Sequence[NodeFact], slots: Mapping[str, Slot], now_s: float
    ) -> tuple[tuple[str, NodeEvent], ...]:
        """Return what happened to which node.

        Nothing at once if the cluster shows what it showed before.
        """
        # Workers outlive their raylet for some seconds, so a report overrules silence and not a
        # refusal.
        seen = [
            replace(fact, answers=True) if self._is_heard(fact, slots, now_s) else fact
            for fact in facts
        ]
        if seen == self._facts:
            return ()
        self._known, happened = updated(self._known, self._config, seen)
        self._facts = seen
        for node, event in happened:
            if isinstance(event, NodeJoined):
                self._events.write("node_joined", node=node, node_id=self._known.present[node])
            else:
                name = "node_left" if isinstance(event, NodeLeft) else "node_refused"
                self._events.write(name, node=node, reason=event.reason)
        return happened

    def seen(self) -> tuple[str, ...]:
        """Return the nodes that are in use, in the order of the configuration."""
        return tuple(name for name in self._config.nodes if name in self._known.present)

    def notices(self) -> list[str]:
        """Return a line for each node that is missing."""
        return notices(self._known, self._config)

    def _is_heard(self, fact: NodeFact, slots: Mapping[str, Slot], now_s: float) -> bool:
        """Whether a worker on a silent node has just reported: then it is there, although it cannot
        be connected to.
        """
        if fact.answers or fact.refuses or fact.name is None:
            return False
        reported = (slots[name].heard_at_s for name in self.slots(fact.name))
        return any(at_s is not None and at_s > now_s - _HEARD_WITHIN_S for at_s in reported)
