"""One call of a function that may run out of memory: try, give back, try smaller.

Covers the course of a call: which size comes next (asked of `workers.resilience.adaptive_size.AdaptiveSize`, which
remembers it for the next call), what a failure means (`workers.oom`), the way back after one, how long to wait and when
to give up. Does not cover how a function gets to be called like this (`workers.resilience.decorator`). Needs no torch.

A call always ends. A size is tried, given back and followed by the next one at most `_ATTEMPT_LIMIT` times, waiting at
most `max_wait_s` in all, and no call ends in `OutOfBatchError` before its smallest size has really failed: an error
rests on a failure, never on a prediction.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from workers.oom import Failure
from workers.resilience.adaptive_size import AdaptiveSize
from workers.resilience.batches import OutOfBatchError, Retry, Rules
from workers.resilience.card_memory import Look, Peak, look, release
from workers.resilience.error_scope import judged
from workers.settings import FailureKind, Learned

if TYPE_CHECKING:
    from workers.resilience.limit_lookup import Recall

R = TypeVar("R")

#: A probable out-of-memory may be a bug; the engine accepts it as often.
MAX_PROBABLE_IN_A_ROW: Final = 2

#: Each size twice, on the way from 2^31 down to 1 by halves. A watchdog: no course comes near it.
_ATTEMPT_LIMIT: Final = 64

#: How often a call that waits asks whether it may continue.
_POLL_S: Final = 0.5

_SIZES_TOLD: Final = 8

_MINUTE_S: Final = 60.0

_log = logging.getLogger(__name__)


class Attempts:
    """What is known from one call of a function to the next. Threads may share it."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._lock = threading.Lock()
        self._recall: Recall | None = None
        if rules.workload is not None:
            # The store needs Unix; who does not use it, does not.
            from workers.resilience.limit_lookup import Recall  # noqa: PLC0415

            self._recall = Recall(rules.workload, rules.clock)
        self.reset()
        #: Not here but before the first call: by then the card may be known.
        self._to_recall = self._recall is not None
        self._failed_at_s: deque[float] = deque(maxlen=rules.failures_per_minute)

    def __reduce__(self) -> tuple[type[Attempts], tuple[Rules]]:
        # What was learned is of this process: its card and what else it holds there.
        return type(self), (self._rules,)

    def reset(self) -> None:
        """Forget everything learned."""
        with self._lock:
            self._to_recall = False
            # A call may be all there ever is, a whole training, so it begins at the top and not with small steps that
            # calibrate.
            self._begin(Learned(size=self._rules.starting_batch_size))
            #: Whether this device's memory says anything about the function. It does not if that works elsewhere.
            self._tells = True
            #: Whether the last call ended because the smallest size failed.
            self._gave_up = False
            self.batch_size: int | None = None
            """The size of the last success."""

    def run(self, function: Callable[[int], R]) -> R:
        """Call `function` with a size, smaller ones after each out-of-memory, and return what it returns.

        Raises:
            OutOfBatchError: The smallest size failed.
            Exception: Whatever else `function` raised, unchanged and at once.
        """
        self._remind()
        course = _Course()
        while True:
            size, before = self._choose(course)
            if course.failure is not None and self._rules.on_retry is not None:
                self._rules.on_retry(
                    Retry(batch_size=course.tried[-1], next_batch_size=size, reason=course.failure.text)
                )
            with Peak(before) as peak:
                outcome = _attempt(function, size, course)
            if isinstance(outcome, _Done):
                self._succeeded(size, peak.bytes)
                return outcome.result
            course.tried.append(size)
            course.failure = outcome
            self._failed(size)
            release()

    def _begin(self, learned: Learned) -> None:
        rules = self._rules
        #: Where the first call begins. A size from an earlier process is not exceeded before it has held, unless its
        #: footprint is known too: then free memory says what fits.
        self._start = learned.size if learned.unit_bytes is None else rules.starting_batch_size
        self._sizer = AdaptiveSize(
            rules.starting_batch_size,
            smallest=rules.smallest_batch_size,
            quantum=rules.multiple_of,
            failures_per_minute=rules.failures_per_minute,
            exact_samples=True,  # each attempt begins with a look
            learned=learned,
            clock=rules.clock,
        )

    def _remind(self) -> None:
        with self._lock:
            if self._recall is not None and self._to_recall:
                self._to_recall = False
                if (learned := self._recall.best()) is not None:
                    self._begin(learned)

    def _succeeded(self, size: int, peak_bytes: int | None) -> None:
        with self._lock:
            self._sizer.succeeded(size, peak_bytes)
            self._tells = peak_bytes is not None
            self._gave_up = False
            self.batch_size = size
            if self._recall is not None:
                self._recall.keep(self._sizer.learned, peak_bytes)

    def _failed(self, size: int) -> None:
        with self._lock:
            self._sizer.failed(size)
            self._failed_at_s.append(self._rules.clock())

    def _choose(self, course: _Course) -> tuple[int, Look | None]:
        """Return the size of the next attempt and what memory looks like before it; wait if nothing may run now.

        Raises:
            OutOfBatchError: There is nothing left to try.
        """
        smallest = self._rules.smallest_batch_size
        while True:
            before = look()
            size = self._next(course, before)
            if course.tried.count(smallest) > 1 or (size is None and smallest in course.tried):
                raise self._given_up(course)
            left_s = self._rules.max_wait_s - course.waited_s
            if len(course.tried) >= _ATTEMPT_LIMIT or (size is None and (left_s <= 0 or self._is_worth_a_try(course))):
                return smallest, before
            if size is not None:
                return size, before
            if course.waited_s == 0:
                _log.warning("%s waits for memory, %.0f s at the most: %s", self._rules.name, left_s, self._reason())
            self._rules.sleep(min(_POLL_S, left_s))
            course.waited_s += min(_POLL_S, left_s)

    def _is_worth_a_try(self, course: _Course) -> bool:
        """Whether to try the smallest size now although the last call gave up there.

        The caller may be a resilient function that has shrunk its own size, and must not wait for the policy.
        """
        with self._lock:
            failures, most = self._failed_at_s, self._rules.failures_per_minute
            may_fail = len(failures) < most or self._rules.clock() - failures[0] >= _MINUTE_S
            return self._gave_up and may_fail and not course.tried

    def _next(self, course: _Course, before: Look | None) -> int | None:
        with self._lock:
            size = self._sizer.next(None if before is None or not self._tells else before.free_bytes)
            if size is None or self.batch_size is not None:
                return size
        if not course.tried:
            return size if size <= self._start else self._down(self._start)
        # No size has succeeded yet, so it is unknown by how much the start was too large. Take half of what failed and
        # not less: if there is only this call, everything runs with the size it ends at.
        return max(size, self._down(course.tried[-1] // 2))

    def _down(self, size: int) -> int:
        return max(self._rules.smallest_batch_size, size // self._rules.multiple_of * self._rules.multiple_of)

    def _reason(self) -> str:
        with self._lock:
            return self._sizer.reason

    def _given_up(self, course: _Course) -> OutOfBatchError:
        rules = self._rules
        self._gave_up = True
        tried = tuple(course.tried)
        sizes = ("… " if len(tried) > _SIZES_TOLD else "") + ", ".join(str(size) for size in tried[-_SIZES_TOLD:])
        failure = "" if course.failure is None else f" ({course.failure.text})"
        lower = f", or lower smallest_batch_size={rules.smallest_batch_size}" if rules.smallest_batch_size > 1 else ""
        return OutOfBatchError(
            f"{rules.name} ran out of memory at its smallest batch size too; tried {sizes}{failure}. Free memory that "
            f"this process or another one holds (on a card nvidia-smi tells), or make the model or one item "
            f"smaller{lower}",
            tried,
        )


@dataclass(slots=True, kw_only=True)
class _Course:
    """How one call has gone so far."""

    tried: list[int] = field(default_factory=list)
    failure: Failure | None = None
    """The last one, as strings: nothing of an attempt outlives it."""
    probable_in_a_row: int = 0
    waited_s: float = 0.0

    def believes(self, failure: Failure) -> bool:
        """Count a failure; return whether it counts as out-of-memory."""
        self.probable_in_a_row = self.probable_in_a_row + 1 if failure.kind is FailureKind.PROBABLE else 0
        if failure.kind is FailureKind.PROBABLE:
            return self.probable_in_a_row <= MAX_PROBABLE_IN_A_ROW
        return failure.kind is FailureKind.DEFINITE


@dataclass(frozen=True, slots=True)
class _Done(Generic[R]):
    result: R


def _attempt(function: Callable[[int], R], size: int, course: _Course) -> _Done[R] | Failure:
    """Call `function`; return its result, or how it ran out of memory, with the handler behind us."""
    handled = sys.exception()
    try:
        return _Done(function(size))
    except Exception as error:
        # Only strings leave the handler: the traceback holds the frames, and the frames hold the tensors.
        failure = judged(error, handled)
        if not course.believes(failure):
            raise
    return failure
