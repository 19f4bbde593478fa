"""How long a sample takes at each point of a training's ladder: a rule at first, then what was
measured. Pure.

The seconds of a sample are a sum: what it takes at best, a part's overhead divided by its samples,
a share for the blocks that are computed again, and a share for the states that come from the host.
Measured points correct these four numbers, so that they also tell of points that were never
visited. None of them is ever negative: where another program made a step slow, what takes more
memory is not taken to be the slower step. Does not measure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

#: What a part of a batch costs beside its samples, in samples: 4 at once were 4 % slower than 16
#: (two CPU cores, three layers of width 64; on a card it is more).
_PART_SAMPLES: Final = 0.16

#: Computing all blocks again takes a third of the time of a step: a forward pass beside a forward
#: and a backward one, which takes twice as long.
_AGAIN: Final = 1 / 3

#: Copying all states to a card and back takes as long as so many samples: 16 bytes for each weight
#: at 12 GB/s, against 6 operations for each weight and token at 30 TFLOP/s, with 1,024 tokens.
_HOST_SAMPLES: Final = 6.5

#: Relative error of a measured speed; the four numbers of the rule are taken to be wrong by their
#: own size.
_NOISE: Final = 0.02

#: No cost becomes less than this share of the rule's.
_LEAST: Final = 0.01

#: Whole levels of a `Rung.level` for one per cent of states on the host.
_SHARE_STEP: Final = 1000


@dataclass(frozen=True, slots=True, order=True)
class Point:
    """One of the steps that a training can take."""

    micro: int
    """Samples computed at once."""
    level: int = 0
    """Blocks that are recomputed."""
    share_pct: int = 0
    """Of the optimiser's states, on the host."""

    @property
    def rung_level(self) -> int:
        """Both as one number, for a `Rung`."""
        return self.level + _SHARE_STEP * self.share_pct

    @staticmethod
    def of(micro: int, rung_level: int) -> Point:
        """Return the point of a rung."""
        share_pct, level = divmod(rung_level, _SHARE_STEP)
        return Point(micro, level, share_pct)


class Speeds:
    """Says how long a sample takes."""

    def __init__(
        self, batch: int, most_level: int, measured: Mapping[Point, float] | None = None
    ) -> None:
        """Begin with a rule, corrected by the seconds of a sample that were measured."""
        self._most_level = max(1, most_level)
        self._rule = (1.0, _PART_SAMPLES, _AGAIN, _HOST_SAMPLES / batch)
        self._factors = self._fitted(measured or {})

    def seconds(self, point: Point) -> float:
        """Return the seconds of a sample.

        Before anything was measured as a multiple of what it takes at best.
        """
        return _product(self._factors, self._terms(point))

    def _terms(self, point: Point) -> tuple[float, ...]:
        """Return what each number of the rule adds, as the rule has it."""
        part, again, host = self._rule[1:]
        again_share = point.level / self._most_level
        parted = 1 + part / point.micro
        return (1.0, part / point.micro, again * again_share * parted, host * point.share_pct / 100)

    def _fitted(self, measured: Mapping[Point, float]) -> Sequence[float]:
        """Return a factor for each of the four: least squares, with the rule as a measurement of
        its own.
        """
        ones = (1.0,) * len(self._rule)
        if not measured:
            return ones
        rows = [self._terms(point) for point in measured]
        scale = median(
            seconds / sum(row) for row, seconds in zip(rows, measured.values(), strict=True)
        )
        told = [seconds / scale for seconds in measured.values()]
        count = range(len(ones))
        matrix = [
            [sum(row[i] * row[j] for row in rows) / _NOISE**2 + (i == j) for j in count]
            for i in count
        ]
        right = [
            sum(row[i] * each for row, each in zip(rows, told, strict=True)) / _NOISE**2 + 1
            for i in count
        ]
        return [scale * max(_LEAST, each) for each in _solved(matrix, right)]


def _product(factors: Iterable[float], terms: Iterable[float]) -> float:
    return sum(factor * term for factor, term in zip(factors, terms, strict=True))


def _solved(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Solve a positive definite system by elimination."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i, pivot in enumerate(rows):
        for row in rows[i + 1 :]:
            factor = row[i] / pivot[i]
            row[:] = [a - factor * b for a, b in zip(row, pivot, strict=True)]
    found = [0.0] * len(rows)
    for i in reversed(range(len(rows))):
        *left, value = rows[i]
        found[i] = (value - _product(left, found)) / left[i]
    return found
