"""What a card has for our workers, from looks that each of them took at another moment. Pure.

A report says how much its worker held and what the card had free at that moment. What the others held then is not in
it: only that it was what their reports before and after say, or something between. Looks at which that makes no
difference are believed; while workers grow or shrink there may be none, and then only bounds are known. Divides nothing
among the workers (`leases.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final

#: Looks that are taken into account. What has been free for so long may be promised.
WINDOW_S: Final = 5.0

#: Share of the card by which the bounds of a look may differ for it to be believed.
_CLEAR: Final = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What one worker saw."""

    slot: str
    at_s: float
    held_bytes: int
    free_bytes: int | None
    """On the card, for anybody; `None` for a process that has ended: it saw nothing, and holds nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Looks:
    """Those of the last seconds, and of each worker at least the last one."""

    taken: tuple[Look, ...] = ()
    """In the order in which they arrived."""
    granted: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    """The most that each worker may come to hold before its next report."""


#: Nobody has looked yet.
NO_LOOKS: Final = Looks()


def looked(looks: Looks, slot: str, now_s: float, held_bytes: int, free_bytes: int | None) -> Looks:
    """Add a look, and drop what is too old to matter."""
    taken = (*looks.taken, Look(slot=slot, at_s=now_s, held_bytes=held_bytes, free_bytes=free_bytes))
    last = {look.slot: place for place, look in enumerate(taken)}
    kept = tuple(
        look
        for place, look in enumerate(taken)
        if look.at_s > now_s - WINDOW_S or (last[look.slot] == place and look.free_bytes is not None)
    )
    return replace(looks, taken=kept)


def gone(looks: Looks, slot: str, now_s: float) -> Looks:
    """Note that a worker's process has ended, and what it held with it."""
    return looked(looks, slot, now_s, 0, None)


def available(looks: Looks, total_bytes: int) -> tuple[int, int] | None:
    """Return the least and the most that the card may have for our workers: what they hold, and what is free.

    The least is that of the whole window, so that what is there for a moment is not promised. The most is that of the
    last look of each worker, so that a moment's lack moves nobody and a lasting one does at once.

    Returns:
        `None` as long as nobody has looked.
    """
    bounds = _bounds(looks)
    if not bounds:
        return None
    clear = [bound for bound in bounds if bound[2] - bound[1] <= _CLEAR * total_bytes]
    believed = clear or bounds
    latest = {slot: high for slot, _, high in believed}
    return min(low for _, low, _ in believed), max(latest.values())


def _bounds(looks: Looks) -> list[tuple[str, int, int]]:
    """Return for each look who took it, and the least and the most that there was for our workers then."""
    slots = {look.slot for look in looks.taken}
    before: dict[str, int] = dict.fromkeys(slots, 0)
    held_before: list[dict[str, int]] = []
    for look in looks.taken:
        before[look.slot] = look.held_bytes
        held_before.append(dict(before))
    # What comes after the last report is bounded by what was allowed.
    after = {slot: max(before[slot], looks.granted.get(slot, 0)) for slot in slots}
    bounds = []
    for look, held in zip(reversed(looks.taken), reversed(held_before), strict=True):
        after[look.slot] = look.held_bytes
        if look.free_bytes is not None:
            low = sum(min(held[slot], after[slot]) for slot in slots)
            high = sum(max(held[slot], after[slot]) for slot in slots)
            bounds.append((look.slot, look.free_bytes + low, look.free_bytes + high))
    bounds.reverse()
    return bounds
