"""The training that contestants do under pressure: a small GPT on made text, and what each of them
makes of memory.

An effective batch is 64 samples. Parts of a batch cost much beside their samples, as on a card:
with 8 samples at once a step takes about twice as long as with 64. All train the same model on the
same batches with the same optimiser on one thread.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from benches.common import status_bytes
from benches.pressure_caps import Course, least_between, least_that_fits, limited
from workers import oom
from workers.devices import cpu
from workers.settings import FailureKind
from workers.training import order, tasks
from workers.training.errors import UpdateInterruptedError
from workers.training.made_data import MadeText
from workers.training.models import Gpt, GptShape
from workers.training.schedule import learning_rate, micro_batches
from workers.training.settings import TrainSettings
from workers.training.tasks import TrainTask
from workers.training.trainer import Trainer
from workers.units import MIB

BATCH = 64
_MOST_BYTES = 32 * MIB
_RESOLUTION_BYTES = MIB // 16
#: Of the cap. What a part takes is known to that, as malloc does not do the same each time.
_MARGIN_AFTER_FAILURE = 0.01
SEED = 0
_SHAPE = GptShape(layers=8, heads=2, width=32, seq=16)
_DATA = MadeText(_SHAPE.seq, _SHAPE.vocabulary, SEED, items=4096)
KEYS: Mapping[str, Any] = {
    "preset": "benches.train_job:task", "batch": BATCH, "steps": 1_000_000, "warmup_steps": 20, "precision": "fp32",
    "optimizer": "adamw-loop", "clip": None, "recompute": "none",
}  # fmt: skip


def settings() -> TrainSettings:
    return TrainSettings(**KEYS)


def task(_settings: TrainSettings | None = None) -> TrainTask:
    return TrainTask(
        name="under-pressure", model=partial(Gpt, _SHAPE, 0.0), dataset=_DATA,
        loss=tasks.next_token_loss, count=tasks.next_tokens, blocks=tasks.blocks_of, lr=2e-3,
        items="tokens",
    )  # fmt: skip


def trainer() -> Trainer:
    return Trainer(task(), settings(), torch.device("cpu"), SEED)


class Tally:
    """What one contestant did; `told` is it as a row."""

    def __init__(self, seconds: float, course: Course) -> None:
        self.seconds, self.course = seconds, course
        self.began_s = time.monotonic()
        self.rows = self.starts = self.wrong_batches = 0
        #: Step, counted from 1 -> the loss, of the last time that it was done.
        self.losses: dict[int, float] = {}
        self.failed_at_s: list[float] = []
        #: When a part ended, and its samples.
        self.parts: list[tuple[float, int]] = []
        #: Steps of the training that goes on when the time is up.
        self.done_in_time = 0

    @property
    def at_s(self) -> float:
        return time.monotonic() - self.began_s

    @property
    def over(self) -> bool:
        return self.at_s >= self.seconds

    def part(self, rows: int) -> None:
        self.rows += rows
        self.parts.append((self.at_s, rows))

    def failed(self, rows: int) -> None:
        self.rows += rows
        self.failed_at_s.append(self.at_s)

    def stepped(self, step: int, loss: float) -> None:
        self.losses[step] = loss
        if not self.over:
            self.done_in_time = step

    def told(self, ended: str | None) -> dict[str, Any]:
        kept = {key: value for key, value in vars(self).items() if key not in {"course", "seconds"}}
        return {**kept, "ended": ended}


def is_oom(error: BaseException) -> bool:
    return oom.classify(error).kind in {FailureKind.DEFINITE, FailureKind.PROBABLE}


def known_size(tally: Tally, fits: Callable[[float], int], *, knows: bool) -> None:
    """Train with the part that fits until it is done (`knows`), or with one that always fits."""
    own = trainer()
    tally.starts = 1
    always = fits(min(share for _, share in tally.course))
    longest_s = margin = 0.0
    while not tally.over:
        ahead = least_between(tally.course, tally.at_s, tally.at_s + longest_s)
        limit = fits(ahead - margin) if knows else always
        began_s = time.monotonic()
        try:
            done = own.micro_batch(limit)
        except Exception as error:
            if not is_oom(error):
                raise
            tally.failed(limit)
            margin += _MARGIN_AFTER_FAILURE
            continue
        longest_s = max(longest_s, time.monotonic() - began_s)
        tally.part(done.rows)
        if done.updated:
            tally.stepped(own.step, own.progress().loss or 0.0)


def accelerate(tally: Tally) -> None:
    """Do as accelerate's example of gradient accumulation with an automatic batch does."""
    from accelerate.utils import find_executable_batch_size  # type: ignore[import-untyped]  # of the extra `bench`

    def train(batch_size: int) -> None:
        tally.starts += 1
        accumulation = BATCH // batch_size
        model, optimizer, rate = _plain()
        for step, batch in batches():
            total, rows = 0.0, 0
            for first in range(0, accumulation * batch_size, batch_size):
                part = batch[first : first + batch_size]
                if tally.over:
                    return
                try:
                    loss = mean_loss(model, part) / accumulation
                    loss.backward()  # type: ignore[no-untyped-call]  # missing in torch's stubs
                except Exception as error:
                    if is_oom(error):
                        tally.failed(len(part))
                    raise
                tally.part(len(part))
                total, rows = total + float(loss.detach()), rows + len(part)
            rate(step)
            optimizer.step()
            optimizer.zero_grad()
            tally.wrong_batches += rows != BATCH
            tally.stepped(step + 1, total)

    find_executable_batch_size(train, starting_batch_size=BATCH)()


def lightning(tally: Tally) -> None:
    """Let Lightning's finder choose before the run, then accumulate with that size for good."""
    import lightning as lit
    from lightning.pytorch.tuner import Tuner

    class Module(lit.LightningModule):  # type: ignore[misc]  # has no types here
        def __init__(self, batch_size: int) -> None:
            super().__init__()
            self.model, optimizer, self.rate = _plain()
            self.made, self.batch_size, self.losses = optimizer, batch_size, [0.0]

        def train_dataloader(self) -> Any:  # noqa: ANN401
            return DataLoader(Samples(), batch_size=self.batch_size)

        def training_step(self, tokens: Tensor, _: int) -> Tensor:
            loss = mean_loss(self.model, tokens)
            self.losses.append(float(loss.detach()))
            tally.part(len(tokens))
            return loss

        def configure_optimizers(self) -> Any:  # noqa: ANN401
            return self.made

    class Counts(lit.Callback):  # type: ignore[misc]  # as above
        def on_train_batch_end(self, trainer: Any, module: Any, *_: object) -> None:  # noqa: ANN401
            parts = trainer.accumulate_grad_batches
            if len(module.losses) > parts:
                step = trainer.global_step
                tally.wrong_batches += parts * module.batch_size != BATCH
                tally.stepped(step, sum(module.losses[1:]) / parts)
                module.losses = [0.0]
                module.rate(step)
            trainer.should_stop = tally.over

    def trainer_of(**more: Any) -> Any:  # noqa: ANN401
        quiet = dict.fromkeys(
            ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
        )
        return lit.Trainer(accelerator="cpu", devices=1, max_steps=10**9, **quiet, **more)

    tally.starts = 1
    module = Module(2)
    Tuner(trainer_of()).scale_batch_size(
        module, mode="power", init_val=2, max_trials=5, steps_per_trial=3
    )
    found = min(BATCH, module.batch_size)
    trainer_of(callbacks=[Counts()], accumulate_grad_batches=-(-BATCH // found)).fit(Module(found))


class Samples(IterableDataset[Tensor]):
    """Single samples in our trainer's order."""

    def __iter__(self) -> Iterator[Tensor]:
        return (sample for _, batch in batches() for sample in batch)

    def __len__(self) -> int:
        return 10**9


def _plain() -> tuple[nn.Module, torch.optim.Optimizer, Callable[[int], None]]:
    """Model, optimiser and what sets the learning rate of a step, counted from 0, as ours."""
    own, known = trainer(), settings()
    optimizer, warmup_steps = own._update.optimizer, known.warmup_steps

    def rate(step: int) -> None:
        now = learning_rate(step, highest=2e-3, steps=known.steps, warmup_steps=warmup_steps)
        for group in optimizer.param_groups:
            group["lr"] = now

    return own.model, optimizer, rate


def mean_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return tasks.next_token_loss(model, tokens) / tasks.next_tokens(tokens)


def batches() -> Iterator[tuple[int, Tensor]]:
    """Yield the effective batches in our trainer's order."""
    step = 0
    while True:
        used = order.samples(SEED, len(_DATA), step * BATCH, BATCH)
        yield step, torch.stack([_DATA[each.index] for each in used])
        step += 1


def count_every_tensor() -> None:
    """Give each tensor a mapping of its own, so that the cap counts it as a card's does.

    The CPU device leaves room on the heap for what other threads need (`workers/devices/cpu.py`),
    and a small part of this job would fit into it as a whole.
    """
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.mallopt(cpu._M_MMAP_THRESHOLD, mmap.PAGESIZE)
    for _ in range(cpu._STOCK_CHUNKS):
        libc.malloc(cpu._STOCK_CHUNK_BYTES)


def warmed_up() -> None:
    """Let libraries take what they keep for a step of each size, before the cap stands."""
    own = trainer()
    for limit in (BATCH, 32, 16, 8, 4, 2, 1):
        _whole_batch(own, limit)
    del own
    gc.collect()
    gc.freeze()


def least_bytes() -> dict[int, int]:
    """Return by what a part takes beside the training at the least, found by caps that it fits into
    or does not.
    """
    return {
        limit: least_that_fits(partial(_fits, limit), _MOST_BYTES, _RESOLUTION_BYTES)
        for limit in micro_batches(BATCH, BATCH)
    }


def _fits(limit: int, cap_bytes: int) -> bool:
    own = trainer()
    failure: Exception | None = None
    with limited(status_bytes("VmData") + cap_bytes):
        try:
            _whole_batch(own, limit)
        except Exception as error:  # noqa: BLE001 - looked at where there is memory again
            failure = error
    if failure is not None and not (is_oom(failure) or isinstance(failure, UpdateInterruptedError)):
        raise failure
    return failure is None


def _whole_batch(own: Trainer, limit: int) -> None:
    step = own.step
    while own.step == step:
        own.micro_batch(limit)


#: By name, those who are no part of this project.
OTHERS: Mapping[str, Callable[[Tally], None]] = {"accelerate": accelerate, "lightning": lightning}
MODULES: Mapping[str, Sequence[str]] = {
    "accelerate": ("accelerate.utils",),
    "lightning": ("lightning", "lightning.pytorch.tuner"),
}
