"""Runs the arms of a pass in interleaved rounds, and keeps what they took. Owns the clock of a
tuning.

Decides no verdict. What a killed tuning has measured is in its journal, and is not measured again.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil
from pydantic import TypeAdapter

from orchestrator.lab.tune.arms import (
    AGAIN,
    BASELINE,
    Arm,
    ArmError,
    clock_of,
    disturbance,
    round_s,
    seconds_of,
    shortest,
    turn_that_fits,
    turns,
)
from orchestrator.lab.tune.levers import Candidate, MakeSpec
from orchestrator.lab.tune.statistics import LEAVING_SHARE, least_rounds
from workers.files import replace_whole
from workers.tuning.messages import Done, Opened, Turn

FILE: Final = "rounds.json"


@dataclass(slots=True, kw_only=True)
class PassData:
    """The measurements of one pass."""

    rounds: list[Mapping[str, float]] = field(default_factory=list)
    """Seconds a sample of each arm, of the rounds that count."""
    dropped: dict[str, int] = field(default_factory=dict)
    """By reason."""
    lost: dict[str, str] = field(default_factory=dict)
    """Arms that refused or died, with the reason."""
    clocks_mhz: list[float] = field(default_factory=list)
    """Of the card, one of each round that counts; empty without a card."""
    later: dict[str, dict[int, float]] = field(default_factory=dict)
    """Validation losses after so many turns; equally many turns take equal time."""
    over_at_s: float = -1.0
    """The budget with which the pass came to its end; a larger one continues it."""


@dataclass(slots=True, kw_only=True)
class _Kept:
    """The content of a journal's file."""

    opened: dict[str, Opened] = field(default_factory=dict)
    passes: dict[str, PassData] = field(default_factory=dict)
    steps: int | None = None
    noted_s: float = 0.0


class Journal:
    """What a tuning has measured so far, in memory and in a file.

    The file is written anew with each measurement. The journal also keeps the time that a tuning
    has spent, with that of the processes that were killed.
    """

    def __init__(self, folder: Path, now: Callable[[], float] = time.monotonic) -> None:
        """Read what is there."""
        self._path = folder / FILE
        self._now = now
        there = self._path.exists()
        kept = TypeAdapter(_Kept).validate_json(self._path.read_bytes()) if there else _Kept()
        self.opened = kept.opened
        """First steps of each arm, of all passes."""
        self.passes = kept.passes
        self.steps = kept.steps
        """Of the comparison; `None` until the baseline's speed is known."""
        self.noted_s = kept.noted_s
        """When the last measurement was taken, in the tuning's time."""
        self._began_s = now() - self.noted_s

    def spent_s(self) -> float:
        """Return the seconds since the tuning began, without pauses between its processes."""
        return self._now() - self._began_s

    def data(self, name: str) -> PassData:
        """Return the measurements of a pass."""
        return self.passes.setdefault(name, PassData())

    def save(self) -> None:
        """Write what was measured."""
        self.noted_s = round(self.spent_s(), 3)
        kept = _Kept(opened=self.opened, passes=self.passes, steps=self.steps, noted_s=self.noted_s)
        replace_whole(self._path, json.dumps(asdict(kept)))


#: Of the budget: until then a pass may go on that has too few rounds for any interval.
_LATEST: Final = 0.9

#: Of the budget, for an answer of an arm; and the bounds of that. In 15 minutes this leaves room
#: for the longest compilation that was measured, 170 s; an arm that is slower would have no rounds.
_PATIENCE_SHARE: Final = 0.25
_LEAST_PATIENCE_S: Final = 30.0
_MOST_PATIENCE_S: Final = 600.0
#: As the baseline takes for its first steps: an arm gets so many times as long.
_AS_LONG: Final = 4.0

#: Times the baseline's step: a lever that takes longer leaves after about 4 of 10 rounds.
_AS_SLOW: Final = 2.0

#: Of a turn's length, what it is guessed to take beside its steps until a round was measured.
_SHARE_BESIDE: Final = 0.25

#: What the process of an arm takes of the host's memory beside its parked state, and of what is
#: free for all arms.
_ARM_HOST_BYTES: Final = 250 * 2**20
_HOST_SHARE: Final = 0.5
#: The baseline and its repetition live in any case.
_ALWAYS: Final = 2

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
            f"an arm takes {arm_bytes / 2**30:.1f} GiB of host memory between its turns, and "
            f"{free_bytes / 2**30:.1f} "
            f"GiB are free for at least {1 + _ALWAYS} arms; end other programs, or take a smaller "
            "train.preset"
        )
    return max(1, min(most, int(_HOST_SHARE * free_bytes / arm_bytes) - _ALWAYS))


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a tuning measures."""

    budget_s: float
    turn_s: float
    least_steps: int
    resolve: float
    """A share: an arm leaves when its interval is at most so wide on either side."""
    confidence: float
    at_once: int
    """Candidates that may live at the same time, as far as host memory allows it."""
    seed: int = 0
    compared_steps: int = _FEWEST_STEPS
    """First steps of each arm, at most."""
    seeds: int = 1
    """Baselines that differ by their seed alone; 1: nothing is trained, so no losses are compared.
    """

    @property
    def seed_names(self) -> tuple[str, ...]:
        """The baselines with other seeds, which do the first steps only."""
        return tuple(f"seed {number}" for number in range(1, self.seeds))


@dataclass(slots=True, kw_only=True)
class _Race:
    """The arms of one pass. Times are seconds of the tuning."""

    pass_name: str
    data: PassData
    is_over: Callable[[Candidate], bool]
    waiting: list[Candidate]
    """Not begun."""
    begin_s: float
    until_s: float
    latest_s: float
    """While there are fewer rounds than these."""
    enough_rounds: int
    steps: int
    """First steps of each arm."""
    overhead_s: float
    """What a turn takes beside its steps: as in the last rounds, before the first one a guess."""
    at_once: int
    """Candidates that may race at the same time."""
    begun: int = 0
    arms: dict[str, Arm] = field(default_factory=dict)
    """All that are alive, with the baseline and its repetition."""
    racing: dict[str, Candidate] = field(default_factory=dict)
    turns: Counter[str] = field(default_factory=Counter)
    """That each arm has taken, in rounds that do not count as well."""

    def count(self, name: str) -> int:
        """Return how many rounds of an arm count."""
        return sum(name in arms for arms in self.data.rounds)


class Measuring:
    """The rounds of all passes."""

    def __init__(
        self,
        plan: Plan,
        journal: Journal,
        make_spec: MakeSpec,
        say: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._journal = journal
        self._make_spec = make_spec
        self._say = say

    def settle_steps(self, arms: int) -> Opened:
        """Find out how fast the baseline is, and how many first steps of each arm the budget
        allows.

        Raises:
            BaselineError: It cannot be measured.
        """
        journal = self._journal
        self._say(f"preparing the baseline, {self._left()}")
        try:
            if journal.steps is None:
                probe = self._open_once("baseline, once", _FEWEST_STEPS)
                step_s = max(probe.step_s, 1e-6)
                steps = int(_OPENING_SHARE * self._plan.budget_s / (arms + 4) / step_s)
                steps = min(self._plan.compared_steps, max(_FEWEST_STEPS, steps))
                journal.steps = steps
            steps = journal.steps or _FEWEST_STEPS
            if BASELINE not in journal.opened:
                journal.opened[BASELINE] = self._open_once(BASELINE, steps)
                journal.save()
        except ArmError as error:
            raise BaselineError(str(error)) from error
        for seed, name in enumerate(self._plan.seed_names, 1):
            if name not in journal.opened:
                with suppress(ArmError):
                    journal.opened[name] = self._open_once(name, steps, seed)
                    journal.save()
        return journal.opened[BASELINE]

    def run(
        self,
        pass_name: str,
        candidates: Sequence[Candidate],
        until_s: float,
        is_over: Callable[[Candidate], bool],
    ) -> PassData:
        """Measure candidates against the baseline, in their order, until all are over or the time
        is.

        A candidate begins if there is time for enough rounds of it and of all that have begun, and
        leaves the rounds as soon as `is_over` says so. It goes on after `until_s`, to 0.9 of the
        budget at most, while there are too few rounds for any interval.

        Raises:
            BaselineError: The baseline has died, or the host has no memory for three arms.
        """
        data, begin_s = self._journal.data(pass_name), self._journal.spent_s()
        if data.over_at_s >= self._plan.budget_s or (data.rounds and begin_s >= until_s):
            return data
        # What was compared before a kill is not compared again, but arms have to warm up, all of
        # them by equal steps.
        names = [BASELINE, AGAIN, *(candidate.name for candidate in candidates)]
        are_opened = all(name in self._journal.opened or name in data.lost for name in names)
        parked_bytes = max(opened.parked_bytes for opened in self._journal.opened.values())
        free_bytes = psutil.virtual_memory().available  # while no arm lives
        race = _Race(
            pass_name=pass_name,
            at_once=arms_at_once(self._plan.at_once, parked_bytes, free_bytes),
            data=data,
            is_over=is_over,
            waiting=[
                candidate
                for candidate in candidates
                if candidate.name not in data.lost and not is_over(candidate)
            ],
            begin_s=begin_s,
            until_s=until_s,
            latest_s=max(until_s, _LATEST * self._plan.budget_s),
            enough_rounds=least_rounds(
                len(candidates) + 1, 1 - (1 - LEAVING_SHARE) * (1 - self._plan.confidence)
            ),
            steps=_WARM_UP_STEPS if are_opened else self._journal.steps or _FEWEST_STEPS,
            overhead_s=_SHARE_BESIDE * self._plan.turn_s,
        )
        try:
            for name in (BASELINE, AGAIN):
                if name == BASELINE or name not in data.lost:
                    self._begin(race, self._arm(name, {}, 0))
            if BASELINE not in race.arms:
                raise BaselineError(data.lost.get(BASELINE, "it did not start"))
            while self._fill(race) and (turn := self._next_turn(race)) is not None:
                self._round(race, turn)
                self._evaluate(race)
                self._part(race)
        finally:
            for arm in race.arms.values():
                arm.close()
        data.over_at_s = self._plan.budget_s
        self._journal.save()
        return data

    def _fill(self, race: _Race) -> bool:
        """Begin what there is room and time for; return whether anything is left to measure."""
        while race.waiting and self._is_time_for_another(race):
            candidate = race.waiting.pop(0)
            race.racing[candidate.name] = candidate
            self._begin(race, self._arm(candidate.name, candidate.changes, 0, candidate.copies))
        return bool(race.racing) or (AGAIN in race.arms and race.count(AGAIN) < race.enough_rounds)

    def _is_time_for_another(self, race: _Race) -> bool:
        if not race.racing and not race.data.rounds:
            return True  # the baseline, its repetition, and one candidate are measured in any case
        if len(race.racing) >= race.at_once:
            return False
        begin_s = (self._journal.spent_s() - race.begin_s) / race.begun
        return self._decided_at_s(race, race.waiting[0].name) + begin_s <= race.until_s

    def _decided_at_s(self, race: _Race, *more: str) -> float:
        """Return when all arms that have begun, and more, can have enough rounds at the soonest."""
        most_s = _AS_SLOW * self._journal.opened[BASELINE].step_s
        steps_s = [min(most_s, step_s) for step_s in self._steps_s(race, *more)]
        lacking = race.enough_rounds - min(race.count(name) for name in (*race.arms, *more))
        shortest_s = round_s(shortest(self._usual), steps_s, race.overhead_s)
        return self._journal.spent_s() + max(0, lacking) * shortest_s

    def _next_turn(self, race: _Race) -> Turn | None:
        """Return how long the next turns are, so that enough rounds are in time; `None` ends them.

        The first round is measured in any case.
        """
        spent_s, steps_s = self._journal.spent_s(), self._steps_s(race)
        lacking = max(0, race.enough_rounds - min(race.count(name) for name in race.arms))
        room_s = (race.until_s - spent_s) / max(1, lacking)
        turn = turn_that_fits(self._usual, steps_s, race.overhead_s, room_s)

        first = not race.data.rounds and not race.data.dropped
        ends_s = spent_s + round_s(turn, steps_s, race.overhead_s)
        return turn if first or ends_s <= (race.latest_s if lacking else race.until_s) else None

    def _round(self, race: _Race, turn: Turn) -> None:
        data, measured, began_s = race.data, list[tuple[str, Done]](), self._journal.spent_s()
        counted, dropped = len(data.rounds), sum(data.dropped.values())
        steps_s = self._steps_s(race)
        for name in turns(
            [arm for arm in race.arms if arm != BASELINE], self._plan.seed, counted + dropped
        ):
            try:
                measured.append((name, race.arms[name].turn(turn.seconds, turn.least_steps)))
                race.turns[name] += 1
            except ArmError as error:
                self._lose(race, name, str(error))
                if name == BASELINE:
                    raise BaselineError(str(error)) from error
        # On a machine that is never quiet, at most half of the rounds are given away for nothing,
        # and none that an interval needs.
        may_drop = dropped < counted and self._decided_at_s(race) <= race.latest_s
        blocks = [done for _, done in measured]
        why = disturbance(blocks) if may_drop else None
        if why is not None:
            data.dropped[why] = data.dropped.get(why, 0) + 1
        else:
            data.rounds.append(
                seconds_of((name, done.seconds / done.samples) for name, done in measured)
            )
            if (clock_mhz := clock_of(blocks)) is not None:
                data.clocks_mhz.append(clock_mhz)
        self._journal.save()
        beside_s = self._journal.spent_s() - began_s - round_s(turn, steps_s, 0.0)
        race.overhead_s = (race.overhead_s + max(0.0, beside_s / len(steps_s))) / 2
        waiting = f", {len(race.waiting)} not begun" if race.waiting else ""
        self._say(
            f"{race.pass_name}: round {len(data.rounds)}, {len(race.racing)} arms{waiting}, "
            f"{self._left()}"
        )

    def _evaluate(self, race: _Race) -> None:
        """Compute the validation losses that are compared, after 1, 2, 4, ...

        times enough rounds.
        """
        judged = [
            candidate
            for candidate in (*race.racing.values(), *race.waiting)
            if candidate.aim == "loss"
        ]
        for name in {
            name for candidate in judged for name in (candidate.name, candidate.beside or AGAIN)
        }:
            whole, rest = divmod(race.turns[name], race.enough_rounds)
            if name not in race.arms or rest or whole.bit_count() != 1:
                continue
            try:
                loss = race.arms[name].evaluate().validation_loss
            except ArmError as error:
                self._lose(race, name, str(error))
                continue
            if loss is not None and math.isfinite(loss):
                race.data.later.setdefault(name, {})[race.turns[name]] = loss
                self._journal.save()

    def _part(self, race: _Race) -> None:
        """End the arms that are over, unless another one is judged against them.

        Where rounds take longer than they did, the last ones wait again, so that there is time to
        decide the others.
        """
        others = {candidate.beside for candidate in (*race.racing.values(), *race.waiting)}
        for candidate in list(race.racing.values()):
            if candidate.name not in others and race.is_over(candidate):
                del race.racing[candidate.name]
                race.arms.pop(candidate.name).close()
        while len(race.racing) > 1 and self._decided_at_s(race) > race.latest_s:
            name, last = race.racing.popitem()
            race.arms.pop(name).close()
            race.waiting.insert(0, last)

    @property
    def _usual(self) -> Turn:
        return Turn(seconds=self._plan.turn_s, least_steps=self._plan.least_steps)

    def _steps_s(self, race: _Race, *more: str) -> list[float]:
        """Return what a step takes, of each turn of a round."""
        opened = self._journal.opened
        names = [BASELINE, *race.arms, *more]
        return [opened[name if name in opened else BASELINE].step_s for name in names]

    def _begin(self, race: _Race, arm: Arm) -> None:
        """Open an arm, and write down its first steps if they were not compared before."""
        self._say(f"{race.pass_name}: preparing {arm.name}, {self._left()}")
        race.arms[arm.name] = arm
        race.turns[arm.name] = 0
        race.begun += 1
        try:
            opened = arm.open(race.steps)
        except ArmError as error:
            self._lose(race, arm.name, str(error))
            return
        if arm.name not in self._journal.opened:
            self._journal.opened[arm.name] = opened
            self._journal.save()

    def _lose(self, race: _Race, name: str, reason: str) -> None:
        race.arms.pop(name).close()
        race.racing.pop(name, None)
        race.data.lost[name] = reason
        self._journal.save()

    def _open_once(self, name: str, steps: int, more_seed: int = 0) -> Opened:
        """Have a baseline do its first steps, and end it."""
        arm = self._arm(name, {}, more_seed)
        try:
            return arm.open(steps)
        finally:
            arm.close()

    def _arm(self, name: str, changes: Mapping[str, Any], more_seed: int, copies: int = 1) -> Arm:
        return Arm(self._make_spec(name, changes, more_seed), self._patience_s, copies)

    @property
    def _patience_s(self) -> float:
        """How long an arm may take for its first steps, or a turn."""
        baseline = self._journal.opened.get(BASELINE)
        if baseline is None:
            return _MOST_PATIENCE_S
        usual_s = baseline.first_step_s + baseline.step_s * (self._journal.steps or 0)
        wanted_s = max(_LEAST_PATIENCE_S, _PATIENCE_SHARE * self._plan.budget_s, _AS_LONG * usual_s)
        return min(_MOST_PATIENCE_S, wanted_s)

    def _left(self) -> str:
        seconds = max(0.0, self._plan.budget_s - self._journal.spent_s())
        return f"{int(seconds // 60)}m{int(seconds % 60):02d}s left"
