"""The process of an arm: opens the device under the cap of its spec, and trains or multiplies when
it is told to.

On a card its tensors wait in host memory between two turns, so that two arms share a card that
holds one of them. Does not choose what is measured or in which order, and compares nothing: the
head does.
"""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import psutil
from pydantic import ValidationError

from workers.devices import open_device
from workers.devices.base import Device
from workers.oom import classify, drop_frames, one_line
from workers.settings import FailureKind
from workers.training.settings import TrainSettings
from workers.training.tasks import find_task
from workers.training.trainer import Trainer
from workers.tuning.messages import ArmSpec, Opened, Refused
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

#: What a first update has changed shows in the third step.
_FEWEST_STEPS: Final = 3

#: No step takes less, whatever the clocks say.
_LEAST_S: Final = 1e-6


def serve(connection: Connection, spec: ArmSpec) -> None:
    """Do the first steps, then a turn for each message. What goes wrong is answered as `Refused`,
    and ends the process.
    """
    # What torch has imported stays. Collecting it took 0.13 of the 0.46 s of a rehearsal's turn.
    gc.freeze()
    try:
        device = open_device(spec.spec)
        multiplies = spec.spec.workload.name == "matmul"
        work: Products | Training = (Products if multiplies else Training)(spec, device)
        answer: Opened | tuple[float, float] = _first_steps(work, spec)
        while True:
            if work.on_card:
                with device.enforced():
                    work.park()
                device.release()
            connection.send(answer)
            answer = _turn(work, connection.recv())
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
        connection.send(Refused(reason))


def _first_steps(work: Products | Training, spec: ArmSpec) -> Opened:
    until_s = time.monotonic() + spec.first_steps_s
    seconds: list[float] = []
    losses: list[float] = []
    peak_bytes = 0
    while len(seconds) < _FEWEST_STEPS or (
        len(seconds) < spec.first_steps and time.monotonic() < until_s
    ):
        seconds.append(work.timed_step()[1])
        losses += work.losses[-1:]
        if len(seconds) > 1:  # the first step takes memory that no later one takes
            peak_bytes = max(peak_bytes, work.device.step_peak_bytes())
    info = work.device.info
    return Opened(
        losses=tuple(losses),
        first_step_s=seconds[0],
        step_s=statistics.median(seconds[1:]),
        peak_bytes=peak_bytes,
        host_bytes=psutil.Process().memory_info().rss,
        device_name=info.name,
        card=info.uuid or "cpu",
        driver=info.driver,
        torch=info.torch_version,
    )


def _turn(work: Products | Training, seconds: float) -> tuple[float, float]:
    """Work for so long, and one step at the least; return what was done in a second, and in one
    without the time in which other programs had the processor.

    Time between steps is not counted. On a card neither is the first step, which fills the
    allocator's pool again.
    """
    if work.on_card:
        with work.device.enforced():
            work.unpark()
            work.step()
    until_s, done, took_s, waited_s = time.monotonic() + seconds, 0.0, 0.0, 0.0
    while not took_s or time.monotonic() < until_s:
        step_done, step_s, step_waited_s = work.timed_step()
        work.device.step_peak_bytes()  # by which a device knows steps that are alike
        done, took_s, waited_s = done + step_done, took_s + step_s, waited_s + step_waited_s
    return done / took_s, done / max(took_s - waited_s, _LEAST_S)


class Products:
    """Matrix products as one worker of `matmul` computes them, without its rests.

    Its memory is what the products need, not a worker's whole claim.
    """

    losses: Sequence[float] = ()

    def __init__(self, spec: ArmSpec, device: Device) -> None:
        workload = spec.spec.workload
        self.device, self.on_card = device, device.info.kind == "cuda"
        self._size, self._batch = workload.size, workload.batch
        context = WorkloadContext(
            device=device.torch_device, dtype=device.torch_dtype, seed=workload.seed
        )
        with device.enforced():
            self._matmul = Matmul(context)

    def timed_step(self) -> tuple[float, float, float]:
        """Do one step; return its operations, its seconds, and 0: workers at once wait for each
        other.
        """
        return *self.device.timed(self.step, self._size), 0.0

    def step(self) -> float:
        """Do one step; return its operations."""
        return self._matmul.step(self._size, self._batch).flop / _UNIT_FLOP

    def park(self) -> None:
        """Drop operands and results; they are drawn anew."""
        self._matmul.release()

    def unpark(self) -> None:
        """Nothing waits."""


class Training:
    """A training. It computes as many samples at once as fit, and then keeps to that."""

    def __init__(self, spec: ArmSpec, device: Device) -> None:
        self.device, self.on_card = device, device.info.kind == "cuda"
        seed = spec.spec.workload.seed
        settings = TrainSettings.model_validate({**spec.settings, "steps": _STEPS, "epochs": None})
        self._task = find_task(settings, seed)
        self._batch, micro = settings.batch, settings.micro
        self._micro = self._batch if micro == "auto" else min(self._batch, micro)
        with device.enforced():
            self._trainer = Trainer(self._task, settings, device.torch_device, seed)

    @property
    def losses(self) -> Sequence[float]:
        """The last is that of the last optimiser step."""
        return self._trainer.course.losses

    def timed_step(self) -> tuple[float, float, float]:
        """Do one optimiser step; return its samples, its seconds, and how many of these this thread
        has waited for a processor, if it computes there.

        Where it does not fit, with half as many samples at once.
        """
        while True:
            try:
                (done, waited_s), seconds = self.device.timed(self._waiting_step, self._micro)
            except Exception as error:
                if classify(error).kind not in _NO_MEMORY or self._micro == 1:
                    raise
                drop_frames(error)
            else:
                return done, seconds, 0.0 if self.on_card else waited_s
            # Outside the handler, which holds the tensors of the failure.
            self._micro //= 2
            self.device.release()

    def _waiting_step(self) -> tuple[float, float]:
        """Do one step; return its samples, and how long this thread has waited."""
        waited_s = _waited_s()
        done = self.step()
        return done, _waited_s() - waited_s

    def step(self) -> float:
        """Do one optimiser step; return its samples, or tokens where lengths differ.

        Packed documents count each.
        """
        while not self._trainer.micro_batch(self._micro).updated:
            pass
        return self._batch * (1.0 if self._task.shorten is None else self._trainer.items_per_sample)

    def park(self) -> None:
        """Move the state to host memory."""
        self._trainer.park()

    def unpark(self) -> None:
        """Move it back."""
        self._trainer.unpark()


def _waited_s() -> float:
    """Return how long this thread has waited for a processor (Linux,
    Documentation/scheduler/sched-stats.rst); 0 where the kernel does not tell.
    """
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1]) / 1e9
    return 0.0
