"""What a check of a result found, as a value that may cross processes.

Does not check anything (`freivalds` and `repeat` do). Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check of one result."""

    kind: str
    """`freivalds` or `repeat`; a workload of the user's may have a word of its own."""
    ok: bool
    worst: float
    """Largest ratio of an error to what is tolerated; `inf` where bits differ or a number is not finite."""
    detail: str
    """Size and element type, and where it failed, in words."""
