"""The memory of a slot with the injected out-of-memory errors of `run --chaos`.

The errors have torch's own type. They are raised at the beginning of a part, before it allocates.
Does not recover: the loop does.
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
    """Makes each part run out of memory with probability `oom_rate`."""

    def __init__(self, *arguments: Any, seed: str, oom_rate: float) -> None:  # noqa: ANN401 - handed on
        super().__init__(*arguments)
        self._chance, self._oom_rate = Random(seed), oom_rate  # noqa: S311 - repeatable is wanted

    def measured(self, part: Callable[[], R]) -> R:
        """Run a part, or raise an injected out-of-memory in its place."""
        return super().measured(lambda: self._run_or_fail(part))

    def _run_or_fail(self, part: Callable[[], R]) -> R:
        if self._chance.random() < self._oom_rate:
            self._account.event("chaos", kind="oom", count=1)
            raise injected_error(FailureKind.DEFINITE)
        return part()
