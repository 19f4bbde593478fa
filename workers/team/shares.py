"""Who computes which rows of a step, as fast as each can; and whose rows come back. Pure: times are
given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Final

from workers.training.schedule import next_part

#: The first parts load kernels and libraries.
_WARM_UP: Final = 2
_MEASURES: Final = 5

#: A member that gets no rows is measured again after so many steps: a row waits for it so long.
_PROBE_EVERY: Final = 8
_PROBE_WAIT_S: Final = 0.2

#: Rows are late after so many times what they should take, and a time beside.
_LATE: Final = 10.0


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows of a step's batch."""

    first: int
    rows: int
    unit: int
    """The place of their sum among those that are added up."""


@dataclass
class _Member:
    """What one does, and how fast."""

    done: list[Rows] = field(default_factory=list)
    under_way: Rows | None = None
    since_s: float = 0.0
    asked_in: int = -_PROBE_EVERY
    """The last step in which it was given rows."""
    measured: list[float] = field(default_factory=list)
    """Rows a second."""

    @property
    def speed(self) -> float | None:
        """Rows a second; `None`: not known yet."""
        warm = self.measured[_WARM_UP:]
        return median(warm[-_MEASURES:]) if warm else None


class Shares:
    """The rows of one step after the other."""

    def __init__(self, batch: int, members: Sequence[str], *, fixed: bool) -> None:
        """Cut batches of so many rows. `fixed`: each member has a range of its own, with a sum of
        its own, also where another one computes it.
        """
        self._batch, self._order, self._fixed = batch, list(members), fixed
        self._members: dict[str, _Member] = {}
        self._step, self._began_s = 0, 0.0
        self._left: list[Rows] = []

    def join(self, member: str) -> None:
        """Have a member that holds no rows."""
        self._members[member] = _Member()

    def leave(self, member: str) -> int:
        """Take back all rows of a member that is gone; return how many."""
        gone = self._members.pop(member)
        back = [*gone.done, *([gone.under_way] if gone.under_way else [])]
        self._left += back
        return sum(rows.rows for rows in back)

    def begin(self, step: int, now_s: float) -> None:
        """Give out the rows of this step."""
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
        """Return rows for a member; `None`: it has some, others will be done sooner, or nothing is
        left now.
        """
        own = self._members[member]
        if own.under_way is not None:
            return None
        given = self._fixed_rows(member) if self._fixed else self._rows(member, most_rows, now_s)
        if given is not None:
            own.under_way, own.since_s, own.asked_in = given, now_s, self._step
        return given

    def done(self, member: str, now_s: float) -> None:
        """Take note that it has computed what it was given."""
        own = self._members[member]
        if own.under_way is not None:
            speed = own.under_way.rows / max(1e-6, now_s - own.since_s)
            own.measured = [*own.measured[-_WARM_UP - _MEASURES :], speed]
            own.done.append(own.under_way)
            own.under_way = None

    def late(self, beside_s: float, now_s: float) -> list[str]:
        """Return the members whose rows take far longer than they should, and so long beside."""
        return [
            member
            for member, each in self._members.items()
            if each.under_way is not None
            and each.speed is not None
            and now_s - each.since_s > beside_s + _LATE * each.under_way.rows / each.speed
        ]

    def _fixed_rows(self, member: str) -> Rows | None:
        owners = [self._order[rows.unit] for rows in self._left]
        own = [place for place, owner in enumerate(owners) if owner == member]
        free = [place for place, owner in enumerate(owners) if owner not in self._members]
        return self._left.pop((own + free)[0]) if own + free else None

    def _rows(self, member: str, most_rows: int, now_s: float) -> Rows | None:
        probed = [each for each in self._members if self._is_unknown(each)]
        is_probed, kept = member in probed, 0
        if not is_probed and now_s - self._began_s < _PROBE_WAIT_S:
            kept = len(probed)
        left = sum(rows.rows for rows in self._left) - kept
        if left <= 0:
            return None
        rows = round(self._fair(member, left, now_s))
        if not rows:
            sooner = any(
                self._busy_s(other, now_s) + 1 / self._speed(other) < 1 / self._speed(member)
                for other in self._members
                if other != member
            )
            if sooner and not is_probed:
                return None
        first = self._left[0]
        rows = min(next_part(max(1, rows), most_rows), first.rows)
        rest = Rows(first.first + rows, first.rows - rows, first.unit)
        self._left[:1] = [rest] if rest.rows else []
        return Rows(first.first, rows, self._order.index(member))

    def _fair(self, member: str, left: int, now_s: float) -> float:
        """Return how many of the rows that are left it computes if all end at the same time."""
        others = [each for each in self._members if each != member]
        waiting = sorted((self._busy_s(each, now_s), self._speed(each)) for each in others)
        speed, rows = self._speed(member), float(left)
        for busy_s, other in waiting:
            if rows / speed <= busy_s:  # all is done before that one is free
                break
            speed, rows = speed + other, rows + busy_s * other
        return self._speed(member) * rows / speed

    def _is_unknown(self, member: str) -> bool:
        """Whether it got no rows for so long that its speed may be another one."""
        return self._step - self._members[member].asked_in >= _PROBE_EVERY

    def _speed(self, member: str) -> float:
        """Return its speed; of one that is not known that of the slowest."""
        known = [speed for each in self._members.values() if (speed := each.speed)]
        return self._members[member].speed or min(known, default=1.0)

    def _busy_s(self, member: str, now_s: float) -> float:
        own = self._members[member]
        if own.under_way is None:
            return 0.0
        return max(0.0, own.under_way.rows / self._speed(member) - (now_s - own.since_s))
