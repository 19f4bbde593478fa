"""The process of an arm: opens the device under the cap of its spec, and trains or multiplies when
it is told to.

Between two turns its tensors wait in host memory, so that two arms share a card that holds one of
them. Does not choose what is measured or in which order, and compares nothing: the head does.
"""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Final

import psutil
from pydantic import ValidationError

from workers.devices import open_device
from workers.devices.base import Device
from workers.messages import IncompatibleError
from workers.oom import classify, drop_frames, one_line
from workers.settings import FailureKind
from workers.training.settings import TrainSettings
from workers.training.tasks import find_task
from workers.training.trainer import Trainer
from workers.tuning.messages import FEWEST_STEPS, ArmSpec, Done, Open, Opened, Refused, Turn
from workers.workloads.base import WorkloadContext
from workers.workloads.matmul import Matmul

# Without NumPy, which nothing here uses, torch says so when its compiler is imported, on the user's
# terminal.
warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)

_NO_MEMORY: Final = {FailureKind.DEFINITE, FailureKind.PROBABLE}

#: What an arm of products counts one of.
_UNIT_FLOP: Final = 1e9

#: So that no schedule of the learning rate ends within a tuning.
_STEPS: Final = 1_000_000


def serve(connection: Connection, spec: ArmSpec) -> None:
    """Answer each message. What goes wrong is answered as `Refused`, and ends the process."""
    # What torch has imported stays. Collecting it took 0.13 of the 0.46 s of a rehearsal's turn.
    gc.freeze()
    try:
        device = open_device(spec.spec)
        multiplies = spec.spec.workload.name == "matmul"
        work = Products(spec, device) if multiplies else Training(spec, device)
        while True:
            message = connection.recv()
            answer = work.open(message) if isinstance(message, Open) else _turn(message, work)
            work.park()
            device.release()
            connection.send(answer)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the head has ended, or needs this arm no more
    except ValidationError as error:
        reason = error.errors()[0]["msg"]
    except Exception as error:  # noqa: BLE001 - a setting may fail in any way, and the head tells it
        failure = classify(error)
        reason = one_line(error)
        if failure.kind in _NO_MEMORY:
            reason = f"does not fit the cap: {failure.text}"
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.send(Refused(reason=reason))


def _turn(turn: Turn, work: Products | Training) -> Done:
    """Work for as long as asked.

    On a card the first step is not counted: it fills the allocator's pool again.
    """
    work.unpark()
    if work.device.info.kind == "cuda":
        work.step()

    def steps() -> float:
        until_s = time.monotonic() + turn.seconds
        samples = work.step()
        while time.monotonic() < until_s:
            samples += work.step()
        return samples

    samples, seconds = work.device.timed(steps)
    return Done(samples=samples, seconds=seconds)


class Products:
    """Matrix products as one worker of `matmul` computes them, without its rests.

    Its memory is what the products need, not a worker's whole claim.
    """

    def __init__(self, spec: ArmSpec, device: Device) -> None:
        workload = spec.spec.workload
        self.device = device
        self._size, self._batch = workload.size, workload.batch
        if device.info.dtype != workload.dtype:
            raise IncompatibleError(
                f"this device computes {device.info.dtype} in place of {workload.dtype}"
            )
        context = WorkloadContext(
            device=device.torch_device, dtype=device.torch_dtype, seed=workload.seed
        )
        with device.enforced():
            self._matmul = Matmul(context)

    def open(self, _: Open) -> Opened:
        """Do the first steps."""
        seconds = [self.device.timed(self.step)[1] for _ in range(FEWEST_STEPS)]
        return _opened(self.device, seconds, self.device.step_peak_bytes(), ())

    def step(self) -> float:
        """Do one step; return its operations."""
        return self._matmul.step(self._size, self._batch).flop / _UNIT_FLOP

    def unpark(self) -> None:
        """Nothing waits: operands are drawn anew."""

    def park(self) -> None:
        """Drop operands and results."""
        with self.device.enforced():
            self._matmul.release()


class Training:
    """A training. It computes as many samples at once as fit, and then keeps to that."""

    def __init__(self, spec: ArmSpec, device: Device) -> None:
        self.device = device
        self._settings = TrainSettings.model_validate(
            {**spec.settings, "steps": _STEPS, "epochs": None}
        )
        self._seed = spec.spec.workload.seed
        self._task = find_task(self._settings, self._seed)
        self._trainer: Trainer | None = None
        micro = self._settings.micro
        self._micro = min(self._settings.batch, self._settings.batch if micro == "auto" else micro)

    def open(self, message: Open) -> Opened:
        """Make the model and do the first steps.

        Where they do not fit, with half as many samples at once.
        """
        while True:
            try:
                return self._open(message)
            except Exception as error:
                if classify(error).kind not in _NO_MEMORY or self._micro == 1:
                    raise
                drop_frames(error)
            # Outside the handler, which holds the tensors of the failure.
            if self._trainer is not None:
                self._trainer.close()
            self._trainer = None
            self._micro //= 2
            self.device.release()

    def _open(self, message: Open) -> Opened:
        until_s = time.monotonic() + message.most_s
        with self.device.enforced():
            self._trainer = trainer = Trainer(
                self._task, self._settings, self.device.torch_device, self._seed
            )
        seconds: list[float] = []
        losses: list[float] = []
        peak_bytes = 0
        while len(losses) < min(message.steps, FEWEST_STEPS) or (
            len(losses) < message.steps and time.monotonic() < until_s
        ):
            seconds.append(self.device.timed(self.step)[1])
            losses.append(trainer.course.losses[-1])
            if len(losses) > 1:  # the first step takes memory that no later one takes
                peak_bytes = max(peak_bytes, self.device.step_peak_bytes())
        return _opened(self.device, seconds, peak_bytes, tuple(losses))

    def step(self) -> float:
        """Do one optimiser step; return its samples."""
        trainer = self._opened()
        while not trainer.micro_batch(self._micro).updated:
            pass
        return self._settings.batch * self._items()

    def unpark(self) -> None:
        """Move the state to the device."""
        with self.device.enforced():
            self._opened().unpark()

    def park(self) -> None:
        """Move the state to host memory."""
        with self.device.enforced():
            self._opened().park()

    def _items(self) -> float:
        """Return what a sample counts for: packed documents count each, and a token is a token."""
        return 1.0 if self._task.shorten is None else self._opened().items_per_sample

    def _opened(self) -> Trainer:
        if self._trainer is None:
            raise RuntimeError("an arm was asked to work before it was opened")
        return self._trainer


def _opened(
    device: Device, seconds: list[float], peak_bytes: int, losses: tuple[float, ...]
) -> Opened:
    info = device.info
    return Opened(
        losses=losses,
        first_step_s=seconds[0],
        step_s=statistics.median(seconds[1:] or seconds),
        peak_bytes=peak_bytes,
        host_bytes=psutil.Process().memory_info().rss,
        device_name=info.name,
        card=info.uuid or "cpu",
        driver=info.driver,
        torch=info.torch_version,
    )
