"""The sizes that are possible: from the smallest to the largest, in steps or on given rungs. Decides nothing."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The sizes there are.

    Raises:
        ValueError: There are none.
    """

    largest: int
    smallest: int = 1
    quantum: int = 1
    """Sizes are multiples of this; `smallest` and `largest` themselves are always allowed."""
    rungs: tuple[int, ...] = ()
    """The only sizes there are, ascending, from `smallest` to `largest`; empty for all multiples of `quantum`."""
    first: int | None = None
    """Where a workload that was never measured begins; `None` for a small share of `largest`."""
    power: float = 1.0
    """Memory grows with size^power."""
    worth_growing: float = 0.01
    """A size grows only by this share or more, because a change has a cost."""
    failures_per_minute: int = 6
    """Never more within any 60 s."""
    exact_samples: bool = False
    """Whether samples of free memory are true to the byte when they are taken; else they are smoothed."""

    def __post_init__(self) -> None:
        if not 1 <= self.smallest <= self.largest:
            raise ValueError(f"sizes must be 1 <= smallest <= largest, not {self.smallest} and {self.largest}")
        for name, value in {"quantum": self.quantum, "failures_per_minute": self.failures_per_minute}.items():
            if value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if self.power <= 0:
            raise ValueError(f"power must be above 0, not {self.power}")
        if self.rungs and (self.rungs[0], self.rungs[-1]) != (self.smallest, self.largest):
            raise ValueError(f"rungs must reach from {self.smallest} to {self.largest}")

    def down(self, size: float) -> int:
        """Return the largest size there is that is no larger; `smallest` at least."""
        if size >= self.largest:
            return self.largest
        if self.rungs:
            return self.rungs[max(0, bisect_right(self.rungs, size) - 1)]
        return max(self.smallest, int(size) // self.quantum * self.quantum)

    def up(self, size: int) -> int:
        """Return the next larger size there is; `largest` at most."""
        if size >= self.largest:
            return self.largest
        if self.rungs:
            return self.rungs[bisect_right(self.rungs, size)]
        return min(self.largest, (size // self.quantum + 1) * self.quantum)
