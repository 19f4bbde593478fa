"""The process of an arm: opens the device under the cap of the spec, and trains or multiplies when
it is asked to.

Between two turns its tensors wait in host memory, so that arms share a card that holds one of them.
Does not choose what is measured or in which order, and compares nothing: the head does.
"""

from __future__ import annotations

import gc
import time
import warnings
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Final, Protocol

import psutil

from workers.devices import open_device
from workers.devices.base import Device
from workers.messages import IncompatibleError
from workers.nvml.queries import visible_card
from workers.nvml.sensors import CardSensors
from workers.oom import classify
from workers.readings import THROTTLE_ALARMS, SensorReading
from workers.settings import FailureKind
from workers.training.errors import TrainingError
from workers.tuning.messages import (
    NO_ROOM,
    ArmSpec,
    Done,
    Evaluate,
    Evaluated,
    Open,
    Opened,
    Refused,
    Turn,
)
from workers.tuning.products import Products
from workers.tuning.trained import Trained

# Without NumPy, which nothing here uses, torch says so when its compiler is imported, on the user's
# terminal.
warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)

#: Of an error's text that is not our own.
_LONGEST: Final = 300


class Work(Protocol):
    """What an arm does in its turns."""

    def open(self, steps: int) -> Opened:
        """Prepare, and do the first steps."""

    def unpark(self) -> None:
        """Move the state to the device."""

    def park(self) -> int:
        """Move the state to host memory; return the bytes that it takes there."""

    def step(self) -> float:
        """Do one optimiser step, or some products; return what `Done.samples` counts."""

    def validation(self) -> Evaluated:
        """Compute the loss on samples that were not trained on."""


def serve(connection: Connection, spec: ArmSpec) -> None:
    """Answer each message. What goes wrong is answered as `Refused`, and ends the process."""
    # What torch has imported stays. Collecting it took 0.13 of the 0.46 s of a rehearsal's turn.
    gc.freeze()
    try:
        device = open_device(spec.spec)
        work: Work = (
            Products(spec, device) if spec.spec.workload.name == "matmul" else Trained(spec, device)
        )
        while True:
            connection.send(_answer(connection.recv(), work, device))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the head has ended, or needs this arm no more
    except (IncompatibleError, TrainingError) as error:
        reason = str(error)
    except Exception as error:  # noqa: BLE001 - a setting may fail in any way, and the head tells it
        found = classify(error)
        out_of_memory = found.kind in {FailureKind.DEFINITE, FailureKind.PROBABLE}
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:_LONGEST]}"
        reason = f"{NO_ROOM}: {found.text}" if out_of_memory else said
    try:
        connection.send(Refused(reason=reason))
    except (BrokenPipeError, ConnectionResetError):
        return


def _answer(message: object, work: Work, device: Device) -> Opened | Done | Evaluated:
    if isinstance(message, Open):
        opened = work.open(message.steps)
        opened = replace(opened, parked_bytes=work.park())
        device.release()
        return opened
    if isinstance(message, Turn):
        return _turn(message, work, device)
    if isinstance(message, Evaluate):
        work.unpark()
        evaluated = work.validation()
        work.park()
        device.release()
        return evaluated
    raise TypeError(f"an arm does not know {type(message).__name__}")


def _turn(turn: Turn, work: Work, device: Device) -> Done:
    """Work for as long as asked.

    The first step is not counted: on a card it fills the allocator's pool again.
    """
    work.unpark()
    work.step()
    with _Watch(device) as watch:
        samples, seconds = device.timed(lambda: _steps(turn, work))
    work.park()
    device.release()
    return Done(
        samples=samples,
        seconds=seconds,
        clock_mhz=watch.clock_mhz,
        throttled=watch.throttled,
        neighbour_share=watch.neighbour_share,
    )


def _steps(turn: Turn, work: Work) -> float:
    until_s, samples, done = time.monotonic() + turn.seconds, 0.0, 0
    while done < turn.least_steps or time.monotonic() < until_s:
        samples += work.step()
        done += 1
    return samples


class _Watch:
    """What the card and the machine did during a block."""

    def __init__(self, device: Device) -> None:
        self._card = CardSensors(visible_card()) if device.info.kind == "cuda" else None
        self._process = psutil.Process()
        self._readings: list[SensorReading] = []
        self.neighbour_share: float | None = None

    def __enter__(self) -> _Watch:
        self._look()
        self._began = (time.monotonic(), self._busy_s(), self._own_s())
        return self

    def __exit__(self, *_: object) -> None:
        self._look()
        if self._card is not None:
            self._card.close()
            return
        wall_s, busy_s, own_s = (
            after - before
            for after, before in zip(
                (time.monotonic(), self._busy_s(), self._own_s()), self._began, strict=True
            )
        )
        cores = psutil.cpu_count() or 1
        if wall_s > 0:
            self.neighbour_share = min(1.0, max(0.0, (busy_s - own_s) / wall_s / cores))

    @property
    def clock_mhz(self) -> float | None:
        """The mean of the clocks at the beginning and at the end."""
        clocks = [each.sm_clock_mhz for each in self._readings if each.sm_clock_mhz]
        return sum(clocks) / len(clocks) if clocks else None

    @property
    def throttled(self) -> bool:
        """Whether the card said so at the beginning or at the end."""
        return any((each.throttle_bits or 0) & THROTTLE_ALARMS for each in self._readings)

    def _look(self) -> None:
        if self._card is not None:
            self._readings.append(self._card.read(time.monotonic()))

    @staticmethod
    def _busy_s() -> float:
        times = psutil.cpu_times()
        return float(times.user + times.nice + times.system)

    def _own_s(self) -> float:
        """Return the processor time of this process and of its loaders."""
        total_s = 0.0
        for each in [self._process, *self._process.children(recursive=True)]:
            with suppress(psutil.Error):  # it has ended since
                times = each.cpu_times()
                total_s += float(times.user + times.system)
        return total_s
