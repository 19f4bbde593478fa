"""The main functions of child processes: an engine driven as by the head, and a bare torch loop.

Each serves orders until its pipe closes. Only child processes touch a device: the process of the
script never makes a CUDA context, so it holds no memory of the card.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from benches.common import ChildDiedError, run_turn

from workers import oom
from workers.devices.base import threads_for
from workers.engine.engine import Engine
from workers.messages import Begin, IncompatibleError, Status, StepCounts, Verdict
from workers.nvml import queries
from workers.settings import WorkerSpec

DTYPES = {
    "fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16,
}  # fmt: skip
#: Approximate length of a batch of products in a bare loop. The loop waits for the batch before
#: the newest.
_QUEUED_S = 0.05
_TURN_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """The result of an order."""

    reports: tuple[Status, ...]
    window_s: float  # from the beginning of the first turn to the end of the last
    process_used_bytes: int | None  # memory of this process on the card, from the driver

    @property
    def last(self) -> Status:
        return self.reports[-1]

    @property
    def counts(self) -> StepCounts:
        return sum((report.counts for report in self.reports), StepCounts())

    @property
    def flop_per_s(self) -> float:
        """Work divided by time, including the time between steps and between turns."""
        return self.counts.work_flop / self.window_s

    @property
    def duty(self) -> float:
        return self.counts.busy_s / self.window_s

    @property
    def failures(self) -> int:
        return self.counts.steps_oom + self.counts.steps_error


def serve_engine(connection: Connection, spec: WorkerSpec, environment: Mapping[str, str]) -> None:
    """Serve orders with one engine; an order is (seconds, earliest start on the monotonic clock).

    An order of 0 s ends after the first good step, like the first turn of a process in a run.
    """
    os.environ.update(environment)  # before CUDA reads it
    engine = Engine(spec, Begin(fresh=True))
    while True:
        seconds, at_s = connection.recv()
        reports: list[Status] = []
        time.sleep(max(0.0, at_s - time.monotonic()))
        began_s = time.monotonic()
        while not reports or (
            reports[-1].verdict is Verdict.OK and time.monotonic() - began_s < seconds
        ):
            duration_s = max(0.0, min(_TURN_S, seconds - (time.monotonic() - began_s)))
            reports.append(run_turn(engine, duration_s))
        window_s = time.monotonic() - began_s
        on_card = spec.device == "cuda"
        used_bytes = queries.process_used_bytes(queries.visible_card()) if on_card else None
        turn = Turn(reports=tuple(reports), window_s=window_s, process_used_bytes=used_bytes)
        connection.send(turn)


def serve_bare_loop(connection: Connection, device_name: str) -> None:
    """Serve orders with a plain torch loop: no cap, no policy, no reports.

    An order is (kind, seconds), and a kind is (type, size, bytes of all matrices, as the product's
    claim). The matrices are kept between orders of the same kind.
    """
    bare: BareLoop | None = None
    torch.set_num_threads(threads_for(1))
    while True:
        kind, seconds = connection.recv()
        if bare is None or bare.kind != kind:
            bare = None  # free the old matrices before the new ones are allocated
            bare = BareLoop(kind, torch.device(device_name))
        connection.send(bare.flop_per_s(seconds))


class BareLoop:
    """A loop that only multiplies matrices of one kind."""

    def __init__(self, kind: tuple[str, int, int], device: torch.device) -> None:
        if device.type == "cpu":
            # M_MMAP_THRESHOLD as the product sets it, so that both do the same work: oneDNN
            # allocates scratch memory again for each product.
            ctypes.CDLL(None).mallopt(-3, 64 * 1024)
        self.kind = kind
        name, self.size, block_bytes = kind
        torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
        each_bytes = self.size * self.size * DTYPES[name].itemsize
        block = torch.empty(
            block_bytes // each_bytes * each_bytes, dtype=torch.uint8, device=device
        )
        matrices = block.view(DTYPES[name]).view(-1, self.size, self.size)
        matrices[:2].normal_(generator=torch.Generator(device=device).manual_seed(0))
        self._left, self._right, *self._ring = matrices.unbind()
        self._cuda = device.type == "cuda"
        self._queued = 1
        self._next = 0
        self.flop_per_s(0.2)  # loads kernels, and finds the number of products in a batch

    def flop_per_s(self, seconds: float) -> float:
        products = 0
        before: Any = None
        waited = not self._cuda
        began_s = batch_s = time.perf_counter()
        while batch_s - began_s < seconds:
            for _ in range(self._queued):
                torch.mm(self._left, self._right, out=self._ring[self._next])
                self._next = (self._next + 1) % len(self._ring)
            products += self._queued
            if self._cuda:
                # The card always has a batch queued, so it is never idle.
                event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                event.record()
                if before is not None:
                    before.synchronize()
                    waited = True
                before = event
            now_s = time.perf_counter()
            if waited and now_s - batch_s < _QUEUED_S / 2:
                self._queued *= 2
            batch_s = now_s
        if self._cuda:
            torch.cuda.synchronize()
        return 2.0 * self.size**3 * products / (time.perf_counter() - began_s)


def call_in_child(
    connection: Connection, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    try:
        answer = function(*arguments)
    except IncompatibleError as error:  # its text is written for the user
        answer = ChildDiedError(f"{function.__name__}: {error}")
    except Exception as error:  # noqa: BLE001 - reported with its traceback
        answer = ChildDiedError(f"{function.__name__}: {oom.traceback_text(error)}")
    connection.send(answer)
