"""The processes of arms, and the order and length of their turns.

Each round runs the baseline twice and every other arm once, in an order drawn anew. Two turns of
the baseline cost one block a round, and take a quarter off the variance of every ratio. An arm that
dies, hangs or refuses is an `ArmError` with the reason, and never the end of the tuning.
"""

from __future__ import annotations

import math
import random
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, Final, TypeVar

from workers.tuning.messages import (
    ArmSpec,
    Done,
    Evaluate,
    Evaluated,
    Open,
    Opened,
    Refused,
    Turn,
    fork_context,
    run_arm,
)

Answer = TypeVar("Answer", Opened, Done, Evaluated)

_END_S: Final = 5.0

BASELINE: Final = "baseline"
AGAIN: Final = "a/a=the baseline"
"""The arm that is the baseline once more: what it seems to gain is the error of the method."""

#: Clocks that differ by more than this share between two arms of a round make their speeds
#: incomparable.
_CLOCK_SHARE: Final = 0.02

#: Of its usual length: a turn is so short where there is no time for enough longer ones. The 0.1 s
#: of a rehearsal are 20 ticks of two cores, in which the share of other programs is counted.
_SHORTEST: Final = 0.5

#: A core that others used for more than this share of a block.
_NEIGHBOUR_SHARE: Final = 0.25


def turns(arms: Sequence[str], seed: int, number: int) -> list[str]:
    """Return the order of a round: the baseline twice, each of `arms` once."""
    order = [BASELINE, BASELINE, *arms]
    random.Random(f"{seed}/{number}").shuffle(order)  # noqa: S311 - no secret
    return order


def shortest(usual: Turn) -> Turn:
    """Return the shortest turn that may stand for the usual one."""
    return Turn(seconds=_SHORTEST * usual.seconds, least_steps=max(1, usual.least_steps // 2))


def round_s(turn: Turn, steps_s: Sequence[float], overhead_s: float) -> float:
    """Return what a round takes, in seconds; `steps_s` are those of a step, for each turn in it.

    A turn has one step that is not counted, and `overhead_s` beside its steps, such as parking.
    """
    return sum(
        overhead_s + step_s + max(turn.seconds, turn.least_steps * step_s) for step_s in steps_s
    )


def turn_that_fits(usual: Turn, steps_s: Sequence[float], overhead_s: float, room_s: float) -> Turn:
    """Return the longest turn with which a round takes at most `room_s`, within its bounds."""
    if round_s(usual, steps_s, overhead_s) <= room_s:
        return usual
    least = shortest(usual)
    spare_s = max(0.0, room_s - round_s(least, steps_s, overhead_s)) / len(steps_s)
    return replace(least, seconds=min(usual.seconds, least.seconds + spare_s))


def disturbance(blocks: Sequence[Done]) -> str | None:
    """Return why a round does not count; `None` if it does."""
    if any(block.throttled for block in blocks):
        return "throttled"
    clocks = [block.clock_mhz for block in blocks if block.clock_mhz]
    if clocks and max(clocks) > min(clocks) * (1 + _CLOCK_SHARE):
        return "clock moved"
    if any((block.neighbour_share or 0.0) > _NEIGHBOUR_SHARE for block in blocks):
        return "another program"
    return None


def clock_of(blocks: Sequence[Done]) -> float | None:
    """Return the mean clock of the card in a round; `None` where it has no sensor."""
    clocks = [block.clock_mhz for block in blocks if block.clock_mhz]
    return sum(clocks) / len(clocks) if clocks else None


def seconds_of(blocks: Iterable[tuple[str, float]]) -> Mapping[str, float]:
    """Return the seconds a sample of each arm of a round; of several turns their geometric mean."""
    logs: dict[str, list[float]] = {}
    for arm, seconds in blocks:
        logs.setdefault(arm, []).append(math.log(seconds))
    return {arm: math.exp(math.fsum(values) / len(values)) for arm, values in logs.items()}


class ArmError(Exception):
    """An arm refused, died, or did not answer."""


class Arm:
    """One arm: one process, or several that work at the same time."""

    def __init__(self, spec: ArmSpec, patience_s: float, copies: int = 1) -> None:
        """Start the processes; they open nothing yet.

        One that does not answer within `patience_s` is killed.
        """
        self.name = spec.name
        self._patience_s = patience_s
        self._members = [
            _Member(replace(spec, seed=spec.seed + number)) for number in range(copies)
        ]

    def open(self, steps: int) -> Opened:
        """Have it do its first steps.

        Raises:
            ArmError: It cannot.
        """
        answers = self._ask(Open(steps=steps), Opened, self._patience_s)
        return replace(
            answers[0],
            peak_bytes=sum(answer.peak_bytes for answer in answers),
            host_bytes=sum(answer.host_bytes for answer in answers),
            parked_bytes=sum(answer.parked_bytes for answer in answers),
        )

    def turn(self, seconds: float, least_steps: int) -> Done:
        """Have it work, all of its processes together; return what they did in a second.

        Raises:
            ArmError: It cannot.
        """
        done = self._ask(
            Turn(seconds=seconds, least_steps=least_steps), Done, self._patience_s + seconds
        )
        speed = sum(one.samples / one.seconds for one in done if one.seconds > 0)
        if speed <= 0:
            raise ArmError("it did nothing in its turn")
        clocks = [one.clock_mhz for one in done if one.clock_mhz]
        shares = [one.neighbour_share for one in done if one.neighbour_share is not None]
        return Done(
            samples=speed,
            seconds=1.0,
            clock_mhz=sum(clocks) / len(clocks) if clocks else None,
            throttled=any(one.throttled for one in done),
            # Each copy takes the others for neighbours.
            neighbour_share=shares[0] if len(done) == 1 and shares else None,
        )

    def evaluate(self) -> Evaluated:
        """Have it compute its validation loss.

        Raises:
            ArmError: It cannot.
        """
        return self._ask(Evaluate(), Evaluated, self._patience_s)[0]

    def close(self) -> None:
        """End its processes."""
        for member in self._members:
            member.close()

    def _ask(self, message: object, wanted: type[Answer], patience_s: float) -> list[Answer]:
        for member in self._members:
            member.send(message)
        return [member.receive(wanted, patience_s) for member in self._members]


class _Member:
    def __init__(self, spec: ArmSpec) -> None:
        context = fork_context()
        self._connection, theirs = context.Pipe()
        # Not a daemon: those may have no children, and a loader has some. It ends when the
        # connection does.
        self._process = context.Process(target=run_arm, args=(theirs, spec), name=spec.name)
        self._process.start()
        theirs.close()

    def send(self, message: object) -> None:
        try:
            self._connection.send(message)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ArmError(self._end()) from error

    def receive(self, wanted: type[Answer], patience_s: float) -> Answer:
        answer = self._answer(patience_s)
        if isinstance(answer, Refused):
            raise ArmError(answer.reason)
        if not isinstance(answer, wanted):
            raise ArmError(f"it answered with {type(answer).__name__}")
        return answer

    def close(self) -> None:
        """Close the connection, which ends the process once its turn is over.

        After some seconds kill it.
        """
        self._connection.close()
        self._process.join(_END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(_END_S)

    def _answer(self, patience_s: float) -> Any:  # noqa: ANN401 - a pipe carries anything
        connection: Connection = self._connection
        if not connection.poll(patience_s):
            self._process.kill()
            raise ArmError(
                f"it took more than {patience_s:.0f} s, so that the budget leaves it no rounds"
            )
        try:
            return connection.recv()
        except (EOFError, ConnectionResetError) as error:
            raise ArmError(self._end()) from error

    def _end(self) -> str:
        self._process.join(_END_S)
        code = self._process.exitcode
        if code is None:
            return "its connection was lost"
        return (
            f"its process was ended by {signal.Signals(-code).name}"
            if code < 0
            else f"its process ended with {code}"
        )
