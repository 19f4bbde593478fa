"""Decides when the Ray node of a PC is started, asked about and replaced, so that it comes back by
itself. Pure.

One turn takes what the PC sees of its node and of the head, and returns what is to be done. Does
not start or end anything, and does not poll (`cli/stay.py` does).

Ray declares a node dead that it has not reached for a while. Such a node can never be a member
again, and neither can one whose head has begun a new cluster: both are replaced.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto

#: The pause after a first failure. It doubles with each further one, up to the second number.
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0

#: A node that was up for so long has not failed in a row.
_STEADY_S = 60.0

#: What a start gets before it is ended and tried again: `ray start` waits without an end for a head
#: that is silent. Of 25 starts that ended well on a 2-core machine at loads of 7 to 23, the longest
#: took 25 s; the median was 12 s.
_START_S = 60.0

#: A start that took too long gets the next one twice the time, up to this: a machine may be that
#: slow.
_LONGEST_START_S = 180.0

#: From one question to the head to the next, if it has no answer.
_ASK_EVERY_S = 3.0


class NodePhase(Enum):
    """What the PC is doing about its node."""

    DOWN = auto()
    STARTING = auto()
    UP = auto()


class Action(Enum):
    """What is to be done now."""

    WAIT = auto()
    START = auto()
    ASK = auto()
    """Ask the head whether this node is a live member of its cluster."""
    END = auto()
    """End what runs of the node; it is started again later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSample:
    """What the PC sees of its node and of the head."""

    now_s: float
    is_reachable: bool
    """A connection to the head can be opened. The head itself always can."""
    is_starting: bool = False
    """`ray start` is at work."""
    is_in_vain: bool = False
    """A process that `ray start` has started and the node needs has ended. It would wait for it all
    the same.
    """
    is_running: bool = False
    """All processes that the node needs are alive."""
    is_asking: bool = False
    """The head was asked and has not answered yet."""
    is_member: bool | None = None
    """The head's answer, in the turn after it came; else `None`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What is known of the node from one turn to the next."""

    phase: NodePhase = NodePhase.DOWN
    since_s: float = 0.0
    """When the phase began."""
    due_s: float = float("-inf")
    """Before this moment the node is not started, and the head is not asked."""
    failures: int = 0
    """How often in a row it could not be started, or ended soon after."""
    in_doubt: bool = False
    """The head was out of reach, and has not said since that the node is a member."""
    overdue: int = 0
    """How many starts took too long since it was up last."""

    @property
    def start_s(self) -> float:
        """How long a start may take."""
        return min(_LONGEST_START_S, _START_S * 2.0 ** min(self.overdue, 10))

    @property
    def pause_s(self) -> float:
        """How long it is left alone after its last failure."""
        return (
            min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(self.failures - 1, 10))
            if self.failures
            else 0.0
        )


def turn(node: Node, sample: NodeSample) -> tuple[Node, Action]:
    """Return what is known after a sample, and what is to be done."""
    match node.phase:
        case NodePhase.DOWN:
            return _while_down(node, sample)
        case NodePhase.STARTING:
            return _while_starting(node, sample)
        case NodePhase.UP:
            return _while_up(node, sample)


def _while_down(node: Node, sample: NodeSample) -> tuple[Node, Action]:
    if sample.is_running:  # it was there before this program
        return _up(node, sample, in_doubt=True), Action.WAIT
    if not sample.is_reachable:  # what failed before may well work once the head is back
        return replace(node, due_s=sample.now_s), Action.WAIT
    if sample.now_s < node.due_s:
        return node, Action.WAIT
    return replace(node, phase=NodePhase.STARTING, since_s=sample.now_s), Action.START


def _while_starting(node: Node, sample: NodeSample) -> tuple[Node, Action]:
    if not sample.is_starting:
        return (
            (_up(node, sample), Action.WAIT)
            if sample.is_running
            else (_failed(node, sample), Action.END)
        )
    if not sample.is_reachable:
        return replace(node, phase=NodePhase.DOWN, since_s=sample.now_s), Action.END
    if sample.is_in_vain:
        return _failed(node, sample), Action.END
    if sample.now_s - node.since_s > node.start_s:
        return replace(_failed(node, sample), overdue=node.overdue + 1), Action.END
    return node, Action.WAIT


def _while_up(node: Node, sample: NodeSample) -> tuple[Node, Action]:
    if not sample.is_running or (node.in_doubt and sample.is_member is False):
        return _failed(node, sample), Action.END
    if not sample.is_reachable:
        return replace(node, in_doubt=True), Action.WAIT
    if sample.is_member:
        return replace(node, in_doubt=False), Action.WAIT
    if not node.in_doubt or sample.is_asking or sample.now_s < node.due_s:
        return node, Action.WAIT
    return replace(node, due_s=sample.now_s + _ASK_EVERY_S), Action.ASK


def _up(node: Node, sample: NodeSample, *, in_doubt: bool = False) -> Node:
    return replace(
        node,
        phase=NodePhase.UP,
        since_s=sample.now_s,
        due_s=sample.now_s,
        in_doubt=in_doubt,
        overdue=0,
    )


def _failed(node: Node, sample: NodeSample) -> Node:
    was_steady = node.phase is NodePhase.UP and sample.now_s - node.since_s >= _STEADY_S
    failures = 1 if was_steady else node.failures + 1
    failed = Node(since_s=sample.now_s, failures=failures, overdue=node.overdue)
    return replace(failed, due_s=sample.now_s + failed.pause_s)
