"""The largest size that fits, before anything fails: one number moved up and down as memory comes
and goes.

The sizes of a loop (`workers.policy.base.Sizes`). It has three parts:

- Memory seen (`memory_seen.py`): samples of the free memory of the device, less a margin.
- Memory needed (`memory_needed.py`): the line through measured peaks with its margin, and steps
  that take several times what others take.
- Sizes tried (`sizes_tried.py`): what has failed lately, and what has ended well.

A failure that the next sample explains (memory was taken) changes nothing else; nor does that of a
heavy step. An unexplained failure widens the line's margin. After two of them without a success
near the allowed size, the signal is ignored until a step confirms it, or until it reports far more
memory than at the contradiction; then earlier failures are forgotten, because they happened under
little memory. When the permitted failures of a minute are used up, nothing is probed until the
oldest is a minute ago, the smallest size neither: it goes on at a size that has ended well lately
under no more memory. Until a step ends well, each size is smaller than the one that failed before
it.

Does not know what a size means in tensors, and nothing of torch. `adaptive.py` makes a policy of
it, `workers/resilience/adaptive_size.py` a class for any loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, NamedTuple

from workers.policy.memory_needed import (
    MUCH_MORE,
    NEAR,
    TWICE,
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

#: The first step of a workload that was never measured is this share of the largest size; a second
#: one, so much larger, gives the slope. Small steps are cheap, and failures are not.
_FIRST_SHARE: Final = 1 / 64
_CALIBRATION_GROWTH: Final = 4.0

#: A size that was measured so often is found; before, it may still grow by less than is worth a
#: change.
SETTLED_STEPS: Final = 8

#: In an emergency the smallest size is tried again when it is promised, and more is there than when
#: it failed. Whatever the signal says it is tried after so long, then after twice as long, at last
#: every minute.
FIRST_WAIT_S: Final = 10.0


class Unjudged(NamedTuple):
    """Failures since the last sample: the next one explains them, because memory was taken, or does
    not. Keeps what was known before them, which holds again if it does.
    """

    needed_bytes: float
    """The least that one of these steps should have taken."""
    heavy: HeavySteps
    """What was known of heavy steps before the first."""
    proofs: Proofs
    """What had ended well before the first that was no heavy step."""
    surprising: bool
    """Whether one of them was no heavy step: what the last sample said is no longer so."""


class Sizer:
    """The largest size that fits, as memory comes and goes. Not for several threads at once."""

    def __init__(
        self, bounds: Bounds, learned: Learned | None = None, *, clock: Callable[[], float]
    ) -> None:
        """Start knowing nothing, or what was learned in an earlier run."""
        self.bounds, self._clock = bounds, clock
        # Memory seen.
        self._level: FreeMemory | None = None
        self._doubts = 0
        """Failures that no sample explained, since a step came near to what was promised."""
        self._contradicted_bytes: float | None = None
        """What the signal said when a step failed that it allowed, or what one took that it did not
        allow.
        """
        # Memory needed.
        self.line: Footprint | None = None
        self._heavy = HeavySteps()
        self._factor = 1.0
        """The step that was asked for last may take so many times what the line says."""
        # Sizes tried.
        self.bracket = Bracket()
        self._proofs: Proofs = ()
        self._failures: tuple[tuple[float, int], ...] = ()
        """Failures of the last minute: when, and at which size."""
        self._failed_size: int | None = None
        """Of the step that failed last, while none has ended well since: the next one is
        smaller.
        """
        self._unjudged: Unjudged | None = None
        # An emergency.
        self._wake_s: float | None = None
        """When to try the smallest size again whatever the signal says."""
        self._wait_s = FIRST_WAIT_S
        self._low_bytes: float | None = None
        """The sample at which the smallest size failed."""
        self.reason = ""
        """Why nothing runs, in words; empty while something does."""
        if learned is not None:
            self.line = footprint_of(learned, bounds.power)
            good = bounds.down(learned.size)
            self.bracket = Bracket(good=good, gallop=FIRST_PROBE, untried=True)

    @property
    def learned(self) -> Learned | None:
        """What is worth remembering for the next run; `None` while nothing is known to be good."""
        return None if self.bracket.in_row else self.known

    @property
    def known(self) -> Learned | None:
        """The same, also after a failure: then its size is what is hoped for."""
        good, line = self.bracket.good, self.line
        if good is None or line is None:
            return None if good is None else Learned(size=good)
        return Learned(size=good, fixed_bytes=line.fixed_bytes, unit_bytes=line.unit_bytes)

    def is_probe(self, size: int) -> bool:
        """Say whether no step as large has ended well in the last minutes."""
        return not self._has_worked or size > max(self.bracket.good or 0, self.bracket.best)

    def failures_lately(self) -> int:
        """Return how many steps have failed within a minute."""
        now_s = self._clock()
        return sum(now_s < at_s + MINUTE_S for at_s, _ in self._failures)

    @property
    def may_fail(self) -> bool:
        """Whether a failure more is within those of a minute."""
        return self.failures_lately() < self.bounds.failures_per_minute

    def may_fit_again(self, free_bytes: int) -> bool:
        """Say whether the smallest size, for which memory was short, may fit in so much.

        Where its step is known to fit, another program may have taken memory for a moment: then it
        is tried again after a while.
        """
        needed_bytes = self.needs_bytes(self.bounds.smallest)
        is_over = needed_bytes > 0 and (self._wake_s is None or self._clock() >= self._wake_s)
        low_bytes = 0.0 if is_over or self._low_bytes is None else self._low_bytes
        return free_bytes > (1 + NEAR) * max(low_bytes, needed_bytes)

    def needs_bytes(self, size: int) -> float:
        """Return what a step of this size takes; 0 where that was never measured."""
        return 0.0 if self.line is None else self.line.bytes_at(self._x(size))

    def next(self, free_bytes: int | None = None) -> int | None:
        """Return the size of the next step; `None` when nothing fits now: run nothing, ask again a
        little later.

        Args:
            free_bytes: All that one step may use now: what the device has free, plus what this
            process holds and would use again, within its cap. `None` when nothing was measured
            since the last call, or there is no signal.
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
                # Where it was never measured, the smallest size may show at once that the line is
                # wrong.
                self._wake_s = at_s + (0.0 if self._is_below else self._wait_s)
            if self._wake_s is None:
                size, reason = self._size(promised, at_s), ""
            else:
                may_wake = at_s >= self._wake_s or (is_promised and self._has_risen)
                size, factor = (bounds.smallest if may_wake and not is_spent else None), 1.0
                why = "is out of memory" if self.bracket.in_row else "needs more than is free"
                reason = f"{bounds.smallest_step} {why}"
        if size is not None:
            size, reason = self._shared(size, factor), ""
        self.reason, self._factor = reason, factor
        return size

    def succeeded(self, size: int, peak_bytes: int | None = None, is_partial: bool = False) -> None:
        """Say that a step of this size ended well, and the most memory it held, if that was
        measured.

        `is_partial`: it had less to do than its size allows, so that it tells nothing.
        """
        if is_partial:
            return
        at_s, x, line, level = self._clock(), self._x(size), self.line, self._level
        heavy, ratio = self._heavy, None
        # What was learned in an earlier run is wrong rather than the first step heavy.
        if self._has_worked and line is not None and peak_bytes is not None and line.predicts(x):
            ratio = peak_bytes / line.bytes_at(x)
        if (ratio is not None and ratio >= MUCH_MORE and not heavy.streak) or (
            peak_bytes is None and heavy.is_due
        ):
            heavy = heavy.met(at_s, heavy.ratio if ratio is None else ratio, failed=False)
            peak_bytes = None
        else:
            heavy = heavy.passed()

        if self._factor == 1.0:
            self.bracket = self.bracket.ended_well(self.bounds.down(size), at_s)
        else:
            best = max(self.bracket.best, size)
            self.bracket = self.bracket._replace(in_row=0, best=best)

        if level is not None and not self._is_unsure:
            # What a step takes that ran although it was not promised is known from its peak, else
            # from the line.
            taken_bytes = (
                line.bytes_at(x) if peak_bytes is None and line is not None else peak_bytes
            )
            ran_against_signal = self._wake_s is not None and not self._is_below
            took_more = peak_bytes is not None and peak_bytes > (1 + NEAR) * level.likely_bytes
            if taken_bytes is not None and (ran_against_signal or took_more):
                self._doubts = min(TWICE, self._doubts + 1)
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
        """Say that a step of this size ran out of memory, and what it would have held at least, if
        that is known.
        """
        at_s, x, bounds = self._clock(), self._x(size), self.bounds
        heavy, line, level = self._heavy, self.line, self._level
        ordinary_size, shown, before_proofs = size, 0.0, self._proofs
        if heavy.is_due:  # it says nothing of the steps between
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
            before = self._unjudged or Unjudged(
                needed_bytes=math.inf,
                heavy=heavy if heavy.confirmed else heavy.passed(failed=True),
                proofs=before_proofs,
                surprising=False,
            )
            self._unjudged = before._replace(
                needed_bytes=min(before.needed_bytes, line.bytes_at(x) * self._factor),
                proofs=before.proofs if before.surprising else before_proofs,
                surprising=before.surprising or not is_expected,
            )
        if is_heavy or (self._is_believed and not heavy.failed and not heavy.confirmed):
            ratio = 2.0  # at the least, as many times an ordinary step's memory
            if line is not None and level is not None:
                shown_bytes = max(level.usable_bytes, at_least_bytes or 0.0)
                ratio = max(1.0, shown_bytes / max(1.0, line.bytes_at(x)))
            heavy = heavy.met(at_s, ratio, failed=True)
        else:
            heavy = heavy.passed(failed=True)
        if is_expected:
            self._learn_heavy(heavy)
            return

        self._heavy = heavy
        self.bracket = self.bracket.ran_out(bounds, max(1, size), at_s, cold=not self._has_worked)
        if at_least_bytes is not None and level is not None and self.bracket.good is not None:
            # A step takes at least its share of what this one showed.
            share = min(1.0, level.likely_bytes / max(1, at_least_bytes)) * (1 - NEAR)
            good = min(self.bracket.good, bounds.down(size * share ** (1.0 / bounds.power)))
            self.bracket = self.bracket._replace(good=good)
        if size <= bounds.smallest:
            self._wake_s = at_s + self._wait_s
            self._wait_s = min(MINUTE_S, 2 * self._wait_s)
            self._low_bytes = None if level is None else level.sample_bytes

    def _sample(self, at_s: float, free_bytes: int | None) -> None:
        """Take in what was measured, and drop failures of more than a minute ago."""
        level, is_unsure = self._level, self._is_unsure
        if self._failures and at_s >= self._failures[0][0] + MINUTE_S:
            self._failures = tuple(each for each in self._failures if at_s < each[0] + MINUTE_S)
        if free_bytes is None:
            if level is not None and at_s > level.at_s + MINUTE_S / 2:  # the signal is gone
                self._level = self._unjudged = None
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
        if self._unjudged is not None:
            self._judge(self._unjudged, level, before_bytes)
        elif was_bytes is not None and level.likely_bytes > MUCH_MORE * was_bytes:
            # The signal was ignored, but it reports something else now.
            self.bracket, self._contradicted_bytes = self.bracket.forgiven(), None
            self._doubts = min(self._doubts, TWICE - 1)

    def _judge(self, unjudged: Unjudged, level: FreeMemory, before_bytes: float) -> None:
        """Find whether the first sample since a failure explains it.

        `before_bytes`: what there was by the samples before the failure.
        """
        bad, line, now = self.bracket.bad, self.line, self._heavy
        self._unjudged = None
        if line is None:
            return
        low_bytes = min(level.most_bytes, before_bytes)  # what was taken may be back already
        if low_bytes < unjudged.needed_bytes and self._doubts < TWICE:
            before = unjudged.heavy
            self._doubts, self._contradicted_bytes = 0, None
            self._heavy = (
                now._replace(ratio=before.ratio)
                if before.confirmed
                else before._replace(ordinary=now.ordinary)
            )
            if bad is not None:
                self._proofs = without_refuted(unjudged.proofs, bad, low_bytes)
        elif bad is not None and not now.confirmed:
            limit_bytes = min(level.usable_bytes, before_bytes)
            self.line = line.surprised(self._x(bad), limit_bytes)
            self._contradicted_bytes = level.likely_bytes
            self._doubts = min(TWICE, self._doubts + 1)
            return
        self.bracket = self.bracket.forgiven()

    def _x(self, size: int) -> float:
        """Return that with which memory grows in a straight line."""
        x: float = float(max(1, size)) ** self.bounds.power
        return x

    @property
    def _has_worked(self) -> bool:
        """Whether a step has ended well."""
        return self.bracket.best > 0

    @property
    def _is_unsure(self) -> bool:
        """Whether what the last sample said is no longer so."""
        return self._unjudged is not None and self._unjudged.surprising

    @property
    def _is_below(self) -> bool:
        """Whether the smallest size is far smaller than all that was measured."""
        return self.line is not None and self.line.is_below(self._x(self.bounds.smallest))

    @property
    def _is_believed(self) -> bool:
        """Whether there is a signal that can be compared with what steps take, and that steps have
        not contradicted.
        """
        return self._level is not None and self.line is not None and self._doubts < TWICE

    def _promised(self) -> float | None:
        """Return the largest size that memory allows; `None` when it is unknown."""
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
        """Whether there is more memory than when the smallest size failed."""
        if self._low_bytes is None:
            return self.bracket.in_row == 0  # only the line said that it does not fit
        return self._level is not None and self._level.sample_bytes > (1 + NEAR) * self._low_bytes

    def _learn_heavy(self, heavy: HeavySteps) -> None:
        """Take over what is now known of heavy steps: once they are regular, they explain the
        failures.
        """
        before, self._heavy = self._heavy, heavy
        if before.confirmed or not heavy.confirmed:
            return
        # Else the signal denies what has run.
        if (self._contradicted_bytes or 0.0) <= (1 + NEAR) * self._memory_bytes(unknown=math.inf):
            self._doubts, self._contradicted_bytes = 0, None
        if self.line is not None:
            self.line = self.line._replace(surprise=0.0)
        if self._unjudged is not None:
            self._unjudged = self._unjudged._replace(surprising=False)
        self.bracket = self.bracket.forgiven()

    def _memory_bytes(self, unknown: float) -> float:
        return unknown if self._level is None else self._level.likely_bytes

    def _safe(self, at_s: float) -> int | None:
        """Return the largest size that has ended well lately under no more memory than now, or half
        of what failed since.

        `None` if nothing has ever ended well.
        """
        memory_bytes = self._memory_bytes(unknown=math.inf)
        if self._is_unsure and self._level is not None and self._level.low_bytes is not None:
            memory_bytes = min(memory_bytes, self._level.low_bytes)
        size = largest_proven(self._proofs, memory_bytes, at_s)
        if not self._has_worked:
            return size
        smallest_failed = min(failed for _, failed in self._failures)
        return max(size or 0, self.bounds.down(smallest_failed // 2))

    def _shared(self, size: int, factor: float) -> int:
        """Return the size no larger than this one, and smaller than what has just failed, whose
        step fits although it takes so many times what the line says.
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
            # Where sizes are few and far apart, the line may reach farther than it promises; a
            # surprise must not bar the way to a size that is much larger. Where far more is there
            # than the last step took, it is the line that is not known: it has no slope yet, or was
            # measured on small steps when memory was short.
            calm = line._replace(surprise=0.0) if larger > MUCH_MORE * good else line
            plenty = 2.0 if line.has_slope else 1.0 + NEAR / 2
            if (
                calm.hoped_x(level.usable_bytes) >= self._x(larger)
                or level.usable_bytes > plenty * line.here_need_bytes
            ):
                return larger
        worth = bounds.worth_growing if line.steps >= SETTLED_STEPS else 0.0
        return good if good < size < min(bounds.largest, good * (1.0 + worth)) else size
