"""One call of a function that may run out of memory: try, give back, try smaller.

Covers the options of `resilient` with their checks, the course of a call (the way back after a
failure, how long to wait and when to give up), and the memory of the current CUDA card around it.
Does not choose sizes (`adaptive_size.py`) nor wrap functions (`decorator.py`). Never loads torch
and never initialises CUDA.

A call always ends. A size is tried, given back and followed by the next one at most
`_ATTEMPT_LIMIT` times, waiting at most `max_wait_s` in all, and no call ends in `OutOfBatchError`
before its smallest size has really failed: an error rests on a failure, never on a prediction.
"""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Final, TypeVar

import psutil

from workers import oom
from workers.learned_limits import LimitStore
from workers.nvml import queries
from workers.oom import MAX_PROBABLE_IN_A_ROW, Failure, classify
from workers.resilience.adaptive_size import AdaptiveSize
from workers.settings import FailureKind, Learned, LimitKey, StoredLimit


@dataclass(frozen=True, slots=True, kw_only=True)
class CardMemory:
    """What the allocator and the driver said at one moment."""

    device: int
    allocated_bytes: int
    """Bytes in live tensors."""
    free_bytes: int
    """What more tensors could take: free on the card or unused in the allocator's pool, within the
    process's cap.
    """


def look() -> CardMemory | None:
    """Ask the current device; `None` where CUDA is not initialised."""
    torch = _torch_with_cuda()
    if torch is None:
        return None
    device = torch.cuda.current_device()
    free_on_card_bytes, total_bytes = torch.cuda.mem_get_info(device)
    stats = torch.cuda.memory_stats(device)
    allocated_bytes = int(stats.get("allocated_bytes.all.current", 0))
    reserved_bytes = int(stats.get("reserved_bytes.all.current", 0))
    # Gaps in segments that are partly in use cannot be given back. Not every backend counts them.
    unused_bytes = (
        reserved_bytes - allocated_bytes - int(stats.get("inactive_split_bytes.all.current", 0))
    )
    cap_bytes = int(torch.cuda.get_per_process_memory_fraction(device) * total_bytes)
    free_bytes = max(0, min(cap_bytes - reserved_bytes, free_on_card_bytes) + unused_bytes)
    return CardMemory(device=device, allocated_bytes=allocated_bytes, free_bytes=free_bytes)


class Peak:
    """The highest number of bytes that tensors took during a `with`, beyond those that were there
    before.

    It restarts the device's own measurement (`torch.cuda.reset_peak_memory_stats`), which the whole
    process shares; what was measured until then is first told to every other `Peak` under way, so
    that they may lie within one another or in other threads. What other threads take on the same
    device counts as well.
    """

    def __init__(self, before: CardMemory | None) -> None:
        #: `None` as long as CUDA is not initialised; then no device holds a tensor.
        self._device = None if before is None else before.device
        self._before_bytes = 0 if before is None else before.allocated_bytes
        self._highest_bytes = 0
        self.bytes: int | None = None
        """The result, once the `with` is over; `None` if this device's tensors never grew: it tells
        nothing.
        """

    def __enter__(self) -> Peak:
        with _lock:
            torch = _torch_with_cuda()
            if torch is not None and self._device is not None:
                _tell_all(torch, self._device)
                torch.cuda.reset_peak_memory_stats(self._device)
            _under_way.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        with _lock:
            torch = _torch_with_cuda()
            if torch is not None:
                _tell_all(
                    torch, torch.cuda.current_device() if self._device is None else self._device
                )
            _under_way.remove(self)
        grown_bytes = self._highest_bytes - self._before_bytes
        self.bytes = grown_bytes if grown_bytes > 0 else None

    def tell(self, device: int, highest_bytes: int) -> None:
        """Take note of what a device measured.

        A `Peak` that began before CUDA takes the first one it hears of.
        """
        if self._device is None:
            self._device = device
        if self._device == device:
            self._highest_bytes = max(self._highest_bytes, highest_bytes)


_lock = threading.Lock()
_under_way: list[Peak] = []


def _tell_all(torch: ModuleType, device: int) -> None:
    highest_bytes = int(torch.cuda.max_memory_allocated(device))
    for peak in _under_way:
        peak.tell(device, highest_bytes)


def release() -> None:
    """Give back what a failed attempt no longer holds; call it outside the handler, when nothing
    holds its frames.

    Raises:
        Exception: The device no longer answers; an out-of-memory that only surfaces here is
            dropped.
    """
    gc.collect()
    torch = _torch_with_cuda()
    if torch is None:
        return
    try:
        # An error of an earlier launch surfaces here and not in the next attempt.
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    except Exception as error:
        if oom.classify(error).kind not in {FailureKind.DEFINITE, FailureKind.PROBABLE}:
            raise


def _torch_with_cuda() -> ModuleType | None:
    """Return torch if it is loaded and has a CUDA context in this process."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)  # absent while another thread is still importing torch
    return torch if cuda is not None and cuda.is_initialized() else None


R = TypeVar("R")

#: Each size twice, on the way from 2^31 down to 1 by halves. A watchdog: no course comes near it.
_ATTEMPT_LIMIT: Final = 64

#: How often a call that waits asks whether it may continue.
_POLL_S: Final = 0.5

_SIZES_TOLD: Final = 8

#: What accelerate's `find_executable_batch_size` says then; its callers may look for these words.
_NOTHING_LEFT: Final = "No executable batch size found, reached zero."

_MINUTE_S: Final = 60.0

#: A size that moved less than this is what is written already, and a write costs some milliseconds.
_WORTH_KEEPING: Final = 0.05
_KEEP_EVERY_S: Final = 10.0

_log = logging.getLogger(__name__)


class OutOfBatchError(MemoryError, RuntimeError):
    """Not even the smallest batch size fits.

    It is a `MemoryError` as well, so that a caller (another resilient function or a worker's
    engine) treats it as an out-of-memory and may shrink its own size. Can be pickled.
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
    reduce_batch_size_fn: Callable[[], int] | None = None
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
        self._rules = rules
        self._lock = threading.Lock()
        self._recall: Recall | None = None
        if rules.workload is not None:
            self._recall = Recall(rules.workload, rules.clock)
        self.reset()
        #: Not here but before the first call: by then the card may be known.
        self._to_recall = self._recall is not None
        self._failed_at_s: deque[float] = deque(maxlen=rules.failures_per_minute)

    def reset(self) -> None:
        """Forget everything learned."""
        with self._lock:
            self._to_recall = False
            # A call may be all there ever is, a whole training, so it begins at the top and not
            # with small steps that calibrate.
            self._begin(Learned(size=self._rules.starting_batch_size))
            #: Whether this device's memory says anything about the function. It does not if that
            #: works elsewhere.
            self._tells = True
            #: Whether the last call ended because the smallest size failed.
            self._gave_up = False
            self.batch_size: int | None = None
            """The size of the last success."""

    def run(self, function: Callable[[int], R]) -> R:
        """Call `function` with a size, smaller ones after each out-of-memory, and return what it
        returns.

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
                    Retry(
                        batch_size=course.tried[-1],
                        next_batch_size=size,
                        reason=course.failure.text,
                    )
                )
            failure: Failure | None = None
            handled = sys.exception()
            with Peak(before) as peak:
                try:
                    result = function(size)
                except Exception as error:
                    # Only strings leave the handler: the traceback holds the frames, and the frames
                    # hold the tensors.
                    failure = classify(error, handled)
                    if not course.believes(failure):
                        raise
            if failure is None:
                self._succeeded(size, peak.bytes)
                return result
            course.tried.append(size)
            course.failure = failure
            with self._lock:
                self._sizer.failed(size)
                self._failed_at_s.append(self._rules.clock())
            release()

    def _begin(self, learned: Learned) -> None:
        rules = self._rules
        #: Where the first call begins. A size from an earlier process is not exceeded before it has
        #: held, unless its footprint is known too: then free memory says what fits.
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

    def _choose(self, course: _Course) -> tuple[int, CardMemory | None]:
        """Return the size of the next attempt and what memory looks like before it.

        Wait if nothing may run now.
        """
        if self._rules.reduce_batch_size_fn is not None:
            return self._reduced(course, self._rules.reduce_batch_size_fn), look()
        smallest = self._rules.smallest_batch_size
        while True:
            before = look()
            size = self._next(course, before)
            if course.tried.count(smallest) > 1 or (size is None and smallest in course.tried):
                raise self._given_up(course)
            left_s = self._rules.max_wait_s - course.waited_s
            if len(course.tried) >= _ATTEMPT_LIMIT or (
                size is None and (left_s <= 0 or self._is_worth_a_try(course))
            ):
                return smallest, before
            if size is not None:
                return size, before
            if course.waited_s == 0:
                reason = self._sizer.reason
                _log.warning(
                    "%s waits for memory, %.0f s at the most: %s", self._rules.name, left_s, reason
                )
            self._rules.sleep(min(_POLL_S, left_s))
            course.waited_s += min(_POLL_S, left_s)

    def _reduced(self, course: _Course, reduce: Callable[[], int]) -> int:
        """Return the size that the caller's function chooses after a failure.

        Before one, the last that it chose.
        """
        if course.tried:
            size = reduce()
            if not self._rules.smallest_batch_size <= size < course.tried[-1]:
                raise self._given_up(course)
            self._start = size
        return self._start

    def _is_worth_a_try(self, course: _Course) -> bool:
        """Whether to try the smallest size now although the last call gave up there.

        The caller may be a resilient function that has shrunk its own size, and must not wait for
        the policy.
        """
        with self._lock:
            failures, most = self._failed_at_s, self._rules.failures_per_minute
            may_fail = len(failures) < most or self._rules.clock() - failures[0] >= _MINUTE_S
            return self._gave_up and may_fail and not course.tried

    def _next(self, course: _Course, before: CardMemory | None) -> int | None:
        with self._lock:
            size = self._sizer.next(
                None if before is None or not self._tells else before.free_bytes
            )
            if size is None or self.batch_size is not None:
                return size
        if not course.tried:
            return size if size <= self._start else self._down(self._start)
        # No size has succeeded yet, so it is unknown by how much the start was too large. Take half
        # of what failed and not less: if there is only this call, everything runs with the size it
        # ends at.
        return max(size, self._down(course.tried[-1] // 2))

    def _down(self, size: int) -> int:
        return max(
            self._rules.smallest_batch_size,
            size // self._rules.multiple_of * self._rules.multiple_of,
        )

    def _given_up(self, course: _Course) -> OutOfBatchError:
        rules = self._rules
        self._gave_up = True
        tried = tuple(course.tried)
        sizes = ("… " if len(tried) > _SIZES_TOLD else "") + ", ".join(
            str(size) for size in tried[-_SIZES_TOLD:]
        )
        failure = "" if course.failure is None else f" ({course.failure.text})"
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
        probable = failure.kind is FailureKind.PROBABLE
        self.probable_in_a_row = self.probable_in_a_row + 1 if probable else 0
        return failure.kind is FailureKind.DEFINITE or (
            probable and self.probable_in_a_row <= MAX_PROBABLE_IN_A_ROW
        )


class Recall:
    """What one function has learned, across processes.

    An error of the store is only logged, once. Initialises CUDA if torch is loaded and sees a card,
    because the card must be known before the first call.
    """

    def __init__(self, workload: str, clock: Callable[[], float]) -> None:
        self._workload = workload
        self._clock = clock
        self._store = LimitStore()
        self._kept: Learned | None = None
        self._kept_at_s: float | None = None
        self._complained = False

    def best(self) -> Learned | None:
        """Return what was learned here; `None` if nothing was, or it is too old."""
        limit = self._store.best(_key(self._workload), time.time())
        self._complain()
        self._kept = None if limit is None else limit.learned
        return self._kept

    def keep(self, learned: Learned | None, peak_bytes: int | None) -> None:
        """Write down what is known now, if it is news."""
        if learned is None or not self._news(learned):
            return
        key = _key(self._workload)
        self._store.remember(
            StoredLimit(
                key=key, learned=learned, peak_bytes=peak_bytes, learned_at_unix_s=time.time()
            )
        )
        self._complain()
        self._kept, self._kept_at_s = learned, self._clock()

    def _news(self, learned: Learned) -> bool:
        if self._kept_at_s is not None and self._clock() - self._kept_at_s < _KEEP_EVERY_S:
            return False
        last = self._kept
        if last is None or (last.unit_bytes is None) != (learned.unit_bytes is None):
            return True
        return abs(learned.size - last.size) > _WORTH_KEEPING * last.size

    def _complain(self) -> None:
        if self._store.problem is not None and not self._complained:
            _log.warning("%s", self._store.problem)
            self._complained = True


def _key(workload: str) -> LimitKey:
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
        total_bytes=total_bytes,
        driver=driver,
        torch="none" if torch is None else str(torch.__version__),
        # A function does not report the types in which it computes; its name stands for that.
        dtype="any",
        workload=workload,
        cap_bytes=cap_bytes,
    )
