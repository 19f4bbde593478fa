"""Processes for the checks, started from a server that has torch loaded and no device open, and
watched meanwhile.

While the crew works, the sensors are sampled from here. All that waits for a process raises
`ChildDiedError` when one ended by itself or does not answer.
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

#: For a process to open its device while six others do, and for a turn beyond its planned end.
_PATIENCE_S = 120.0
_LOOK_EVERY_S = 0.25
#: Between the order and the start that all of a crew have in common.
_RUN_UP_S = 0.1
#: Steps until matmul has filled its share: one for each stage after the first, and one beyond.
_STAGES = 5
#: torch once for all of them, and never a device: CUDA does not survive a fork.
_SERVER = get_context("forkserver")
_SERVER.set_forkserver_preload(["acceptance.bodies"])
Child = partial(common.Child, context=_SERVER)


class Watch(list[SensorReading]):
    """The readings of the sensors while others work."""

    def __init__(self, sampler: Sampler) -> None:
        super().__init__()
        self._sampler = sampler

    def look(self) -> None:
        """Take a sample if one is due."""
        self.extend(filter(None, [self._sampler.sample_if_due(time.monotonic())]))


def open_watch(kind: str) -> Watch:
    """Return a watch that samples a few times a second; a turn may be shorter than one."""
    sensors = CardSensors(visible_card()) if kind == "cuda" else ProcessorSensors()
    return Watch(Sampler(sensors, every_s=_LOOK_EVERY_S))


def summed_up(readings: Sequence[SensorReading]) -> dict[str, float | None]:
    """Return the median clock at work, the most of heat and power, and the share with alarms."""

    def told(key: str) -> list[float]:
        return [value for each in readings if (value := getattr(each, key)) is not None]

    clocks = sorted(
        each.sm_clock_mhz for each in readings if each.sm_clock_mhz and each.utilisation_pct != 0.0
    )
    alarms = [bool(int(bits) & THROTTLE_ALARMS) for bits in told("throttle_bits")]
    return {
        "sm_clock_mhz": float(clocks[len(clocks) // 2]) if clocks else None,
        "temperature_most_c": max(told("temperature_c"), default=None),
        "power_most_w": max(told("power_w"), default=None),
        "alarms_pct": 100.0 * sum(alarms) / len(alarms) if alarms else None,
    }


def gather(
    chosen: Sequence[common.Child], watch: Watch, *, seconds: float = _PATIENCE_S
) -> list[Any]:
    """Wait for one answer of each child, which takes so long, and sample the sensors meanwhile."""
    patience_s = seconds + _PATIENCE_S
    until_s = time.monotonic() + patience_s
    answers = []
    for child in chosen:
        while not child.pipe.poll(_LOOK_EVERY_S):
            watch.look()
            if time.monotonic() > until_s:
                raise ChildDiedError(f"{child.name} gave no answer within {patience_s:.0f} s")
        answers.append(child.receive())
    return answers


def in_child(watch: Watch, function: Callable[..., Any], *arguments: object) -> Any:  # noqa: ANN401
    """Run a function in a process of its own; `ChildDiedError` tells what it raised."""
    with contextlib.closing(
        Child(function.__name__, bodies.call_in_child, function, arguments)
    ) as child:
        (answer,) = gather([child], watch)
    if isinstance(answer, ChildDiedError):
        raise answer
    return answer


class Crew:
    """Several engines in processes of their own that have done their first steps; to be closed."""

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
        """Have all, or those of these numbers, work at once; when one has died, all are ended."""
        chosen = self.children if who is None else [self.children[number] for number in who]
        at_s = time.monotonic() + _RUN_UP_S
        try:
            for child in chosen:
                child.send((seconds, at_s))
            return gather(chosen, self._watch, seconds=seconds)
        except ChildDiedError:
            self.close()  # the others' answers would be taken for those of the next order
            raise

    def close(self) -> None:
        for child in self.children:
            child.pipe.close()  # first all of them: leaving a card takes a while
        for child in self.children:
            child.close()
        self.children = []


def crew_of(
    specs: Sequence[WorkerSpec], watch: Watch, environment: Mapping[str, str] | None = None
) -> contextlib.closing[Crew]:
    return contextlib.closing(Crew(specs, watch, environment))
