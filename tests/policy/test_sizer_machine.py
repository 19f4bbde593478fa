"""The sizer in worlds nobody would design: named invariants that hold whatever happens.

Covers arbitrary sizes, footprints, courses of memory and signals, lying ones too, and what is promised once a world
stays as it is. `SIZER_EXAMPLES` is how many times as many examples are tried. Does not cover how much work gets done
on courses of memory as they are met in practice; that is `test_simulator.py`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from random import Random
from typing import NamedTuple, Self

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from workers.policy import bracket as brackets
from workers.policy import sizer
from workers.policy.bounds import Bounds
from workers.policy.footprint import Learned
from workers.policy.sizer import Asked, Event, Failed, Sizer, Succeeded
from workers.sizing import AdaptiveSize

EXAMPLES = int(os.environ.get("SIZER_EXAMPLES", "1"))
IDLE_S = 1.0
"""How long a loop waits that runs nothing."""
MOST_BYTES = 10**15


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """What a step needs, what there is, and what is said of it."""

    fixed_bytes: float
    unit_bytes: float
    power: float
    free_bytes: int
    wobble: float = 0.0
    workspace: float = 0.0
    """What a library adds at every other range of sizes."""
    workspace_sizes: int = 64
    factor: float = 1.0
    """What became of all needs."""
    told: bool = False
    """Whether there is a signal."""
    told_every: int = 1
    """The signal comes with every question, or every second, ..."""
    lie: float = 1.0
    noise: float = 0.0
    stuck_bytes: int | None = None
    garbage: bool = False
    peaks: bool = False
    garbage_peaks: bool = False

    def need_bytes(self, size: int, share: float) -> int:
        """Return what a step needs whose wobble is `share` of the widest, from -1 to 1."""
        need = self.fixed_bytes + self.unit_bytes * float(size) ** self.power
        if (size // self.workspace_sizes) % 2:
            need *= 1.0 + self.workspace
        return math.ceil(need * self.factor * (1.0 + share * self.wobble))

    def surely_fits(self, size: int) -> bool:
        return self.need_bytes(size, 1.0) <= self.free_bytes

    def never_fits(self, size: int) -> bool:
        return self.need_bytes(size, -1.0) > self.free_bytes

    def signal_bytes(self, draw: Random, question: int) -> int | None:
        """Return what is said to be free."""
        if not self.told or question % self.told_every:
            return None
        if self.garbage:
            return _garbage(draw)
        if self.stuck_bytes is not None:
            return self.stuck_bytes
        return max(0, int(self.free_bytes * self.lie * (1.0 + self.noise * draw.gauss(0.0, 1.0))))

    @property
    def honest(self) -> bool:
        """Whether all that is said is so."""
        return (self.lie, self.noise, self.stuck_bytes) == (1.0, 0.0, None) and not self.garbage_peaks | self.garbage


def _garbage(draw: Random) -> int:
    return draw.choice([0, 1, MOST_BYTES, int(10 ** draw.uniform(0, 15))])


class Try(NamedTuple):
    """A question, and what came of it."""

    at_s: float
    told_bytes: int | None
    size: int | None
    reason: str
    ended_at_s: float = 0.0
    failed: bool = False


class Loop:
    """Somebody's loop: asks for a size, runs the step in a world, says how it went."""

    def __init__(self, bounds: Bounds, world: World, learned: Learned | None, seed: int) -> None:
        self.bounds = bounds
        self.world = world
        self.now_s = 0.0
        self.draw = Random(seed)
        self.first_state = self.state = sizer.cold(bounds, learned)
        self.events: list[Event] = []
        self.tries: list[Try] = []
        self.questions = 0
        self.shell: AdaptiveSize | None = None
        if not bounds.rungs and bounds.worth_growing == Bounds(largest=1).worth_growing:
            self.shell = AdaptiveSize(
                bounds.largest,
                smallest=bounds.smallest,
                quantum=bounds.quantum,
                power=bounds.power,
                failures_per_minute=bounds.failures_per_minute,
                learned=learned,
                clock=lambda: self.now_s,
            )

    def fork(self) -> Self:
        """Return a loop in the same state, whose future does not touch this one's."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other.shell, other.tries, other.events = None, [], []
        other.draw = Random()  # noqa: S311 - a simulation
        other.draw.setstate(self.draw.getstate())
        return other

    def ask(self) -> int | None:
        event = Asked(self.now_s, self.world.signal_bytes(self.draw, self.questions))
        self.questions += 1
        self.events.append(event)
        self.state, size = sizer.asked(self.state, self.bounds, event)
        self.tries.append(Try(self.now_s, event.free_bytes, size, self.state.reason))
        if self.shell is not None:
            assert self.shell.next(event.free_bytes) == size
        return size

    def end_well(self, size: int, peak_bytes: int | None) -> None:
        self.events.append(event := Succeeded(self.now_s, size, peak_bytes))
        self.state = sizer.succeeded(self.state, self.bounds, event)
        if self.shell is not None:
            self.shell.succeeded(size, peak_bytes)

    def run_out(self, size: int) -> None:
        self.events.append(event := Failed(self.now_s, size))
        self.state = sizer.failed(self.state, self.bounds, event)
        if self.shell is not None:
            self.shell.failed(size)

    def turn(self, step_s: float, *, fails: bool | None = None) -> None:
        """Ask and run one step; `fails` is for steps whose end the world does not decide."""
        size = self.ask()
        if size is None:
            self.now_s += max(step_s, IDLE_S)
            return
        self.now_s += step_s
        need_bytes = self.world.need_bytes(size, self.draw.uniform(-1.0, 1.0))
        if fails is None:
            fails = need_bytes > self.world.free_bytes
        self.tries[-1] = self.tries[-1]._replace(ended_at_s=self.now_s, failed=fails)
        if fails:
            self.run_out(size)
        else:
            peak_bytes = _garbage(self.draw) if self.world.garbage_peaks else need_bytes
            self.end_well(size, peak_bytes if self.world.peaks else None)


def finite(value: object) -> Iterator[float]:
    """Yield every number in a state."""
    if is_dataclass(value):
        for field in fields(value):
            yield from finite(getattr(value, field.name))
    elif isinstance(value, tuple):
        for part in value:
            yield from finite(part)
    elif isinstance(value, (int, float)):
        yield value
