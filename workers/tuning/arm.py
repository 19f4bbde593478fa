"""The process of an arm: opens the device under the cap of the spec, and trains or multiplies when
it is asked to.

Between two turns its tensors wait in host memory, so that arms share a card that holds one of them.
Does not choose what is measured or in which order, and compares nothing: the head does.
"""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from contextlib import suppress
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, Final

import psutil
from torch.utils.data import default_collate

from workers.devices import open_device
from workers.devices.base import Device
from workers.engine.between_steps import DutyCycle
from workers.messages import IncompatibleError
from workers.nvml.queries import visible_card
from workers.nvml.sensors import CardSensors
from workers.oom import classify, drop_frames, one_line
from workers.readings import THROTTLE_ALARMS, SensorReading
from workers.settings import FailureKind
from workers.training import order
from workers.training.batches import Batch
from workers.training.errors import TrainingError
from workers.training.settings import TrainSettings
from workers.training.tasks import TrainTask, find_task, validation
from workers.training.trainer import Trainer
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
from workers.workloads.base import WorkloadContext
from workers.workloads.matmul import Matmul

# Without NumPy, which nothing here uses, torch says so when its compiler is imported, on the user's
# terminal.
warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)

_NO_MEMORY: Final = {FailureKind.DEFINITE, FailureKind.PROBABLE}

#: What an arm of products counts, so that its figure is about that of the samples of a training.
_UNIT_FLOP: Final = 1e9

#: Samples of the validation: the last ones of the first epoch, which no arm comes near.
_VALIDATION_SAMPLES: Final = 64

#: So that no schedule of the learning rate ends within a tuning.
_STEPS: Final = 1_000_000


def serve(connection: Connection, spec: ArmSpec) -> None:
    """Answer each message. What goes wrong is answered as `Refused`, and ends the process."""
    # What torch has imported stays. Collecting it took 0.13 of the 0.46 s of a rehearsal's turn.
    gc.freeze()
    try:
        device = open_device(spec.spec)
        kind = Products if spec.spec.workload.name == "matmul" else Trained
        work: Products | Trained = kind(spec, device)
        while True:
            connection.send(_answer(connection.recv(), work, device))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the head has ended, or needs this arm no more
    except (IncompatibleError, TrainingError) as error:
        reason = str(error)
    except Exception as error:  # noqa: BLE001 - a setting may fail in any way, and the head tells it
        failure = classify(error)
        reason = one_line(error)
        if failure.kind in _NO_MEMORY:
            reason = f"{NO_ROOM}: {failure.text}"
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.send(Refused(reason=reason))


def _answer(
    message: Open | Turn | Evaluate, work: Products | Trained, device: Device
) -> Opened | Done | Evaluated:
    if isinstance(message, Open):
        opened = replace(work.open(message.steps), parked_bytes=work.park())
        device.release()
        return opened
    if isinstance(message, Turn):
        return _turn(message, work, device)
    work.unpark()
    evaluated = work.validation()
    work.park()
    device.release()
    return evaluated


def _turn(turn: Turn, work: Products | Trained, device: Device) -> Done:
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


def _steps(turn: Turn, work: Products | Trained) -> float:
    until_s, samples, done = time.monotonic() + turn.seconds, 0.0, 0
    while done < turn.least_steps or time.monotonic() < until_s:
        samples += work.step()
        done += 1
    return samples


class Products:
    """Matrix products as one worker of `matmul`, as a run would start it, with its duty.

    Its memory is what the products need, not the whole claim: arms share a card.
    """

    def __init__(self, spec: ArmSpec, device: Device) -> None:
        self._device = device
        workload = spec.spec.workload
        self._size, self._batch = workload.size, workload.batch
        if device.info.dtype != workload.dtype:
            raise IncompatibleError(
                f"this device computes {device.info.dtype} in place of {workload.dtype}"
            )
        self._duty = DutyCycle(spec.spec.duty)
        context = WorkloadContext(
            device=device.torch_device, dtype=device.torch_dtype, seed=spec.seed
        )
        with device.enforced():
            self._matmul = Matmul(context)

    def open(self, steps: int) -> Opened:
        """Find out how many products make a step."""
        began_s = time.perf_counter()
        for _ in range(steps):
            self._device.timed(self.step)
        return Opened(
            step_s=(time.perf_counter() - began_s) / max(1, steps),
            peak_bytes=self._device.step_peak_bytes(),
            flop=_UNIT_FLOP,
            **_place(self._device),
        )

    def step(self) -> float:
        """Do one step, and rest as the duty says."""
        began_s = time.perf_counter()
        flop = self._matmul.step(self._size, self._batch).flop
        self._duty.worked(time.perf_counter() - began_s, 1.0)
        while self._duty.rest(1.0):
            pass
        return flop / _UNIT_FLOP

    def unpark(self) -> None:
        """Nothing waits: operands are drawn anew."""

    def park(self) -> int:
        """Drop operands and results."""
        with self._device.enforced():
            self._matmul.release()
        return 0

    def validation(self) -> Evaluated:
        """There is none."""
        return Evaluated(validation_loss=None, step=0)


class Trained:
    """A training: its first steps are compared, the later ones are timed.

    It computes as many samples at once as fit, and then keeps to that.
    """

    def __init__(self, spec: ArmSpec, device: Device) -> None:
        self._device = device
        self._settings = TrainSettings.model_validate(
            {**spec.settings, "steps": _STEPS, "epochs": None}
        )
        plain = TrainSettings.model_validate({**spec.plain, "steps": _STEPS, "epochs": None})
        data_seed = spec.spec.workload.seed
        task = find_task(self._settings, data_seed)
        if task.evaluate is None:
            judge = find_task(plain, data_seed)
            unseen = partial(_last_samples, judge, data_seed)
            task = replace(task, evaluate=validation(unseen, judge.loss, judge.count))
        self._task = task
        self._seed = spec.seed
        self._trainer: Trainer | None = None
        micro = self._settings.micro
        self._micro = min(self._settings.batch, self._settings.batch if micro == "auto" else micro)

    def open(self, steps: int) -> Opened:
        """Make the model and do the first steps.

        Where they do not fit, with half as many samples at once.
        """
        while True:
            try:
                return self._open(steps)
            except Exception as error:
                if classify(error).kind not in _NO_MEMORY or self._micro == 1:
                    raise
                drop_frames(error)
            # Outside the handler, which holds the tensors of the failure.
            if self._trainer is not None:
                self._trainer.close()
            self._trainer = None
            self._micro //= 2
            self._device.release()

    def _open(self, steps: int) -> Opened:
        with self._device.enforced():
            self._trainer = trainer = Trainer(
                self._task, self._settings, self._device.torch_device, self._seed
            )
            flop = trainer.flop_per_sample() / self._items()
        seconds, losses, peak_bytes = [], [], 0
        for _ in range(steps):
            began_s = time.perf_counter()
            self._device.timed(self.step)
            seconds.append(time.perf_counter() - began_s)
            losses.append(trainer.course.losses[-1])
            peak_bytes = max(peak_bytes, self._device.step_peak_bytes())
        return Opened(
            losses=tuple(losses),
            weights_sha256=trainer.weights_sha256(),
            validation_loss=self.validation().validation_loss,
            first_step_s=seconds[0],
            step_s=statistics.median(seconds[1:] or seconds),
            peak_bytes=peak_bytes,
            flop=flop,
            micro=self._micro,
            **_place(self._device),
        )

    def step(self) -> float:
        """Do one optimiser step."""
        trainer = self._opened()
        while not trainer.micro_batch(self._micro).updated:
            pass
        return self._settings.batch * self._items()

    def _items(self) -> float:
        """Return what a sample counts for.

        A row of packed documents is more than one document; a token is a token.
        """
        return 1.0 if self._task.shorten is None else self._opened().items_per_sample

    def unpark(self) -> None:
        """Move the state to the device."""
        with self._device.enforced():
            self._opened().unpark()

    def park(self) -> int:
        """Move the state to host memory; return the bytes that it takes there."""
        with self._device.enforced():
            return self._opened().park() + self._opened().on_host_bytes

    def validation(self) -> Evaluated:
        """Compute the baseline's loss of this model, with averaged weights if there are some."""
        trainer = self._opened()
        with self._device.enforced():
            figures = trainer.evaluate()
        return Evaluated(validation_loss=figures.get("validation_loss"), step=trainer.step)

    def _opened(self) -> Trainer:
        if self._trainer is None:
            raise RuntimeError("an arm was asked to work before it was opened")
        return self._trainer


def _last_samples(judge: TrainTask, seed: int) -> list[Batch]:
    """Return a batch of the samples at the end of the first epoch."""
    items = len(judge.dataset)
    count = min(_VALIDATION_SAMPLES, items)
    samples = order.samples(seed, items, items - count, count)
    keys = samples if judge.by_sample else [sample.index for sample in samples]
    several = getattr(judge.dataset, "__getitems__", None)
    made = several(keys) if several is not None else [judge.dataset[key] for key in keys]
    return [(judge.collate or default_collate)(made)]


def _place(device: Device) -> dict[str, Any]:
    """Return what `Opened` says of where an arm is."""
    info = device.info
    return {
        "device_name": info.name,
        "card": info.uuid or "cpu",
        "device_bytes": info.total_bytes,
        "driver": info.driver,
        "torch": info.torch_version,
        "host_bytes": psutil.Process().memory_info().rss,
    }


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
        clocks = [reading.sm_clock_mhz for reading in self._readings if reading.sm_clock_mhz]
        return sum(clocks) / len(clocks) if clocks else None

    @property
    def throttled(self) -> bool:
        """Whether the card said so at the beginning or at the end."""
        return any((reading.throttle_bits or 0) & THROTTLE_ALARMS for reading in self._readings)

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
        for process in [self._process, *self._process.children(recursive=True)]:
            with suppress(psutil.Error):  # it has ended since
                times = process.cpu_times()
                total_s += float(times.user + times.system)
        return total_s
