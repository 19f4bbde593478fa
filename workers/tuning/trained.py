"""A training as an arm: its first steps are compared, the later ones are timed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final, TypeVar

import psutil
import torch
from torch import nn
from torch.utils.data import default_collate

from workers.devices.base import Device
from workers.oom import classify, drop_frames
from workers.settings import FailureKind
from workers.training import order
from workers.training.host_memory import wait_asleep
from workers.training.loader import on_device
from workers.training.settings import TrainSettings
from workers.training.tasks import Batch, TrainTask, find_task
from workers.training.trainer import Trainer
from workers.tuning.messages import ArmSpec, Evaluated, Opened

T = TypeVar("T")

_VALIDATION: Final = "validation_loss"

#: Samples of the validation: the last ones of the first epoch, which no arm comes near.
_VALIDATION_SAMPLES: Final = 64

#: So that no schedule of the learning rate ends within a tuning.
_STEPS: Final = 1_000_000


class Trained:
    """One training. It computes as many samples at once as fit, and then keeps to that."""

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
            task = replace(
                task, evaluate=partial(_validation, judge, device.torch_device, data_seed)
            )
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
                shrinks = (
                    classify(error).kind in {FailureKind.DEFINITE, FailureKind.PROBABLE}
                    and self._micro > 1
                )
                if not shrinks:
                    raise
                drop_frames(error)
            if (
                self._trainer is not None
            ):  # outside the handler, which holds the tensors of the failure
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
            self._under_cap(self.step)
            seconds.append(time.perf_counter() - began_s)
            losses.append(trainer.course.losses[-1])
            peak_bytes = max(peak_bytes, self._device.step_peak_bytes())
        info = self._device.info
        return Opened(
            losses=tuple(losses),
            weights_sha256=trainer.weights_sha256(),
            validation_loss=self.validation().validation_loss,
            first_step_s=seconds[0],
            step_s=statistics.median(seconds[1:] or seconds),
            peak_bytes=peak_bytes,
            flop=flop,
            micro=self._micro,
            device_name=info.name,
            card=info.uuid or "cpu",
            device_bytes=info.total_bytes,
            driver=info.driver,
            torch=info.torch_version,
            host_bytes=psutil.Process().memory_info().rss,
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
        """See `Work.unpark`."""
        with self._device.enforced():
            self._opened().unpark()

    def park(self) -> int:
        """See `Work.park`."""
        with self._device.enforced():
            return self._opened().park() + self._opened().on_host_bytes

    def validation(self) -> Evaluated:
        """Compute the baseline's loss of this model, with averaged weights if there are some."""
        trainer = self._opened()
        with self._device.enforced():
            figures = trainer.evaluate()
        return Evaluated(validation_loss=figures.get(_VALIDATION), step=trainer.step)

    def _under_cap(self, work: Callable[[], T]) -> T:
        return self._device.timed(work)[0]

    def _opened(self) -> Trainer:
        if self._trainer is None:
            raise RuntimeError("an arm was asked to work before it was opened")
        return self._trainer


def _validation(
    judge: TrainTask, device: torch.device, seed: int, model: nn.Module
) -> dict[str, float]:
    """Return the mean loss of samples at the end of the first epoch."""
    items = len(judge.dataset)
    count = min(_VALIDATION_SAMPLES, items)
    batch = _batch(judge, order.samples(seed, items, items - count, count))
    loss = judge.loss(model, on_device(batch, device))
    wait_asleep(device)
    return {_VALIDATION: float(loss) / judge.count(batch)}


def _batch(task: TrainTask, samples: list[order.Sample]) -> Batch:
    """Make a batch as the loader does."""
    keys = samples if task.by_sample else [each.index for each in samples]
    several = getattr(task.dataset, "__getitems__", None)
    items = several(keys) if several is not None else [task.dataset[key] for key in keys]
    return (task.collate or default_collate)(items)
