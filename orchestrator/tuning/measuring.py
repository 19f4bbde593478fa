"""Runs the arms of a pass in interleaved rounds, and writes down what they took. Owns the clock of a tuning.

Decides no verdict. What a killed tuning has measured is in its journal, and is not measured again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import psutil

from orchestrator.tuning.arms import Arm, ArmError
from orchestrator.tuning.journal import Journal, PassData
from orchestrator.tuning.levers import Candidate
from orchestrator.tuning.rounds import AGAIN, BASELINE, Block, clock_of, disturbance, seconds_of, turns
from orchestrator.tuning.statistics import effects, least_rounds
from workers.tuning.messages import ArmSpec, Opened

MakeSpec: TypeAlias = Callable[[str, Mapping[str, Any], int], ArmSpec]
"""From name, changes against the baseline, and how much to add to the seed."""

#: Of the budget: until then a pass may go on that has too few rounds for any interval.
_LATEST: Final = 0.9

#: Of the budget, for an answer of an arm; and the bounds of that. In 15 minutes this leaves room for the longest
#: compilation that was measured, 170 s; an arm that is slower would have no rounds.
_PATIENCE_SHARE: Final = 0.25
_LEAST_PATIENCE_S: Final = 30.0
_MOST_PATIENCE_S: Final = 600.0
#: As the baseline takes for its first steps: an arm gets so many times as long.
_AS_LONG: Final = 4.0

#: The baseline, its repetition, and one candidate are measured in any case.
_ALWAYS: Final = 2

#: What the process of an arm takes of the host's memory beside its parked state, and of what is free for all arms.
_ARM_HOST_BYTES: Final = 250 * 2**20
_HOST_SHARE: Final = 0.5

#: Of the budget, for the first steps of all arms; and the bounds of how many steps that are.
_OPENING_SHARE: Final = 0.1
_FEWEST_STEPS: Final = 8
_WARM_UP_STEPS: Final = 2


class BaselineError(Exception):
    """The baseline cannot be measured, so nothing can."""


def arms_at_once(most: int, parked_bytes: int, free_bytes: int) -> int:
    """Return how many candidates may live beside the baseline and its repetition, at most `most`.

    Args:
        most: What the device allows.
        parked_bytes: Host memory that the state of one arm takes between its turns.
        free_bytes: Of the host's memory.

    Raises:
        BaselineError: Not even one candidate fits beside the two.
    """
    arm_bytes = _ARM_HOST_BYTES + parked_bytes
    if (1 + _ALWAYS) * arm_bytes > free_bytes:
        raise BaselineError(
            f"an arm takes {arm_bytes / 2**30:.1f} GiB of host memory between its turns, and {free_bytes / 2**30:.1f} "
            f"GiB are free for at least {1 + _ALWAYS} arms; end other programs, or take a smaller train.preset"
        )
    return max(1, min(most, int(_HOST_SHARE * free_bytes / arm_bytes) - _ALWAYS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a tuning measures."""

    budget_s: float
    turn_s: float
    least_steps: int
    resolve: float
    """A share: the rounds end when every interval is at most so wide on either side."""
    confidence: float
    at_once: int
    """Arms beside the baseline and its repetition that may live at the same time; host memory may allow fewer."""
    seed: int = 0
    compared_steps: int = _FEWEST_STEPS
    """First steps of each arm, at most."""
    seeds: int = 1
    """Baselines that differ by their seed alone; 1: nothing is trained, so no losses are compared."""

    @property
    def seed_names(self) -> tuple[str, ...]:
        """The baselines with other seeds, which do the first steps only."""
        return tuple(f"seed {number}" for number in range(1, self.seeds))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ends:
    """When the rounds of some arms end, in seconds of the tuning."""

    usual_s: float
    latest_s: float
    """While there are fewer rounds than these."""
    enough_rounds: int


class Clock:
    """The time that a tuning has spent, with that of the processes that were killed."""

    def __init__(self, before_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began_s = now() - before_s

    def spent_s(self) -> float:
        """Return the seconds since the tuning began, without pauses between its processes."""
        return self._now() - self._began_s


class Measuring:
    """The rounds of all passes."""

    def __init__(
        self, plan: Plan, journal: Journal, clock: Clock, make_spec: MakeSpec, say: Callable[[str], None]
    ) -> None:
        self._plan = plan
        self._journal = journal
        self._clock = clock
        self._make_spec = make_spec
        self._say = say

    def settle_steps(self, arms: int) -> Opened:
        """Find out how fast the baseline is, and how many first steps of each arm the budget allows.

        Raises:
            BaselineError: It cannot be measured.
        """
        if self._journal.steps is None:
            probe = self._baseline("baseline, once", _FEWEST_STEPS)
            step_s = max(probe.step_s, 1e-6)
            steps = int(_OPENING_SHARE * self._plan.budget_s / (arms + 4) / step_s)
            steps = min(self._plan.compared_steps, max(_FEWEST_STEPS, steps))
            self._journal.note("steps", self._clock.spent_s(), steps=steps)
        if BASELINE not in self._journal.opened:
            self._journal.note_opened(
                BASELINE, self._baseline(BASELINE, self._journal.steps or _FEWEST_STEPS), self._clock.spent_s()
            )
        for number, name in enumerate(self._plan.seed_names, 1):
            if name not in self._journal.opened:
                with suppress(ArmError):
                    self._open_and_close(name, number)
        return self._journal.opened[BASELINE]

    def run(self, pass_name: str, candidates: Sequence[Candidate], until_s: float) -> PassData:
        """Measure candidates against the baseline until all are resolved, or the time is over.

        It goes on after `until_s`, to 0.9 of the budget at most, while there are too few rounds for any interval.

        Raises:
            BaselineError: The baseline has died, or the host has no memory for three arms.
        """
        data = self._journal.data(pass_name)
        begin_s, over_at_s = self._clock.spent_s(), data.over_at_s
        if over_at_s >= self._plan.budget_s or (data.rounds and begin_s >= until_s):
            return data
        latest_s = max(until_s, _LATEST * self._plan.budget_s)
        parked_bytes = max(each.parked_bytes for each in self._journal.opened.values())
        free_bytes = psutil.virtual_memory().available  # while no arm lives
        waves = -(-len(candidates) // arms_at_once(self._plan.at_once, parked_bytes, free_bytes))
        size = math.ceil(len(candidates) / max(1, waves))
        for number in range(waves):
            wave = list(candidates[number * size : (number + 1) * size])
            share = (number + 1) / waves
            ends = _Ends(
                usual_s=begin_s + share * (until_s - begin_s),
                latest_s=begin_s + share * (latest_s - begin_s),
                enough_rounds=least_rounds(len(candidates), self._plan.confidence),
            )
            self._wave(pass_name, wave, ends, number)
        self._journal.note("over", self._clock.spent_s(), pass_name=pass_name, budget_s=self._plan.budget_s)
        return data

    def _wave(self, pass_name: str, wave: Sequence[Candidate], ends: _Ends, number: int) -> None:
        data, arms = self._journal.data(pass_name), dict[str, Arm]()
        wanted: list[tuple[str, Mapping[str, Any], int]] = [(BASELINE, {}, 1), (AGAIN, {}, 1)]
        wanted += [(each.name, each.changes, each.copies) for each in wave]
        # What was compared before a kill is not compared again, but arms have to warm up, all of them by equal steps.
        known = all(name in self._journal.opened or name in data.lost for name, _, _ in wanted)
        steps = _WARM_UP_STEPS if known else self._journal.steps or _FEWEST_STEPS
        try:
            for name, changes, copies in wanted:
                too_late = self._clock.spent_s() > ends.usual_s and len(arms) > _ALWAYS
                if (name == BASELINE or name not in data.lost) and not too_late:
                    self._say(f"{pass_name}: preparing {name}, {self._left()}")
                    self._start(pass_name, arms, self._arm(name, changes, 0, copies), steps)
            if BASELINE not in arms:
                raise BaselineError(data.lost.get(BASELINE, "it did not start"))
            self._rounds(pass_name, arms, ends, number)
            self._evaluate(pass_name, arms)
        finally:
            for arm in arms.values():
                arm.close()

    def _rounds(self, pass_name: str, arms: dict[str, Arm], ends: _Ends, wave: int) -> None:
        """Run rounds; each takes about as long as the one before, and none begins that would end too late."""
        data, took_s = self._journal.data(pass_name), 0.0
        names = [name for name in arms if name != BASELINE]
        counted = len([each for each in data.rounds if any(name in each for name in names)])
        while (
            self._clock.spent_s() + took_s <= (ends.usual_s if counted >= ends.enough_rounds else ends.latest_s)
            or counted + sum(data.dropped.values()) == 0
        ):
            began_s, measured, number = self._clock.spent_s(), list[Block](), len(data.rounds)
            drawn = number + sum(data.dropped.values())
            for name in turns([each for each in names if each in arms], self._plan.seed + wave, drawn):
                try:
                    measured.append(arms[name].turn(self._plan.turn_s, self._plan.least_steps))
                except ArmError as error:
                    self._lose(pass_name, arms, name, str(error))
                    if name == BASELINE:
                        raise BaselineError(str(error)) from error
            kept, dropped = len(data.rounds), sum(data.dropped.values())
            # On a machine that is never quiet, at most half of the time is given away for nothing.
            why = disturbance(measured) if dropped < kept else None
            seconds = seconds_of((block.arm, block.seconds_per_sample) for block in measured)
            detail: dict[str, Any] = {"seconds": dict(seconds), "clock_mhz": clock_of(measured), "dropped": why}
            self._journal.note("round", self._clock.spent_s(), pass_name=pass_name, **detail)
            counted += why is None
            took_s = self._clock.spent_s() - began_s
            widest = self._widest(data, [name for name in names if name in arms])
            told = "" if widest is None or math.isinf(widest) else f", widest ±{100 * widest:.1f} %"
            self._say(f"{pass_name}: round {counted}, {len(names)} arms{told}, {self._left()}")
            if widest is not None and widest <= self._plan.resolve:
                return

    def _widest(self, data: PassData, names: Sequence[str]) -> float | None:
        """Return the half-width of the widest interval."""
        found = effects(data.rounds, BASELINE, names, self._plan.confidence)
        return max((each.half_width for each in found.values()), default=None)

    def _evaluate(self, pass_name: str, arms: dict[str, Arm]) -> None:
        for name, arm in list(arms.items()):
            try:
                loss = arm.evaluate().validation_loss
            except ArmError as error:
                self._lose(pass_name, arms, name, str(error))
                continue
            if loss is not None and math.isfinite(loss):
                detail: dict[str, Any] = {"pass_name": pass_name, "arm": name, "loss": loss}
                self._journal.note("later", self._clock.spent_s(), **detail)

    def _start(self, pass_name: str, arms: dict[str, Arm], arm: Arm, steps: int) -> None:
        """Open an arm, and write down its first steps if they were not compared before."""
        arms[arm.name] = arm
        try:
            opened = arm.open(steps)
        except ArmError as error:
            self._lose(pass_name, arms, arm.name, str(error))
            return
        if arm.name not in self._journal.opened:
            self._journal.note_opened(arm.name, opened, self._clock.spent_s())

    def _lose(self, pass_name: str, arms: dict[str, Arm], name: str, reason: str) -> None:
        arms.pop(name).close()
        self._journal.note("lost", self._clock.spent_s(), pass_name=pass_name, arm=name, reason=reason)

    def _open_and_close(self, name: str, seed: int) -> None:
        arm = self._arm(name, {}, seed)
        try:
            opened = arm.open(self._journal.steps or _FEWEST_STEPS)
        finally:
            arm.close()
        self._journal.note_opened(name, opened, self._clock.spent_s())

    def _baseline(self, name: str, steps: int) -> Opened:
        self._say(f"preparing the baseline, {self._left()}")
        arm = Arm(self._make_spec(name, {}, 0), _MOST_PATIENCE_S)
        try:
            return arm.open(steps)
        except ArmError as error:
            raise BaselineError(str(error)) from error
        finally:
            arm.close()

    def _arm(self, name: str, changes: Mapping[str, Any], more_seed: int, copies: int = 1) -> Arm:
        return Arm(self._make_spec(name, changes, more_seed), self._patience_s, copies)

    @property
    def _patience_s(self) -> float:
        """How long an arm may take for its first steps, or a turn."""
        baseline = self._journal.opened.get(BASELINE)
        usual_s = 0.0 if baseline is None else baseline.first_step_s + baseline.step_s * (self._journal.steps or 0)
        wanted_s = max(_LEAST_PATIENCE_S, _PATIENCE_SHARE * self._plan.budget_s, _AS_LONG * usual_s)
        return min(_MOST_PATIENCE_S, wanted_s)

    def _left(self) -> str:
        seconds = max(0.0, self._plan.budget_s - self._clock.spent_s())
        return f"{int(seconds // 60)}m{int(seconds % 60):02d}s left"
