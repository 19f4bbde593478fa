"""Which slice carries a fault of its process, and when a node is ended and started again.

Chance is a hash of the seed. Decides nothing about what becomes of a fault (`outcomes.py`). Pure.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from orchestrator.core.chaos.plan import ChaosPlan
from orchestrator.core.chaos.state import (
    ChaosState,
    Clock,
    Down,
    EndNode,
    FaultOutcome,
    NodeCommand,
    Sent,
    StartNode,
    close,
    new_fault,
    with_down,
)
from orchestrator.core.slot import Slot, Submit
from workers.messages import FaultKind, ProcessFault, Report

#: The last seconds of a run that are left alone, and how much of a short run at most. A process that was killed is back
#: after some seconds, a node after half a minute.
_CALM_S = 60.0
_CALM_SHARE = 0.2


def chance(seed: int, *words: object) -> float:
    """Return a number in [0, 1) that looks random and is always the same for the same seed and words."""
    text = "\x1f".join(str(word) for word in (seed, *words))
    drawn = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return (int.from_bytes(drawn, "big") >> 11) / 2**53


def open_book(plan: ChaosPlan, homes: Mapping[str, str], head_node: str) -> ChaosState:
    """Return an empty book; nothing is injected before `begin`.

    Args:
        plan: Checked.
        homes: The node of each slot.
        head_node: Never ended.
    """
    return ChaosState(plan=plan, homes=dict(homes), head_node=head_node, planned=plan.node_faults)


def begin(book: ChaosState, now_s: float, ends_at_s: float | None = None) -> ChaosState:
    """The run begins to count: all times of the plan are from here.

    Shortly before `ends_at_s` nothing is struck by the clock or by chance any more, so that what was struck can come
    back and the outcome of the run says something. A node that the plan names is ended when the plan says so.
    """
    rules = [(rule.kind, rule.every_s) for rule in book.plan.strikes if rule.every_s is not None]
    if book.plan.random_nodes is not None:
        rules.append((FaultKind.NODE, book.plan.random_nodes.every_s))
    clocks = tuple(Clock(kind=kind, every_s=every_s, at_s=now_s + every_s) for kind, every_s in rules)
    calm_from_s = None
    if ends_at_s is not None:
        calm_from_s = ends_at_s - min(_CALM_S, _CALM_SHARE * (ends_at_s - now_s))
    return replace(book, began_s=now_s, clocks=clocks, calm_from_s=calm_from_s)


def strike_for(book: ChaosState, slot: Slot, submit: Submit, now_s: float) -> tuple[ChaosState, ProcessFault | None]:
    """Decide whether the next slice carries a strike; the first one of a process never does."""
    seed, name = book.plan.seed, slot.slot
    targets = _targets(book)
    if submit.duration_s <= 0 or name not in targets or _is_calm(book, now_s):
        return book, None
    clock = _due(book, targets, name, now_s)
    kind = clock.kind if clock is not None else _drawn(book, slot, submit)
    if kind is None:
        return book, None
    if clock is not None:
        book = _wound(book, clock, now_s)
    book, fault = new_fault(book, kind, name, now_s)
    book = replace(book, sent=(*book.sent, Sent(fault=fault, sequence=submit.sequence)))
    return book, ProcessFault(kind=kind, at_share=chance(seed, "share", name, submit.sequence))


def node_commands(book: ChaosState, now_s: float) -> tuple[ChaosState, tuple[NodeCommand, ...]]:
    """Return what to do with nodes now; everything overdue at once, but a node is down for its whole pause."""
    commands: list[NodeCommand] = []
    if book.began_s is None or book.over:
        return book, ()
    for planned in book.planned:
        if now_s - book.began_s >= planned.at_s and not _is_down(book, planned.node):
            book = replace(book, planned=tuple(other for other in book.planned if other is not planned))
            book = _ended_node(book, planned.node, planned.pause_s, now_s)
            commands.append(EndNode(node=planned.node))
    for clock in () if _is_calm(book, now_s) else book.clocks:
        nodes = _endable(book) if clock.kind is FaultKind.NODE and now_s >= clock.at_s else ()
        if nodes and book.plan.random_nodes is not None:
            node = nodes[int(chance(book.plan.seed, clock.kind, clock.count) * len(nodes))]
            book = _ended_node(_wound(book, clock, now_s), node, book.plan.random_nodes.pause_s, now_s)
            commands.append(EndNode(node=node))
    for down in book.down:
        if down.start_at_s is not None and now_s >= down.start_at_s:
            book = with_down(book, replace(down, start_at_s=None), now_s)
            commands.append(StartNode(node=down.fault.target))
    return book, tuple(commands)


def _is_calm(book: ChaosState, now_s: float) -> bool:
    return book.calm_from_s is not None and now_s >= book.calm_from_s


def _targets(book: ChaosState) -> tuple[str, ...]:
    """The slots that may be struck now, in a fixed order."""
    if book.began_s is None or book.over:
        return ()
    busy = {sent.fault.target for sent in book.sent}
    nodes = {down.fault.target for down in book.down}
    return tuple(slot for slot in sorted(book.working) if slot not in busy and book.homes[slot] not in nodes)


def _endable(book: ChaosState) -> tuple[str, ...]:
    """The nodes that a random fault may end: at work, and not the head's."""
    unwell = {book.head_node, *(down.fault.target for down in book.down)}
    at_work = {book.homes[slot] for slot in book.working}
    return tuple(sorted(at_work - unwell))


def _due(book: ChaosState, targets: Sequence[str], slot: str, now_s: float) -> Clock | None:
    """The clock whose due strike falls on this slot. It draws again when the targets change, so no strike is lost."""
    for clock in book.clocks:
        if clock.kind is not FaultKind.NODE and now_s >= clock.at_s:
            drawn = chance(book.plan.seed, clock.kind, clock.count)
            if targets[int(drawn * len(targets))] == slot:
                return clock
    return None


def _drawn(book: ChaosState, slot: Slot, submit: Submit) -> FaultKind | None:
    """Draw for each kind with a rate, as often as the slice is expected to have steps; the first that hits."""
    steps = _expected_steps(slot.report, submit.duration_s)
    for rule in book.plan.strikes:
        if rule.rate is not None:
            share = 1.0 if rule.rate >= 1.0 else -math.expm1(steps * math.log1p(-rule.rate))
            if chance(book.plan.seed, rule.kind, slot.slot, submit.sequence) < share:
                return rule.kind
    return None


def _expected_steps(report: Report | None, duration_s: float) -> float:
    """As many as in the last slice, for its length; one at least."""
    if report is None or report.wall_s <= 0:
        return 1.0
    return max(1.0, report.counts.steps / report.wall_s * duration_s)


def _wound(book: ChaosState, clock: Clock, now_s: float) -> ChaosState:
    """Set the clock to its next time; of several that were missed, one is made up for."""
    later = replace(clock, at_s=max(clock.at_s + clock.every_s, now_s), count=clock.count + 1)
    return replace(book, clocks=tuple(later if other is clock else other for other in book.clocks))


def _is_down(book: ChaosState, node: str) -> bool:
    return any(down.fault.target == node and down.start_at_s is not None for down in book.down)


def _ended_node(book: ChaosState, node: str, pause_s: float, now_s: float) -> ChaosState:
    for down in book.down:
        if down.fault.target == node:
            book = replace(book, down=tuple(other for other in book.down if other is not down))
            book = close(book, down.fault, FaultOutcome.NOT_BACK, "not back before it was ended again")
    slots = frozenset(slot for slot, home in book.homes.items() if home == node)
    book, fault = new_fault(book, FaultKind.NODE, node, now_s)
    down = Down(fault=fault, ended_at_s=now_s, start_at_s=now_s + pause_s, waiting=slots - book.quarantined)
    return replace(book, down=(*book.down, down))
