"""One call of a function that may run out of memory: which size is tried, and when it is given up.

Covers the options of `resilient` with their checks, what is known from one call to the next, and
how long a call waits. The loop (`workers/elastic/loop.py`) tries and gives memory back; this says
with which size. Does not wrap functions (`decorator.py`).

A call always ends. A size is tried, given back and followed by the next one at most
`_ATTEMPT_LIMIT` times, waiting at most `max_wait_s` in all, and no call ends in `OutOfBatchError`
before its smallest size has really failed: an error rests on a failure, never on a prediction.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import psutil

from workers.elastic.card_memory import CurrentCard
from workers.elastic.loop import Loop
from workers.learned_limits import LimitKey, LimitStore
from workers.nvml import queries
from workers.oom import Failure
from workers.resilience.adaptive_size import AdaptiveSize
from workers.settings import Learned

R = TypeVar("R")

#: Each size twice, on the way from 2^31 down to 1 by halves. A watchdog: no course comes near it.
_ATTEMPT_LIMIT: Final = 64

#: How often a call that waits asks whether it may continue.
_POLL_S: Final = 0.5

_SIZES_TOLD: Final = 8

#: What was learned is written so often at most.
_KEEP_EVERY_S: Final = 10.0

#: What accelerate's `find_executable_batch_size` says then; its callers may look for these words.
_NOTHING_LEFT: Final = "No executable batch size found, reached zero."

_log = logging.getLogger(__name__)


class OutOfBatchError(MemoryError, RuntimeError):
    """Not even the smallest batch size fits.

    It is a `MemoryError` as well, so that a caller (another resilient function or a worker's
    engine) treats it as an out-of-memory and may shrink its own size. Can be pickled.
    """

    def __init__(self, sentence: str, tried: tuple[int, ...]) -> None:
        super().__init__(sentence)
        self.tried = tried
        """Every batch size that failed in this call, in order."""

    def __reduce__(self) -> tuple[type[OutOfBatchError], tuple[str, tuple[int, ...]]]:
        return type(self), (str(self), self.tried)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """What `on_retry` gets: an attempt ran out of memory, all was given back, and another one
    begins.
    """

    batch_size: int
    """The one that failed."""
    next_batch_size: int
    reason: str
    """The text of the error: one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryRules:
    """What a function's user asked for.

    `workers.resilience.decorator.resilient` says what it means and raises.
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
        for name in (
            "starting_batch_size",
            "smallest_batch_size",
            "multiple_of",
            "failures_per_minute",
        ):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} of {self.name} must be a whole number, not {value!r}")
            if value < 1:
                raise ValueError(f"{name} of {self.name} must be at least 1, not {value}")
        if self.smallest_batch_size > self.starting_batch_size:
            raise ValueError(
                f"smallest_batch_size of {self.name} ({self.smallest_batch_size}) must not be "
                "above its "
                f"starting_batch_size ({self.starting_batch_size}), the largest that is ever tried"
            )
        if not self.max_wait_s >= 0:
            raise ValueError(
                f"max_wait_s of {self.name} must be 0 or more seconds, not {self.max_wait_s}"
            )


class Attempts:
    """What is known from one call of a function to the next. Threads may share it."""

    def __init__(self, rules: RetryRules) -> None:
        self.rules = rules
        self._lock = threading.Lock()
        self._limits: LimitStore | None = None
        if rules.workload is not None:
            key, tell = partial(_key, rules.workload), partial(_log.warning, "%s")
            self._limits = LimitStore(key, tell, every_s=_KEEP_EVERY_S)
        self.reset()
        #: Not here but before the first call: by then the card may be known.
        self._to_recall = self._limits is not None

    def reset(self) -> None:
        """Forget everything learned."""
        with self._lock:
            self._to_recall = False
            # A call may be all there ever is, a whole training, so it begins at the top and not
            # with small steps that calibrate.
            self._begin(Learned(size=self.rules.starting_batch_size))
            #: Whether this device's memory says anything about the function. It does not if that
            #: works elsewhere.
            self._tells = True
            self.gave_up = False
            """Whether the last call ended because the smallest size failed."""
            self.batch_size: int | None = None
            """The size of the last success."""

    def run(self, function: Callable[[int], R]) -> R:
        """Call `function` with a size, smaller ones after each out-of-memory, and return what it
        returns.

        Raises:
            OutOfBatchError: The smallest size failed.
            Exception: Whatever else `function` raised, unchanged and at once.
        """
        with self._lock:
            if self._limits is not None and self._to_recall:
                self._to_recall = False
                if (limit := self._limits.best()) is not None:
                    self._begin(limit.learned)
        call = _Call(self)
        return Loop(call, CurrentCard(), call).run(function)

    @property
    def reason(self) -> str:
        """Why there was no size, in words."""
        return self._sizer.reason

    def next(self, free_bytes: int | None, tried: list[int]) -> int | None:
        """Return a size for a call that has tried these; `None`: nothing may run now."""
        with self._lock:
            size = self._sizer.next(free_bytes if self._tells else None)
            if size is None and not tried and self.gave_up and self._sizer.may_fail:
                # The caller may be a resilient function that has shrunk its own size, and must not
                # wait here because the last call gave up.
                return self.rules.smallest_batch_size
            if size is None or self.batch_size is not None or not tried:
                return size
            # No size has succeeded yet, so it is unknown by how much the start was too large. Take
            # half of what failed and not less: if there is only this call, everything runs with the
            # size it ends at.
            return max(size, self._sizer.bounds.down(tried[-1] // 2))

    def succeeded(self, size: int, peak_bytes: int | None) -> None:
        """Take note of a success."""
        with self._lock:
            self._sizer.succeeded(size, peak_bytes)
            self._tells = peak_bytes is not None
            self.gave_up = False
            self.batch_size = size
            if self._limits is not None:
                self._limits.keep(self._sizer.learned)

    def failed(self, size: int) -> None:
        """Take note of an out-of-memory."""
        with self._lock:
            self._sizer.failed(size)

    def _begin(self, learned: Learned) -> None:
        rules = self.rules
        self._sizer = AdaptiveSize(
            rules.starting_batch_size,
            smallest=rules.smallest_batch_size,
            quantum=rules.multiple_of,
            failures_per_minute=rules.failures_per_minute,
            exact_samples=True,  # each attempt begins with a look
            learned=learned,
            clock=rules.clock,
        )


class _Call:
    """One call: sizes for its loop, and what is done where none fits."""

    def __init__(self, attempts: Attempts) -> None:
        self._attempts, self._rules = attempts, attempts.rules
        self._tried: list[int] = []
        self._failure: Failure | None = None
        """The last one, as strings: nothing of an attempt outlives it."""
        self._waited_s = 0.0

    @property
    def reason(self) -> str:
        """See `Sizes.reason`."""
        return self._attempts.reason

    def next(self, free_bytes: int | None) -> int | None:
        """See `Sizes.next`.

        Raises:
            OutOfBatchError: The smallest size has failed.
        """
        tried, smallest = self._tried, self._rules.smallest_batch_size
        size = self._attempts.next(free_bytes, tried)
        if tried.count(smallest) > 1 or (size is None and smallest in tried):
            raise self._given_up()
        if len(tried) >= _ATTEMPT_LIMIT:
            return smallest
        return smallest if size is None and self._left_s <= 0 else size

    def succeeded(self, size: int, peak_bytes: int | None, _is_partial: bool) -> None:
        """See `Sizes.succeeded`."""
        self._attempts.succeeded(size, peak_bytes)

    def failed(self, size: int, _at_least_bytes: int | None) -> None:
        """See `Sizes.failed`."""
        self._tried.append(size)
        self._attempts.failed(size)

    def ran_out(self, _size: int, failure: Failure, _at_least_bytes: int | None) -> None:
        """See `Watch.ran_out`."""
        self._failure = failure

    def begins(self, size: int) -> None:
        """Tell the user of the failure before this attempt."""
        if self._failure is not None and self._rules.on_retry is not None:
            self._rules.on_retry(
                Retry(batch_size=self._tried[-1], next_batch_size=size, reason=self._failure.text)
            )

    def ended(self, size: int) -> None:
        """See `Watch.ended`."""

    def starved(self, reason: str) -> None:
        """Wait a little."""
        if self._waited_s == 0:
            name, left_s = self._rules.name, self._left_s
            _log.warning("%s waits for memory, %.0f s at the most: %s", name, left_s, reason)
        wait_s = min(_POLL_S, self._left_s)
        self._rules.sleep(wait_s)
        self._waited_s += wait_s

    @property
    def _left_s(self) -> float:
        return self._rules.max_wait_s - self._waited_s

    def _given_up(self) -> OutOfBatchError:
        rules = self._rules
        self._attempts.gave_up = True
        tried = tuple(self._tried)
        sizes = ("… " if len(tried) > _SIZES_TOLD else "") + ", ".join(
            str(size) for size in tried[-_SIZES_TOLD:]
        )
        failure = "" if self._failure is None else f" ({self._failure.text})"
        smallest = rules.smallest_batch_size
        end = f", or lower smallest_batch_size={smallest}" if smallest > 1 else f". {_NOTHING_LEFT}"
        return OutOfBatchError(
            f"{rules.name} ran out of memory at its smallest batch size too; tried "
            f"{sizes}{failure}. Free memory that "
            "this process or another one holds (on a card nvidia-smi tells), or make the model "
            "or one item "
            f"smaller{end}",
            tried,
        )


def _key(workload: str) -> LimitKey:
    """Return the circumstances under which a size holds: card, cap and versions.

    Initialises CUDA if torch is loaded and sees a card.
    """
    import resource  # noqa: PLC0415 - only on Unix

    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        device = torch.cuda.current_device()
        card, driver = torch.cuda.get_device_properties(device), queries.driver_version()
        name, total_bytes = card.name, card.total_memory
        cap_bytes = int(torch.cuda.get_per_process_memory_fraction(device) * total_bytes)
    else:
        name, total_bytes, driver = "CPU", psutil.virtual_memory().total, None
        limits = [
            resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_AS)
        ]
        cap_bytes = min(
            [total_bytes, *(limit for limit in limits if limit != resource.RLIM_INFINITY)]
        )
    return LimitKey(
        card=name,
        driver=driver,
        torch="none" if torch is None else str(torch.__version__),
        # A function does not report the types in which it computes; its name stands for that.
        dtype="any",
        workload=workload,
        cap_bytes=cap_bytes,
    )
