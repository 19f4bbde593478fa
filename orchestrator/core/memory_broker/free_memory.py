"""Estimates the memory of a card for our workers, from samples that they took at different moments.
Pure.

A report says how much its worker held and what the card had free at that moment. What the other
workers held then lies between their reports before and after. A sample is used as exact if this
makes no difference. While workers grow or shrink there may be no such sample, and then only bounds
are known. Divides nothing among the workers (`leases.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

#: Age of the samples that are used. What has been free for so long may be promised.
WINDOW_S: Final = 5.0

#: Share of the card by which the bounds of a look may differ for it to be used.
_CLEAR: Final = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What one worker saw."""

    slot: str
    at_s: float
    held_bytes: int
    most_bytes: int
    """The most that it held since its previous sample."""
    free_bytes: int | None
    """Free on the card; `None` for a process that has ended: it measured nothing, and holds
    nothing.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Looks:
    """Those of the last seconds, and of each worker at least the last one."""

    taken: tuple[Look, ...] = ()
    granted: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """The most that each worker may come to hold before its next report."""


#: No worker has reported yet.
NO_LOOKS: Final = Looks()


def looked(looks: Looks, look: Look) -> Looks:
    """Add a sample, and drop those that are too old."""
    taken = (*looks.taken, look)
    last = {look.slot: place for place, look in enumerate(taken)}
    kept = tuple(
        old
        for place, old in enumerate(taken)
        if old.at_s > look.at_s - WINDOW_S
        or (last[old.slot] == place and old.free_bytes is not None)
    )
    return replace(looks, taken=kept)


def gone(looks: Looks, slot: str, now_s: float) -> Looks:
    """Note that a worker's process has ended, and what it held with it."""
    return looked(looks, Look(slot=slot, at_s=now_s, held_bytes=0, most_bytes=0, free_bytes=None))


def available(looks: Looks, total_bytes: int) -> tuple[int, int] | None:
    """Return the least and the most that the card may have for our workers: what they hold, and
    what is free.

    The least is that of the whole window, so that memory that is free only for a moment is not
    promised. The most is that of the last sample of each worker, so that a short lack changes no
    lease and a lasting one does at once. `None` before the first report.
    """
    bounds = _bounds(looks)
    if not bounds:
        return None
    clear = [bound for bound in bounds if bound[2] - bound[1] <= _CLEAR * total_bytes]
    believed = clear or bounds
    latest = {slot: high for slot, _, high in believed}
    return min(low for _, low, _ in believed), max(latest.values())


def _bounds(looks: Looks) -> list[tuple[str, int, int]]:
    """Return for each sample its worker, and the least and the most that there was for our workers
    then.
    """
    most: dict[str, int] = {}
    before: list[int] = []
    for look in looks.taken:
        before.append(most.get(look.slot, 0))
        most[look.slot] = look.most_bytes
    # Backwards from now, of each worker the least and the most that it may have held; what it has
    # come to hold since its last report is bounded by what it was allowed.
    spans = {
        slot: (bytes_, max(bytes_, looks.granted.get(slot, 0))) for slot, bytes_ in most.items()
    }
    low_bytes, high_bytes = (sum(span[end] for span in spans.values()) for end in (0, 1))
    bounds = []
    for look, before_bytes in zip(reversed(looks.taken), reversed(before), strict=True):
        low_bytes -= spans[look.slot][0]
        high_bytes -= spans[look.slot][1]
        if look.free_bytes is not None:
            seen_bytes = look.free_bytes + look.held_bytes
            bounds.append((look.slot, seen_bytes + low_bytes, seen_bytes + high_bytes))
        span = (min(before_bytes, look.most_bytes), max(before_bytes, look.most_bytes))
        low_bytes += span[0]
        high_bytes += span[1]
        spans[look.slot] = span
    bounds.reverse()
    return bounds
