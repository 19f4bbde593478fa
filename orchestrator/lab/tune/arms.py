"""The processes of arms, as the head sees them: started, asked one at a time, and ended by their
own handles.

An arm that dies, hangs or refuses is an `ArmError` with the reason, and never the end of the
tuning. Does not choose what is asked.
"""

from __future__ import annotations

import signal
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, Final, TypeVar

from orchestrator.lab.tune.rounds import Block
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
            peak_bytes=sum(each.peak_bytes for each in answers),
            host_bytes=sum(each.host_bytes for each in answers),
            parked_bytes=sum(each.parked_bytes for each in answers),
        )

    def turn(self, seconds: float, least_steps: int) -> Block:
        """Have it work, all of its processes together.

        Raises:
            ArmError: It cannot.
        """
        done = self._ask(
            Turn(seconds=seconds, least_steps=least_steps), Done, self._patience_s + seconds
        )
        speed = sum(each.samples / each.seconds for each in done if each.seconds > 0)
        if speed <= 0:
            raise ArmError("it did nothing in its turn")
        clocks = [each.clock_mhz for each in done if each.clock_mhz]
        shares = [each.neighbour_share for each in done if each.neighbour_share is not None]
        return Block(
            arm=self.name,
            seconds_per_sample=1 / speed,
            clock_mhz=sum(clocks) / len(clocks) if clocks else None,
            throttled=any(each.throttled for each in done),
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
