"""Follows the nodes of a run: which joined, which left, which cannot be used. Pure.

A node is known by its label, and by its node id for as long as that lives: a raylet that was started again is the same
node with another id. Decides nothing about a slot (`lifecycle.py`) and queries nothing (`supervisor.py` does).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from orchestrator.config.schema import Config
from orchestrator.core.fleet import NodeFact
from orchestrator.core.placement import Missing, refusals
from orchestrator.core.slot import NodeJoined, NodeLeft, NodeRefused

NodeEvent: TypeAlias = NodeJoined | NodeLeft | NodeRefused

_SILENT = "its node does not answer"


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """What is known of the nodes of a run."""

    present: Mapping[str, str] = field(default_factory=dict)
    """Nodes in use -> their node ids."""
    seen: frozenset[str] = frozenset()
    """Nodes that were ever in use."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Nodes that are there and cannot be used -> why."""


def updated(
    known: Membership, config: Config, facts: Sequence[NodeFact]
) -> tuple[Membership, tuple[tuple[str, NodeEvent], ...]]:
    """Compare the live nodes with what is known; return what is known now, and what happened to which node.

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
    present = dict(known.present)
    for name, node_id in known.present.items():
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
        if name not in present and known.refused.get(name) != text
    )
    gone = known.refused.keys() - refused.keys() - present.keys()
    events.extend((name, NodeRefused(reason=NodeLeft().reason)) for name in config.nodes if name in gone)
    unused = {name: text for name, text in refused.items() if name not in present}
    return Membership(present=present, seen=known.seen | present.keys(), refused=unused), tuple(events)


def notices(known: Membership, config: Config) -> list[str]:
    """Return a line for each node that is missing: what a person may want to do something about."""
    return [_notice(known, name) for name in config.nodes if name not in known.present]


def _notice(known: Membership, name: str) -> str:
    if name in known.refused:
        return f"{name} cannot be used: {known.refused[name]}"
    return f"{name} has left" if name in known.seen else f"{name} has not joined"
