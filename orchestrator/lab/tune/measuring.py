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
from typing import Any, Final, TypeAlias, TypeVar

from orchestrator.config.schema import TuneConfig
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

Result = TypeVar("Result")

MakeSpec: TypeAlias = Callable[[str, Mapping[str, Any]], ArmSpec]
"""From the name of an arm and its changes against the baseline."""

#: A process that is told to end has so long for it.
_END_S: Final = 5.0

#: For an answer of an arm: this share of the budget, between these bounds. In 15 minutes the share
#: leaves room for the longest compilation that was measured, 170 s.
_PATIENCE_SHARE: Final = 0.25
_PATIENCE_BOUNDS_S: Final = (60.0, 600.0)

#: Of a lever's time, for one turn; and the bounds of a turn. Beside other programs, ratios of turns
#: of 2.5 s scattered twice as far as those of 0.5 s (measured).
_TURN_SHARE: Final = 1 / 40
_TURN_BOUNDS_S: Final = (0.1, 0.5)

#: An interval of so many rounds of 5 % of noise is 1 % wide on either side.
_MOST_ROUNDS: Final = 120

#: Of a lever's time, for the first steps of its arm.
_OPENING_SHARE: Final = 0.2


class ArmError(Exception):
    """An arm refused, died, or did not answer."""


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
        self, make_spec: MakeSpec, rules: TuneConfig, budget_s: float, levers: int
    ) -> None:
        """Start nothing yet; `levers` is how many there will be."""
        self._make_spec = make_spec
        self._patience_s = _between(_PATIENCE_BOUNDS_S, _PATIENCE_SHARE * budget_s)
        self._least_rounds = least_rounds(rules.confidence)
        opening_s = _OPENING_SHARE * budget_s / (levers + 1)
        self._open = Open(steps=rules.parity_steps, most_s=opening_s)
        self._arm: _Arm | None = None
        self.opened: Opened | None = None
        """The baseline's first steps."""

    def baseline(self) -> Opened:
        """Return the first steps of the baseline, whose process is started if there is none.

        Raises:
            ArmError: It cannot be measured.
        """
        if self._arm is None or self.opened is None:
            self._arm = _Arm(self._make_spec("baseline", {}), self._patience_s, 1)
            self.opened = self._of_baseline(lambda arm: arm.open(self._open))
            self._open = Open(steps=len(self.opened.losses))
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
            arm = _Arm(spec, self._patience_s, candidate.copies)
            measured.opened = arm.open(self._open)
            turn_s = _between(_TURN_BOUNDS_S, _TURN_SHARE * (until_s - time.monotonic()))
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
        """Have it do its first steps; the memory of several processes is added.

        Raises:
            ArmError: It cannot.
        """
        answers: list[Opened] = self._ask(message)
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
        answers: list[Done] = self._ask(Turn(seconds=seconds))
        return sum(done.samples / done.seconds for done in answers)

    def close(self) -> None:
        """Close the connections, which ends the processes once their turn is over, or kill them."""
        for connection, _ in self._members:
            connection.close()
        for _, process in self._members:
            process.join(_END_S)
            if process.is_alive():
                process.kill()
                process.join(_END_S)

    def _ask(self, message: Open | Turn) -> list[Any]:
        """Return the answer of each process; `ArmError` if one has none, or refuses."""
        answers = []
        try:
            for connection, _ in self._members:
                connection.send(message)
            for connection, _ in self._members:
                if not connection.poll(self._patience_s):
                    raise ArmError(f"it gave no answer for {self._patience_s:.0f} s")
                answers.append(connection.recv())
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            raise ArmError(self._end()) from error
        for answer in answers:
            if isinstance(answer, Refused):
                raise ArmError(answer.reason)
        return answers

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


def _between(bounds: tuple[float, float], value: float) -> float:
    return min(bounds[1], max(bounds[0], value))
