"""The loop: it tries a part of a step, gives memory back after an out-of-memory, and tries a
smaller one.

    loop = Loop(sizes, memory, watch)
    while work_is_left:
        loop.run(lambda size: compute(size))

`Sizes` decides how large a part is, `Memory` knows what there is of it, and `Watch` counts, waits
and tells. The loop decides nothing, and knows neither torch nor what a size means. What it does
stands in one place because the order matters: memory is given back outside of the exception
handler, whose traceback holds the frames, and the frames hold the tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from workers import oom
from workers.oom import MAX_PROBABLE_IN_A_ROW, Failure
from workers.policy.base import Sizes
from workers.settings import FailureKind

R = TypeVar("R")
S = TypeVar("S")
S_contra = TypeVar("S_contra", contravariant=True)


class Memory(Protocol):
    """The memory in which parts run."""

    def allowed_bytes(self) -> int | None:
        """Return all that the next part may hold; `None` if that is not known."""

    def measured(self, part: Callable[[], R], /) -> R:
        """Run a part, and measure the most that it holds."""

    def peak_bytes(self) -> int | None:
        """Return the most that the last measured part held, also of one that failed."""

    def failed_bytes(self, failure: Failure, /) -> int | None:
        """Return what a part would have held that has just failed. Its frames are still there."""

    def release(self) -> None:
        """Give back what a failed part no longer holds."""


class Watch(Protocol[S_contra]):
    """What surrounds a loop."""

    def begins(self, size: S_contra, /) -> None:
        """Take note that a part of this size begins. What this raises ends the step."""

    def ended(self, size: S_contra, /) -> None:
        """Take note that it ended well."""

    def ran_out(self, size: S_contra, failure: Failure, at_least_bytes: int | None, /) -> None:
        """Take note that it ran out of memory, which was given back."""

    def starved(self, reason: str, /) -> None:
        """Wait until it makes sense to ask again, or raise what ends the step."""


class Loop(Generic[S]):
    """Runs parts one after the other. Not for several threads at once."""

    def __init__(self, sizes: Sizes[S], memory: Memory, watch: Watch[S]) -> None:
        self.sizes = sizes
        self._memory, self._watch = memory, watch
        self._probable_in_a_row = 0
        self._is_partial = False
        self.allowed_bytes: int | None = None
        """All that the part under way may hold, as it was measured last; `None`: never."""
        self.peak_bytes: int | None = None
        """The most that the last part held that ended well, if that was measured."""

    def run(self, part: Callable[[S], R]) -> R:
        """Run a part of the size that fits, and smaller ones after each out-of-memory.

        Raises:
            Exception: What the part raised that is no out-of-memory, unchanged and at once; or what
                the watch raises.
        """
        while True:
            allowed_bytes = self._memory.allowed_bytes()
            if allowed_bytes is not None:
                self.allowed_bytes = allowed_bytes
            size = self.sizes.next(allowed_bytes)
            if size is None:
                self._watch.starved(self.sizes.reason)
                continue
            self._watch.begins(size)
            failure: Failure | None = None
            handled = sys.exception()
            self._is_partial = False
            try:
                result = self._memory.measured(lambda size=size: part(size))  # type: ignore[misc]
            except Exception as error:
                failure = oom.classify(error, handled)
                if not self._believes(failure):
                    raise
                # Only figures and text leave the handler.
                at_least_bytes = self._memory.failed_bytes(failure)
                oom.drop_frames(error)
            if failure is None:
                self._probable_in_a_row = 0
                self.peak_bytes = self._memory.peak_bytes()
                self.sizes.succeeded(size, self.peak_bytes, self._is_partial)
                self._watch.ended(size)
                return result
            self._memory.release()
            self.sizes.failed(size, at_least_bytes)
            self._watch.ran_out(size, failure, at_least_bytes)

    def was_partial(self) -> None:
        """Say within a part that it has less to do than its size allows, so that what it takes of
        memory tells nothing.
        """
        self._is_partial = True

    def _believes(self, failure: Failure) -> bool:
        """Say whether it is an out-of-memory: one that is so by its text alone, only so often."""
        is_probable = failure.kind is FailureKind.PROBABLE
        self._probable_in_a_row = self._probable_in_a_row + 1 if is_probable else 0
        if is_probable:
            return self._probable_in_a_row <= MAX_PROBABLE_IN_A_ROW
        return failure.kind is FailureKind.DEFINITE
