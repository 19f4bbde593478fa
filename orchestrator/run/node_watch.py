"""Follows the nodes of a run: which have joined, have left, or cannot be used. Logs each change.

A node is identified by its label; a raylet that was started again is the same node with another
node id. Decides nothing about a slot (`lifecycle.py`) and queries nothing (`supervisor.py` does).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from orchestrator.config.schema import Config
from orchestrator.core.fleet import NodeFact
from orchestrator.core.placement import refusals
from orchestrator.core.slot import NodeJoined, NodeLeft, NodeRefused
from orchestrator.record.events import EventLog

NodeEvent: TypeAlias = NodeJoined | NodeLeft | NodeRefused

_SILENT = "its node does not answer"


class NodeWatch:
    """The nodes in use, and the changes since the last update."""

    def __init__(self, config: Config, events: EventLog) -> None:
        """Start without nodes."""
        self._config = config
        self._events = events
        self._facts: list[NodeFact] = []
        self._ever: set[str] = set()
        self.present: dict[str, str] = {}
        """Node ids, keyed by the names of the nodes in use."""
        self.refused: dict[str, str] = {}
        """Why a node that has joined cannot be used, keyed by its name."""

    def update(
        self, facts: Sequence[NodeFact], heard: Collection[str] = ()
    ) -> list[tuple[str, NodeEvent]]:
        """Return what has happened to each node; nothing if the cluster shows the same as before.

        A node that does not answer counts as gone even if Ray still lists it: Ray is slower to
        notice. The nodes in `heard` have a worker that has just reported. It outlives its raylet by
        some seconds, so it overrules silence, but not a refused connection.
        """
        seen = [
            replace(fact, answers=True) if fact.name in heard and not fact.refuses else fact
            for fact in facts
        ]
        if seen == self._facts:
            return []
        self._facts = seen
        happened = list(self._compared(seen))
        for node, event in happened:
            if isinstance(event, NodeJoined):
                self._events.write("node_joined", node=node, node_id=self.present[node])
            else:
                name = "node_left" if isinstance(event, NodeLeft) else "node_refused"
                self._events.write(name, node=node, reason=event.reason)
        return happened

    def in_use(self) -> tuple[str, ...]:
        """Return the nodes in use, in the order of the configuration."""
        return tuple(name for name in self._config.nodes if name in self.present)

    def address(self, node: str) -> str:
        """Return the address with which a node in use has joined; for a node that has left,
        loopback, which no other PC reaches.
        """
        node_id = self.present.get(node)
        return next((it.address for it in self._facts if it.node_id == node_id), "127.0.0.1")

    def notices(self) -> list[str]:
        """Return a line for each missing node, on which a person may want to act."""
        lines = []
        for name in self._config.nodes:
            if name in self.refused:
                lines.append(f"{name} cannot be used: {self.refused[name]}")
            elif name not in self.present:
                lines.append(f"{name} has {'left' if name in self._ever else 'not joined'}")
        return lines

    def _compared(self, seen: Sequence[NodeFact]) -> Iterator[tuple[str, NodeEvent]]:
        answering = [fact for fact in seen if fact.answers and fact.name in self._config.nodes]
        texts: dict[str, list[str]] = {}
        for refusal in refusals(self._config, answering):
            if not refusal.is_absent:
                texts.setdefault(refusal.node, []).append(refusal.text)

        for name in self._config.nodes:
            ids = [fact.node_id for fact in answering if fact.name == name]
            before = self.present.get(name)
            if before is not None and before not in ids:
                del self.present[name]
                is_listed = any(fact.node_id == before for fact in seen)
                yield name, NodeLeft(reason=_SILENT) if is_listed else NodeLeft()
            if name in self.present:
                continue
            was_refused, refused = self.refused.pop(name, None), "; ".join(texts.get(name, ()))
            if refused:
                self.refused[name] = refused
            elif ids:
                self.present[name] = ids[0]
                self._ever.add(name)
                yield name, NodeJoined()
                continue
            if refused != (was_refused or ""):
                # A node that could not be used and is gone has left.
                yield name, NodeRefused(reason=refused or NodeLeft().reason)
