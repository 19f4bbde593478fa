"""Divides the rows of each step among the members by their speed, and takes back the rows of a lost
member. Pure: times are arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Final

from workers.training.schedule import next_part

#: These first measurements of a member do not count: they load kernels and libraries.
_WARM_UP: Final = 2
_MEASURES: Final = 5

#: A member without rows for this many steps is measured again; a row waits for it for this time.
_PROBE_EVERY: Final = 8
_PROBE_WAIT_S: Final = 0.2

#: Rows are late after this multiple of the time they should take, plus a grace time.
_LATE_FACTOR: Final = 10.0


@dataclass(frozen=True, slots=True)
class Rows:
    """A range of rows of a step's batch."""

    first: int
    rows: int
    unit: int
    """Position of their sum in the order in which the leader adds sums up."""


@dataclass
class _Member:
    """The rows of one member, and its speed."""

    done: list[Rows] = field(default_factory=list)
    under_way: Rows | None = None
    given_at_s: float = 0.0
    last_given_step: int = -_PROBE_EVERY
    """The last step in which the member was given rows."""
    measured: list[float] = field(default_factory=list)
    """The last measured speeds, in rows per second."""

    @property
    def speed(self) -> float | None:
        """Rows per second; `None`: not measured yet."""
        warm = self.measured[_WARM_UP:]
        return median(warm[-_MEASURES:]) if warm else None


class Shares:
    """Gives out the rows of one step after another."""

    def __init__(self, batch: int, members: Sequence[str], *, fixed: bool) -> None:
        """Divide batches of `batch` rows. `fixed`: each member owns one range with its own sum, and
        the range keeps its sum when another member computes it.
        """
        self._batch, self._order, self._fixed = batch, list(members), fixed
        self._members: dict[str, _Member] = {}
        self._step, self._began_s = 0, 0.0
        self._left: list[Rows] = []

    def join(self, member: str) -> None:
        """Add a member; it holds no rows yet."""
        self._members[member] = _Member()

    def leave(self, member: str) -> int:
        """Remove a member and take back all its rows; return how many these are."""
        gone = self._members.pop(member)
        back = [*gone.done, *([gone.under_way] if gone.under_way else [])]
        self._left += back
        return sum(rows.rows for rows in back)

    def begin(self, step: int, now_s: float) -> None:
        """Begin this step: all of its rows are to be given out."""
        self._step, self._began_s = step, now_s
        for each in self._members.values():
            each.done, each.under_way = [], None
        count = len(self._order) if self._fixed else 1
        ends = [self._batch * number // count for number in range(count + 1)]
        self._left = [
            Rows(first, end - first, unit)
            for unit, (first, end) in enumerate(pairwise(ends))
            if end > first
        ]

    @property
    def is_complete(self) -> bool:
        """Whether all rows are computed."""
        return not self._left and not any(each.under_way for each in self._members.values())

    def rows_of(self, member: str) -> int:
        """Return how many rows of this step a member has computed."""
        return sum(rows.rows for rows in self._members[member].done)

    def give(self, member: str, most_rows: int, now_s: float) -> Rows | None:
        """Return rows for a member; `None`: it still has rows, others will be done sooner, or
        nothing is left now.
        """
        own = self._members[member]
        if own.under_way is not None:
            return None
        given = self._fixed_rows(member) if self._fixed else self._rows(member, most_rows, now_s)
        if given is not None:
            own.under_way, own.given_at_s, own.last_given_step = given, now_s, self._step
        return given

    def done(self, member: str, now_s: float) -> None:
        """Record that the member has computed the rows it was given."""
        own = self._members[member]
        if own.under_way is not None:
            speed = own.under_way.rows / max(1e-6, now_s - own.given_at_s)
            own.measured = [*own.measured[-_WARM_UP - _MEASURES :], speed]
            own.done.append(own.under_way)
            own.under_way = None

    def late(self, grace_s: float, now_s: float) -> list[str]:
        """Return members whose rows took 10 times what they should, and `grace_s` more."""
        return [
            member
            for member, each in self._members.items()
            if each.under_way is not None
            and each.speed is not None
            and now_s - each.given_at_s > grace_s + _LATE_FACTOR * each.under_way.rows / each.speed
        ]

    def _fixed_rows(self, member: str) -> Rows | None:
        """Return the member's range, or else that of a member that is gone."""
        owners = [self._order[rows.unit] for rows in self._left]
        own = [place for place, owner in enumerate(owners) if owner == member]
        free = [place for place, owner in enumerate(owners) if owner not in self._members]
        return self._left.pop((own + free)[0]) if own + free else None

    def _rows(self, member: str, most_rows: int, now_s: float) -> Rows | None:
        """Return a fair part of the rows that are left; `None`: see `give`."""
        probed = [each for each in self._members if self._must_probe(each)]
        is_probed, reserved = member in probed, 0
        if not is_probed and now_s - self._began_s < _PROBE_WAIT_S:
            reserved = len(probed)
        left = sum(rows.rows for rows in self._left) - reserved
        if left <= 0:
            return None
        rows = round(self._fair_rows(member, left, now_s))
        if not rows:
            others_are_sooner = any(
                self._busy_s(other, now_s) + 1 / self._speed(other) < 1 / self._speed(member)
                for other in self._members
                if other != member
            )
            if others_are_sooner and not is_probed:
                return None
        first = self._left[0]
        rows = min(next_part(max(1, rows), most_rows), first.rows)
        rest = Rows(first.first + rows, first.rows - rows, first.unit)
        self._left[:1] = [rest] if rest.rows else []
        return Rows(first.first, rows, self._order.index(member))

    def _fair_rows(self, member: str, left: int, now_s: float) -> float:
        """Return how many of `left` rows the member computes if all end at the same time."""
        others = [each for each in self._members if each != member]
        waiting = sorted((self._busy_s(each, now_s), self._speed(each)) for each in others)
        speed, rows = self._speed(member), float(left)
        for busy_s, other in waiting:
            if rows / speed <= busy_s:  # all rows are done before that member is free
                break
            speed, rows = speed + other, rows + busy_s * other
        return self._speed(member) * rows / speed

    def _must_probe(self, member: str) -> bool:
        """Whether the member got no rows for `_PROBE_EVERY` steps: its speed may have changed."""
        return self._step - self._members[member].last_given_step >= _PROBE_EVERY

    def _speed(self, member: str) -> float:
        """Return the member's speed, or the slowest known one if it was not measured."""
        known = [speed for each in self._members.values() if (speed := each.speed)]
        return self._members[member].speed or min(known, default=1.0)

    def _busy_s(self, member: str, now_s: float) -> float:
        """Return the seconds until the member has probably computed its rows."""
        own = self._members[member]
        if own.under_way is None:
            return 0.0
        return max(0.0, own.under_way.rows / self._speed(member) - (now_s - own.given_at_s))
