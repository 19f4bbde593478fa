"""Child processes for the checks, forked from a server that has loaded torch and opened no device.

While the children work, this process samples the sensors. Each function that waits for a child
raises `ChildDiedError` if the child has ended or does not answer.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing import get_context
from typing import Any

from benches import common
from benches.common import ChildDiedError

from acceptance import bodies
from acceptance.bodies import Turn
from workers.nvml.queries import visible_card
from workers.nvml.sensors import CardSensors, ProcessorSensors, Sampler
from workers.readings import THROTTLE_ALARMS, SensorReading
from workers.settings import WorkerSpec

#: Limit for a process to open its device beside six others, and for a turn after its planned end.
_PATIENCE_S = 120.0
_SAMPLE_EVERY_S = 0.25
#: Time from the order to the common start of a crew.
_RUN_UP_S = 0.1
#: Steps until matmul has filled its share: one for each stage after the first, and one more.
_STAGES = 5
#: The server loads torch once for all children, and no device: CUDA does not survive a fork.
_SERVER = get_context("forkserver")
_SERVER.set_forkserver_preload(["acceptance.bodies"])
Child = partial(common.Child, context=_SERVER)


class Watch(list[SensorReading]):
    """The readings of the sensors while child processes work."""

    def __init__(self, sampler: Sampler) -> None:
        super().__init__()
        self._sampler = sampler

    def look(self) -> None:
        """Take a sample if one is due."""
        self.extend(filter(None, [self._sampler.sample_if_due(time.monotonic())]))


def open_watch(kind: str) -> Watch:
    """Return a watch that samples every 0.25 s, because a turn may be shorter than 1 s."""
    sensors = CardSensors(visible_card()) if kind == "cuda" else ProcessorSensors()
    return Watch(Sampler(sensors, every_s=_SAMPLE_EVERY_S))


def summed_up(readings: Sequence[SensorReading]) -> dict[str, float | None]:
    """Return the median clock under load, peak temperature and power, and the share of alarms."""

    def values_of(key: str) -> list[float]:
        return [value for each in readings if (value := getattr(each, key)) is not None]

    clocks = sorted(
        each.sm_clock_mhz for each in readings if each.sm_clock_mhz and each.utilisation_pct != 0.0
    )
    alarms = [bool(int(bits) & THROTTLE_ALARMS) for bits in values_of("throttle_bits")]
    return {
        "sm_clock_mhz": float(clocks[len(clocks) // 2]) if clocks else None,
        "temperature_most_c": max(values_of("temperature_c"), default=None),
        "power_most_w": max(values_of("power_w"), default=None),
        "alarms_pct": 100.0 * sum(alarms) / len(alarms) if alarms else None,
    }


def gather(
    chosen: Sequence[common.Child], watch: Watch, *, seconds: float = _PATIENCE_S
) -> list[Any]:
    """Wait for one answer of each child, expected after `seconds`; sample the sensors meanwhile."""
    patience_s = seconds + _PATIENCE_S
    until_s = time.monotonic() + patience_s
    answers = []
    for child in chosen:
        while not child.pipe.poll(_SAMPLE_EVERY_S):
            watch.look()
            if time.monotonic() > until_s:
                raise ChildDiedError(f"{child.name} gave no answer within {patience_s:.0f} s")
        answers.append(child.receive())
    return answers


def in_child(watch: Watch, function: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401
    """Run a function in a child process. ChildDiedError: it raised the error in the text."""
    with contextlib.closing(
        Child(function.__name__, bodies.call_in_child, function, arguments)
    ) as child:
        (answer,) = gather([child], watch)
    if isinstance(answer, ChildDiedError):
        raise answer
    return answer


class Crew:
    """Several engines in child processes, after their first steps. The caller must close it."""

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        watch: Watch,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.specs = tuple(specs)
        self._watch = watch
        self.children = [
            Child(spec.slot, bodies.serve_engine, spec, dict(environment or {})) for spec in specs
        ]
        self.first = self.turn(0.0)
        for _ in range(_STAGES):
            self.turn(0.0)

    def turn(self, seconds: float, *, who: Sequence[int] | None = None) -> list[Turn]:
        """Run all engines, or those with the numbers `who`, at once; if one dies, end them all."""
        chosen = self.children if who is None else [self.children[number] for number in who]
        at_s = time.monotonic() + _RUN_UP_S
        try:
            for child in chosen:
                child.send((seconds, at_s))
            return gather(chosen, self._watch, seconds=seconds)
        except ChildDiedError:
            self.close()  # otherwise the next order would receive the other engines' old answers
            raise

    def close(self) -> None:
        for child in self.children:
            child.pipe.close()  # all pipes first, because closing a card takes a while
        for child in self.children:
            child.close()
        self.children = []


def crew_of(
    specs: Sequence[WorkerSpec], watch: Watch, environment: Mapping[str, str] | None = None
) -> contextlib.closing[Crew]:
    return contextlib.closing(Crew(specs, watch, environment))
