"""The largest size that fits, before anything fails: one number moved up and down as memory comes and goes.

A pure reducer over three events (asked, succeeded, failed) that carry their time. Two bounds limit the size:

- What memory allows: the footprint learned from measured peaks (`footprint.py`) against the free memory of the device
  (`free_memory.py`), minus the margins of both.
- What has failed lately (`size_bounds.py`).

A failure that the next sample explains (memory was taken) changes nothing else. An unexplained failure widens the
margins. After two of them without a success near the allowed size, the signal is ignored until a step confirms it, or
until it reports far more memory than at the contradiction; then earlier failures are forgotten, because they happened
under little memory. When the permitted failures of a minute are used up, nothing runs until the oldest is a minute ago.

Does not know what a size means in tensors, and nothing of torch. `policy.py` makes a policy of it,
`workers/resilience/adaptive_size.py` a class for any loop.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, TypeAlias

from workers.policy.adaptive import size_bounds as brackets
from workers.policy.adaptive.bounds import Bounds
from workers.policy.adaptive.footprint import Footprint, footprint_of, measured
from workers.policy.adaptive.free_memory import Level, doubted, sampled
from workers.policy.adaptive.size_bounds import Bracket
from workers.settings import Learned

#: Failures within so long are counted against the allowance.
WINDOW_S: Final = 60.0

#: The first step of a workload that was never measured is this share of the largest size; a second one, so much
#: larger, gives the slope. Small steps are cheap, and failures are not.
_FIRST_SHARE: Final = 1 / 64
_CALIBRATION_GROWTH: Final = 4.0

#: Until a new sample shows how far memory fell, this share of the failed size is kept.
_KEPT_UNTIL_SAMPLED: Final = 0.25

#: After a failure only a share of the usable memory is allowed for so long: another program often takes more.
_COOL_S: Final = 5.0
_PROMISED_WHILE_COOLING: Final = 0.8

#: A sample that has not come by then will not come.
_SAMPLE_DUE_S: Final = 5.0

#: Unexplained failures after which a signal is ignored.
_DOUBTS: Final = 2

#: A step this close to what was promised, or this far above it, says whether the signal is right.
_NEAR: Final = 0.9
_ABOVE: Final = 1.1

#: A signal that has not been heard for so long is gone.
_SIGNAL_LOST_S: Final = 30.0

#: A signal that reports so many times the bytes of the last contradiction has changed: it is used again, and no size is
#: known to be bad any more.
_FAR_MORE: Final = 1.25

#: So many times what the last step took is plenty, and worth a probe of the next size whatever the line says.
_PLENTY_WITHOUT_SLOPE: Final = 1.05
_PLENTY: Final = 2.0

#: A size that was measured so often is found; before, it may still grow by less than is worth a change.
SETTLED_STEPS: Final = 8

#: In an emergency the smallest size is tried again after so long, then after twice as long, whatever the signal says.
_FIRST_WAIT_S: Final = 10.0
_LONGEST_WAIT_S: Final = 60.0

#: Or when so much more is there than when the smallest size failed.
_WORTH_WAKING: Final = 1.1


class Asked(NamedTuple):
    """A step is about to begin, and wants a size."""

    at_s: float
    free_bytes: int | None
    """All that the step may use, own memory counted back; `None` if nothing was measured since the last step."""


class Succeeded(NamedTuple):
    """A step ended well."""

    at_s: float
    size: int
    peak_bytes: int | None
    """`None` if it was not measured."""


class Failed(NamedTuple):
    """A step ran out of memory."""

    at_s: float
    size: int


Event: TypeAlias = Asked | Succeeded | Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizer:
    """What is known after some events."""

    bracket: Bracket = field(default_factory=Bracket)
    line: Footprint | None = None
    level: Level | None = None
    told: bool = False
    """Whether the last question came with a sample."""
    sampled_at_s: float = 0.0
    unsure_since_s: float | None = None
    """When a step failed since the last sample: what that said is no longer so."""
    doubts: int = 0
    """Failures that no sample explained, since a step came near to what was promised."""
    failed_at_s: tuple[float, ...] = ()
    """Failures of the last minute."""
    rests_since_s: float | None = None
    """Since when nothing runs because there were too many."""
    wake_s: float | None = None
    """In an emergency: when to try the smallest size again whatever the signal says."""
    wait_s: float = _FIRST_WAIT_S
    low_bytes: float | None = None
    """What was usable when the smallest size failed."""
    contradicted_bytes: float | None = None
    """What the signal said when a step failed that it allowed, or what one took that it did not allow."""
    fits_at_bytes: float | None = None
    """The lowest sample at which the smallest size has ended well, since it failed last."""
    reason: str = ""
    """Why nothing runs, in words; empty while something does."""


def cold(bounds: Bounds, learned: Learned | None = None) -> Sizer:
    """Return the state before the first event, with what was remembered of an earlier run."""
    if learned is None:
        return Sizer()
    return Sizer(
        bracket=brackets.started_at(bounds.down(learned.size)),
        line=footprint_of(learned, bounds.power),
    )


def learned_of(state: Sizer) -> Learned | None:
    """Return what is worth remembering; `None` while nothing is known to be good."""
    good = state.bracket.good
    if good is None or state.bracket.in_row:
        return None
    if state.line is None:
        return Learned(size=good)
    return Learned(size=good, fixed_bytes=state.line.fixed_bytes, unit_bytes=state.line.unit_bytes)


def asked(state: Sizer, bounds: Bounds, event: Asked) -> tuple[Sizer, int | None]:
    """Return the state, and the size of the next step: none while nothing may run."""
    state = _sampled(state, bounds, event)
    if len(state.failed_at_s) >= bounds.failures_per_minute:
        since_s = event.at_s if state.rests_since_s is None else state.rests_since_s
        reason = f"{len(state.failed_at_s)} failures within a minute, and no more are allowed"
        return _idle(state, reason, since_s), None
    if state.rests_since_s is not None:
        rest_s = event.at_s - state.rests_since_s
        state = replace(state, bracket=brackets.rested(state.bracket, rest_s), rests_since_s=None)
    promised = _promised(state, bounds, event.at_s)
    too_little = promised is not None and promised < bounds.smallest and not _may_stay(state, bounds)
    too_little = too_little and not _has_fitted(state)
    if state.wake_s is None and too_little:
        # The line says so; where it was never measured, the smallest size may show at once that it is wrong there.
        wait_s = 0.0 if _is_below(state, bounds) else state.wait_s
        state = replace(state, wake_s=event.at_s + wait_s)
    if state.wake_s is not None:
        if _may_wake(state, bounds, promised, event.at_s):
            return _busy(state), bounds.smallest
        why = "is out of memory" if state.bracket.in_row else "needs more than is free"
        return _idle(state, f"the smallest size ({bounds.smallest}) {why}", None), None
    return _busy(state), _size(state, bounds, promised, event.at_s)


def succeeded(state: Sizer, bounds: Bounds, event: Succeeded) -> Sizer:
    """Return the state after a step that ended well."""
    line, level, doubts, contradicted_bytes = state.line, state.level, state.doubts, state.contradicted_bytes
    if event.peak_bytes is not None:
        if level is not None and state.unsure_since_s is None:
            knows_better = state.fits_at_bytes is not None and event.peak_bytes > level.usable_bytes
            ran_against_signal = (state.wake_s is not None and not _is_below(state, bounds)) or knows_better
            if event.peak_bytes > _ABOVE * level.likely_bytes or ran_against_signal:
                doubts = min(_DOUBTS, doubts + 1)
                contradicted_bytes = float(event.peak_bytes)
            elif doubts and _NEAR * level.usable_bytes < event.peak_bytes <= level.likely_bytes:
                doubts = 0
        line = measured(line, float(max(1, event.size)) ** bounds.power, event.peak_bytes, event.at_s)
    size = bounds.down(event.size)
    if state.unsure_since_s is not None and state.bracket.good is not None:
        size = max(size, state.bracket.good)  # small for want of a sample only
    return Sizer(
        bracket=brackets.ended_well(state.bracket, size, event.at_s),
        line=line,
        level=level,
        told=state.told,
        sampled_at_s=state.sampled_at_s,
        unsure_since_s=state.unsure_since_s,
        doubts=doubts,
        failed_at_s=state.failed_at_s,
        contradicted_bytes=contradicted_bytes,
        fits_at_bytes=_fits_at(state) if event.size <= bounds.smallest else state.fits_at_bytes,
    )


def failed(state: Sizer, bounds: Bounds, event: Failed) -> Sizer:
    """Return the state after a step that ran out of memory."""
    state = replace(
        state,
        bracket=brackets.ran_out(state.bracket, bounds, max(1, event.size), event.at_s),
        unsure_since_s=event.at_s if _believed(state) else None,
        failed_at_s=(*state.failed_at_s, event.at_s)[-bounds.failures_per_minute :],
    )
    if event.size > bounds.smallest:
        return state
    return replace(
        state,
        wake_s=event.at_s + state.wait_s,
        wait_s=min(_LONGEST_WAIT_S, 2 * state.wait_s),
        low_bytes=None if state.level is None else state.level.sample_bytes,
        fits_at_bytes=None,
    )


def _sampled(state: Sizer, bounds: Bounds, event: Asked) -> Sizer:
    """Take in what was measured, and drop failures of more than a minute ago."""
    if state.failed_at_s and event.at_s >= state.failed_at_s[0] + WINDOW_S:
        lately = tuple(at_s for at_s in state.failed_at_s if event.at_s < at_s + WINDOW_S)
        state = replace(state, failed_at_s=lately)
    level = state.level
    if event.free_bytes is None:
        if level is not None and event.at_s > state.sampled_at_s + _SIGNAL_LOST_S:
            return replace(state, level=None, told=False, unsure_since_s=None)
        if level is None or not (state.told or level.fresh):
            return state
        return replace(state, level=replace(level, fresh=False), told=False)
    unsure = state.unsure_since_s is not None
    level = sampled(level, float(event.free_bytes), every_step=state.told, exact_samples=bounds.exact_samples)
    state = replace(state, level=level, told=True, sampled_at_s=event.at_s, unsure_since_s=None)
    if unsure:
        return _judged(state, bounds)
    if state.contradicted_bytes is None or level.likely_bytes <= _FAR_MORE * state.contradicted_bytes:
        return state
    doubts = min(state.doubts, _DOUBTS - 1)  # it was ignored, but it reports something else now
    return replace(state, bracket=brackets.forgiven(state.bracket), contradicted_bytes=None, doubts=doubts)


def _judged(state: Sizer, bounds: Bounds) -> Sizer:
    """Return the state after the first sample since a failure, which explains that or does not."""
    bad, line, level = state.bracket.bad, state.line, state.level
    if bad is None or line is None or level is None:
        return state
    x = float(bad) ** bounds.power
    if level.likely_bytes < line.bytes_at(x) and state.doubts < _DOUBTS:
        return replace(state, bracket=brackets.forgiven(state.bracket), doubts=0, contradicted_bytes=None)
    state = replace(state, contradicted_bytes=level.likely_bytes)
    if line.is_beyond(x):
        return replace(state, line=line.surprised(x, level.usable_bytes))  # no measurement of this size had allowed it
    known = x == line.here_x
    # An exact level leaves only the step to blame: it takes more than it did, and so may all others.
    if level.exact or not known:
        line = line.surprised(x, level.usable_bytes)
    return replace(state, line=line, level=doubted(level), doubts=min(_DOUBTS, state.doubts + 1))


def _may_wake(state: Sizer, bounds: Bounds, promised: float | None, now_s: float) -> bool:
    if state.wake_s is None or now_s >= state.wake_s:
        return True
    level = state.level
    if level is None or promised is None or promised < bounds.smallest:
        return False
    if state.low_bytes is None:
        return state.bracket.in_row == 0
    return level.sample_bytes > _WORTH_WAKING * state.low_bytes


def _fits_at(state: Sizer) -> float | None:
    """Return the lowest sample at which the smallest size has ended well, now that it has once more."""
    if state.level is None or state.unsure_since_s is not None:
        return state.fits_at_bytes
    return min(state.level.sample_bytes, state.fits_at_bytes or state.level.sample_bytes)


def _has_fitted(state: Sizer) -> bool:
    """Whether the smallest size has ended well under a signal as low as it is now, whatever the line says of that."""
    return (
        state.fits_at_bytes is not None and state.level is not None and state.level.sample_bytes >= state.fits_at_bytes
    )


def _is_below(state: Sizer, bounds: Bounds) -> bool:
    """Whether the smallest size is far smaller than all that was measured."""
    return state.line is not None and state.line.is_below(float(bounds.smallest) ** bounds.power)


def _believed(state: Sizer) -> bool:
    """Whether there is a signal that can be compared with what steps take, and that steps have not contradicted."""
    return state.level is not None and state.line is not None and state.doubts < _DOUBTS


def _busy(state: Sizer) -> Sizer:
    return replace(state, reason="") if state.reason else state


def _idle(state: Sizer, reason: str, rests_since_s: float | None) -> Sizer:
    if state.reason == reason and state.rests_since_s == rests_since_s:
        return state
    return replace(state, reason=reason, rests_since_s=rests_since_s)


def _promised(state: Sizer, bounds: Bounds, now_s: float) -> float | None:
    """Return the largest size that memory allows; `None` when it is unknown."""
    line, level = state.line, state.level
    if line is None or level is None or state.unsure_since_s is not None or not _believed(state):
        return None
    cooling = bool(state.failed_at_s) and now_s < state.failed_at_s[-1] + _COOL_S
    usable_bytes = level.usable_bytes * (_PROMISED_WHILE_COOLING if cooling else 1.0)
    x = line.largest_x(usable_bytes)
    smallest_x = float(bounds.smallest) ** bounds.power
    if x < smallest_x and level.exact:
        x = min(smallest_x, line.largest_x(level.sample_bytes))  # what may go away soon is no emergency yet
    if x <= 0:
        return 0.0
    power = 1.0 / bounds.power
    if not line.has_slope:
        return min(x**power, _CALIBRATION_GROWTH * line.here_x**power)  # type: ignore[no-any-return]  # float ** float
    return x**power  # type: ignore[no-any-return]  # float ** float may be complex, not above 0


def _size(state: Sizer, bounds: Bounds, promised: float | None, now_s: float) -> int:
    bracket, level = state.bracket, state.level
    good = bracket.good
    if good is None:
        return bounds.down(bounds.largest * _FIRST_SHARE if bounds.first is None else bounds.first)
    if state.unsure_since_s is not None and bracket.bad is not None and now_s < state.unsure_since_s + _SAMPLE_DUE_S:
        return min(good, bounds.down(bracket.bad * _KEPT_UNTIL_SAMPLED))
    allowed = brackets.allowed(bracket, good, bounds, now_s, promised=promised is not None)
    if promised is None or level is None or state.line is None:
        return allowed
    size = bounds.down(min(promised, allowed))
    if size <= good < allowed and bracket.may_probe(now_s):
        larger = bounds.up(good)
        if _may_fit(state.line, level, float(larger) ** bounds.power):
            return larger
    settled = state.line.steps >= SETTLED_STEPS
    worth = bounds.worth_growing if settled else 0.0
    return good if good < size < min(bounds.largest, good * (1.0 + worth)) else size


def _may_fit(line: Footprint, level: Level, x: float) -> bool:
    """Whether the next size is worth a probe although nothing is promised.

    Where sizes are few and far apart, the line may reach farther than it promises; and where there is far more than
    the last step took, it is the line that is not known: it has no slope yet, or was measured on small
    steps when memory was short.
    """
    factor = _PLENTY if line.has_slope else _PLENTY_WITHOUT_SLOPE
    return level.usable_bytes > factor * line.here_need_bytes or line.hoped_x(level.usable_bytes) >= x


def _may_stay(state: Sizer, bounds: Bounds) -> bool:
    """Whether the size of the last good step still fits: its own peak is known, whatever is to be feared elsewhere."""
    line, level, good = state.line, state.level, state.bracket.good
    if line is None or level is None or good is None or state.bracket.in_row:
        return False
    return line.here_x == float(good) ** bounds.power and line.here_need_bytes <= level.usable_bytes
