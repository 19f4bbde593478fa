"""The process of an arm: opens the device under the cap of its spec, and trains or multiplies when
it is told to.

On a card its tensors wait in host memory between two turns, so that two arms share a card that
holds one of them. Does not choose what is measured or in which order, and compares nothing: the
head does.
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

# Without NumPy, which nothing here uses, torch says so when its compiler is imported, on the user's
# terminal.
warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)

#: What an arm of products counts one of.
_UNIT_FLOP: Final = 1e9

#: So that no schedule of the learning rate ends within a tuning.
_STEPS: Final = 1_000_000

#: Before the first turn: the first step of a process takes memory that no later one takes, and may
#: compile; a CPU keeps memory between steps after eight that are alike, and is up to a third slower
#: until then (measured). After so many seconds no more of them begin.
_WARM_STEPS: Final = 10
_WARM_S: Final = 4.0


def serve(connection: Connection, spec: WorkerSpec) -> None:
    """Do a turn for each message. What goes wrong is told as `Refused`, and ends the process."""
    # What torch has imported stays. Collecting it took 0.13 of the 0.46 s of a rehearsal's turn.
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
                work.timed_step()  # not counted: it fills the allocator's pool again
            connection.send(_turn(work, seconds))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the head has ended, or needs this arm no more
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
    except Exception as error:  # noqa: BLE001 - a setting may fail in any way, and the head tells it
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
        work.device.step_peak_bytes()  # by which a device knows steps that are alike
        steps += 1


def _turn(work: Products | Training, seconds: float) -> Turn:
    """Work for so long, and one step at the least. Time between steps is not counted."""
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
    """Matrix products as one worker of `matmul` computes them, without its rests.

    Its memory is what the products need, not a worker's whole claim.
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
        """Do one step; return its operations and its seconds."""
        return self.device.timed(self._step, self._size)

    def _step(self) -> float:
        return self._matmul.step(self._size, self._batch).flop / _UNIT_FLOP

    def park(self) -> None:
        """Drop operands and results; they are drawn anew."""
        self._matmul.release()

    def unpark(self) -> None:
        """Nothing waits."""


class Training:
    """A training. It computes as many samples at once as fit, and then keeps to that."""

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
        """Do one optimiser step; return its samples, or tokens where lengths differ, and its
        seconds. Packed documents count each.

        Where it does not fit, with half as many samples at once.
        """
        while True:
            try:
                return self.device.timed(self._step, self._micro)
            except Exception as error:
                if not classify(error).is_out_of_memory or self._micro == 1:
                    raise
                drop_frames(error)
            # Outside the handler, which holds the tensors of the failure.
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
        """Move it back."""
        self._trainer.unpark()
