"""Values of `resilient`: its options with their checks, what `on_retry` gets, and the final error.

Does not use them (`workers.resilience.retry` does).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


class OutOfBatchError(MemoryError, RuntimeError):
    """Not even the smallest batch size fits.

    It is a `MemoryError` as well, so that a caller (another resilient function or a worker's engine) treats it as an
    out-of-memory and may shrink its own size. Can be pickled.
    """

    def __init__(self, sentence: str, tried: tuple[int, ...]) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        """What was tried and what to do next; the whole message."""
        self.tried = tried
        """Every batch size that failed in this call, in order."""

    def __reduce__(self) -> tuple[type[OutOfBatchError], tuple[str, tuple[int, ...]]]:
        return type(self), (self.sentence, self.tried)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """What `on_retry` gets: an attempt ran out of memory, all was given back, and another one begins."""

    batch_size: int
    """The one that failed."""
    next_batch_size: int
    reason: str
    """The text of the error: one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a function's user asked for. See `workers.resilience.decorator.resilient`.

    Raises:
        TypeError: A batch size is no whole number.
        ValueError: The numbers leave no size to try.
    """

    name: str
    """The function's, for messages."""
    starting_batch_size: int
    smallest_batch_size: int = 1
    multiple_of: int = 1
    failures_per_minute: int = 6
    max_wait_s: float = 120.0
    workload: str | None = None
    """The name under which what is learned outlives the process; `None` if it does not."""
    on_retry: Callable[[Retry], None] | None = None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        for name in ("starting_batch_size", "smallest_batch_size", "multiple_of", "failures_per_minute"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} of {self.name} must be a whole number, not {value!r}")
            if value < 1:
                raise ValueError(f"{name} of {self.name} must be at least 1, not {value}")
        if self.smallest_batch_size > self.starting_batch_size:
            raise ValueError(
                f"smallest_batch_size of {self.name} ({self.smallest_batch_size}) must not be above its "
                f"starting_batch_size ({self.starting_batch_size}), the largest that is ever tried"
            )
        if not self.max_wait_s >= 0:
            raise ValueError(f"max_wait_s of {self.name} must be 0 or more seconds, not {self.max_wait_s}")
