"""The loop: runs a part of a step, releases memory after an out-of-memory, and retries smaller.

    loop = Loop(sizes, memory, watch)
    while work_is_left:
        loop.run(lambda size: compute(size))

`Sizes` decides how large a part is, `Memory` measures and releases memory, and `Watch` counts,
waits and logs. The loop decides nothing, and knows neither torch nor the meaning of a size. Its
steps are in one place because their order matters: memory is released outside the exception
handler, whose traceback keeps the frames alive, and the frames keep the tensors.
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
    """Measures and releases the memory in which parts run."""

    def allowed_bytes(self) -> int | None:
        """Return the bytes that the next part may hold in all; `None` if unknown."""

    def measured(self, part: Callable[[], R], /) -> R:
        """Run a part, and measure its peak."""

    def peak_bytes(self) -> int | None:
        """Return the peak of the last measured part, also if it failed."""

    def failed_bytes(self, failure: Failure, /) -> int | None:
        """Return the bytes that the part that just failed would have held. Called while its frames
        are still alive.
        """

    def release(self) -> None:
        """Release the memory of a failed part."""


class Watch(Protocol[S_contra]):
    """Is called before and after each part of a loop."""

    def begins(self, size: S_contra, /) -> None:
        """Called before a part of this size; an exception ends the step."""

    def ended(self, size: S_contra, /) -> None:
        """Called after a part of this size has succeeded."""

    def ran_out(self, size: S_contra, failure: Failure, at_least_bytes: int | None, /) -> None:
        """Called after a part of this size ran out of memory, and the memory was released."""

    def starved(self, reason: str, /) -> None:
        """Called if nothing fits: wait until a retry makes sense, or raise to end the step."""


class Loop(Generic[S]):
    """Runs parts one after another. Not thread-safe."""

    def __init__(self, sizes: Sizes[S], memory: Memory, watch: Watch[S]) -> None:
        self.sizes = sizes
        self._memory, self._watch = memory, watch
        self._probable_in_a_row = 0
        self._is_partial = False
        self.allowed_bytes: int | None = None
        """Bytes that the present part may hold, as last measured; `None` if never measured."""
        self.peak_bytes: int | None = None
        """Peak of the last successful part; `None` if it was not measured."""

    def run(self, part: Callable[[S], R]) -> R:
        """Run a part at a size that fits; after each out-of-memory retry at the next smaller size.

        Raises:
            Exception: Any exception of the part that is not an out-of-memory, unchanged and at
                once; or an exception of the watch.
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
                if not self._counts_as_oom(failure):
                    raise
                # Only numbers and text leave the handler.
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
        """Mark the present part as smaller than its size allows, so that its peak is not learned
        from. Call it inside the part.
        """
        self._is_partial = True

    def _counts_as_oom(self, failure: Failure) -> bool:
        """Return whether a failure counts as an out-of-memory. One known only by its text counts at
        most `MAX_PROBABLE_IN_A_ROW` times in a row.
        """
        is_probable = failure.kind is FailureKind.PROBABLE
        self._probable_in_a_row = self._probable_in_a_row + 1 if is_probable else 0
        if is_probable:
            return self._probable_in_a_row <= MAX_PROBABLE_IN_A_ROW
        return failure.kind is FailureKind.DEFINITE
