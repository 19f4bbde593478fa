"""A loop that asks the sizer for sizes, and worlds around it: needs, free memory, and signals that may lie."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, Final, NamedTuple, TypeAlias

from hypothesis import strategies as st

from workers.policy.sizer import Sizer
from workers.policy.sizes_tried import Bounds
from workers.resilience.adaptive_size import AdaptiveSize
from workers.settings import Learned

IDLE_S: Final = 1.0
"""How long a loop waits that runs nothing."""
MOST_BYTES: Final = 10**15


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a step needs: `fixed + unit x size^power`, and what comes and goes."""

    fixed_bytes: float
    unit_bytes: float
    power: float
    wobble: float = 0.0
    workspace: float = 0.0
    """What a library adds at every other range of sizes."""
    workspace_sizes: int = 64
    factor: float = 1.0
    """A jump of all needs."""

    def need_bytes(self, size: int, way: float) -> int:
        """Return what a step needs that wobbles `way` of the way, -1 to 1."""
        need: float = (self.fixed_bytes + self.unit_bytes * float(size) ** self.power) * self.factor
        extra = self.workspace if (size // self.workspace_sizes) % 2 else 0.0
        return math.ceil(need * (1.0 + extra) * (1.0 + way * self.wobble))


@dataclass(frozen=True, slots=True, kw_only=True)
class Signal:
    """What is said of free memory and of peaks."""

    every: int = 0
    """At every which question; 0: never."""
    lie: float = 1.0
    noise: float = 0.0
    stuck_share: float | None = None
    """What is always said, as a share of what the largest size needs."""
    garbage: bool = False
    peaks: bool = False
    garbage_peaks: bool = False


#: A function of the sizer, and what it is told after the state and the bounds.
Reducer: TypeAlias = Callable[..., Any]
Event: TypeAlias = tuple[Reducer, tuple[Any, ...]]


class Try(NamedTuple):
    """A question, and what came of it."""

    at_s: float
    told_bytes: int | None
    size: int | None
    reason: str
    ended_at_s: float
    failed: bool


@dataclass
class Loop:
    """A user's loop: asks for a size, runs the step, says how it went."""

    bounds: Bounds
    workload: Workload
    signal: Signal
    free_bytes: int
    draw: Random
    learned: Learned | None = None
    now_s: float = 0.0
    questions: int = 0
    events: list[Event] = field(default_factory=list)
    answers: list[int | None] = field(default_factory=list)
    tries: list[Try] = field(default_factory=list)
    state: Sizer = field(init=False)
    shell: AdaptiveSize | None = None

    def __post_init__(self) -> None:
        bounds = self.bounds
        self.state = Sizer.cold(bounds, self.learned)
        if not bounds.rungs and bounds.worth_growing == Bounds(largest=1).worth_growing:
            self.shell = AdaptiveSize(
                bounds.largest,
                smallest=bounds.smallest,
                quantum=bounds.quantum,
                power=bounds.power,
                failures_per_minute=bounds.failures_per_minute,
                exact_samples=bounds.exact_samples,
                learned=self.learned,
                clock=lambda: self.now_s,
            )

    def fork(self, **changes: object) -> Loop:
        """Return a loop in the same state, in a world of its own from now on."""
        other = replace(
            self,
            events=[],
            answers=[],
            tries=[],
            draw=Random(self.questions),  # noqa: S311 - a draw of the simulated world
            **changes,
        )  # type: ignore[arg-type]
        other.state, other.shell = self.state, None
        return other

    def ask(self) -> int | None:
        said_bytes = self._said_bytes()
        self.questions += 1
        self.state, size = Sizer.next_size(
            self.state, self.bounds, *self._noted(Sizer.next_size, said_bytes)
        )
        if self.shell is not None:
            assert (self.shell.next(said_bytes), self.shell.reason) == (size, self.state.reason)
        self.answers.append(size)
        self.tries.append(
            Try(self.now_s, said_bytes, size, self.state.reason, self.now_s, failed=False)
        )
        return size

    def ended_well(self, size: int, peak_bytes: int | None) -> None:
        self.state = Sizer.succeeded(
            self.state, self.bounds, *self._noted(Sizer.succeeded, size, peak_bytes)
        )
        if self.shell is not None:
            self.shell.succeeded(size, peak_bytes)

    def ran_out(self, size: int) -> None:
        self.state = Sizer.failed(self.state, self.bounds, *self._noted(Sizer.failed, size))
        if self.shell is not None:
            self.shell.failed(size)

    def _noted(self, reducer: Reducer, *told: int | None) -> tuple[Any, ...]:
        self.events.append((reducer, (self.now_s, *told)))
        return self.events[-1][1]

    def turn(self, step_s: float, *, fails: bool | None = None, share: float = 1.0) -> Try:
        """Ask, and run one step.

        Args:
            step_s: How long it takes.
            fails: For steps whose end something else than their need decides.
            share: Of the size asked for, what is run: the last batch of an epoch is smaller.
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
            self.ran_out(size)
        else:
            peak_bytes = self._garbage_bytes() if self.signal.garbage_peaks else need_bytes
            self.ended_well(size, peak_bytes if self.signal.peaks else None)
        return self.tries[-1]

    def turns_for(self, seconds: float, step_s: float) -> list[Try]:
        """Take turns for so long and return them."""
        first, until_s = len(self.tries), self.now_s + seconds
        while self.now_s < until_s:
            self.turn(step_s)
        return self.tries[first:]

    def surely_fits(self, size: int, times: float = 1.0) -> bool:
        """Whether a step of this size fits, however it wobbles, so many times over."""
        return times * self.workload.need_bytes(size, 1.0) <= self.free_bytes

    def nothing_fits(self) -> bool:
        """Whether no step fits, however it wobbles; it helps no size that it has no workspace."""
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


# From 1 to a million, small ones as often as large ones.
magnitudes = st.floats(min_value=0.0, max_value=6.0).map(lambda power: int(10**power))
steps_s = st.sampled_from([0.0, 1e-6, 1e-3, 0.05, 1.0, 20.0]) | st.floats(
    min_value=0.0, max_value=100.0
)
pauses_s = st.sampled_from([1e-6, 4.9, 5.0, 9.9, 10.0, 59.9, 60.0, 61.0, 3600.0]) | st.floats(
    0.0, 1e7
)
#: Free memory as a share of what the largest size needs.
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
        fixed_bytes=max(fixed_share * largest_bytes, 1e4),  # whole bytes must not matter
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
