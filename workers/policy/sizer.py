"""The largest size that fits, before anything fails: one number moved up and down as memory comes
and goes.

A pure reducer over three events (asked, succeeded, failed), whose time comes as an argument. It has
three parts:

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
    Bounds,
    Bracket,
    Proof,
    Proofs,
    largest_proven,
    started_at,
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


class Sizer(NamedTuple):
    """What is known after some events; an immutable value, changed with `_replace`."""

    # Memory seen.
    level: FreeMemory | None = None
    doubts: int = 0
    """Failures that no sample explained, since a step came near to what was promised."""
    contradicted_bytes: float | None = None
    """What the signal said when a step failed that it allowed, or what one took that it did not
    allow.
    """
    # Memory needed.
    line: Footprint | None = None
    heavy: HeavySteps = HeavySteps()
    factor: float = 1.0
    """The step that was asked for last may take so many times what the line says."""
    # Sizes tried.
    bracket: Bracket = Bracket()
    proofs: Proofs = ()
    failures: tuple[tuple[float, int], ...] = ()
    """Failures of the last minute: when, and at which size."""
    failed_size: int | None = None
    """Of the step that failed last, while none has ended well since: the next one is smaller."""
    unjudged: Unjudged | None = None
    # An emergency.
    wake_s: float | None = None
    """When to try the smallest size again whatever the signal says."""
    wait_s: float = FIRST_WAIT_S
    low_bytes: float | None = None
    """The sample at which the smallest size failed."""
    reason: str = ""
    """Why nothing runs, in words; empty while something does."""

    @classmethod
    def cold(cls, bounds: Bounds, learned: Learned | None = None) -> Sizer:
        """Return the state before the first event, with what was remembered of an earlier run."""
        if learned is None:
            return cls()
        bracket = started_at(bounds.down(learned.size))
        return cls(bracket=bracket, line=footprint_of(learned, bounds.power))

    @property
    def learned(self) -> Learned | None:
        """What is worth remembering; `None` while nothing is known to be good."""
        good, line = self.bracket.good, self.line
        if good is None or self.bracket.in_row:
            return None
        if line is None:
            return Learned(size=good)
        return Learned(size=good, fixed_bytes=line.fixed_bytes, unit_bytes=line.unit_bytes)

    @property
    def has_worked(self) -> bool:
        """Whether a step has ended well."""
        return self.bracket.best > 0

    @property
    def unsure(self) -> bool:
        """Whether what the last sample said is no longer so."""
        return self.unjudged is not None and self.unjudged.surprising

    def is_probe(self, size: int) -> bool:
        """Say whether no step as large has ended well in the last minutes."""
        return not self.has_worked or size > max(self.bracket.good or 0, self.bracket.best)

    def next_size(
        self, bounds: Bounds, at_s: float, free_bytes: int | None
    ) -> tuple[Sizer, int | None]:
        """Return the state when a step is about to begin, and its size: none while nothing may run.

        `free_bytes` is all that the step may use, own memory counted back; `None` if nothing was
        measured since the last.
        """
        state = self._sampled(bounds, at_s, free_bytes)
        size: int | None
        factor, is_spent = (
            state.heavy.factor(at_s),
            len(state.failures) >= bounds.failures_per_minute,
        )
        if is_spent and state.wake_s is None:
            size = state._safe(bounds, at_s)
            reason = f"{len(state.failures)} failures within a minute, and no size is known to fit"
        else:
            promised = state._promised(bounds)
            state = state._asleep(bounds, promised, at_s)
            if state.wake_s is None:
                size, reason = state._size(bounds, promised, at_s), ""
            else:
                may_wake = not is_spent and state._may_wake(bounds, promised, at_s)
                size, factor = (bounds.smallest if may_wake else None), 1.0
                why = "is out of memory" if state.bracket.in_row else "needs more than is free"
                reason = f"{bounds.smallest_step} {why}"
        if size is not None:
            size, reason = state._shared(bounds, size, factor), ""
        return state._replace(reason=reason, factor=factor), size

    def may_fail(self, bounds: Bounds, at_s: float) -> bool:
        """Say whether a failure more is within those of a minute."""
        lately = [failed_at_s for failed_at_s, _ in self.failures if at_s < failed_at_s + MINUTE_S]
        return len(lately) < bounds.failures_per_minute

    def may_fit_again(self, bounds: Bounds, at_s: float, free_bytes: int) -> bool:
        """Say whether the smallest size, for which memory was short, may fit in so much.

        Where its step is known to fit, another program may have taken memory for a moment: then it
        is tried again after a while.
        """
        needed_bytes = self.needs_bytes(bounds, bounds.smallest)
        is_over = needed_bytes > 0 and (self.wake_s is None or at_s >= self.wake_s)
        low_bytes = 0.0 if is_over or self.low_bytes is None else self.low_bytes
        return free_bytes > (1 + NEAR) * max(low_bytes, needed_bytes)

    def needs_bytes(self, bounds: Bounds, size: int) -> float:
        """Return what a step of this size takes; 0 where that was never measured."""
        return 0.0 if self.line is None else self.line.bytes_at(float(size) ** bounds.power)

    def succeeded(self, bounds: Bounds, at_s: float, size: int, peak_bytes: int | None) -> Sizer:
        """Return the state after a step that ended well; its peak is `None` if it was not
        measured.
        """
        line, level, heavy, bracket = self.line, self.level, self.heavy, self.bracket
        doubts, contradicted_bytes = self.doubts, self.contradicted_bytes
        x = float(max(1, size)) ** bounds.power
        ratio = None
        # What was learned in an earlier run is wrong rather than the first step heavy.
        if self.has_worked and line is not None and peak_bytes is not None and line.predicts(x):
            ratio = peak_bytes / line.bytes_at(x)
        if (ratio is not None and ratio >= MUCH_MORE and not heavy.streak) or (
            peak_bytes is None and heavy.is_due
        ):
            heavy = heavy.met(at_s, heavy.ratio if ratio is None else ratio, failed=False)
            peak_bytes = None
        else:
            heavy = heavy.passed()

        if self.factor == 1.0:
            bracket = bracket.ended_well(bounds.down(size), at_s)
        else:
            bracket = bracket._replace(in_row=0, best=max(bracket.best, size))

        if level is not None and not self.unsure:
            # What a step takes that ran although it was not promised is known from its peak, else
            # from the line.
            taken_bytes = (
                line.bytes_at(x) if peak_bytes is None and line is not None else peak_bytes
            )
            ran_against_signal = self.wake_s is not None and not self._is_below(bounds)
            took_more = peak_bytes is not None and peak_bytes > (1 + NEAR) * level.likely_bytes
            if taken_bytes is not None and (ran_against_signal or took_more):
                doubts, contradicted_bytes = min(TWICE, doubts + 1), float(taken_bytes)
            elif peak_bytes is not None and (
                (1 - NEAR) * level.usable_bytes < peak_bytes <= level.likely_bytes
            ):
                doubts = 0
        return self._replace(
            bracket=bracket,
            proofs=with_proof(self.proofs, Proof(size, self._memory_bytes(unknown=0.0), at_s)),
            line=line if peak_bytes is None else with_peak(line, x, peak_bytes, at_s),
            doubts=doubts,
            contradicted_bytes=contradicted_bytes,
            failed_size=None,
            wake_s=None,
            wait_s=FIRST_WAIT_S,
            low_bytes=None,
            reason="",
        )._with(heavy)

    def failed(
        self, bounds: Bounds, at_s: float, size: int, at_least_bytes: int | None = None
    ) -> Sizer:
        """Return the state after a step that ran out of memory.

        It would have held `at_least_bytes`, if that is known.
        """
        heavy, line, level, proofs = self.heavy, self.line, self.level, self.proofs
        x, ordinary_size, shown = float(max(1, size)) ** bounds.power, size, 0.0
        if heavy.is_due:  # it says nothing of the steps between
            ordinary_size = int(size * self.factor ** (1.0 / bounds.power))
        else:
            proofs = without_refuted(proofs, size, self._memory_bytes(unknown=math.inf))
        failures = (*self.failures, (at_s, ordinary_size))[-2 * bounds.failures_per_minute :]
        if line is not None and line.predicts(x):
            shown = (at_least_bytes or 0) / line.bytes_at(x)
        is_heavy = heavy.is_due or (shown >= MUCH_MORE and not heavy.failed)
        is_expected = is_heavy and size > bounds.smallest

        unjudged = self.unjudged
        if line is not None and self._believed:
            needed_bytes = line.bytes_at(x) * self.factor
            before = unjudged or Unjudged(
                needed_bytes=math.inf,
                heavy=heavy if heavy.confirmed else heavy.passed(failed=True),
                proofs=self.proofs,
                surprising=False,
            )
            unjudged = before._replace(
                needed_bytes=min(before.needed_bytes, needed_bytes),
                proofs=before.proofs if before.surprising else self.proofs,
                surprising=before.surprising or not is_expected,
            )
        if is_heavy or (self._believed and not heavy.failed and not heavy.confirmed):
            ratio = 2.0  # at the least, as many times an ordinary step's memory
            if line is not None and level is not None:
                shown_bytes = max(level.usable_bytes, at_least_bytes or 0.0)
                ratio = max(1.0, shown_bytes / max(1.0, line.bytes_at(x)))
            heavy = heavy.met(at_s, ratio, failed=True)
        else:
            heavy = heavy.passed(failed=True)
        state = self._replace(failures=failures, proofs=proofs, unjudged=unjudged, failed_size=size)
        if is_expected:
            return state._with(heavy)

        bracket = self.bracket.ran_out(bounds, max(1, size), at_s, cold=not self.has_worked)
        if at_least_bytes is not None and level is not None and bracket.good is not None:
            # A step takes at least its share of what this one showed.
            share = min(1.0, level.likely_bytes / max(1, at_least_bytes)) * (1 - NEAR)
            good = min(bracket.good, bounds.down(size * share ** (1.0 / bounds.power)))
            bracket = bracket._replace(good=good)
        state = state._replace(bracket=bracket, heavy=heavy)
        if size > bounds.smallest:
            return state
        return state._replace(
            wake_s=at_s + state.wait_s,
            wait_s=min(MINUTE_S, 2 * state.wait_s),
            low_bytes=None if level is None else level.sample_bytes,
        )

    def _sampled(self, bounds: Bounds, at_s: float, free_bytes: int | None) -> Sizer:
        """Take in what was measured, and drop failures of more than a minute ago."""
        state, level, unsure = self, self.level, self.unsure
        if self.failures and at_s >= self.failures[0][0] + MINUTE_S:
            lately = tuple(failure for failure in self.failures if at_s < failure[0] + MINUTE_S)
            state = state._replace(failures=lately)
        if free_bytes is None:
            if level is None:
                return state
            if at_s > level.at_s + MINUTE_S / 2:  # the signal is gone
                return state._replace(level=None, unjudged=None)
            return state._replace(level=level._replace(exact=False)) if level.exact else state

        before_bytes = math.inf if level is None else level.most_bytes
        level = with_sample(
            level, float(free_bytes), at_s, exact=bounds.exact_samples, failed=unsure
        )
        state = state._replace(level=level)
        if state.low_bytes is not None and unsure:
            state = state._replace(low_bytes=min(state.low_bytes, level.sample_bytes))
        if state.unjudged is not None:
            return state._judged(bounds, level, before_bytes)
        was_bytes = state.contradicted_bytes
        if was_bytes is not None and level.likely_bytes > MUCH_MORE * was_bytes:
            # The signal was ignored, but it reports something else now.
            return state._replace(
                bracket=state.bracket.forgiven(),
                contradicted_bytes=None,
                doubts=min(state.doubts, TWICE - 1),
            )
        return state

    def _judged(self, bounds: Bounds, level: FreeMemory, before_bytes: float) -> Sizer:
        """Return the state after the first sample since a failure, which explains that or does not.

        `before_bytes`: what there was by the samples before the failure.
        """
        bad, line, unjudged = self.bracket.bad, self.line, self.unjudged
        state = self._replace(unjudged=None)
        if line is None or unjudged is None:
            return state
        low_bytes = min(level.most_bytes, before_bytes)  # what was taken may be back already
        if low_bytes < unjudged.needed_bytes and self.doubts < TWICE:
            before, now = unjudged.heavy, self.heavy
            return state._replace(
                bracket=self.bracket.forgiven(),
                doubts=0,
                contradicted_bytes=None,
                heavy=now._replace(ratio=before.ratio)
                if before.confirmed
                else before._replace(ordinary=now.ordinary),
                proofs=self.proofs
                if bad is None
                else without_refuted(unjudged.proofs, bad, low_bytes),
            )
        if bad is None or self.heavy.confirmed:
            return state._replace(bracket=self.bracket.forgiven())
        limit_bytes = min(level.usable_bytes, before_bytes)
        return state._replace(
            line=line.surprised(float(bad) ** bounds.power, limit_bytes),
            contradicted_bytes=level.likely_bytes,
            doubts=min(TWICE, self.doubts + 1),
        )

    def _is_below(self, bounds: Bounds) -> bool:
        """Whether the smallest size is far smaller than all that was measured."""
        return self.line is not None and self.line.is_below(float(bounds.smallest) ** bounds.power)

    @property
    def _believed(self) -> bool:
        """Whether there is a signal that can be compared with what steps take, and that steps have
        not contradicted.
        """
        return self.level is not None and self.line is not None and self.doubts < TWICE

    def _promised(self, bounds: Bounds) -> float | None:
        """Return the largest size that memory allows; `None` when it is unknown."""
        line, level = self.line, self.level
        if line is None or level is None or not self._believed:
            return None
        usable_bytes = level.usable_bytes
        if self.unsure:  # memory was taken, or a probe failed
            if level.low_bytes is None or not self.bracket.taken:
                return None
            usable_bytes = min(usable_bytes, level.low_bytes)
        power = 1.0 / bounds.power
        size = float(max(0.0, line.largest_x(usable_bytes)) ** power)
        return size if line.has_slope else min(size, _CALIBRATION_GROWTH * line.here_x**power)

    def _asleep(self, bounds: Bounds, promised: float | None, at_s: float) -> Sizer:
        """Return the state that waits if the line says that not even the smallest size fits."""
        if self.wake_s is not None or promised is None or promised >= bounds.smallest:
            return self
        # Where it was never measured, the smallest size may show at once that the line is wrong.
        return self._replace(wake_s=at_s + (0.0 if self._is_below(bounds) else self.wait_s))

    def _may_wake(self, bounds: Bounds, promised: float | None, at_s: float) -> bool:
        risen = self.bracket.in_row == 0  # only the line said that it does not fit
        if self.low_bytes is not None:
            now_bytes = 0.0 if self.level is None else self.level.sample_bytes
            risen = now_bytes > (1 + NEAR) * self.low_bytes
        is_promised = promised is not None and promised >= bounds.smallest
        return (self.wake_s is not None and at_s >= self.wake_s) or (is_promised and risen)

    def _with(self, heavy: HeavySteps) -> Sizer:
        """Return the state with what is now known of heavy steps: once they are regular, they
        explain the failures.
        """
        state = self._replace(heavy=heavy)
        if self.heavy.confirmed or not heavy.confirmed:
            return state
        # Else the signal denies what has run.
        if (self.contradicted_bytes or 0.0) <= (1 + NEAR) * self._memory_bytes(unknown=math.inf):
            state = state._replace(doubts=0, contradicted_bytes=None)
        unjudged = self.unjudged
        return state._replace(
            line=None if self.line is None else self.line._replace(surprise=0.0),
            unjudged=None if unjudged is None else unjudged._replace(surprising=False),
            bracket=self.bracket.forgiven(),
        )

    def _memory_bytes(self, unknown: float) -> float:
        return unknown if self.level is None else self.level.likely_bytes

    def _safe(self, bounds: Bounds, at_s: float) -> int | None:
        """Return the largest size that has ended well lately under no more memory than now, or half
        of what failed since.

        `None` if nothing has ever ended well.
        """
        memory_bytes = self._memory_bytes(unknown=math.inf)
        if self.unsure and self.level is not None and self.level.low_bytes is not None:
            memory_bytes = min(memory_bytes, self.level.low_bytes)
        size = largest_proven(self.proofs, memory_bytes, at_s)
        if not self.has_worked:
            return size
        return max(size or 0, bounds.down(min(failed for _, failed in self.failures) // 2))

    def _shared(self, bounds: Bounds, size: int, factor: float) -> int:
        """Return the size no larger than this one, and smaller than what has just failed, whose
        step fits although it takes so many times what the line says.
        """
        line, level, power = self.line, self.level, 1.0 / bounds.power
        if self.failed_size is not None:
            size = min(size, bounds.down(self.failed_size - 1))
        if factor > 1.0 and line is not None and level is not None and self._believed:
            x = max(1.0, line.largest_x(level.usable_bytes / factor))
            return min(size, bounds.down(x**power))
        return bounds.down(size / factor**power) if factor > 1.0 else size

    def _size(self, bounds: Bounds, promised: float | None, now_s: float) -> int:
        bracket, level, line, good = self.bracket, self.level, self.line, self.bracket.good
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
                calm.hoped_x(level.usable_bytes) >= float(larger) ** bounds.power
                or level.usable_bytes > plenty * line.here_need_bytes
            ):
                return larger
        worth = bounds.worth_growing if line.steps >= SETTLED_STEPS else 0.0
        return good if good < size < min(bounds.largest, good * (1.0 + worth)) else size
