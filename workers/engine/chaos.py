"""The memory of a slot with the out-of-memory errors of `run --chaos` in it.

The errors are torch's own, and come at the beginning of a part of a step, before anything
allocates. Recovers from nothing: the loop does.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, TypeVar

from workers.engine.memory import SlotMemory
from workers.settings import FailureKind
from workers.testing import injected_error

R = TypeVar("R")


class ChaoticMemory(SlotMemory):
    """Any part in it runs out of memory, if chance says so."""

    def __init__(self, *given: Any, seed: str, oom_rate: float) -> None:  # noqa: ANN401 - handed on
        super().__init__(*given)
        self._chance, self._oom_rate = Random(seed), oom_rate  # noqa: S311 - repeatable is wanted

    def measured(self, part: Callable[[], R]) -> R:
        """Run a part, or have it fail."""
        return super().measured(lambda: self._tried(part))

    def _tried(self, part: Callable[[], R]) -> R:
        if self._chance.random() < self._oom_rate:
            self._account.event("chaos", kind="oom", count=1)
            raise injected_error(FailureKind.DEFINITE)
        return part()
