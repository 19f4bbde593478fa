"""The processes of a tuning, and the turns that they take.

The baseline's process stays for the whole tuning, and that of a lever for its rounds. A process that
refuses, dies or hangs costs its lever, and never the tuning. Decides no verdict.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any, Final, TypeVar

from orchestrator.lab.tune.levers import Candidate
from orchestrator.lab.tune.statistics import least_rounds
from workers.tuning.messages import (
    ArmSpec,
    Done,
    Open,
    Opened,
    Refused,
    Turn,
    fork_context,
    run_arm,
)

Answer = TypeVar("Answer", Opened, Done)
Result = TypeVar("Result")

#: A process that is told to end has so long for it.
_END_S: Final = 5.0

#: Of the budget, for an answer of an arm; and the bounds of that. In 15 minutes this leaves room
#: for the longest compilation that was measured, 170 s.
_PATIENCE_SHARE: Final = 0.25
_LEAST_PATIENCE_S: Final = 60.0
_MOST_PATIENCE_S: Final = 600.0

#: Of a lever's time, for one turn; and the shortest one: 10 ticks of the processors' clocks.
_TURN_SHARE: Final = 1 / 40
_SHORTEST_S: Final = 0.1
_LONGEST_S: Final = 3.0

#: An interval of so many rounds of 3 % of noise is 0.8 % wide on either side.
_MOST_ROUNDS: Final = 60

#: First steps of each arm at the least, and the share of a lever's time that they may take.
_FEWEST_STEPS: Final = 4
_OPENING_SHARE: Final = 0.2


class ArmError(Exception):
    """An arm refused, died, or did not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a tuning measures."""

    budget_s: float
    confidence: float
    parity_steps: int = _FEWEST_STEPS
    """First steps of each arm, at most."""

    @property
    def patience_s(self) -> float:
        """How long an arm may take for an answer."""
        wanted_s = max(_LEAST_PATIENCE_S, _PATIENCE_SHARE * self.budget_s)
        return min(_MOST_PATIENCE_S, wanted_s)


@dataclass(slots=True, kw_only=True)
class Measured:
    """What was measured of a lever."""

    opened: Opened | None = None
    log_ratios: list[float] = field(default_factory=list)
    """Of speeds, lever to baseline, one of each round."""
    speeds: list[float] = field(default_factory=list)
    """Samples a second of the lever in each round."""
    lost: str | None = None
    """Why its process, or the baseline's, could not go on."""


class Bench:
    """The baseline, and each lever against it."""

    def __init__(
        self, plan: Plan, make_spec: Callable[[str, Mapping[str, Any]], ArmSpec], levers: int
    ) -> None:
        """Start nothing yet; `levers` is how many there will be."""
        self._plan = plan
        self._make_spec = make_spec
        self._least_rounds = least_rounds(plan.confidence)
        opening_s = _OPENING_SHARE * plan.budget_s / (levers + 1)
        self._open = Open(steps=plan.parity_steps, most_s=opening_s, least_steps=_FEWEST_STEPS)
        self._arm: _Arm | None = None
        self.opened: Opened | None = None
        """The baseline's first steps."""

    def baseline(self) -> Opened:
        """Return the first steps of the baseline, whose process is started if there is none.

        Raises:
            ArmError: It cannot be measured.
        """
        if self._arm is None or self.opened is None:
            self._arm = _Arm(self._make_spec("baseline", {}), self._plan.patience_s, 1)
            self.opened = self._of_baseline(lambda arm: arm.open(self._open))
            steps = len(self.opened.losses) or _FEWEST_STEPS
            self._open = replace(self._open, steps=steps, least_steps=steps)
        return self.opened

    def measure(self, candidate: Candidate, until_s: float, last_s: float) -> Measured:
        """Measure a lever until a time; it gets the fewest rounds also after that, until `last_s`.

        Times are those of `time.monotonic`. Rounds end by the clock and never by what they show, so
        that the interval holds.
        """
        measured, arm = Measured(), None
        try:
            self.baseline()
            spec = self._make_spec(candidate.name, candidate.changes)
            arm = _Arm(spec, self._plan.patience_s, candidate.copies)
            measured.opened = arm.open(self._open)
            left_s = max(0.0, until_s - time.monotonic())
            turn_s = min(_LONGEST_S, max(_SHORTEST_S, _TURN_SHARE * left_s))
            while self._goes_on(len(measured.log_ratios), until_s, last_s):
                self._round(arm, turn_s, measured)
        except ArmError as error:
            measured.lost = str(error)
        finally:
            if arm is not None:
                arm.close()
        return measured

    def close(self) -> None:
        """End the baseline's process."""
        if self._arm is not None:
            self._arm.close()
        self._arm = None

    def _goes_on(self, rounds: int, until_s: float, last_s: float) -> bool:
        now_s = time.monotonic()
        lacks_rounds = rounds < self._least_rounds and now_s < last_s
        return rounds < _MOST_ROUNDS and (now_s < until_s or lacks_rounds)

    def _round(self, arm: _Arm, turn_s: float, measured: Measured) -> None:
        """Have both take a turn. Who begins changes with each round."""
        baseline_first = len(measured.log_ratios) % 2 == 0
        own = None if baseline_first else arm.turn(turn_s)
        other = self._of_baseline(lambda baseline: baseline.turn(turn_s))
        own = arm.turn(turn_s) if own is None else own
        measured.speeds.append(own)
        measured.log_ratios.append(math.log(own / other))

    def _of_baseline(self, ask: Callable[[_Arm], Result]) -> Result:
        """Return what the baseline's arm answers; the next lever gets another one if it fails."""
        if self._arm is None:
            raise ArmError("the baseline has ended")
        try:
            return ask(self._arm)
        except ArmError as error:
            self.close()
            raise ArmError(f"the baseline: {error}") from error


class _Arm:
    """One process, or several that work at the same time."""

    def __init__(self, spec: ArmSpec, patience_s: float, copies: int) -> None:
        context = fork_context()
        self._patience_s = patience_s
        self._members = []
        for _ in range(copies):
            ours, theirs = context.Pipe()
            # Not a daemon: those may have no children, and a loader has some. It ends when the
            # connection does.
            process = context.Process(target=run_arm, args=(theirs, spec), name=spec.name)
            process.start()
            theirs.close()
            self._members.append((ours, process))

    def open(self, message: Open) -> Opened:
        """Have it do its first steps; peaks of several processes are added.

        Raises:
            ArmError: It cannot.
        """
        answers = self._ask(message, Opened)
        return replace(
            answers[0],
            peak_bytes=sum(answer.peak_bytes for answer in answers),
            host_bytes=sum(answer.host_bytes for answer in answers),
        )

    def turn(self, seconds: float) -> float:
        """Have it work, all of its processes together; return what they did in a second.

        Raises:
            ArmError: It cannot.
        """
        done = self._ask(Turn(seconds=seconds), Done)
        speed = sum(one.samples / one.seconds for one in done if one.seconds > 0)
        if speed <= 0:
            raise ArmError("it did nothing in its turn")
        return speed

    def close(self) -> None:
        """Close the connections, which ends the processes once their turn is over, or kill them."""
        for connection, _ in self._members:
            connection.close()
        for _, process in self._members:
            process.join(_END_S)
            if process.is_alive():
                process.kill()
                process.join(_END_S)

    def _ask(self, message: Open | Turn, wanted: type[Answer]) -> list[Answer]:
        answers = []
        try:
            for connection, _ in self._members:
                connection.send(message)
            for connection, _ in self._members:
                answers.append(self._answer(connection, wanted))
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            raise ArmError(self._end()) from error
        return answers

    def _answer(self, connection: Connection, wanted: type[Answer]) -> Answer:
        if not connection.poll(self._patience_s):
            raise ArmError(
                f"it took more than {self._patience_s:.0f} s, and has no time for rounds"
            )
        answer = connection.recv()
        if isinstance(answer, Refused):
            raise ArmError(answer.reason)
        if not isinstance(answer, wanted):
            raise ArmError(f"it answered with {type(answer).__name__}")
        return answer

    def _end(self) -> str:
        """Return how the first process that has ended did so."""
        for _, process in self._members:
            process.join(_END_S)
            code = process.exitcode
            if code is not None and code < 0:
                return f"its process was ended by {signal.Signals(-code).name}"
            if code is not None:
                return f"its process ended with {code}"
        return "its connection was lost"
