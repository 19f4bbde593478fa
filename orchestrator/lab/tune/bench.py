"""The processes of a tuning, and the turns that they take.

The baseline's process stays for the whole tuning, and that of a lever for its rounds. A process
that refuses, dies or hangs costs its lever, and never the tuning. Decides no verdict.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final, TypeAlias

from orchestrator.config.schema import TuneConfig
from orchestrator.lab.tune.trial import Trial, least_rounds
from workers.tuning.messages import ArmSpec, Opened, Refused, fork_context, run_arm

MakeSpec: TypeAlias = Callable[[Trial | None], ArmSpec]
"""From a lever, or `None` for the baseline."""

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
_OPENING_SHARE: Final = 0.3


class ArmError(Exception):
    """An arm refused, died, or did not answer."""


class Bench:
    """The baseline, and each lever against it."""

    def __init__(
        self, make_spec: MakeSpec, rules: TuneConfig, budget_s: float, levers: int
    ) -> None:
        """Start nothing yet; `levers` is how many there will be."""
        self._make_spec, self._rules = make_spec, rules
        self._patience_s = _between(_PATIENCE_BOUNDS_S, _PATIENCE_SHARE * budget_s)
        self._least_rounds = least_rounds(rules)
        self._opening_s = _OPENING_SHARE * budget_s / (levers + 1)
        self._arm: _Arm | None = None
        self.opened: Opened | None = None
        """The baseline's first steps."""

    def baseline(self) -> Opened:
        """Return the first steps of the baseline, whose process is started if there is none.

        Raises:
            ArmError: It cannot be measured.
        """
        if self._arm is None or self.opened is None:
            self._arm = self._start(None)
            self.opened = self._arm.opened
        return self.opened

    def measure(self, trial: Trial, until_s: float, last_s: float) -> str | None:
        """Measure a lever until a time; it gets the fewest rounds also after that, until `last_s`.

        Times are those of `time.monotonic`. A lever whose first look tells its speed leaves its
        time to the others. Returns why a process could not go on, or `None`.
        """
        arm = None
        try:
            baseline = self.baseline()
            arm = self._start(trial)
            trial.opened(arm.opened, baseline)
            turn_s = _between(_TURN_BOUNDS_S, _TURN_SHARE * (until_s - time.monotonic()))
            arm.turn(turn_s)  # not counted: a CPU then keeps memory between steps that are alike
            while not trial.look(self._rules) and self._goes_on(trial.rounds, until_s, last_s):
                # Who begins changes with each round.
                if trial.rounds % 2:
                    own, other = arm.turn(turn_s), self._baseline_turn(turn_s)
                else:
                    other, own = self._baseline_turn(turn_s), arm.turn(turn_s)
                clock = 0 if trial.counts_waiting else 1
                trial.speeds.append((own[clock], other[clock]))
        except ArmError as error:
            return str(error)
        finally:
            if arm is not None:
                arm.close()
        return None

    def close(self) -> None:
        """End the baseline's process."""
        if self._arm is not None:
            self._arm.close()
        self._arm = None

    def _start(self, trial: Trial | None) -> _Arm:
        """Start an arm; a lever does no more first steps than the baseline has done."""
        spec = replace(self._make_spec(trial), first_steps_s=self._opening_s)
        if self.opened is not None:
            spec = replace(spec, first_steps=len(self.opened.losses))
        return _Arm(spec, self._patience_s, 1 if trial is None else trial.copies)

    def _goes_on(self, rounds: int, until_s: float, last_s: float) -> bool:
        now_s = time.monotonic()
        lacks_rounds = rounds < self._least_rounds and now_s < last_s
        return rounds < _MOST_ROUNDS and (now_s < until_s or lacks_rounds)

    def _baseline_turn(self, seconds: float) -> tuple[float, float]:
        """Return the speeds of the baseline; the next lever gets another process if it fails."""
        if self._arm is None:
            raise ArmError("the baseline has ended")
        try:
            return self._arm.turn(seconds)
        except ArmError as error:
            self.close()
            raise ArmError(f"the baseline: {error}") from error


class _Arm:
    """One process, or several that work at the same time."""

    opened: Opened
    """Their first steps; the memory of several processes is added."""

    def __init__(self, spec: ArmSpec, patience_s: float, copies: int) -> None:
        """Start them, and wait for their first steps; `ArmError` if one cannot do them."""
        context = fork_context()
        self._patience_s = patience_s
        self._members = []
        for _ in range(copies):
            ours, theirs = context.Pipe()
            # Not a daemon: those may have no children, and a loader has some. It ends when the
            # connection does.
            process = context.Process(target=run_arm, args=(theirs, spec), name=spec.spec.slot)
            process.start()
            theirs.close()
            self._members.append((ours, process))
        try:
            answers = self._answers()
        except BaseException:
            self.close()
            raise
        self.opened = replace(
            answers[0],
            peak_bytes=sum(answer.peak_bytes for answer in answers),
            host_bytes=sum(answer.host_bytes for answer in answers),
        )

    def turn(self, seconds: float) -> tuple[float, float]:
        """Have all of its processes work together; return what they did in a second, and in one
        without the time in which other programs had the processor.

        Raises:
            ArmError: It cannot.
        """
        speeds, alone = zip(*self._answers(seconds), strict=True)
        return sum(speeds), sum(alone)

    def close(self) -> None:
        """Close the connections, which ends the processes once their turn is over, or kill them."""
        for connection, _ in self._members:
            connection.close()
        for _, process in self._members:
            process.join(_END_S)
            if process.is_alive():
                process.kill()
                process.join(_END_S)

    def _answers(self, seconds: float | None = None) -> list[Any]:
        """Return the answer of each process to a turn, if one is asked for; `ArmError` if one has
        none, or refuses.
        """
        answers = []
        try:
            for connection, _ in self._members:
                if seconds is not None:
                    connection.send(seconds)
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
