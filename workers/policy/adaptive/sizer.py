"""The largest size that fits, before anything fails: one number moved up and down as memory comes
and goes.

A pure reducer over three events (asked, succeeded, failed), whose time comes as an argument. Two
bounds limit the size:

- What memory allows: the footprint learned from measured peaks (`footprint.py`) against the free
memory of the device
  (`free_memory.py`), minus the margins of both.
- What has failed lately (`size_bounds.py`).

A failure that the next sample explains (memory was taken) changes nothing else; nor does that of a
step that takes several times what others take (`heavy_steps.py`). An unexplained failure widens the
footprint's margin. After two of them without a success near the allowed size, the signal is ignored
until a step confirms it, or until it reports far more memory than at the contradiction; then
earlier failures are forgotten, because they happened under little memory. When the permitted
failures of a minute are used up, nothing is probed until the oldest is a minute ago, the smallest
size neither: it goes on at a size that has ended well lately under no more memory
(`proven_sizes.py`). Until a step ends well, each size is smaller than the one that failed before
it.

Does not know what a size means in tensors, and nothing of torch. `policy.py` makes a policy of it,
`workers/resilience/adaptive_size.py` a class for any loop.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from workers.policy.adaptive.footprint import Footprint, footprint_of, measured
from workers.policy.adaptive.free_memory import Level, sampled
from workers.policy.adaptive.heavy_steps import HEAVY, HeavySteps
from workers.policy.adaptive.proven_sizes import Proof, Proofs, largest_proven, proven, refuted
from workers.policy.adaptive.size_bounds import Bounds, Bracket, started_at
from workers.policy.adaptive.unjudged import Unjudged, and_failure
from workers.settings import Learned

#: Failures within so long are counted against the allowance.
WINDOW_S: Final = 60.0

#: The first step of a workload that was never measured is this share of the largest size; a second
#: one, so much larger, gives the slope. Small steps are cheap, and failures are not.
_FIRST_SHARE: Final = 1 / 64
_CALIBRATION_GROWTH: Final = 4.0

#: Unexplained failures after which a signal is ignored.
_DOUBTS: Final = 2

#: A step this close to what was promised, or this far above it, says whether the signal is right.
_NEAR: Final = 0.9
_ABOVE: Final = 1.1

#: A signal that has not been heard for so long is gone.
_SIGNAL_LOST_S: Final = 30.0

#: A signal that reports so many times the bytes of the last contradiction has changed: it is used
#: again, and no size is known to be bad any more.
_FAR_MORE: Final = 1.25

#: So many times what the last step took is plenty, and worth a probe of the next size whatever the
#: line says.
_PLENTY_WITHOUT_SLOPE: Final = 1.05
_PLENTY: Final = 2.0

#: A size that is so many times as large is worth a failure that the line expects because of a
#: surprise alone.
_FAR_APART: Final = 1.25

#: A size that was measured so often is found; before, it may still grow by less than is worth a
#: change.
SETTLED_STEPS: Final = 8

#: After a failure that showed what the step needs at least, the next size takes this share of what
#: fits by that.
_BELOW_EVIDENCE: Final = 0.9

#: In an emergency the smallest size is tried again when it is promised, and so much more is there
#: than when it failed. Whatever the signal says it is tried after so long, then after twice as
#: long.
_WORTH_WAKING: Final = 1.1
_FIRST_WAIT_S: Final = 10.0
_LONGEST_WAIT_S: Final = 60.0


class Sizer(NamedTuple):
    """What is known after some events; an immutable value, changed with `_replace`."""

    bracket: Bracket = Bracket()
    has_worked: bool = False
    """Whether a step has ended well."""
    proofs: Proofs = ()
    line: Footprint | None = None
    level: Level | None = None
    heavy: HeavySteps = HeavySteps()
    factor: float = 1.0
    """The step that was asked for last may take so many times what the line says."""
    sampled_at_s: float = 0.0
    unjudged: Unjudged | None = None
    """Failures since the last sample."""
    doubts: int = 0
    """Failures that no sample explained, since a step came near to what was promised."""
    failures: tuple[tuple[float, int], ...] = ()
    """Failures of the last minute: when, and at which size."""
    failed_size: int | None = None
    """Of the step that failed last, while none has ended well since: the next one is smaller."""
    wake_s: float | None = None
    """In an emergency: when to try the smallest size again whatever the signal says."""
    wait_s: float = _FIRST_WAIT_S
    low_bytes: float | None = None
    """The sample at which the smallest size failed."""
    contradicted_bytes: float | None = None
    """What the signal said when a step failed that it allowed, or what one took that it did not
    allow.
    """
    reason: str = ""
    """Why nothing runs, in words; empty while something does."""

    @property
    def unsure(self) -> bool:
        """Whether what the last sample said is no longer so."""
        return self.unjudged is not None and self.unjudged.surprising


def cold(bounds: Bounds, learned: Learned | None = None) -> Sizer:
    """Return the state before the first event, with what was remembered of an earlier run."""
    if learned is None:
        return Sizer()
    return Sizer(
        bracket=started_at(bounds.down(learned.size)), line=footprint_of(learned, bounds.power)
    )


def learned_of(state: Sizer) -> Learned | None:
    """Return what is worth remembering; `None` while nothing is known to be good."""
    good = state.bracket.good
    if good is None or state.bracket.in_row:
        return None
    if state.line is None:
        return Learned(size=good)
    return Learned(size=good, fixed_bytes=state.line.fixed_bytes, unit_bytes=state.line.unit_bytes)


def asked(
    state: Sizer, bounds: Bounds, at_s: float, free_bytes: int | None
) -> tuple[Sizer, int | None]:
    """Return the state when a step is about to begin, and its size: none while nothing may run.

    `free_bytes` is all that the step may use, own memory counted back; `None` if nothing was
    measured since the last.
    """
    state = _sampled(state, bounds, at_s, free_bytes)
    factor = state.heavy.factor(at_s)
    if len(state.failures) >= bounds.failures_per_minute and state.wake_s is None:
        safe = _safe(state, bounds, at_s)
        if safe is None:
            reason = f"{len(state.failures)} failures within a minute, and no size is known to fit"
            return state._replace(reason=reason, factor=1.0), None
        return state._replace(reason="", factor=factor), _shared(state, bounds, safe, factor)
    promised = _promised(state, bounds)
    if state.wake_s is None and promised is not None and promised < bounds.smallest:
        # The line says so; where it was never measured, the smallest size may show at once that it
        # is wrong there.
        wait_s = 0.0 if _is_below(state, bounds) else state.wait_s
        state = state._replace(wake_s=at_s + wait_s)
    if state.wake_s is not None:
        risen = state.bracket.in_row == 0  # only the line said that it does not fit
        if state.low_bytes is not None:
            risen = (
                state.level is not None
                and state.level.sample_bytes > _WORTH_WAKING * state.low_bytes
            )
        is_time = at_s >= state.wake_s or (
            promised is not None and promised >= bounds.smallest and risen
        )
        if is_time and len(state.failures) < bounds.failures_per_minute:
            return state._replace(reason="", factor=1.0), bounds.smallest
        why = "is out of memory" if state.bracket.in_row else "needs more than is free"
        return state._replace(reason=f"{bounds.smallest_step} {why}"), None
    size = _size(state, bounds, promised, at_s)
    return state._replace(reason="", factor=factor), _shared(state, bounds, size, factor)


def succeeded(
    state: Sizer, bounds: Bounds, at_s: float, size: int, peak_bytes: int | None
) -> Sizer:
    """Return the state after a step that ended well; its peak is `None` if it was not measured."""
    line, level, doubts, contradicted_bytes = (
        state.line,
        state.level,
        state.doubts,
        state.contradicted_bytes,
    )
    x = float(max(1, size)) ** bounds.power
    heavy, bracket = state.heavy, state.bracket
    ratio = (
        None
        if line is None or peak_bytes is None or not line.predicts(x)
        else peak_bytes / line.bytes_at(x)
    )
    if (ratio is not None and ratio >= HEAVY and not heavy.streak) or (
        peak_bytes is None and heavy.is_due
    ):
        heavy = heavy.met(at_s, heavy.ratio if ratio is None else ratio, failed=False)
        peak_bytes = None
    else:
        heavy = heavy.passed()
    bracket = (
        bracket.ended_well(bounds.down(size), at_s)
        if state.factor == 1.0
        else bracket._replace(in_row=0)
    )
    if level is not None and not state.unsure:
        # What a step takes that ran although it was not promised is known from its peak, else from
        # the line.
        taken_bytes = line.bytes_at(x) if peak_bytes is None and line is not None else peak_bytes
        ran_against_signal = state.wake_s is not None and not _is_below(state, bounds)
        took_more = peak_bytes is not None and peak_bytes > _ABOVE * level.likely_bytes
        if taken_bytes is not None and (ran_against_signal or took_more):
            doubts = min(_DOUBTS, doubts + 1)
            contradicted_bytes = float(taken_bytes)
        elif (
            peak_bytes is not None and _NEAR * level.usable_bytes < peak_bytes <= level.likely_bytes
        ):
            doubts = 0
    if peak_bytes is not None:
        line = measured(line, x, peak_bytes, at_s)
    state = state._replace(
        bracket=bracket,
        has_worked=True,
        proofs=proven(state.proofs, Proof(size, _memory_bytes(state, unknown=0.0), at_s)),
        line=line,
        doubts=doubts,
        contradicted_bytes=contradicted_bytes,
        failed_size=None,
        wake_s=None,
        wait_s=_FIRST_WAIT_S,
        low_bytes=None,
        reason="",
    )
    return _regular(state, heavy)


def failed(
    state: Sizer, bounds: Bounds, at_s: float, size: int, at_least_bytes: int | None = None
) -> Sizer:
    """Return the state after a step that ran out of memory.

    It would have held `at_least_bytes`, if that is known.
    """
    heavy, line, proofs, ordinary_size = state.heavy, state.line, state.proofs, size
    if heavy.is_due:  # it says nothing of the steps between
        ordinary_size = int(size * state.factor ** (1.0 / bounds.power))
    else:
        proofs = refuted(proofs, size, _memory_bytes(state, unknown=math.inf))
    failures = (*state.failures, (at_s, ordinary_size))[-2 * bounds.failures_per_minute :]
    x = float(max(1, size)) ** bounds.power
    shown = (
        None if line is None or not line.predicts(x) else (at_least_bytes or 0) / line.bytes_at(x)
    )
    is_heavy = heavy.is_due or (shown is not None and shown >= HEAVY and not heavy.failed)
    unjudged = state.unjudged
    is_expected = is_heavy and size > bounds.smallest
    if line is not None and _believed(state):
        needed_bytes = line.bytes_at(x) * state.factor
        unjudged = and_failure(
            unjudged, needed_bytes, heavy, state.proofs, surprising=not is_expected
        )
    if is_heavy or (_believed(state) and not heavy.failed and not heavy.confirmed):
        heavy = heavy.met(at_s, _guess(state, bounds, size, at_least_bytes), failed=True)
    else:
        heavy = heavy.passed(failed=True)
    state = state._replace(failures=failures, proofs=proofs, unjudged=unjudged, failed_size=size)
    if is_expected:
        return _regular(state, heavy)
    bracket = state.bracket.ran_out(bounds, max(1, size), at_s, cold=not state.has_worked)
    if at_least_bytes is not None and state.level is not None and bracket.good is not None:
        # A step takes at least its share of what this one showed.
        share = min(1.0, state.level.likely_bytes / max(1, at_least_bytes)) * _BELOW_EVIDENCE
        bracket = bracket._replace(
            good=min(bracket.good, bounds.down(size * share ** (1.0 / bounds.power)))
        )
    state = state._replace(bracket=bracket, heavy=heavy)
    if size > bounds.smallest:
        return state
    return state._replace(
        wake_s=at_s + state.wait_s,
        wait_s=min(_LONGEST_WAIT_S, 2 * state.wait_s),
        low_bytes=None if state.level is None else state.level.sample_bytes,
    )


def is_probe(state: Sizer, size: int) -> bool:
    """Say whether no step as large has ended well in the last minutes."""
    return not state.has_worked or size > max(state.bracket.good or 0, state.bracket.best)


def _sampled(state: Sizer, bounds: Bounds, at_s: float, free_bytes: int | None) -> Sizer:
    """Take in what was measured, and drop failures of more than a minute ago."""
    if state.failures and at_s >= state.failures[0][0] + WINDOW_S:
        state = state._replace(
            failures=tuple(failure for failure in state.failures if at_s < failure[0] + WINDOW_S)
        )
    level = state.level
    if free_bytes is None:
        if level is not None and at_s > state.sampled_at_s + _SIGNAL_LOST_S:
            return state._replace(level=None, unjudged=None)
        return (
            state._replace(level=level._replace(exact=False))
            if level is not None and level.exact
            else state
        )
    unsure = state.unsure
    before_bytes = math.inf if level is None else level.most_bytes
    passed_s = at_s - state.sampled_at_s
    level = sampled(
        level, float(free_bytes), exact=bounds.exact_samples, passed_s=passed_s, failed=unsure
    )
    state = state._replace(level=level, sampled_at_s=at_s)
    if state.low_bytes is not None and unsure:
        state = state._replace(low_bytes=min(state.low_bytes, level.sample_bytes))
    if state.unjudged is not None:
        return _judged(state, bounds, before_bytes)
    if (
        state.contradicted_bytes is None
        or level.likely_bytes <= _FAR_MORE * state.contradicted_bytes
    ):
        return state
    doubts = min(state.doubts, _DOUBTS - 1)  # it was ignored, but it reports something else now
    return state._replace(bracket=state.bracket.forgiven(), contradicted_bytes=None, doubts=doubts)


def _judged(state: Sizer, bounds: Bounds, before_bytes: float) -> Sizer:
    """Return the state after the first sample since a failure, which explains that or does not.

    `before_bytes`: what there was by the samples before the failure.
    """
    bad, line, level, unjudged = state.bracket.bad, state.line, state.level, state.unjudged
    state = state._replace(unjudged=None)
    if line is None or level is None or unjudged is None:
        return state
    low_bytes = min(level.most_bytes, before_bytes)  # what was taken may be back already
    if low_bytes < unjudged.needed_bytes and state.doubts < _DOUBTS:
        return state._replace(
            bracket=state.bracket.forgiven(),
            doubts=0,
            contradicted_bytes=None,
            heavy=unjudged.heavy_if_taken(state.heavy),
            proofs=state.proofs if bad is None else refuted(unjudged.proofs, bad, low_bytes),
        )
    if bad is None or state.heavy.confirmed:
        return state._replace(bracket=state.bracket.forgiven())
    x = float(bad) ** bounds.power
    return state._replace(
        line=line.surprised(x, min(level.usable_bytes, before_bytes)),
        contradicted_bytes=level.likely_bytes,
        doubts=min(_DOUBTS, state.doubts + 1),
    )


def _is_below(state: Sizer, bounds: Bounds) -> bool:
    """Whether the smallest size is far smaller than all that was measured."""
    return state.line is not None and state.line.is_below(float(bounds.smallest) ** bounds.power)


def _believed(state: Sizer) -> bool:
    """Whether there is a signal that can be compared with what steps take, and that steps have not
    contradicted.
    """
    return state.level is not None and state.line is not None and state.doubts < _DOUBTS


def _promised(state: Sizer, bounds: Bounds) -> float | None:
    """Return the largest size that memory allows; `None` when it is unknown."""
    line, level = state.line, state.level
    if line is None or level is None or not _believed(state):
        return None
    usable_bytes = level.usable_bytes
    if state.unsure:  # memory was taken, or a probe failed
        if level.low_bytes is None or not state.bracket.taken:
            return None
        usable_bytes = min(usable_bytes, level.low_bytes)
    x = line.largest_x(usable_bytes)
    if x <= 0:
        return 0.0
    power = 1.0 / bounds.power
    if not line.has_slope:
        return min(x**power, _CALIBRATION_GROWTH * line.here_x**power)  # type: ignore[no-any-return]  # float ** float
    return x**power  # type: ignore[no-any-return]  # float ** float may be complex, not above 0


def _regular(state: Sizer, heavy: HeavySteps) -> Sizer:
    """Return the state with what is now known of heavy steps: once they are regular, they explain
    the failures.
    """
    if state.heavy.confirmed or not heavy.confirmed:
        return state._replace(heavy=heavy)
    line = None if state.line is None else state.line._replace(surprise=0.0)
    if (state.contradicted_bytes or 0.0) <= _ABOVE * _memory_bytes(state, unknown=math.inf):
        state = state._replace(
            doubts=0, contradicted_bytes=None
        )  # else the signal denies what has run
    return state._replace(
        heavy=heavy,
        line=line,
        unjudged=None if state.unjudged is None else state.unjudged._replace(surprising=False),
        bracket=state.bracket.forgiven(),
    )


def _memory_bytes(state: Sizer, unknown: float) -> float:
    return unknown if state.level is None else state.level.likely_bytes


def _safe(state: Sizer, bounds: Bounds, at_s: float) -> int | None:
    """Return the largest size that has ended well lately under no more memory than now, or half of
    what failed since.

    `None` if nothing has ever ended well.
    """
    memory_bytes = _memory_bytes(state, unknown=math.inf)
    if state.unsure and state.level is not None and state.level.low_bytes is not None:
        memory_bytes = min(memory_bytes, state.level.low_bytes)
    size = largest_proven(state.proofs, memory_bytes, at_s)
    if not state.has_worked:
        return size
    return max(size or 0, bounds.down(min(size for _, size in state.failures) // 2))


def _guess(state: Sizer, bounds: Bounds, size: int, at_least_bytes: int | None) -> float:
    """Return how many times an ordinary step's memory a failed one would have taken, at the least."""
    line, level = state.line, state.level
    if line is None or level is None:
        return 2.0
    shown_bytes = max(level.usable_bytes, at_least_bytes or 0.0)
    return max(1.0, shown_bytes / max(1.0, line.bytes_at(float(size) ** bounds.power)))


def _shared(state: Sizer, bounds: Bounds, size: int, factor: float) -> int:
    """Return the size no larger than this one whose step fits although it takes so many times what
    the line says.
    """
    line, level = state.line, state.level
    if state.failed_size is not None:
        size = min(size, bounds.down(state.failed_size - 1))
    if factor == 1.0:
        return size
    if line is None or level is None or not _believed(state):
        return bounds.down(size / factor ** (1.0 / bounds.power))
    x = max(1.0, line.largest_x(level.usable_bytes / factor))
    return min(size, bounds.down(x ** (1.0 / bounds.power)))


def _size(state: Sizer, bounds: Bounds, promised: float | None, now_s: float) -> int:
    bracket, level = state.bracket, state.level
    good = bracket.good
    if good is None:
        return bounds.down(bounds.largest * _FIRST_SHARE if bounds.first is None else bounds.first)
    allowed = bracket.allowed(good, bounds, now_s, promised=promised is not None)
    if promised is None or level is None or state.line is None:
        return allowed
    size = bounds.down(min(promised, allowed))
    if size <= good < allowed and bracket.may_probe(now_s):
        # Where sizes are few and far apart, the line may reach farther than it promises; a surprise
        # must not bar the way to a size that is much larger. Where far more is there than the last
        # step took, it is the line that is not known: it has no slope yet, or was measured on small
        # steps when memory was short.
        larger, line = bounds.up(good), state.line
        if larger > _FAR_APART * good:
            line = line._replace(surprise=0.0)
        reaches = line.hoped_x(level.usable_bytes) >= float(larger) ** bounds.power
        plenty = _PLENTY if line.has_slope else _PLENTY_WITHOUT_SLOPE
        if reaches or level.usable_bytes > plenty * line.here_need_bytes:
            return larger
    settled = state.line.steps >= SETTLED_STEPS
    worth = bounds.worth_growing if settled else 0.0
    return good if good < size < min(bounds.largest, good * (1.0 + worth)) else size
