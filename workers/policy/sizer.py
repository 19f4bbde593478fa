"""Finds the largest size that fits in memory before anything fails: moves one number up and down as
memory comes and goes.

Implements the sizes of a loop (`workers.policy.base.Sizes`) from three estimates:

- Memory available (`memory_seen.py`): samples of the free memory of the device, less a margin.
- Memory needed (`memory_needed.py`): the line through measured peaks with its margin, and heavy
  steps, which take far more than others.
- Sizes tried (`sizes_tried.py`): the sizes that failed or succeeded lately.

If the next sample explains a failure (memory was taken), the failure changes nothing else; nor does
the failure of a heavy step. An unexplained failure widens the line's margin. After two of them
without a success near the allowed size, the memory signal is ignored until a step confirms it, or
until it reports far more memory than at the contradiction. Then earlier failures are forgotten,
because they happened with little memory.

When the failures allowed in one minute are used up, the sizer probes nothing, not even the smallest
size, until the oldest failure is a minute old. Meanwhile it uses a size that succeeded lately with
no more memory. Until a step succeeds, each size is smaller than the one that failed before it.

Does not know what a size means in tensors, nor torch. `adaptive.py` builds a policy on it, and
`workers/resilience/adaptive_size.py` a class for any loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple

from workers.policy.memory_needed import (
    CONFIRMATIONS,
    MUCH_MORE,
    NEAR,
    Footprint,
    HeavySteps,
    footprint_of,
    with_peak,
)
from workers.policy.memory_seen import MINUTE_S, FreeMemory, with_sample
from workers.policy.sizes_tried import (
    FIRST_PROBE,
    Bounds,
    Bracket,
    Proof,
    Proofs,
    largest_proven,
    with_proof,
    without_refuted,
)
from workers.settings import Learned

#: The first size of a workload that was never measured, as a share of the largest, and the factor
#: to the second size, which gives the slope. Small steps are cheap, and failures are not.
_FIRST_SHARE: Final = 1 / 64
_CALIBRATION_GROWTH: Final = 4.0

#: A size measured this often counts as settled; before, it may grow by less than `worth_growing`.
SETTLED_STEPS: Final = 8

#: In an emergency the smallest size is tried again when the estimates allow it and there is more
#: memory than when it failed. Independently of the signal it is tried after this time, which
#: doubles after each failure, up to one minute.
FIRST_WAIT_S: Final = 10.0


class PendingFailures(NamedTuple):
    """Failures since the last sample. The next sample may explain them: memory was taken. Then the
    knowledge from before the failures, kept here, is restored.
    """

    needed_bytes: float
    """The least predicted memory of the failed steps."""
    heavy: HeavySteps
    """The state of `HeavySteps` before the first failure."""
    proofs: Proofs
    """The proofs before the first failure that was not a heavy step."""
    surprising: bool
    """Whether one of the failures was not an expected heavy step: the last sample is outdated."""


class Sizer:
    """Decides the largest size that fits, as memory comes and goes. Not thread-safe."""

    def __init__(
        self, bounds: Bounds, learned: Learned | None = None, *, clock: Callable[[], float]
    ) -> None:
        """Start without knowledge, or with what an earlier run has learned."""
        self.bounds, self._clock = bounds, clock
        # Memory available.
        self._level: FreeMemory | None = None
        self._doubts = 0
        """Contradictions of the memory signal since a step confirmed it. At `CONFIRMATIONS` it is
        ignored.
        """
        self._contradicted_bytes: float | None = None
        """Memory at the last contradiction: what the signal reported when a step failed within it,
        or what a step used beyond it.
        """
        # Memory needed.
        self.line: Footprint | None = None
        self._heavy = HeavySteps()
        self._factor = 1.0
        """Memory that the last requested step may take, as a multiple of the line's prediction."""
        # Sizes tried.
        self.bracket = Bracket()
        self._proofs: Proofs = ()
        self._failures: tuple[tuple[float, int], ...] = ()
        """Time and size of each failure of the last minute."""
        self._failed_size: int | None = None
        """Size of the last failed step, until a step succeeds: the next one must be smaller."""
        self._pending: PendingFailures | None = None
        # An emergency.
        self._wake_s: float | None = None
        """Time to try the smallest size again independently of the signal; `None`: no emergency."""
        self._wait_s = FIRST_WAIT_S
        self._low_bytes: float | None = None
        """The sample with which the smallest size failed."""
        self.reason = ""
        """Why no size fits; empty while one does."""
        if learned is not None:
            self.line = footprint_of(learned, bounds.power)
            good = bounds.down(learned.size)
            self.bracket = Bracket(good=good, gallop=FIRST_PROBE, untried=True)

    @property
    def learned(self) -> Learned | None:
        """What the next run should start with; `None` after a failure, until a step succeeds."""
        return None if self.bracket.in_row else self.known

    @property
    def known(self) -> Learned | None:
        """As `learned`, but also after a failure; then the size is the one to try next."""
        good, line = self.bracket.good, self.line
        if good is None or line is None:
            return None if good is None else Learned(size=good)
        return Learned(size=good, fixed_bytes=line.fixed_bytes, unit_bytes=line.unit_bytes)

    def is_probe(self, size: int) -> bool:
        """Return whether no step as large has succeeded in the last minutes."""
        return not self._has_worked or size > max(self.bracket.good or 0, self.bracket.best)

    def failures_lately(self) -> int:
        """Return how many steps failed within the last minute."""
        now_s = self._clock()
        return sum(now_s < at_s + MINUTE_S for at_s, _ in self._failures)

    @property
    def may_fail(self) -> bool:
        """Whether the limit of failures per minute allows one more."""
        return self.failures_lately() < self.bounds.failures_per_minute

    def may_fit_again(self, free_bytes: int) -> bool:
        """Return whether the smallest size, which did not fit, may fit in `free_bytes`.

        If its need is known, another program may have taken memory for a moment: then it may be
        tried again after a while with the same memory.
        """
        needed_bytes = self.needs_bytes(self.bounds.smallest)
        is_over = needed_bytes > 0 and (self._wake_s is None or self._clock() >= self._wake_s)
        low_bytes = 0.0 if is_over or self._low_bytes is None else self._low_bytes
        return free_bytes > (1 + NEAR) * max(low_bytes, needed_bytes)

    def needs_bytes(self, size: int) -> float:
        """Return the predicted memory of a step of this size; 0 if none was ever measured."""
        return 0.0 if self.line is None else self.line.bytes_at(self._x(size))

    def next(self, free_bytes: int | None = None) -> int | None:
        """Return the size of the next step; `None` if nothing fits now: ask again a little later.

        Args:
            free_bytes: All memory that one step may use now: what is free on the device, plus what
            this process holds and would reuse, within its cap. `None` if nothing was measured since
            the last call, or there is no signal.
        """
        bounds, at_s = self.bounds, self._clock()
        self._sample(at_s, free_bytes)
        size: int | None
        factor, is_spent = self._heavy.factor(at_s), not self.may_fail
        if is_spent and self._wake_s is None:
            size = self._safe(at_s)
            reason = f"{len(self._failures)} failures within a minute, and no size is known to fit"
        else:
            promised = self._promised()
            is_promised = promised is not None and promised >= bounds.smallest
            if self._wake_s is None and promised is not None and not is_promised:
                # If no size as small was measured, the line may be wrong: try it at once.
                self._wake_s = at_s + (0.0 if self._is_below else self._wait_s)
            if self._wake_s is None:
                size, reason = self._size(promised, at_s), ""
            else:
                may_wake = at_s >= self._wake_s or (is_promised and self._has_risen)
                size, factor = (bounds.smallest if may_wake and not is_spent else None), 1.0
                why = "is out of memory" if self.bracket.in_row else "needs more than is free"
                reason = f"{bounds.smallest_step} {why}"
        if size is not None:
            size, reason = self._reduced(size, factor), ""
        self.reason, self._factor = reason, factor
        return size

    def succeeded(self, size: int, peak_bytes: int | None = None, is_partial: bool = False) -> None:
        """Record that a step of this size succeeded, and its peak if it was measured.

        `is_partial`: it had less to do than its size allows; nothing is learned from it.
        """
        if is_partial:
            return
        at_s, x, line, level = self._clock(), self._x(size), self.line, self._level
        heavy, ratio = self._heavy, None
        # Before the first success a deviation means that the learned line is wrong, not a heavy
        # step.
        if self._has_worked and line is not None and peak_bytes is not None and line.predicts(x):
            ratio = peak_bytes / line.bytes_at(x)
        if (ratio is not None and ratio >= MUCH_MORE and not heavy.streak) or (
            peak_bytes is None and heavy.is_due
        ):
            heavy = heavy.after_heavy(at_s, heavy.ratio if ratio is None else ratio, failed=False)
            peak_bytes = None
        else:
            heavy = heavy.after_ordinary()

        if self._factor == 1.0:
            self.bracket = self.bracket.after_success(self.bounds.down(size), at_s)
        else:
            best = max(self.bracket.best, size)
            self.bracket = self.bracket._replace(in_row=0, best=best)

        if level is not None and not self._is_unsure:
            # The memory of a step that ran against the signal: its peak if measured, else the
            # line's value.
            taken_bytes = (
                line.bytes_at(x) if peak_bytes is None and line is not None else peak_bytes
            )
            ran_against_signal = self._wake_s is not None and not self._is_below
            took_more = peak_bytes is not None and peak_bytes > (1 + NEAR) * level.likely_bytes
            if taken_bytes is not None and (ran_against_signal or took_more):
                self._doubts = min(CONFIRMATIONS, self._doubts + 1)
                self._contradicted_bytes = float(taken_bytes)
            elif peak_bytes is not None and (
                (1 - NEAR) * level.usable_bytes < peak_bytes <= level.likely_bytes
            ):
                self._doubts = 0
        proof = Proof(size, self._memory_bytes(unknown=0.0), at_s)
        self._proofs = with_proof(self._proofs, proof)
        if peak_bytes is not None:
            self.line = with_peak(self.line, x, peak_bytes, at_s)
        self._failed_size = self._wake_s = self._low_bytes = None
        self._wait_s, self.reason = FIRST_WAIT_S, ""
        self._learn_heavy(heavy)

    def failed(self, size: int, at_least_bytes: int | None = None) -> None:
        """Record that a step of this size ran out of memory, and the least bytes that it would have
        held, if known.
        """
        at_s, x, bounds = self._clock(), self._x(size), self.bounds
        heavy, line, level = self._heavy, self.line, self._level
        ordinary_size, shown, before_proofs = size, 0.0, self._proofs
        if heavy.is_due:  # a heavy step shows nothing about ordinary ones
            ordinary_size = int(size * self._factor ** (1.0 / bounds.power))
        else:
            self._proofs = without_refuted(self._proofs, size, self._memory_bytes(unknown=math.inf))
        failures = (*self._failures, (at_s, ordinary_size))
        self._failures, self._failed_size = failures[-2 * bounds.failures_per_minute :], size
        if line is not None and line.predicts(x):
            shown = (at_least_bytes or 0) / line.bytes_at(x)
        is_heavy = heavy.is_due or (shown >= MUCH_MORE and not heavy.failed)
        is_expected = is_heavy and size > bounds.smallest

        if line is not None and self._is_believed:
            before = self._pending or PendingFailures(
                needed_bytes=math.inf,
                heavy=heavy if heavy.confirmed else heavy.after_ordinary(failed=True),
                proofs=before_proofs,
                surprising=False,
            )
            self._pending = before._replace(
                needed_bytes=min(before.needed_bytes, line.bytes_at(x) * self._factor),
                proofs=before.proofs if before.surprising else before_proofs,
                surprising=before.surprising or not is_expected,
            )
        if is_heavy or (self._is_believed and not heavy.failed and not heavy.confirmed):
            ratio = 2.0  # assumed multiple of an ordinary step's memory
            if line is not None and level is not None:
                shown_bytes = max(level.usable_bytes, at_least_bytes or 0.0)
                ratio = max(1.0, shown_bytes / max(1.0, line.bytes_at(x)))
            heavy = heavy.after_heavy(at_s, ratio, failed=True)
        else:
            heavy = heavy.after_ordinary(failed=True)
        if is_expected:
            self._learn_heavy(heavy)
            return

        self._heavy = heavy
        self.bracket = self.bracket.after_oom(bounds, max(1, size), at_s, cold=not self._has_worked)
        if at_least_bytes is not None and level is not None and self.bracket.good is not None:
            # The good size is reduced in proportion to the memory that this step needed.
            share = min(1.0, level.likely_bytes / max(1, at_least_bytes)) * (1 - NEAR)
            good = min(self.bracket.good, bounds.down(size * share ** (1.0 / bounds.power)))
            self.bracket = self.bracket._replace(good=good)
        if size <= bounds.smallest:
            self._wake_s = at_s + self._wait_s
            self._wait_s = min(MINUTE_S, 2 * self._wait_s)
            self._low_bytes = None if level is None else level.sample_bytes

    def _sample(self, at_s: float, free_bytes: int | None) -> None:
        """Update the estimate with a sample, and drop failures older than a minute."""
        level, is_unsure = self._level, self._is_unsure
        if self._failures and at_s >= self._failures[0][0] + MINUTE_S:
            self._failures = tuple(each for each in self._failures if at_s < each[0] + MINUTE_S)
        if free_bytes is None:
            if level is not None and at_s > level.at_s + MINUTE_S / 2:  # the signal is gone
                self._level = self._pending = None
            elif level is not None and level.exact:
                self._level = level._replace(exact=False)
            return

        before_bytes = math.inf if level is None else level.most_bytes
        self._level = level = with_sample(
            level, float(free_bytes), at_s, exact=self.bounds.exact_samples, failed=is_unsure
        )
        if self._low_bytes is not None and is_unsure:
            self._low_bytes = min(self._low_bytes, level.sample_bytes)
        was_bytes = self._contradicted_bytes
        if self._pending is not None:
            self._judge(self._pending, level, before_bytes)
        elif was_bytes is not None and level.likely_bytes > MUCH_MORE * was_bytes:
            # The signal contradicted steps, but it reports far more memory now.
            self.bracket, self._contradicted_bytes = self.bracket.without_bad(), None
            self._doubts = min(self._doubts, CONFIRMATIONS - 1)

    def _judge(self, pending: PendingFailures, level: FreeMemory, before_bytes: float) -> None:
        """Decide whether the first sample after failures explains them, and learn from the answer.

        `before_bytes`: upper bound of the memory by the samples before the failure.
        """
        bad, line, now = self.bracket.bad, self.line, self._heavy
        self._pending = None
        if line is None:
            return
        low_bytes = min(level.most_bytes, before_bytes)  # taken memory may be free again
        if low_bytes < pending.needed_bytes and self._doubts < CONFIRMATIONS:
            before = pending.heavy
            self._doubts, self._contradicted_bytes = 0, None
            self._heavy = (
                now._replace(ratio=before.ratio)
                if before.confirmed
                else before._replace(ordinary=now.ordinary)
            )
            if bad is not None:
                self._proofs = without_refuted(pending.proofs, bad, low_bytes)
        elif bad is not None and not now.confirmed:
            limit_bytes = min(level.usable_bytes, before_bytes)
            self.line = line.after_surprise(self._x(bad), limit_bytes)
            self._contradicted_bytes = level.likely_bytes
            self._doubts = min(CONFIRMATIONS, self._doubts + 1)
            return
        self.bracket = self.bracket.without_bad()

    def _x(self, size: int) -> float:
        """Return size^power, in which memory grows linearly."""
        x: float = float(max(1, size)) ** self.bounds.power
        return x

    @property
    def _has_worked(self) -> bool:
        """Whether a step has succeeded."""
        return self.bracket.best > 0

    @property
    def _is_unsure(self) -> bool:
        """Whether the last sample is outdated, because a step failed unexpectedly since."""
        return self._pending is not None and self._pending.surprising

    @property
    def _is_below(self) -> bool:
        """Whether the smallest size is far below every measured size."""
        return self.line is not None and self.line.is_below(self._x(self.bounds.smallest))

    @property
    def _is_believed(self) -> bool:
        """Whether there is a memory signal and a line, and steps do not contradict the signal."""
        return self._level is not None and self.line is not None and self._doubts < CONFIRMATIONS

    def _promised(self) -> float | None:
        """Return the largest size that the available memory allows; `None` if unknown."""
        line, level = self.line, self._level
        if line is None or level is None or not self._is_believed:
            return None
        usable_bytes = level.usable_bytes
        if self._is_unsure:  # memory was taken, or a probe failed
            if level.low_bytes is None or not self.bracket.taken:
                return None
            usable_bytes = min(usable_bytes, level.low_bytes)
        power = 1.0 / self.bounds.power
        size = float(max(0.0, line.largest_x(usable_bytes)) ** power)
        return size if line.has_slope else min(size, _CALIBRATION_GROWTH * line.here_x**power)

    @property
    def _has_risen(self) -> bool:
        """Whether there is more memory than when the smallest size failed, or only the line
        excluded it.
        """
        if self._low_bytes is None:
            return self.bracket.in_row == 0  # it did not fail: only the line excluded it
        return self._level is not None and self._level.sample_bytes > (1 + NEAR) * self._low_bytes

    def _learn_heavy(self, heavy: HeavySteps) -> None:
        """Store the new state of heavy steps. Once their period is confirmed, it explains the
        failures.
        """
        before, self._heavy = self._heavy, heavy
        if before.confirmed or not heavy.confirmed:
            return
        # Otherwise a step has run that the signal excluded.
        if (self._contradicted_bytes or 0.0) <= (1 + NEAR) * self._memory_bytes(unknown=math.inf):
            self._doubts, self._contradicted_bytes = 0, None
        if self.line is not None:
            self.line = self.line._replace(surprise=0.0)
        if self._pending is not None:
            self._pending = self._pending._replace(surprising=False)
        self.bracket = self.bracket.without_bad()

    def _memory_bytes(self, unknown: float) -> float:
        return unknown if self._level is None else self._level.likely_bytes

    def _safe(self, at_s: float) -> int | None:
        """Return the size to use while no failure is allowed: the larger one of the largest that
        succeeded lately with no more memory than now, and half of the smallest that failed in the
        last minute.

        Before any success only a proven size; `None` if there is none.
        """
        memory_bytes = self._memory_bytes(unknown=math.inf)
        if self._is_unsure and self._level is not None and self._level.low_bytes is not None:
            memory_bytes = min(memory_bytes, self._level.low_bytes)
        size = largest_proven(self._proofs, memory_bytes, at_s)
        if not self._has_worked:
            return size
        smallest_failed = min(failed for _, failed in self._failures)
        return max(size or 0, self.bounds.down(smallest_failed // 2))

    def _reduced(self, size: int, factor: float) -> int:
        """Return the largest size up to `size`, and below the last failed one, whose step fits if
        it takes `factor` times the predicted memory.
        """
        line, level, bounds = self.line, self._level, self.bounds
        power = 1.0 / bounds.power
        if self._failed_size is not None:
            size = min(size, bounds.down(self._failed_size - 1))
        if factor > 1.0 and line is not None and level is not None and self._is_believed:
            x = max(1.0, line.largest_x(level.usable_bytes / factor))
            return min(size, bounds.down(x**power))
        return bounds.down(size / factor**power) if factor > 1.0 else size

    def _size(self, promised: float | None, now_s: float) -> int:
        bounds, bracket, level, line = self.bounds, self.bracket, self._level, self.line
        good = bracket.good
        if good is None:
            return bounds.down(
                bounds.largest * _FIRST_SHARE if bounds.first is None else bounds.first
            )
        allowed = bracket.allowed(good, bounds, now_s, promised=promised is not None)
        if promised is None or level is None or line is None:
            return allowed
        size, larger = bounds.down(min(promised, allowed)), bounds.up(good)
        if size <= good < allowed and bracket.may_probe(now_s):
            # Try the next size if the line reaches it at any distance: sizes may be few and far
            # apart. A surprise must not block a much larger size. Try it as well if there is far
            # more memory than the last step took: then the line is uncertain, because it has no
            # slope yet or was measured on small steps.
            calm = line._replace(surprise=0.0) if larger > MUCH_MORE * good else line
            plenty = 2.0 if line.has_slope else 1.0 + NEAR / 2
            if (
                calm.extrapolated_x(level.usable_bytes) >= self._x(larger)
                or level.usable_bytes > plenty * line.here_need_bytes
            ):
                return larger
        worth = bounds.worth_growing if line.steps >= SETTLED_STEPS else 0.0
        return good if good < size < min(bounds.largest, good * (1.0 + worth)) else size
