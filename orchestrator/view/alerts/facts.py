"""What a frame says beyond the values of its rows: which nodes and cards are there, and what a
reason means. Pure.

Metrics and alerts both take it from here, so that they cannot disagree. What is no longer true,
because the head has ended or the slot has no worker, is not told.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from orchestrator.core.slot import HeadState
from orchestrator.record.follow import Frame, Freshness
from orchestrator.record.model import Row
from workers.messages import WorkerState

OUTCOMES: Final = ("running", "good", "degraded", "interrupted", "failed")

#: As `workers.training.accumulator` words it.
_NOT_FINITE = re.compile(r"\bof optimiser step \d+ is (nan|-?inf)\b")


def outcome(frame: Frame) -> str:
    """Return how the run stands; one whose head was killed has not ended, and counts as running."""
    return frame.run.outcome if frame.freshness is Freshness.ENDED else "running"


def is_up(frame: Frame) -> bool:
    """Say whether a head works on the run."""
    return frame.freshness in {Freshness.LIVE, Freshness.LATE}


def rows(frame: Frame) -> tuple[Row, ...]:
    """Return the slots as they are now; none once no head works on the run."""
    return tuple(frame.snapshot.rows) if is_up(frame) else ()


def nodes_up(frame: Frame) -> Mapping[str, bool]:
    """Say of each planned node whether it is in the cluster.

    Nothing before the run has told for the first time.
    """
    if not is_up(frame) or frame.run.updated_at_unix_s is None:
        return {}
    return {node: node in frame.snapshot.nodes_seen for node in frame.snapshot.nodes_planned}


def is_held(row: Row) -> bool:
    """Say whether a person holds the slot: then it does nothing, and nothing is wrong."""
    return row.state is HeadState.HELD


def is_leaking(row: Row) -> bool:
    """Say whether its process keeps memory that its work does not need."""
    return row.reason.startswith("LEAK: ")


def is_not_finite(row: Row) -> bool:
    """Say whether its training was stopped because its loss or gradient is NaN or infinite."""
    return row.state is HeadState.QUARANTINED and _NOT_FINITE.search(row.reason) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A card of the run."""

    node: str
    uuid: str
    name: str | None
    is_up: bool
    """Whether it has a worker, or slots that are held; not up while all its workers are awaited or
    lost.
    """
    teller: Row | None
    """The slot that heard of its sensors last; `None` if no worker reports."""


def cards(frame: Frame) -> tuple[Card, ...]:
    """Return the cards on which the run has workers, or waits for them."""
    of_card: dict[tuple[str, str], list[Row]] = {}
    for row in rows(frame):
        if row.gpu_uuid is not None and row.state is not HeadState.QUARANTINED:
            of_card.setdefault((row.node, row.gpu_uuid), []).append(row)
    found = []
    for (node, uuid), slots in of_card.items():
        tellers = [row for row in slots if isinstance(row.state, WorkerState) and not is_held(row)]
        up = bool(tellers) or any(map(is_held, slots))
        teller = min(tellers, key=_age_s, default=None)
        found.append(Card(node=node, uuid=uuid, name=slots[0].gpu_name, is_up=up, teller=teller))
    return tuple(found)


def _age_s(row: Row) -> float:
    return float("inf") if row.heartbeat_age_s is None else row.heartbeat_age_s
