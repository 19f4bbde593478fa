"""Which jobs may share a card, what each gets of it, and whether that pays.

Two jobs share a card where both ask for it, or where they are alike and a trial has shown that the
card does more for two than for one. Does not say which jobs start (`placement.py`). Pure.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from orchestrator.jobs.model import Card, Job, Kind
from workers.units import MIB

#: A packed job gets what was measured for it, and this share more, or `RESERVE_BYTES` if that is
#: more: an allocator fragments, and the next long sequence takes more than the last.
RESERVE: Final = 0.10
RESERVE_BYTES: Final = 256 * MIB

#: What jobs that ask for it share a card as.
ASKED: Final = ""

#: Settings of a training that change neither its memory nor its time.
SAME_STEP: Final = frozenset(
    {"steps", "epochs", "lr", "warmup_steps", "weight_decay", "dropout", "label_smoothing"}
)
_SAME_STEP_KEYS: Final = {f"train.{key}" for key in SAME_STEP} | {"train.from", "workload.seed"}

#: A trial is judged by so many windows, each of at least so many seconds and steps.
WINDOWS: Final = 6
_WINDOW_S: Final = 5.0
_WINDOW_STEPS: Final = 4

#: Student's t for 95 % on both sides of so many windows.
_T: Final = 2.571

#: Two jobs share a card if they do so many times the steps of one; below, each is only slower.
_LEAST_GAIN: Final = 1.10

#: Both have so much left, alone, before a trial is made: one that fails costs them half a minute,
#: and one of them a start. 2 % of this.
TRIAL_WORTH_S: Final = 1800.0


def packed_budgets(measured: Sequence[int | None], room_bytes: int) -> tuple[int, ...] | None:
    """Return the budgets of jobs that share a card, from the most that each has taken.

    `None` where one of them was never measured, or where their sum is more than the card's room.
    """
    budgets = tuple(
        each + max(RESERVE_BYTES, math.ceil(each * RESERVE))
        for each in measured
        if each is not None
    )
    return budgets if len(budgets) == len(measured) and sum(budgets) <= room_bytes else None


def likeness(job: Job) -> str | None:
    """Return what jobs have in common whose steps cost the same; `None`: nothing says that."""
    if job.kind is not Kind.TRAIN or job.steps is None or job.pack is not None:
        return None
    cost = {key: value for key, value in job.overrides.items() if key not in _SAME_STEP_KEYS}
    return json.dumps(cost, sort_keys=True, default=str)


def shares_of(
    job: Job,
    steps_left: int,
    cards: Iterable[Card],
    paces: Mapping[str, float],
    pays: Mapping[tuple[str, str], bool],
) -> dict[str, str]:
    """Return the cards that a job may share, by name, and with jobs of which word.

    `paces`: steps per second of one like it that was alone, by the title of a card. `pays`: what
    trials have shown, by likeness and title.
    """
    if job.pack:
        return {card.name: ASKED for card in cards}
    alike = likeness(job)
    if alike is None:
        return {}
    found = {}
    for card in cards:
        pace = paces.get(card.title)
        is_worth_a_trial = pace is not None and steps_left >= pace * TRIAL_WORTH_S
        if pays.get((alike, card.title), is_worth_a_trial):
            found[card.name] = alike
    return found


class Gain(NamedTuple):
    """What a card does for two jobs, in times of what it does for one."""

    gain: float
    low: float
    """Lower end of the 95 % interval."""

    @property
    def pays(self) -> bool:
        """Whether two such jobs share a card from now on."""
        return self.gain >= _LEAST_GAIN and self.low > 1.0


def pace_of(windows: Sequence[float]) -> float | None:
    """Return the steps per second of a job, once it was seen long enough."""
    return statistics.fmean(windows) if len(windows) >= WINDOWS else None


def judged(paces: Sequence[Sequence[float]], alone: float) -> Gain | None:
    """Return what came of a trial, from the paces of both and of one that was alone, in steps per
    second; `None`: it goes on.
    """
    pairs = list(zip(*(pace[-WINDOWS:] for pace in paces), strict=False))
    if len(pairs) < WINDOWS:
        return None
    sums = [sum(pair) / alone for pair in pairs]
    gain = statistics.fmean(sums)
    return Gain(gain, gain - _T * statistics.stdev(sums) / math.sqrt(len(sums)))


@dataclass(slots=True)
class Pace:
    """Steps per second of a job, window by window."""

    beside: str
    """The other job on its card all the time; empty: it was alone."""
    windows: list[float] = field(default_factory=list)
    _at: int | None = None
    """Where it was before its first step there: its process may still have begun."""
    _began: tuple[float, int] | None = None

    def saw(self, at_s: float, step: int) -> None:
        """Take in how far it is; its first step there begins the first window."""
        if self._at is None or step < self._at:
            self.windows, self._at, self._began = [], step, None
        elif self._began is None:
            self._began = (at_s, step) if step > self._at else None
        else:
            began_s, first = self._began
            if at_s - began_s >= _WINDOW_S and step - first >= _WINDOW_STEPS:
                self.windows = [*self.windows, (step - first) / (at_s - began_s)][-WINDOWS:]
                self._at, self._began = step, (at_s, step)
