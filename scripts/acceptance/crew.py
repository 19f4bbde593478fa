"""Processes for the checks, started from a server that has torch loaded and no device open, and watched meanwhile.

A process that ends by itself is found out and told as such. While the crew works, the sensors are looked at from here.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection as pipes
from multiprocessing import get_context
from typing import Any

from acceptance import seats
from acceptance.seats import Failed, Turn
from workers.nvml.card_sensors import CardSensors
from workers.nvml.queries import visible_card
from workers.nvml.sampler import ProcessorSensors, Sampler
from workers.readings import THROTTLE_ALARMS, SensorReading
from workers.settings import WorkerSpec

#: For a process to open its device while six others do, and for a turn beyond its planned end.
_PATIENCE_S = 120.0
_LOOK_EVERY_S = 0.25
#: Between the order and the start that all of a crew have in common.
_RUN_UP_S = 0.1


class SeatDiedError(RuntimeError):
    """A process of the checks ended by itself, or does not answer."""


@dataclass(slots=True)
class Watch:
    """The sensors while others work."""

    sampler: Sampler
    readings: list[SensorReading] = field(default_factory=list)

    def look(self) -> None:
        """Take a sample if one is due."""
        reading = self.sampler.sample_if_due(time.monotonic())
        if reading is not None:
            self.readings.append(reading)

    def take(self) -> list[SensorReading]:
        """Return the readings since the last call."""
        taken, self.readings = self.readings, []
        return taken


def open_watch(kind: str) -> Watch:
    """Return a watch that looks a few times a second."""
    looking = CardSensors(visible_card()) if kind == "cuda" else ProcessorSensors()
    # A worker samples once a second; a turn may be shorter.
    return Watch(sampler=Sampler(looking, every_s=_LOOK_EVERY_S))


def summed_up(readings: Sequence[SensorReading]) -> dict[str, float | None]:
    """Return the middle of the clocks at work, the highest temperature and power, and the share of samples in which the
    hardware complained; `None` for what nobody tells.
    """  # noqa: D205 - one sentence
    clocks = sorted(each.sm_clock_mhz for each in readings if each.sm_clock_mhz and each.utilisation_pct != 0.0)
    bits = [each.throttle_bits for each in readings if each.throttle_bits is not None]
    return {
        "sm_clock_mhz": float(clocks[len(clocks) // 2]) if clocks else None,
        "temperature_most_c": max((r.temperature_c for r in readings if r.temperature_c is not None), default=None),
        "power_most_w": max((r.power_w for r in readings if r.power_w is not None), default=None),
        "alarms_pct": 100.0 * sum(bool(each & THROTTLE_ALARMS) for each in bits) / len(bits) if bits else None,
    }


class Seat:
    """One process and the pipe to it."""

    def __init__(self, name: str, body: Callable[..., None], *arguments: object) -> None:
        context = get_context("forkserver")
        # torch once for all of them, and never a device: CUDA does not survive a fork.
        context.set_forkserver_preload(["acceptance.seats"])
        self.name = name
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=body, args=(theirs, *arguments), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, order: object) -> None:
        """Give an order.

        Raises:
            SeatDiedError: The process is gone.
        """
        try:
            self.pipe.send(order)
        except OSError:
            raise self._died() from None

    def receive(self) -> Any:  # noqa: ANN401 - whatever was ordered
        """Return what the process sends; there has to be something.

        Raises:
            SeatDiedError: It has ended.
        """
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            raise self._died() from None

    def close(self) -> None:
        """End the process."""
        self.pipe.close()
        self._process.join(5.0)
        self._process.kill()
        self._process.join()
        self._process.close()

    def _died(self) -> SeatDiedError:
        self._process.join(5.0)
        return SeatDiedError(f"the process of {self.name} ended with {self._process.exitcode}")


def gather(chosen: Sequence[Seat], watch: Watch, *, patience_s: float = _PATIENCE_S) -> list[Any]:
    """Wait for one answer of each seat, and look at the sensors meanwhile.

    Raises:
        SeatDiedError: One of them ended or does not answer.
    """
    answers: dict[str, Any] = {}
    until_s = time.monotonic() + patience_s
    while len(answers) < len(chosen):
        waiting = {seat.pipe: seat for seat in chosen if seat.name not in answers}
        watch.look()
        for pipe in pipes.wait(list(waiting), timeout=_LOOK_EVERY_S):
            seat = waiting[pipe]  # type: ignore[index]  # only our own pipes were waited for
            answers[seat.name] = seat.receive()
        if time.monotonic() > until_s and len(answers) < len(chosen):
            names = ", ".join(seat.name for seat in waiting.values() if seat.name not in answers)
            raise SeatDiedError(f"no answer within {patience_s:.0f} s: {names}")
    return [answers[seat.name] for seat in chosen]


def asked(seat: Seat, order: object, watch: Watch, seconds: float) -> Any:  # noqa: ANN401 - whatever was ordered
    """Give one seat an order that takes so long, and return its answer.

    Raises:
        SeatDiedError: It ended or does not answer.
    """
    seat.send(order)
    (answer,) = gather([seat], watch, patience_s=seconds + _PATIENCE_S)
    return answer


def in_child(watch: Watch, function: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401 - as it returns
    """Run a function in a process of its own, and return what it returns.

    Raises:
        SeatDiedError: It ended, does not answer, or raised; says what.
    """
    with contextlib.closing(Seat(function.__name__, seats.call_in_child, function, arguments)) as seat:
        (answer,) = gather([seat], watch, patience_s=2 * _PATIENCE_S)
    if isinstance(answer, Failed):
        raise SeatDiedError(f"{function.__name__}: {answer.text}")
    return answer


class Crew:
    """Several engines, each in a process of its own, that have done their first good steps."""

    def __init__(self, specs: Sequence[WorkerSpec], watch: Watch, environment: Mapping[str, str] | None = None) -> None:
        """Start all at once.

        Raises:
            SeatDiedError: One of them ended or does not answer.
        """
        self.specs = tuple(specs)
        self._watch = watch
        self.seats = [Seat(spec.slot, seats.engine_seat, spec, dict(environment or {})) for spec in specs]
        self.first = self.turn(0.0)
        """The first turn of each."""

    def turn(self, seconds: float, *, who: Sequence[int] | None = None) -> list[Turn]:
        """Have all, or those of these numbers, work at the same time.

        Raises:
            SeatDiedError: One of them ended or does not answer; then all are ended.
        """
        chosen = self.seats if who is None else [self.seats[number] for number in who]
        at_s = time.monotonic() + _RUN_UP_S
        try:
            for seat in chosen:
                seat.send((seconds, at_s))
            return gather(chosen, self._watch, patience_s=seconds + _PATIENCE_S)
        except SeatDiedError:
            self.close()  # the others' answers would be taken for those of the next order
            raise

    def beside(self, seconds: float, function: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401 - as it returns
        """Have all work for so long, and run a function in a process of its own meanwhile.

        Raises:
            SeatDiedError: One of them ended or does not answer.
        """
        for seat in self.seats:
            seat.send((seconds, 0.0))
        answer = in_child(self._watch, function, *arguments)
        gather(self.seats, self._watch, patience_s=seconds + _PATIENCE_S)
        return answer

    def close(self) -> None:
        """End all."""
        for seat in self.seats:
            seat.pipe.close()  # first all of them: leaving a card takes a while
        for seat in self.seats:
            seat.close()
        self.seats = []


class Crews:
    """Keeps the last crew, because the next check may ask for the same one, and a start takes seconds."""

    def __init__(self) -> None:
        self._crew: Crew | None = None

    def have(self, specs: Sequence[WorkerSpec], watch: Watch) -> Crew:
        """Return a crew of these specs.

        Raises:
            SeatDiedError: One of them ended or does not answer.
        """
        if self._crew is None or not self._crew.seats or self._crew.specs != tuple(specs):
            self.close()
            self._crew = Crew(specs, watch)
        return self._crew

    def close(self) -> None:
        """End the crew that is kept, if there is one."""
        crew, self._crew = self._crew, None
        if crew is not None:
            crew.close()


@contextlib.contextmanager
def crew_of(specs: Sequence[WorkerSpec], watch: Watch, environment: Mapping[str, str] | None = None) -> Iterator[Crew]:
    """Open a crew for the duration of a `with`."""
    with contextlib.closing(Crew(specs, watch, environment)) as crew:
        yield crew
