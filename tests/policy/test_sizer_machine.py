"""The invariants of the sizer in random worlds.

Covers arbitrary sizes, needs, courses of memory and signals, including wrong signals, and the
promises for a world that no longer changes. `SIZER_EXAMPLES=100` tries a hundred times as many
examples. Does not cover the amount of work under realistic courses of memory
(`scripts/bench.py policy`), or that equal events give equal decisions (`test_adaptive.py`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from random import Random
from typing import Final, NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from workers.policy import sizes_tried as brackets
from workers.policy.memory_seen import MINUTE_S
from workers.policy.sizer import FIRST_WAIT_S, Sizer
from workers.policy.sizes_tried import Bounds
from workers.settings import Learned

IDLE_S: Final = 1.0
"""How long a loop waits if it runs nothing."""
MOST_BYTES: Final = 10**15


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The need of a step: `fixed + unit x size^power`, with variations."""

    fixed_bytes: float
    unit_bytes: float
    power: float
    wobble: float = 0.0
    workspace: float = 0.0
    """Share of the need that a library adds in every second range of sizes."""
    workspace_sizes: int = 64
    factor: float = 1.0
    """Factor of all needs, for a jump."""

    def need_bytes(self, size: int, way: float) -> int:
        """Return the need of a step in bytes; `way`, from -1 to 1, scales the wobble."""
        need: float = (self.fixed_bytes + self.unit_bytes * float(size) ** self.power) * self.factor
        extra = self.workspace if (size // self.workspace_sizes) % 2 else 0.0
        return math.ceil(need * (1.0 + extra) * (1.0 + way * self.wobble))


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """The reports of free memory and of peaks."""

    every: int = 0
    """Free memory is reported at every n-th question; 0: never."""
    lie: float = 1.0
    noise: float = 0.0
    stuck_share: float | None = None
    """A constant report, as a share of the need of the largest size."""
    garbage: bool = False
    peaks: bool = False
    garbage_peaks: bool = False


class Try(NamedTuple):
    """A question, and its result."""

    at_s: float
    told_bytes: int | None
    size: int | None
    reason: str
    ended_at_s: float
    failed: bool


@dataclass
class Loop:
    """A user's loop: asks for a size, runs the step, reports the result."""

    bounds: Bounds
    workload: Workload
    signal: Signal
    free_bytes: int
    draw: Random
    learned: Learned | None = None
    now_s: float = 0.0
    questions: int = 0
    tries: list[Try] = field(default_factory=list)
    sizer: Sizer = field(init=False)

    def __post_init__(self) -> None:
        self.sizer = Sizer(self.bounds, self.learned, clock=lambda: self.now_s)

    def fork(self, **changes: object) -> Loop:
        """Return a loop in the same state, whose world is separate from now on."""
        draw = Random(self.questions)  # noqa: S311 - a draw of the simulated world
        other = replace(self, tries=[], draw=draw, **changes)  # type: ignore[arg-type]
        other.sizer.__dict__ |= vars(self.sizer) | {"_clock": lambda: other.now_s}
        return other

    def ask(self) -> int | None:
        said_bytes = self._said_bytes()
        self.questions += 1
        size = self.sizer.next(said_bytes)
        self.tries.append(
            Try(self.now_s, said_bytes, size, self.sizer.reason, self.now_s, failed=False)
        )
        return size

    def turn(self, step_s: float, *, fails: bool | None = None, share: float = 1.0) -> Try:
        """Ask, and run one step.

        Args:
            step_s: The length of the step.
            fails: Whether the step fails, regardless of its need.
            share: The part of the size that is run: the last batch of an epoch is smaller.
        """
        size = self.ask()
        if size is None:
            self.now_s += max(step_s, IDLE_S)
            return self.tries[-1]
        self.now_s += step_s
        size = self.bounds.down(size * share)
        need_bytes = self.workload.need_bytes(size, self.draw.uniform(-1.0, 1.0))
        if fails is None:
            fails = need_bytes > self.free_bytes
        self.tries[-1] = self.tries[-1]._replace(size=size, ended_at_s=self.now_s, failed=fails)
        if fails:
            self.sizer.failed(size)
        else:
            peak_bytes = self._garbage_bytes() if self.signal.garbage_peaks else need_bytes
            self.sizer.succeeded(size, peak_bytes if self.signal.peaks else None)
        return self.tries[-1]

    def turns_for(self, seconds: float, step_s: float) -> list[Try]:
        """Take turns for `seconds`, and return them."""
        first, until_s = len(self.tries), self.now_s + seconds
        while self.now_s < until_s:
            self.turn(step_s)
        return self.tries[first:]

    def surely_fits(self, size: int, times: float = 1.0) -> bool:
        """Return whether `times` the largest need of this size fits."""
        return times * self.workload.need_bytes(size, 1.0) <= self.free_bytes

    def nothing_fits(self) -> bool:
        """Return whether no step fits, even with the smallest need and without a workspace."""
        bare = replace(self.workload, workspace=0.0)
        return bare.need_bytes(self.bounds.smallest, -1.0) > self.free_bytes

    def is_plainly_told(self) -> bool:
        """Whether steps of the smallest size can tell if the signal is right.

        Garbage may be right by chance, and is believed for a while; noise as large as the signal is
        garbage. So is a signal that leaves the smallest size just about enough: its own peak never
        proves that wrong, and the margins forbid it now and then.
        """
        signal = self.signal
        if signal.garbage or signal.garbage_peaks or signal.noise >= 1.0:
            return False
        said_bytes = self.free_bytes * signal.lie
        if signal.stuck_share is not None:
            said_bytes = signal.stuck_share * self.workload.need_bytes(self.bounds.largest, 0.0)
        just_enough_bytes = self.workload.need_bytes(self.bounds.smallest, 0.0)
        return not signal.every or not just_enough_bytes / 2 <= said_bytes <= 2 * just_enough_bytes

    def _said_bytes(self) -> int | None:
        signal = self.signal
        if not signal.every or self.questions % signal.every:
            return None
        if signal.garbage:
            return self._garbage_bytes()
        if signal.stuck_share is not None:
            return int(signal.stuck_share * self.workload.need_bytes(self.bounds.largest, 0.0))
        return max(
            0, int(self.free_bytes * signal.lie * (1.0 + signal.noise * self.draw.gauss(0.0, 1.0)))
        )

    def _garbage_bytes(self) -> int:
        return self.draw.choice([0, 1, MOST_BYTES, int(10 ** self.draw.uniform(0.0, 15.0))])


# From 1 to 10^6, uniform in the logarithm.
magnitudes = st.floats(min_value=0.0, max_value=6.0).map(lambda power: int(10**power))
steps_s = st.sampled_from([0.0, 1e-6, 1e-3, 0.05, 1.0, 20.0]) | st.floats(
    min_value=0.0, max_value=100.0
)
pauses_s = st.sampled_from([1e-6, 4.9, 5.0, 9.9, 10.0, 59.9, 60.0, 61.0, 3600.0]) | st.floats(
    0.0, 1e7
)
#: Free memory as a share of the need of the largest size.
shares = (
    st.sampled_from([0.0, 1.0])
    | st.floats(0.0, 1.5)
    | st.floats(-5.0, 1.0).map(lambda power: 10.0**power)
)
peaks = st.sampled_from([True, True, True, False])
signals = st.one_of(
    st.builds(Signal, peaks=peaks),
    st.builds(Signal, every=st.sampled_from([1, 2, 10, 40]), peaks=peaks),
    st.builds(
        Signal,
        every=st.integers(1, 40),
        peaks=peaks,
        lie=st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.98]),
    ),
    st.builds(
        Signal,
        every=st.integers(1, 40),
        peaks=peaks,
        lie=st.sampled_from([1.02, 1.1, 1.5, 3.0, 100.0]),
    ),
    st.builds(
        Signal,
        every=st.integers(1, 40),
        peaks=peaks,
        noise=st.sampled_from([0.01, 0.03, 0.1, 0.3, 1.0]),
    ),
    st.builds(Signal, every=st.integers(1, 40), peaks=peaks, stuck_share=shares),
    st.builds(Signal, every=st.integers(1, 40), peaks=peaks, garbage=st.just(True)),
    st.builds(Signal, every=st.integers(0, 40), peaks=st.just(True), garbage_peaks=st.just(True)),
)


@st.composite
def all_bounds(draw: st.DrawFn) -> Bounds:
    largest = draw(magnitudes)
    smallest = draw(st.just(1) | st.integers(1, largest))
    rungs = draw(st.just(()) | st.lists(st.integers(smallest, largest), max_size=20))
    return Bounds(
        largest=largest,
        smallest=smallest,
        quantum=draw(st.sampled_from([1, 1, 8, 64]) | st.integers(1, largest + 1)),
        rungs=tuple(sorted({smallest, largest, *rungs})) if rungs else (),
        power=draw(st.sampled_from([1.0, 2.0])),
        worth_growing=draw(st.sampled_from([0.01, 0.01, 0.0, 0.02, 0.1])),
        failures_per_minute=draw(st.sampled_from([6]) | st.integers(1, 20)),
        exact_samples=draw(st.booleans()),
    )


@st.composite
def loops(draw: st.DrawFn) -> Loop:
    bounds = draw(all_bounds())
    power = draw(st.sampled_from([bounds.power, bounds.power, 1.0, 2.0]))
    largest_bytes = 10.0 ** draw(st.floats(6.0, 14.0))
    fixed_share = draw(st.sampled_from([0.0, 0.2, 0.5, 0.9, 0.99]))
    workload = Workload(
        fixed_bytes=max(fixed_share * largest_bytes, 1e4),  # rounding to bytes must not matter
        unit_bytes=(1.0 - fixed_share) * largest_bytes / float(bounds.largest) ** power,
        power=power,
        wobble=draw(st.sampled_from([0.0, 0.01, 0.05, 0.3])),
        workspace=draw(st.sampled_from([0.0, 0.05, 0.5])),
        workspace_sizes=draw(st.sampled_from([1, 16, 64, 1000])),
    )
    return Loop(
        bounds=bounds,
        workload=workload,
        signal=draw(signals),
        free_bytes=int(largest_bytes * draw(shares)),
        draw=Random(draw(st.integers(0, 1000))),  # noqa: S311 - a simulation
    )


EXAMPLES: Final = int(os.environ.get("SIZER_EXAMPLES", "1"))

#: The same examples every time, unless more are requested. Fresh examples still find a known limit:
#: a signal that is right and wrong in turns can make a worker rest for 10 s between two
#: steps.
STEADY = EXAMPLES == 1
TRIFLE_S: Final = 1e-6
"""Tolerance for sums of times."""

FORGOTTEN_S: Final = brackets.FORGET_S + MINUTE_S + MINUTE_S + brackets.PROBE_EVERY_S + 2 * IDLE_S
"""After so long without a failure no bad size is remembered, no failure counted, no emergency waited out, and a probe
may be had again."""


def steps_to_grow(ratio: float) -> int:
    """Return the probes that gallop from one size to `ratio` times as much, and two more: into and out of the wait."""
    bolder, reached, steps = brackets.FIRST_PROBE, 1.0, 2
    while reached < ratio:
        reached *= 1.0 + bolder
        bolder = min(1.0, bolder * brackets.GALLOP)
        steps += 1
    return steps


def settling_s(bounds: Bounds, step_s: float) -> float:
    """Return how long it may take from the largest size, failing all the way, to the smallest one that ends well."""
    # A probe beyond it may fail first, and leaves it where it is.
    size, failures = bounds.largest, 2
    while size > bounds.smallest:
        size = bounds.down(
            min(size * brackets.KEPT_AFTER[-1 if failures > 6 else failures - 2], size - 1)
        )
        failures += 1
    rests = math.ceil(failures / bounds.failures_per_minute) + 1
    return rests * MINUTE_S + MINUTE_S + failures * step_s + 2 * IDLE_S


def numbers(value: object) -> Iterator[float]:
    """Yield every number in a state."""
    if isinstance(value, tuple):
        for item in value:
            yield from numbers(item)
    elif isinstance(value, (int, float)):
        yield value


class SizerMachine(RuleBasedStateMachine):
    """Plays the loop and its world."""

    @initialize(loop=loops())
    def start(self, loop: Loop) -> None:
        self._follow(loop)

    def _follow(self, loop: Loop) -> None:
        """Begin to check a new loop."""
        self.loop = loop
        self.looked_at = 0
        self.failed: Try | None = None
        self.told_bytes: int | None = None
        self.lowest_bytes: int | None = None
        self.risen = False

    # What the loop does.

    @rule(times=st.integers(1, 40), step_s=steps_s)
    def steps_run(self, times: int, step_s: float) -> None:
        for _ in range(times):
            self.loop.turn(step_s)

    @rule(times=st.integers(1, 30), step_s=steps_s, fails=st.sampled_from([True, True, False]))
    def steps_end_as_no_need_explains(self, times: int, step_s: float, fails: bool) -> None:
        for _ in range(times):
            self.loop.turn(step_s, fails=fails)

    @rule(share=st.floats(0.0, 1.0), step_s=steps_s)
    def a_smaller_step_runs_than_was_asked_for(self, share: float, step_s: float) -> None:
        self.loop.turn(step_s, share=share)

    @rule(times=st.integers(1, 5))
    def sizes_are_asked_for_and_not_run(self, times: int) -> None:
        for _ in range(times):
            self.loop.ask()

    @rule(seconds=pauses_s)
    def nothing_happens(self, seconds: float) -> None:
        self.loop.now_s += seconds

    @rule()
    def the_process_starts_anew_with_what_was_learned(self) -> None:
        old = self.loop
        learned = old.sizer.learned
        self._follow(
            Loop(old.bounds, old.workload, old.signal, old.free_bytes, old.draw, learned, old.now_s)
        )

    # What the world does.

    @rule(share=shares)
    def memory_comes_or_goes(self, share: float) -> None:
        self.loop.free_bytes = int(
            share * self.loop.workload.need_bytes(self.loop.bounds.largest, 0.0)
        )

    @rule(
        factor=st.sampled_from([0.1, 0.5, 0.9, 1.0, 1.1, 2.0, 10.0]),
        wobble=st.sampled_from([0.0, 0.01, 0.3]),
    )
    def needs_jump(self, factor: float, wobble: float) -> None:
        self.loop.workload = replace(self.loop.workload, factor=factor, wobble=wobble)

    @rule(signal=signals)
    def the_signal_changes(self, signal: Signal) -> None:
        self.loop.signal = signal

    # The promises for a world that no longer changes. They are checked on a fork, which does not
    # affect the loop.

    @rule(step_s=st.sampled_from([0.05, 1.0, 20.0]))
    def what_stays_as_it_is_runs_or_rests(self, step_s: float) -> None:
        """In a world that no longer changes, steps succeed if the smallest size fits.

        If nothing fits, the loop rests.
        """
        loop, within_s = self.loop.fork(), settling_s(self.loop.bounds, step_s)
        if loop.surely_fits(loop.bounds.smallest):
            self._runs(loop, within_s, step_s)
        elif loop.nothing_fits():
            self._rests(loop, within_s, step_s)

    def _runs(self, loop: Loop, within_s: float, step_s: float) -> None:
        end_s = loop.now_s + within_s + step_s
        while not _good(loop.turn(step_s)):
            assert loop.now_s <= end_s, (
                f"no step ended well for {within_s:.0f} s, and the smallest fits"
            )
        if loop.surely_fits(loop.bounds.smallest, 2.0) and loop.is_plainly_told():
            loop.turns_for(within_s, max(step_s, 1.0))
            turns = loop.turns_for(300.0 + 10 * step_s, step_s)
            run_s = sum(turn.ended_at_s - turn.at_s for turn in turns if _good(turn))
            assert run_s >= (turns[-1].at_s - turns[0].at_s) / 4, (
                "it rests, and there is room for twice the smallest"
            )

    def _rests(self, loop: Loop, within_s: float, step_s: float) -> None:
        loop.turns_for(within_s, step_s)
        turns = loop.turns_for(300.0, step_s)
        tried = [turn for turn in turns if turn.size is not None]
        assert all(turn.reason for turn in turns if turn.size is None)
        assert {turn.size for turn in tried} <= {loop.bounds.smallest}
        longest_s = MINUTE_S + MINUTE_S + step_s + 2 * IDLE_S
        times_s = [turns[0].at_s, *(turn.at_s for turn in tried), turns[-1].at_s]
        assert max(later - sooner for sooner, later in pairwise(times_s)) <= longest_s
        room = 2 * loop.workload.need_bytes(loop.bounds.largest, 1.0)
        freed = loop.fork(free_bytes=room, signal=Signal(every=1, peaks=True))
        assert any(_good(turn) for turn in freed.turns_for(longest_s, step_s)), (
            "memory returned, and nothing runs"
        )

    @rule(step_s=st.sampled_from([1.0, 20.0, 100.0]), every=st.sampled_from([0, 1, 10]))
    def what_returns_is_used(self, step_s: float, every: int) -> None:
        """Without remembered failures, `steps_to_grow` good steps reach the largest size."""
        old, bounds = self.loop.workload, self.loop.bounds
        workload = replace(old, factor=1.0, wobble=min(old.wobble, 0.05))
        free_bytes = 4 * max(
            workload.need_bytes(size, 1.0) for size in (bounds.largest, max(1, bounds.largest - 1))
        )
        loop = self.loop.fork(
            workload=workload, free_bytes=free_bytes, signal=Signal(every=every, peaks=every > 0)
        )
        turns = loop.turns_for(FORGOTTEN_S, step_s)
        assert not any(turn.failed for turn in turns)
        for _ in range(steps_to_grow(bounds.largest / bounds.smallest)):
            if loop.turn(step_s).size == bounds.largest:
                return
        assert loop.turn(step_s).size == bounds.largest

    # What always holds.

    @invariant()
    def every_size_is_one_there_is(self) -> None:
        bounds = self.loop.bounds
        for size in {turn.size for turn in self._news() if turn.size is not None}:
            assert bounds.smallest <= size <= bounds.largest
            assert bounds.down(size) == size

    @invariant()
    def a_reason_is_given_exactly_while_nothing_runs(self) -> None:
        failures_s = [turn.ended_at_s for turn in self.loop.tries if turn.failed]
        for turn in self._news():
            assert bool(turn.reason) == (turn.size is None)
            if "within a minute" in turn.reason:
                lately = sum(turn.at_s - MINUTE_S < at_s <= turn.at_s for at_s in failures_s)
                assert lately >= self.loop.bounds.failures_per_minute, (
                    "it rests for failures that are long past"
                )

    @invariant()
    def failures_within_a_minute_stay_within_what_is_allowed_and_what_it_takes_to_shrink_without_a_pause(
        self,
    ) -> None:
        """Any further failure is of a proven size, or makes the next size smaller by a third."""
        bounds = self.loop.bounds
        allowed = (
            bounds.failures_per_minute
            + 1
            + math.ceil(math.log(bounds.largest / bounds.smallest, 1.5))
        )
        failures_s = [turn.ended_at_s for turn in self.loop.tries if turn.failed]
        for first_s, one_too_many_s in zip(failures_s, failures_s[allowed:], strict=False):
            assert one_too_many_s - first_s >= MINUTE_S - TRIFLE_S

    @invariant()
    def every_number_is_finite(self) -> None:
        assert all(
            math.isfinite(number) for number in numbers(tuple(vars(self.loop.sizer).values()))
        )

    @invariant()
    def no_size_fails_twice_without_a_release_between(self) -> None:
        """After a failure the next size is smaller.

        Only the smallest size is tried again, after a rest or a rise of free memory.
        """
        failures_s = [turn.ended_at_s for turn in self.loop.tries[: self.looked_at] if turn.failed]
        for turn in self._news(forget=True):
            if (told_bytes := turn.told_bytes) is not None:
                self.risen |= self.lowest_bytes is None or told_bytes > self.lowest_bytes
                self.lowest_bytes = (
                    told_bytes if self.lowest_bytes is None else min(self.lowest_bytes, told_bytes)
                )
                self.told_bytes = told_bytes
            if turn.size is None:
                continue
            if (
                (failed := self.failed) is not None
                and failed.size is not None
                and turn.size >= failed.size
            ):
                assert turn.size == failed.size == self.loop.bounds.smallest
                rested_s = turn.at_s - failed.ended_at_s
                lately = sum(at_s > turn.at_s - MINUTE_S + TRIFLE_S for at_s in failures_s)
                assert lately < self.loop.bounds.failures_per_minute, (
                    "the smallest is tried too often"
                )
                assert self.risen or rested_s >= FIRST_WAIT_S - TRIFLE_S, (
                    "it failed, and nothing has changed"
                )
            failures_s += [turn.ended_at_s] if turn.failed else []
            self.failed = turn if turn.failed else None
            self.lowest_bytes, self.risen = self.told_bytes, False

    def _news(self, *, forget: bool = False) -> list[Try]:
        news = self.loop.tries[self.looked_at :]
        if forget:
            self.looked_at = len(self.loop.tries)
        return news


def _good(turn: Try) -> bool:
    return turn.size is not None and not turn.failed


SizerMachine.TestCase.settings = settings(
    max_examples=60 * EXAMPLES, stateful_step_count=30, deadline=None, derandomize=STEADY
)
TestSizerMachine = SizerMachine.TestCase
