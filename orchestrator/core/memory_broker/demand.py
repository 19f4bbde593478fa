"""Whether a worker uses its lease, or leaves it to the others. Pure.

A worker with small steps, or one that can run nothing, holds little even with a large lease. What
it leaves unused for some reports is lent to others, except a reserve above what it holds. When it
grows into that reserve, it wants more. Divides nothing (`leases.py` does).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

#: A worker that holds less than this share of its lease has left it untaken.
_TAKEN: Final = 0.8

#: A worker that holds more by this share than at the report before is growing.
_GROWING: Final = 0.03

#: Reports in a row that leave a lease unused before it is lent out. Two slices are under way when a
#: lease is raised, and one more must run before it shows. Doubled each time that the worker wants
#: it back, so that a worker whose need changes often disturbs the others less and less.
_PATIENCE: Final = 5
_LONGEST_PATIENCE: Final = 80

#: The reserve that is left to it, as a multiple of what it holds and a share of its cap; and how
#: far it must have grown into that to want more. The gap between the two is wider than the margin
#: that a policy keeps below its lease.
_ROOM: Final = 1.2
_ROOM_OF_CAP: Final = 1 / 32
_GROWN: Final = 1.08
_GROWN_OF_CAP: Final = 1 / 128

#: A share that was left is offered again once it is larger by this.
_WORTH_OFFERING: Final = 1.5

#: A worker that can run nothing cannot grow, and what it needs may have changed: asked again after
#: so many reports, about a minute.
_ASK_AGAIN: Final = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What is known of how much one process wants to hold."""

    held_bytes: int = 0
    """The most in the slice that it reported last."""
    untaken: int = 0
    """Reports in a row in which it left its lease, although the bytes were free, and did not grow.
    """
    patience: int = _PATIENCE
    content_bytes: int | None = None
    """What it held when its share was lent out; `None` while it has a whole one."""
    left_bytes: int = 0
    """The lease that it left then."""
    waited: int = 0

    def wanted_bytes(self, cap_bytes: int) -> int:
        """Return the most that it should be leased while others could use the rest."""
        if self.content_bytes is None:
            return cap_bytes
        return min(cap_bytes, int(_ROOM * self.content_bytes + _ROOM_OF_CAP * cap_bytes))

    def offered(self, share_bytes: int) -> Demand:
        """Return the demand for a share: whole again if what it left was less."""
        if share_bytes <= _WORTH_OFFERING * self.left_bytes:
            return self
        return replace(self, content_bytes=None, untaken=0)


#: Of a process that has not reported yet.
FRESH: Final = Demand()


def heard(
    demand: Demand,
    *,
    cap_bytes: int,
    lease_bytes: int,
    held_bytes: int,
    free_bytes: int,
    starving: bool,
) -> Demand:
    """Return the demand after a report of a worker that may ever hold its cap, and now its lease.

    `held_bytes` is the most since the report before, `free_bytes` what the card has free besides:
    what is not there was not left. A starving worker could run nothing.
    """
    grew = held_bytes > (1.0 + _GROWING) * demand.held_bytes
    demand = replace(demand, held_bytes=held_bytes, waited=demand.waited + 1)
    if demand.content_bytes is not None:
        if held_bytes > _GROWN * demand.content_bytes + _GROWN_OF_CAP * cap_bytes:
            patience = min(2 * demand.patience, _LONGEST_PATIENCE)
            return replace(demand, content_bytes=None, untaken=0, patience=patience)
        if starving and demand.waited >= _ASK_AGAIN:
            return replace(demand, content_bytes=None, untaken=0)
        return demand
    left = held_bytes < _TAKEN * lease_bytes and lease_bytes <= held_bytes + free_bytes
    if not left or grew:
        return replace(demand, untaken=0)
    if demand.untaken + 1 < demand.patience:
        return replace(demand, untaken=demand.untaken + 1)
    return replace(demand, untaken=0, content_bytes=held_bytes, left_bytes=lease_bytes, waited=0)
