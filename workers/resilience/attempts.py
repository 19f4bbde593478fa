"""One call of a function that may run out of memory: chooses the sizes to try and when to give up.

Contains the options of `resilient` with their checks, the state between calls, and the waiting of a
call. The loop (`workers/elastic/loop.py`) runs attempts and releases memory; this module chooses
the size. Does not wrap functions (`decorator.py` does).

A call always ends. It makes at most `_ATTEMPT_LIMIT` attempts, and waits at most `max_wait_s` in
all. It raises `OutOfBatchError` only after its smallest size has failed in an attempt, never
because of a prediction.
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

#: Watchdog: each size twice from 2^31 down to 1 by halves. No regular call comes near it.
_ATTEMPT_LIMIT: Final = 64

#: Seconds between two checks of a waiting call whether it may continue.
_POLL_S: Final = 0.5

_SIZES_LISTED: Final = 8

#: Fewest seconds between two writes of what was learned.
_WRITE_EVERY_S: Final = 10.0

#: The text of accelerate's `find_executable_batch_size`; its callers may search for it.
_NOTHING_LEFT: Final = "No executable batch size found, reached zero."

_log = logging.getLogger(__name__)


class OutOfBatchError(MemoryError, RuntimeError):
    """Not even the smallest batch size fits.

    It is also a `MemoryError`, so that a caller (another resilient function or a worker's engine)
    treats it as an out-of-memory and may reduce its own size. Can be pickled.
    """

    def __init__(self, sentence: str, tried: tuple[int, ...]) -> None:
        super().__init__(sentence)
        self.tried = tried
        """Every batch size that failed in this call, in order."""

    def __reduce__(self) -> tuple[type[OutOfBatchError], tuple[str, tuple[int, ...]]]:
        return type(self), (str(self), self.tried)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """The argument of `on_retry`: an attempt ran out of memory, the memory was released, and the
    next attempt begins.
    """

    batch_size: int
    """The size that failed."""
    next_batch_size: int
    reason: str
    """The text of the error, in one line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryRules:
    """The options of a resilient function.

    `workers.resilience.decorator.resilient` documents them and the errors.
    """

    name: str
    """The function's name, for messages."""
    starting_batch_size: int
    smallest_batch_size: int = 1
    multiple_of: int = 1
    failures_per_minute: int = 6
    max_wait_s: float = 120.0
    workload: str | None = None
    """The name under which learned sizes are stored for later processes; `None`: not stored."""
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
    """The state between the calls of a function. Threads may share it."""

    def __init__(self, rules: RetryRules) -> None:
        self.rules = rules
        self._lock = threading.Lock()
        self._limits: LimitStore | None = None
        if rules.workload is not None:
            key, warn = partial(_key, rules.workload), partial(_log.warning, "%s")
            self._limits = LimitStore(key, warn, every_s=_WRITE_EVERY_S)
        self.reset()
        #: Load stored sizes only before the first call: the card may be unknown until then.
        self._must_load = self._limits is not None

    def reset(self) -> None:
        """Forget everything learned."""
        with self._lock:
            self._must_load = False
            # The first call may be a whole training, so it begins with the largest size instead of
            # small steps for calibration.
            self._begin(Learned(size=self.rules.starting_batch_size))
            #: Whether this device's memory is related to the function, which may compute elsewhere.
            self._uses_device = True
            self.gave_up = False
            """Whether the last call ended because the smallest size failed."""
            self.batch_size: int | None = None
            """The size of the last success."""

    def run(self, function: Callable[[int], R]) -> R:
        """Call `function` with a size, and a smaller one after each out-of-memory; return its
        result.

        Raises:
            OutOfBatchError: The smallest size failed.
            Exception: Any other exception of `function`, unchanged and at once.
        """
        with self._lock:
            if self._limits is not None and self._must_load:
                self._must_load = False
                if (limit := self._limits.best()) is not None:
                    self._begin(limit.learned)
        call = _Call(self)
        return Loop(call, CurrentCard(), call).run(function)

    @property
    def reason(self) -> str:
        """Why `next` returned no size, in words."""
        return self._sizer.reason

    def next(self, free_bytes: int | None, tried: list[int]) -> int | None:
        """Return a size for a call that has tried those in `tried`; `None`: nothing may run now."""
        with self._lock:
            size = self._sizer.next(free_bytes if self._uses_device else None)
            if size is None and not tried and self.gave_up and self._sizer.may_fail:
                # The caller may be a resilient function that has reduced its own size. It must not
                # wait here because the last call gave up.
                return self.rules.smallest_batch_size
            if size is None or self.batch_size is not None or not tried:
                return size
            # No size has succeeded yet, so it is unknown how far the first size was too large. Take
            # half of the failed size and no less: if there is only this call, everything runs with
            # its last size.
            return max(size, self._sizer.bounds.down(tried[-1] // 2))

    def succeeded(self, size: int, peak_bytes: int | None) -> None:
        """Record a success."""
        with self._lock:
            self._sizer.succeeded(size, peak_bytes)
            self._uses_device = peak_bytes is not None
            self.gave_up = False
            self.batch_size = size
            if self._limits is not None:
                self._limits.keep(self._sizer.learned)

    def failed(self, size: int) -> None:
        """Record an out-of-memory."""
        with self._lock:
            self._sizer.failed(size)

    def _begin(self, learned: Learned) -> None:
        rules = self.rules
        self._sizer = AdaptiveSize(
            rules.starting_batch_size,
            smallest=rules.smallest_batch_size,
            quantum=rules.multiple_of,
            failures_per_minute=rules.failures_per_minute,
            exact_samples=True,  # each attempt begins with a measurement
            learned=learned,
            clock=rules.clock,
        )


class _Call:
    """One call: the `Sizes` and the `Watch` of its loop."""

    def __init__(self, attempts: Attempts) -> None:
        self._attempts, self._rules = attempts, attempts.rules
        self._tried: list[int] = []
        self._failure: Failure | None = None
        """The last failure, as strings: it must keep no object of an attempt alive."""
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
            raise self._out_of_batch()
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
        """Call `on_retry` with the failure before this attempt, if any."""
        if self._failure is not None and self._rules.on_retry is not None:
            self._rules.on_retry(
                Retry(batch_size=self._tried[-1], next_batch_size=size, reason=self._failure.text)
            )

    def ended(self, size: int) -> None:
        """See `Watch.ended`."""

    def starved(self, reason: str) -> None:
        """Wait up to `_POLL_S` seconds, as long as `max_wait_s` allows."""
        if self._waited_s == 0:
            name, left_s = self._rules.name, self._left_s
            _log.warning("%s waits for memory, %.0f s at the most: %s", name, left_s, reason)
        wait_s = min(_POLL_S, self._left_s)
        self._rules.sleep(wait_s)
        self._waited_s += wait_s

    @property
    def _left_s(self) -> float:
        return self._rules.max_wait_s - self._waited_s

    def _out_of_batch(self) -> OutOfBatchError:
        rules = self._rules
        self._attempts.gave_up = True
        tried = tuple(self._tried)
        sizes = ("… " if len(tried) > _SIZES_LISTED else "") + ", ".join(
            str(size) for size in tried[-_SIZES_LISTED:]
        )
        failure = "" if self._failure is None else f" ({self._failure.text})"
        smallest = rules.smallest_batch_size
        end = f", or lower smallest_batch_size={smallest}" if smallest > 1 else f". {_NOTHING_LEFT}"
        return OutOfBatchError(
            f"{rules.name} ran out of memory at its smallest batch size too; tried "
            f"{sizes}{failure}. Free memory that "
            "this process or another one holds (nvidia-smi shows it for a card), or make the model "
            "or one item "
            f"smaller{end}",
            tried,
        )


def _key(workload: str) -> LimitKey:
    """Return the conditions under which a size is valid: card, cap and versions.

    Initialises CUDA if torch is loaded and has a card.
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
        # A function does not report its data types; its name stands for them.
        dtype="any",
        workload=workload,
        cap_bytes=cap_bytes,
    )
