"""The training under pressure, the same for all contestants, and what a contestant's process tells of it.

A GPT of 0.2 M parameters in fp32 on made text. On a CPU two samples at once are nearly as fast as all: a small
micro-batch costs little here, and much on a card. So contestants that never grow again lose less here.
"""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from benches.pressure_job import HOSTS, Host
from workers import oom
from workers.settings import FailureKind, Scalar
from workers.training import order
from workers.training.made_data import MadeText
from workers.training.models import Gpt, GptShape
from workers.training.optimizers import adamw, allocate_states
from workers.training.settings import TrainSettings
from workers.training.tasks import TrainTask, blocks_of, next_token_loss, next_tokens
from workers.units import MIB

#: Samples of an optimiser step, for every contestant.
BATCH = 32
_SHAPE = GptShape(layers=4, heads=4, width=64, seq=64, vocabulary=256)
_SEED = 0
_ITEMS = 4096
#: So many steps that the schedule of the learning rate never moves.
_STEPS = 10**9
_LR = 1e-3

PLAIN: dict[str, Scalar] = {
    "preset": "benches.train_pressure_job:task",
    "steps": _STEPS,
    "batch": BATCH,
    "lr": _LR,
    "warmup_steps": 0,
    "clip": None,
    "precision": "fp32",
    "checkpoint": "none",
}
_SETTINGS = TrainSettings.model_validate(PLAIN)


@dataclass(slots=True)
class Tally:
    """What a process has computed since it was cleared: by part its moment and rows, by step its loss."""

    parts: list[tuple[float, int]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    failed_at_s: list[float] = field(default_factory=list)
    wrong_batches: int = 0
    starts: int = 1
    skipped: int = 0


tally = Tally()


class Texts(Dataset[torch.Tensor]):
    """Samples made beforehand; `in_order` by their place in the whole training, else by their index."""

    def __init__(self, *, in_order: bool) -> None:
        self._made = torch.stack(MadeText(_SHAPE.seq, _SHAPE.vocabulary, _SEED, _ITEMS).__getitems__(range(_ITEMS)))
        self._in_order = in_order

    def __len__(self) -> int:
        return 2**31 if self._in_order else _ITEMS

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._in_order:
            (used,) = order.samples(_SEED, _ITEMS, index, 1)
            index = used.index
        return self._made[index]


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Count the part, and return the sum over its tokens."""
    tally.parts.append((time.monotonic(), len(tokens)))
    return next_token_loss(model, tokens)


def task(_: TrainSettings) -> TrainTask:
    return TrainTask(
        name="pressure",
        model=lambda: Gpt(_SHAPE, 0.0),
        dataset=Texts(in_order=False),
        loss=loss_of,
        count=next_tokens,
        blocks=blocks_of,
        items="tokens",
    )


def new_model() -> Gpt:
    """Return the model with the weights that the trainer begins with."""
    torch.manual_seed(order.mixed(_SEED, 0) >> 1)
    return Gpt(_SHAPE, 0.0)


def new_optimizer(model: nn.Module) -> torch.optim.AdamW:
    return adamw(list(model.parameters()), _SETTINGS, _LR)


def batches() -> Iterator[torch.Tensor]:
    texts = Texts(in_order=True)
    for first in range(0, len(texts), BATCH):
        yield torch.stack([texts[first + place] for place in range(BATCH)])


class PlainLoop:
    """The loop that its users write: parts of a size that is told, gradients added by `backward`."""

    def __init__(self, device: torch.device) -> None:
        self._model = new_model().to(device)
        self._optimizer = new_optimizer(self._model)
        allocate_states(self._optimizer)
        self._batches = batches()
        self._device = device
        self._tokens: torch.Tensor | None = None

    def step(self, micro: Callable[[], int]) -> None:
        """Train on one effective batch; after an out-of-memory, the next call trains on the same one again."""
        if self._tokens is None:
            self._tokens = next(self._batches).to(self._device)
        try:
            self._train(self._tokens, micro)
        except Exception as error:
            if oom.classify(error).kind not in {FailureKind.DEFINITE, FailureKind.PROBABLE}:
                raise
            tally.failed_at_s.append(time.monotonic())
        else:
            self._tokens = None
            return
        self._optimizer.zero_grad(set_to_none=False)
        gc.collect()

    def _train(self, tokens: torch.Tensor, micro: Callable[[], int]) -> None:
        done, total = 0, 0.0
        while done < BATCH:
            left = BATCH - done
            parts = -(-left // max(1, micro()))
            part = tokens[done : done + -(-left // parts)]
            loss = loss_of(self._model, part) / next_tokens(tokens)
            loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
            total += float(loss.detach())
            done += len(part)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)
        tally.losses.append(total)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a part of so many samples takes, in bytes and seconds, by its size; the sizes in ascending order."""

    points: list[tuple[int, float, float]]

    def largest_within(self, limit_bytes: float) -> int:
        return max((rows for rows, peak_bytes, _ in self.points if peak_bytes <= limit_bytes), default=1)

    @property
    def most_bytes(self) -> float:
        return self.points[-1][1]

    @property
    def longest_s(self) -> float:
        return max(seconds for _, _, seconds in self.points)


def opened(device: str) -> Host:
    """Open the host with memory enough for all, and let libraries take what they keep."""
    host = HOSTS[device](2**30)
    loop = PlainLoop(host.torch_device)
    for rows in (BATCH, 1, BATCH):
        loop.step(lambda rows=rows: rows)  # type: ignore[misc]  # a default is the loop's value of now
    host.settle(lambda: loop.step(lambda: BATCH))
    return host


def measure(connection: Connection, device: str, seconds: float) -> None:
    """Send the sizes, and the losses of a run that is left alone, with its samples a second."""
    host = opened(device)
    loop = PlainLoop(host.torch_device)
    loop.step(lambda: BATCH)
    points = []
    for rows in sorted({-(-BATCH // parts) for parts in range(1, BATCH + 1)}):
        times_s = []
        for _ in range(5):
            began_s = time.perf_counter()
            loop.step(lambda rows=rows: rows)  # type: ignore[misc]  # as above
            times_s.append((time.perf_counter() - began_s) * rows / BATCH)
        points.append((rows, _needed_bytes(host, loop, rows, device), sorted(times_s)[2]))
    del loop
    gc.collect()
    loop = PlainLoop(host.torch_device)
    tally.losses.clear()
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s:
        loop.step(lambda: BATCH)
    connection.send((Sizes(points=points), tally.losses, len(tally.losses) * BATCH / seconds))


def _needed_bytes(host: Host, loop: PlainLoop, rows: int, device: str) -> float:
    """Return what a step in parts of so many rows needs: on a CPU, the least under which the kernel refuses nothing."""
    if device == "cuda":
        return host.measured(lambda: loop.step(lambda: rows))
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    base_bytes, little, enough = host.base_bytes(), 0, 256 * MIB
    while enough - little > MIB // 4:
        tried = (little + enough) // 2
        before = len(tally.failed_at_s)
        resource.setrlimit(resource.RLIMIT_DATA, (base_bytes + tried, hard))
        try:
            loop.step(lambda: rows)
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        little, enough = (tried, enough) if len(tally.failed_at_s) > before else (little, tried)
    return float(enough)


def plain_row(began_s: float, ended: str | None) -> dict[str, Any]:
    """Return what the process has tallied; the bench makes figures of it."""
    return {
        "losses": list(tally.losses),
        "skipped": tally.skipped,
        "parts": [(at_s - began_s, rows) for at_s, rows in tally.parts],
        "failed_at_s": [round(at_s - began_s, 2) for at_s in tally.failed_at_s],
        "wrong_batches": tally.wrong_batches,
        "starts": tally.starts,
        "ended": ended,
    }
