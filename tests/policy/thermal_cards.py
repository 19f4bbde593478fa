"""Simulated cards in virtual time, and the effect of a rule for the temperature on them.

Ambient temperature, cooling, time constants, sensor, fan and the number of workers are drawn from a
seed, in the ranges of real cards. Each worker runs its own rule, and reads the temperature at its
own moment. The best constant duty is the largest one whose readings, including noise, stay below
the critical temperature after settling. Only the work after settling counts.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

from workers.policy.thermal import ThermalGovernor
from workers.readings import SensorReading
from workers.settings import ThermalSettings

DURATION_S = 1800.0
#: Time after which a card counts as settled.
SETTLED_S = 600.0
_STEP_S = 0.25
#: The guides reduce the duty above the first temperature, and pause from the second on.
_HOT_C, _CRITICAL_C = 78.0, 83.0
#: Returns the duty for a temperature and the time in seconds of its reading; 0 is a pause.
Rule = Callable[[float, float], float]


def governor() -> Rule:
    thermal = ThermalGovernor(ThermalSettings())

    def duty(temperature_c: float, at_s: float) -> float:
        return thermal.after_reading(SensorReading(temperature_c=temperature_c), at_s).duty

    return duty


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A card with its cooling, its sensor, and the workers on it.

    Cooling as one or two masses in a row.
    """

    seed: int
    ambient_c: float
    full_c: float  # final temperature at full load, with the fan as slow as at rest
    idle_share: float  # idle power as a share of full power
    heatsink_s: float  # time constant of the whole card, or of the heatsink alone
    die_share: float  # share of the thermal resistance between die and heatsink; 0: one mass
    die_s: float
    fan: float  # share by which a fan at full speed lowers the thermal resistance
    lag_s: float
    noise_c: float
    truncates: bool  # whether the sensor cuts fractions off instead of rounding
    offsets_s: tuple[float, ...]  # moment within a second at which each worker reads the sensor
    slot_duty: float  # largest duty of each worker
    fills_gaps: bool  # whether one worker can keep the device busy, so that workers fill gaps

    def used(self, duties: Sequence[float]) -> float:
        if self.fills_gaps:
            return 1.0 - math.prod(1.0 - duty for duty in duties)
        return statistics.fmean(duties)


def draw(seed: int) -> Card:
    chance = random.Random(seed)  # noqa: S311 - to play, not to keep secrets
    heatsink_s = math.exp(chance.uniform(math.log(10.0), math.log(200.0)))
    return Card(
        seed=seed,
        ambient_c=chance.uniform(18.0, 32.0),
        full_c=chance.uniform(88.0, 105.0),
        idle_share=chance.uniform(0.06, 0.15),
        heatsink_s=heatsink_s,
        die_share=chance.choice([0.0, chance.uniform(0.15, 0.4)]),
        die_s=min(chance.uniform(2.0, 8.0), heatsink_s / 2.0),
        fan=chance.choice([0.0, chance.uniform(0.0, 0.2)]),
        lag_s=chance.uniform(0.0, 3.0),
        noise_c=chance.uniform(0.0, 0.3),
        truncates=chance.random() < 0.5,
        offsets_s=tuple(chance.random() for _ in range(chance.randint(1, 7))),
        slot_duty=chance.choice([0.6, 0.7, 0.9, 1.0, 1.0]),
        fills_gaps=chance.random() < 0.6,
    )


class _Heat:
    def __init__(self, card: Card) -> None:
        self._card = card
        self._noise = random.Random(card.seed)  # noqa: S311 - to play, not to keep secrets
        rise_c = (card.full_c - card.ambient_c) * card.idle_share
        self._die_c = rise_c * card.die_share
        self._heatsink_c = rise_c - self._die_c
        self._air = 1.0
        self._sensed_c = self.die_c = card.ambient_c + rise_c

    def pass_time(self, used: float) -> None:
        card = self._card
        watts = card.idle_share + (1.0 - card.idle_share) * used
        # The fan follows the die between 50 and 80 C with a delay of some seconds.
        speed = min(1.0, max(0.0, (self.die_c - 50.0) / 30.0))
        self._air += (1.0 - card.fan * speed - self._air) * _STEP_S / 8.0
        rise_c = (card.full_c - card.ambient_c) * watts
        heatsink_c = rise_c * (1.0 - card.die_share) * self._air
        self._heatsink_c += (heatsink_c - self._heatsink_c) * _STEP_S / card.heatsink_s
        self._die_c += (rise_c * card.die_share - self._die_c) * _STEP_S / card.die_s
        self.die_c = card.ambient_c + self._heatsink_c + self._die_c
        self._sensed_c += (self.die_c - self._sensed_c) * min(
            1.0, _STEP_S / max(_STEP_S, card.lag_s)
        )

    def read(self) -> float:
        told_c = self._sensed_c + self._noise.gauss(0.0, self._card.noise_c)
        return float(math.floor(told_c) if self._card.truncates else math.floor(told_c + 0.5))


class Look(NamedTuple):
    """A reading of the sensor by a worker, and the duty that its rule returned."""

    at_s: float
    worker: int
    temperature_c: float
    duty: float
    settled: bool


@dataclass(slots=True)
class Course:
    """The course of a card, in seconds: the time with a critical die, and the work after
    settling.
    """

    looks: list[Look] = field(default_factory=list)
    work_s: float = 0.0
    critical_s: dict[bool, float] = field(
        default_factory=lambda: {False: 0.0, True: 0.0}
    )  # by whether it had settled

    @property
    def settled_c(self) -> list[float]:
        return [look.temperature_c for look in self.looks if look.settled]

    def settled_duties(self, worker: int) -> list[float]:
        """Return the duties of a worker after settling."""
        return [look.duty for look in self.looks if look.worker == worker and look.settled]


def play(card: Card, make: Callable[[], Rule]) -> Course:
    heat, course = _Heat(card), Course()
    rules = [make() for _ in card.offsets_s]
    looks_at_s = list(card.offsets_s)
    duties = [0.0] * len(rules)
    for number in range(int(DURATION_S / _STEP_S)):
        now_s = number * _STEP_S
        settled = now_s >= SETTLED_S
        for worker, rule in enumerate(rules):
            if now_s >= looks_at_s[worker]:
                looks_at_s[worker] += 1.0
                told_c = heat.read()
                duty = rule(told_c, now_s)
                duties[worker] = card.slot_duty * duty
                course.looks.append(Look(now_s, worker, told_c, duty, settled))
        used = card.used(duties)
        heat.pass_time(used)
        if settled:
            course.work_s += used * _STEP_S
        if heat.die_c >= _CRITICAL_C:
            course.critical_s[settled] += _STEP_S
    return course


def best_constant(card: Card) -> Course:
    """Return the course with the largest constant duty, in 512ths, without a critical reading after
    settling.
    """

    @cache
    def constant(parts: int) -> Course:
        return play(card, lambda: lambda _temperature_c, _at_s: parts / 512)

    def is_hot(parts: int) -> bool:
        return max(constant(parts).settled_c) >= _CRITICAL_C

    return constant(max(0, bisect_left(range(512), True, key=is_hot) - 1) if is_hot(512) else 512)


def turns(duties: Sequence[float], noticed: float = 0.05) -> int:
    """Return how often a duty changed its direction.

    Changes by a smaller share than `noticed` do not count.
    """
    count, direction, turning = 0, 0, duties[0]
    for duty in duties:
        if (duty - turning) * direction > 0.0:
            turning = duty
        elif abs(duty - turning) > noticed * max(duty, turning):
            count += direction != 0
            direction, turning = (1 if duty > turning else -1), duty
    return count


def judge(card: Card, course: Course) -> dict[str, Any]:
    runs = [course.settled_duties(worker) for worker in range(len(card.offsets_s))]
    outside_s = [look.at_s for look in course.looks if _outside(look)]
    return {
        "settle_s": max(outside_s, default=0.0),
        "least_c": min(course.settled_c),
        "most_c": max(course.settled_c),
        "outside_settled_pct": 100.0
        * statistics.fmean(_outside(look) for look in course.looks if look.settled),
        "critical_unsettled_s": course.critical_s[False],
        "critical_settled_s": course.critical_s[True],
        "pauses_settled": sum(a > b == 0.0 for run in runs for a, b in itertools.pairwise(run)),
        "turns_per_min": max(60.0 * turns(run) / len(run) for run in runs),
    }


def _outside(look: Look) -> bool:
    """Return whether a card is too hot, paused, or throttled although it is cool."""
    needless = look.temperature_c < _HOT_C - 3.0 and look.duty < 0.99
    return look.temperature_c >= _CRITICAL_C or look.duty <= 0.0 or needless
