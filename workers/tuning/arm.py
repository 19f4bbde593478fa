"""The process of an arm: opens the device under the cap of its spec, and computes one turn for each
message of the head.

Between turns on a card its tensors are parked in host memory, so that two arms can share a card
that holds only one of them. Does not choose or order the turns, and compares nothing: the head
does.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Final

from pydantic import ValidationError

from workers.devices import open_device
from workers.devices.base import Device
from workers.oom import classify, drop_frames, one_line
from workers.settings import WorkerSpec
from workers.training.settings import TrainSettings
from workers.training.tasks import find_task
from workers.training.trainer import Trainer
from workers.tuning.messages import LOSSES_MOST, Refused, Turn
from workers.workloads.base import WorkloadContext
from workers.workloads.matmul import Matmul

# Without NumPy, which nothing here uses, torch prints this warning when its compiler is imported.
warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)

#: Unit of work of an arm of `matmul`.
_UNIT_FLOP: Final = 1e9

#: Total steps of an arm's training: no learning rate schedule ends within a tuning.
_STEPS: Final = 1_000_000

#: Warm-up steps before the first turn, and the time after which no further one begins. The first
#: step of a process takes memory that later ones do not, and may compile. A CPU keeps memory
#: between steps after eight equal ones, and is up to a third slower until then (measured).
_WARM_STEPS: Final = 10
_WARM_S: Final = 4.0


def serve(connection: Connection, spec: WorkerSpec) -> None:
    """Compute a turn for each message; send `Refused` after a failure, and return."""
    # Modules are never freed. Their collection took 0.13 of the 0.46 s of a rehearsal's turn.
    gc.freeze()
    try:
        device = open_device(spec)
        on_card, multiplies = device.info.kind == "cuda", spec.workload.name == "matmul"
        work: Products | Training = (Products if multiplies else Training)(spec, device)
        _warm(work)
        while True:
            if on_card:
                with device.enforced():
                    work.park()
                device.release()
            seconds = connection.recv()
            if on_card:
                with device.enforced():
                    work.unpark()
                work.timed_step()  # not counted: refills the allocator's pool
            connection.send(_turn(work, seconds))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the head has ended, or no longer needs this arm
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
    except Exception as error:  # noqa: BLE001 - settings may fail in any way; the head reports it
        failure = classify(error)
        reason = one_line(error)
        if failure.is_out_of_memory:
            reason = f"does not fit the cap: {failure.text}"
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.send(Refused(reason))


def _warm(work: Products | Training) -> None:
    until_s, steps = time.monotonic() + _WARM_S, 0
    while not steps or (steps < _WARM_STEPS and time.monotonic() < until_s):
        work.timed_step()
        work.device.step_peak_bytes()  # lets the device detect equal steps
        steps += 1


def _turn(work: Products | Training, seconds: float) -> Turn:
    """Work for `seconds`, at least one step. The time between steps is not counted."""
    until_s, done, took_s, peak_bytes = time.monotonic() + seconds, 0.0, 0.0, 0
    while not took_s or time.monotonic() < until_s:
        step_done, step_s = work.timed_step()
        done, took_s = done + step_done, took_s + step_s
        peak_bytes = max(peak_bytes, work.device.step_peak_bytes())
    info = work.device.info
    return Turn(
        speed=done / took_s,
        losses=tuple(work.losses[:LOSSES_MOST]),
        peak_bytes=peak_bytes,
        subject={
            "device": info.name,
            "card": info.uuid,
            "driver": info.driver,
            "torch": info.torch_version,
        },
    )


class Products:
    """Matrix products as a worker of `matmul` computes them, without its duty rests.

    Holds only the memory that the products need, not a worker's whole claim.
    """

    losses: Sequence[float] = ()

    def __init__(self, spec: WorkerSpec, device: Device) -> None:
        workload = spec.workload
        self.device, self._size, self._batch = device, workload.size, workload.batch
        context = WorkloadContext(
            device=device.torch_device, dtype=device.torch_dtype, seed=workload.seed
        )
        with device.enforced():
            self._matmul = Matmul(context)

    def timed_step(self) -> tuple[float, float]:
        """Run one step; return its work in 10^9 operations, and its seconds."""
        return self.device.timed(self._step, self._size)

    def _step(self) -> float:
        return self._matmul.step(self._size, self._batch).flop / _UNIT_FLOP

    def park(self) -> None:
        """Release operands and results; the next step draws new ones."""
        self._matmul.release()

    def unpark(self) -> None:
        """Do nothing: nothing is parked."""


class Training:
    """A training. After an out-of-memory it halves the samples computed at once, and keeps that."""

    def __init__(self, spec: WorkerSpec, device: Device) -> None:
        self.device, seed = device, spec.workload.seed
        endless = {**spec.workload.settings, "steps": _STEPS, "epochs": None}
        settings = TrainSettings.model_validate(endless)
        self._task = find_task(settings, seed)
        self._batch, micro = settings.batch, settings.micro
        self._micro = self._batch if micro == "auto" else min(self._batch, micro)
        self.losses: list[float] = []
        with device.enforced():
            self._trainer = Trainer(self._task, settings, device.torch_device, seed)

    def timed_step(self) -> tuple[float, float]:
        """Run one optimiser step; return its samples (tokens if lengths differ) and its seconds.
        Each packed document counts as a sample.

        If it does not fit, retry with half as many samples at once.
        """
        while True:
            try:
                return self.device.timed(self._step, self._micro)
            except Exception as error:
                if not classify(error).is_out_of_memory or self._micro == 1:
                    raise
                drop_frames(error)
            # Outside the exception handler, which keeps the tensors of the failed step alive.
            self._micro //= 2
            self.device.release()

    def _step(self) -> float:
        while not self._trainer.micro_batch(self._micro).updated:
            pass
        self.losses.append(self._trainer.course.losses[-1])
        return self._batch * (1.0 if self._task.shorten is None else self._trainer.items_per_sample)

    def park(self) -> None:
        """Move the state to host memory."""
        self._trainer.park()

    def unpark(self) -> None:
        """Move the state back to the device."""
        self._trainer.unpark()
