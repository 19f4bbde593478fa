"""The processes of a tuning, and the turns that they take.

The baseline's process stays for the whole tuning, and that of a lever for its rounds. A process
that refuses, dies or hangs costs its lever, and never the tuning. Decides no verdict.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Final

from orchestrator.lab.tune.trial import LEAST_ROUNDS, Trial
from workers.tuning.messages import ArmSpec, Refused, Turn, fork_context, run_arm

#: A process that is told to end has so long for it.
_END_S: Final = 5.0

#: For an answer of an arm; the longest compilation that was measured took 170 s.
_PATIENCE_S: Final = 300.0

#: Beside other programs, ratios of turns of 2.5 s scattered twice as far as those of 0.5 s
#: (measured).
_TURN_S: Final = 0.4

#: An interval of so many rounds of 5 % of noise is 1 % wide on either side.
_MOST_ROUNDS: Final = 120


class ArmError(Exception):
    """An arm refused, died, or did not answer."""


class Bench:
    """The baseline, and each lever against it."""

    def __init__(self, make_spec: Callable[[Trial | None], ArmSpec]) -> None:
        """Start nothing yet; `make_spec` makes an arm of a lever, or of `None` for the baseline."""
        self._make_spec = make_spec
        self._baseline: _Arm | None = None

    def baseline(self) -> Turn:
        """Return a turn of the baseline, whose process is started if there is none.

        Raises:
            ArmError: It cannot be measured. The next lever gets another process.
        """
        try:
            self._baseline = self._baseline or _Arm(self._make_spec(None), 1)
            return self._baseline.turn()
        except ArmError as error:
            self.close()
            raise ArmError(f"the baseline: {error}") from error

    def measure(self, trial: Trial, until_s: float, last_s: float) -> None:
        """Measure a lever until a time; it gets the fewest rounds also after that, until `last_s`.

        Times are those of `time.monotonic`. Nothing but the clock ends the rounds: an interval that
        is looked at again and again until it pleases holds less than it promises.

        Raises:
            ArmError: A process could not go on; what was measured until then stays in the trial.
        """
        arm = _Arm(self._make_spec(trial), trial.copies)
        try:
            arm.turn()  # not counted: a CPU then keeps memory between steps that are alike
            while _goes_on(trial.rounds, until_s, last_s):
                # Who begins changes with each round.
                if trial.rounds % 2:
                    own, other = arm.turn(), self.baseline()
                else:
                    other, own = self.baseline(), arm.turn()
                trial.take(own, other)
        finally:
            arm.close()

    def close(self) -> None:
        """End the baseline's process."""
        if self._baseline is not None:
            self._baseline.close()
        self._baseline = None


class _Arm:
    """One process, or several that work at the same time."""

    def __init__(self, spec: ArmSpec, copies: int) -> None:
        context = fork_context()
        self._members = []
        for _ in range(copies):
            ours, theirs = context.Pipe()
            # Not a daemon: those may have no children, and a loader has some. It ends when the
            # connection does.
            process = context.Process(target=run_arm, args=(theirs, spec), name=spec.spec.slot)
            process.start()
            theirs.close()
            self._members.append((ours, process))

    def turn(self) -> Turn:
        """Have all of its processes work together; speeds and memory are added.

        Raises:
            ArmError: One cannot, or has ended.
        """
        turns: list[Turn] = []
        for connection, _ in self._members:
            with suppress(BrokenPipeError, ConnectionResetError):  # its last words can be received
                connection.send(_TURN_S)
        try:
            for connection, _ in self._members:
                if not connection.poll(_PATIENCE_S):
                    raise ArmError(f"it gave no answer for {_PATIENCE_S:.0f} s")
                answer = connection.recv()
                if isinstance(answer, Refused):
                    raise ArmError(answer.reason)
                turns.append(answer)
        except (EOFError, ConnectionResetError) as error:
            raise ArmError(self._end()) from error
        speed, peak_bytes = (
            sum(each.speed for each in turns),
            sum(each.peak_bytes for each in turns),
        )
        return replace(turns[0], speed=speed, peak_bytes=peak_bytes)

    def close(self) -> None:
        """Close the connections, which ends the processes once their turn is over, or kill them."""
        for connection, _ in self._members:
            connection.close()
        for _, process in self._members:
            process.join(_END_S)
            if process.is_alive():
                process.kill()
                process.join(_END_S)

    def _end(self) -> str:
        """Return how the first process that has ended did so."""
        for _, process in self._members:
            process.join(_END_S)
            code = process.exitcode
            if code is not None:
                how = signal.Signals(-code).name if code < 0 else str(code)
                return f"its process was ended by {how}"
        return "its connection was lost"


def _goes_on(rounds: int, until_s: float, last_s: float) -> bool:
    now_s = time.monotonic()
    lacks_rounds = rounds < LEAST_ROUNDS and now_s < last_s
    return rounds < _MOST_ROUNDS and (now_s < until_s or lacks_rounds)
