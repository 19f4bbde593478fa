"""The contestants of `train-pressure`: each trains the same job in a process of its own until its time is over.

A contestant that reads the cap (`ours`) reads it from the kernel, as a worker on a card reads what other programs have
left. The ideal alone is told the course.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, Final

import torch
from torch.utils.data import DataLoader

from benches.common import lone_worker, status_bytes
from benches.pressure_caps import Course, least_between
from benches.pressure_job import Host
from benches.train_pressure_job import (
    BATCH,
    PLAIN,
    PlainLoop,
    Sizes,
    Texts,
    loss_of,
    new_model,
    new_optimizer,
    opened,
    plain_row,
    tally,
)
from workers.devices.cpu import CpuDevice
from workers.devices.process_memory import process_memory
from workers.engine import engine as engines
from workers.engine import open_session
from workers.messages import Directive, Report, Verdict
from workers.settings import WorkloadSpec
from workers.training.course import Course as TrainCourse
from workers.training.tasks import next_tokens
from workers.units import GIB, MIB

_SLICE_S: Final = 1.0
#: What a step takes of `RLIMIT_DATA` beside its tensors: a page for each mapping, small things on the heap.
_SMALL_BYTES: Final = 2 * MIB
#: Keeps the ideal, and the size that always fits, from failing over what the measured sizes do not tell.
_MARGIN: Final = 0.1


@dataclass(slots=True)
class Turn:
    """One turn: what the bench tells a contestant, and when it is over."""

    device: str
    course: Course
    seconds: float
    memory_bytes: float
    sizes: Sizes
    host: Host
    began_s: float = 0.0

    def over(self) -> bool:
        return time.monotonic() - self.began_s >= self.seconds

    def within(self, from_s: float, to_s: float) -> int:
        """Return the largest part that fits from one moment of the course to another."""
        left_bytes = self.memory_bytes * least_between(self.course, from_s, to_s)
        return self.sizes.largest_within(left_bytes / (1 + _MARGIN))


class _SharedCpu(CpuDevice):
    """The CPU as a card that other programs use too: its limit is moved from outside, at any moment.

    It is read as the free memory of a card is, and never set here.
    """

    @contextlib.contextmanager
    def enforced(self) -> Iterator[None]:
        before, self._now = self._now, process_memory()
        self._base = replace(
            self._base,
            data_bytes=self._base.data_bytes + self._now.data_bytes - before.data_bytes,
            resident_bytes=self._base.resident_bytes + self._now.resident_bytes - before.resident_bytes,
        )
        try:
            yield
        finally:
            self._now = process_memory()

    def _left_bytes(self) -> int:
        limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
        if limit == resource.RLIM_INFINITY:
            return self.most_bytes
        return max(0, min(self.most_bytes, limit - self._base.data_bytes - _SMALL_BYTES))

    def free_bytes(self) -> int:
        return max(0, self._left_bytes() - self.held_bytes())

    def allowed_bytes(self, leave_bytes: int) -> int:
        return max(0, self._left_bytes() - leave_bytes)


def _ours(turn: Turn) -> Callable[[], None]:
    """Return the real engine under the real policy, with its workload open."""
    if turn.device == "cpu":
        open_session.open_device = _SharedCpu  # type: ignore[attr-defined]  # the engine opens the device by this name
    spec = lone_worker(budget_bytes=GIB, device=turn.device)
    spec = replace(
        spec,
        policy="adaptive",
        workers_on_host=os.cpu_count() or 1,  # one thread, as all contestants
        workload=WorkloadSpec(name="train", dtype="fp32", size=1, batch=BATCH, seed=0, settings=PLAIN),
    )
    engine = engines.Engine(spec)
    number = 0

    def slice_of(seconds: float) -> Report:
        nonlocal number
        number += 1
        report = engine.run_slice(Directive(incarnation=0, sequence=number, duration_s=seconds, resume=None))
        for event in report.events:
            if event.name == "oom":
                tally.failed_at_s.append(time.monotonic() - time.time() + event.at_unix_s)
        if report.verdict is not Verdict.OK:
            raise RuntimeError(f"the engine gave up: {report.verdict} {report.reason}")
        return report

    finished_step = TrainCourse.finished_step

    def counted(self: TrainCourse, loss: float, parts: Iterable[tuple[int, int]], *, updated: bool) -> None:
        finished_step(self, loss, parts, updated=updated)
        tally.losses.append(loss)

    TrainCourse.finished_step = counted  # type: ignore[method-assign]  # a course keeps only its first and last loss
    slice_of(2.0)
    tally.skipped = len(tally.losses)

    def go() -> None:
        while not turn.over():
            slice_of(min(_SLICE_S, max(0.05, turn.began_s + turn.seconds - time.monotonic())))

    return go


def _sized(turn: Turn, micro: Callable[[float], int]) -> Callable[[], None]:
    loop = PlainLoop(turn.host.torch_device)
    for _ in range(2):
        loop.step(lambda: BATCH)
    tally.skipped = len(tally.losses)

    def go() -> None:
        while not turn.over():
            loop.step(lambda: micro(time.monotonic() - turn.began_s))

    return go


def _fixed(turn: Turn) -> Callable[[], None]:
    always = turn.within(0.0, turn.seconds)
    return _sized(turn, lambda _: always)


def _ideal(turn: Turn) -> Callable[[], None]:
    longest_s = 1.5 * turn.sizes.longest_s
    return _sized(turn, lambda at_s: turn.within(at_s, at_s + longest_s))


def _accelerate(turn: Turn) -> Callable[[], None]:
    """The example `by_feature/automatic_gradient_accumulation.py`: what is decorated makes all anew."""
    from accelerate import Accelerator  # type: ignore[import-not-found]  # of the extra `bench`
    from accelerate.utils import find_executable_batch_size  # type: ignore[import-not-found]  # as above

    starts = 0

    @find_executable_batch_size(starting_batch_size=BATCH)  # type: ignore[untyped-decorator]  # as above
    def train(size: int) -> None:
        nonlocal starts
        starts += 1
        if starts > 1:
            tally.failed_at_s.append(time.monotonic())
        tally.starts = starts
        tally.losses.clear()
        tally.wrong_batches = 0
        accumulation = BATCH // size
        accelerator = Accelerator(cpu=turn.device == "cpu", gradient_accumulation_steps=accumulation)
        model = new_model()
        loader = DataLoader(Texts(in_order=True), batch_size=size)
        model, optimizer, loader = accelerator.prepare(model, new_optimizer(model), loader)
        total = 0.0
        for number, tokens in enumerate(loader, 1):
            if turn.over():
                return
            with accelerator.accumulate(model):
                loss = loss_of(model, tokens) / next_tokens(tokens)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            total += float(loss.detach()) / accumulation
            if number % accumulation == 0:
                tally.losses.append(total)
                tally.wrong_batches += size * accumulation != BATCH
                total = 0.0

    return train  # type: ignore[no-any-return]  # what decorates it has no types


def _lightning(turn: Turn) -> Callable[[], None]:
    """Its finder before the run, then that size for good; accumulation makes up for what it is too small."""
    import lightning as lit  # type: ignore[import-not-found]  # of the extra `bench`
    from lightning.pytorch.tuner import Tuner  # type: ignore[import-not-found]

    class Module(lit.LightningModule):  # type: ignore[misc]  # has no types here
        def __init__(self) -> None:
            super().__init__()
            self.model, self.batch_size, self.total, self.parts = new_model(), 2, 0.0, 0

        def train_dataloader(self) -> Any:  # noqa: ANN401
            return DataLoader(Texts(in_order=True), batch_size=min(BATCH, self.batch_size))

        def training_step(self, tokens: torch.Tensor, _: int) -> torch.Tensor:
            loss = loss_of(self.model, tokens) / next_tokens(tokens)
            self.total += float(loss.detach())
            self.parts += 1
            return loss

        def configure_optimizers(self) -> Any:  # noqa: ANN401
            return new_optimizer(self.model)

    class Counts(lit.Callback):  # type: ignore[misc]  # as above
        def on_train_batch_end(self, trainer: Any, module: Any, *_: object) -> None:  # noqa: ANN401
            if module.parts >= trainer.accumulate_grad_batches:
                tally.losses.append(module.total / module.parts)
                tally.wrong_batches += module.parts * min(BATCH, module.batch_size) != BATCH
                module.total, module.parts = 0.0, 0
            trainer.should_stop = turn.over()

    def trainer_of(**more: Any) -> Any:  # noqa: ANN401
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        quiet["enable_model_summary"] = False
        return lit.Trainer(accelerator=turn.device, devices=1, max_steps=10**9, min_steps=None, **quiet, **more)

    def go() -> None:
        module = Module()
        tuner = Tuner(trainer_of())
        tuner.scale_batch_size(module, mode="power", init_val=2, max_trials=int(math.log2(BATCH)), steps_per_trial=3)
        found = min(BATCH, module.batch_size)
        module = Module()
        module.batch_size = found
        tally.losses.clear()
        trainer_of(callbacks=[Counts()], accumulate_grad_batches=-(-BATCH // found)).fit(module)

    return go


def _composer(turn: Turn) -> Callable[[], None]:
    """Composer's trainer with `device_train_microbatch_size="auto"`, from the venv of composer_venv.sh."""
    from composer import Callback, Time, Trainer  # type: ignore[import-not-found]  # of a venv of its own
    from composer.models import ComposerModel  # type: ignore[import-not-found]
    from composer.trainer import trainer as trainers  # type: ignore[import-not-found]

    if turn.device == "cpu":
        # It refuses a CPU, and knows a card's out-of-memory only.
        trainers._is_auto_microbatching = lambda device_train_microbatch_size, **_: (
            device_train_microbatch_size == "auto"
        )

    def is_oom(error: RuntimeError) -> bool:
        short = "can't allocate memory" in str(error) or "out of memory" in str(error)
        if short:
            tally.failed_at_s.append(time.monotonic())
        return short

    trainers._is_cuda_oom = is_oom

    class Model(ComposerModel):  # type: ignore[misc]  # has no types here
        def __init__(self) -> None:
            super().__init__()
            self.model = new_model()

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return loss_of(self.model, tokens) / next_tokens(tokens)

        def loss(self, outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            return outputs

    class Counts(Callback):  # type: ignore[misc]  # as above
        def batch_end(self, state: Any, _: Any) -> None:  # noqa: ANN401
            tally.losses.append(float(state.total_loss_dict["loss/train/total"]))
            if turn.over():
                state.stop_training()

    model = Model()
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(Texts(in_order=True), batch_size=BATCH),
        optimizers=new_optimizer(model),
        max_duration=Time(1, "ep"),
        device="cpu" if turn.device == "cpu" else "gpu",
        device_train_microbatch_size="auto",
        callbacks=[Counts()],
        progress_bar=False,
        log_to_console=False,
        loggers=[],
    )
    return trainer.fit  # type: ignore[no-any-return]


#: By name; each prepares itself before the cap stands, and returns what runs under it.
CONTESTANTS: Mapping[str, Callable[[Turn], Callable[[], None]]] = {
    "ours": _ours,
    "composer": _composer,
    "accelerate": _accelerate,
    "lightning": _lightning,
    "fixed": _fixed,
    "ideal": _ideal,
}


def contest(
    connection: Connection,
    contestant: str,
    device: str,
    course: Course,
    seconds: float,
    memory_bytes: float,
    sizes: Sizes,
    composer_path: str,
) -> None:
    """Be one contestant: say what is held, wait for the start, run, and send what came of it."""
    warnings.simplefilter("ignore")
    if contestant == "composer":
        # Last, so that torch and all that is here already stay as they are.
        sys.path.append(composer_path)
        library = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]  # torch has no types
        for name in ("nms", "qnms"):
            signature = f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            library.define(signature)  # type: ignore[no-untyped-call]  # torch has no types here
    turn = Turn(device, course, seconds, memory_bytes, sizes, opened(device))
    tally.losses.clear()
    try:
        go = CONTESTANTS[contestant](turn)
    except ImportError as error:
        connection.send(f"not installed: {error}")
        return
    tally.parts.clear()
    tally.failed_at_s.clear()
    connection.send((os.getpid(), turn.host.base_bytes() if device == "cuda" else status_bytes("VmData")))
    connection.recv()
    turn.began_s = time.monotonic()
    ended: str | None = None
    try:
        go()
    except Exception as error:  # noqa: BLE001 - a contestant that gives up is a finding
        ended = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    turn.host.lift()
    connection.send(plain_row(turn.began_s, ended))
