"""The training job of `pressure.py`, whose larger batches are faster, and the measurement of it.

The job trains a deep & cross network (arXiv 1708.05123). A dense Adam updates all embedding tables,
however small the batch, and the activations of each item need memory. Larger tables make memory
more valuable: `scout` sizes the tables so that half of the full speed is reached at a given share
of the largest batch, whatever an update and an item cost on this machine.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import torch
from torch import nn
from torch.nn import functional

from benches.common import lone_worker, status_bytes
from workers.devices import open_device
from workers.units import MIB

#: Tables, numbers in each row of a table, and cross layers. An item is one row of each table.
_FEATURES, _WIDTH, _LAYERS = 16, 32, 6
#: Parameters, gradients and Adam's two moments of one row of all tables, in fp32.
_ROW_BYTES = _FEATURES * _WIDTH * 4 * 4
_FIRST_ITEMS = 64
#: Use of `RLIMIT_DATA` by a step beside its tensors: a page for each mapping, and small blocks on
#: the heap.
_SMALL_BYTES = MIB // 2
_UNUSED_BUDGET_BYTES = 256 * MIB
#: Number of strings that `settle` interns. torch leaves Python's table of interned strings shortly
#: before it doubles, which takes 3.7 MiB at once.
_INTERNED = 60_000
_PROT_NONE, _MAP_FIXED_NOREPLACE = 0, 0x100000  # of mmap(2)
#: Size that runs at half of the full speed, as a share of the largest size that fits. In the
#: simulator's regime `precious` it is 1000 items of 2 GiB, on levels up to 8 GiB.
_HALF_SPEED_SHARE = 0.42
#: Bounds of parameters, gradients and moments, as multiples of the memory of a step.
_LEAST_STATE, _MOST_STATE = 1 / 8, 3.0
#: Small, so that a step takes 0.1 s, and a minute has hundreds of steps.
MEMORY_BYTES = 48 * MIB
_STEPS = 7
_SMALL_ITEMS = 16
#: Sizes at which the throughput is measured, as shares of the largest size that fits.
_SHARES = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1.0)


class Host:
    """This process, its data size, and its `RLIMIT_DATA`, which the benchmark moves from outside.

    The clock is the processor time of this process with one thread, so that other load on the
    machine costs no contestant time. On an idle machine it advances like wall time.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        # Opening the device sets malloc up: freed memory returns to the kernel at once, and small
        # blocks have room at the limit. The cap of the device is not used.
        self.name = open_device(lone_worker(budget_bytes=_UNUSED_BUDGET_BYTES)).info.name
        self.clock_s = time.process_time
        torch.set_num_threads(1)

    def wait(self, seconds: float) -> None:
        """Wait actively for `seconds` of `clock_s`: a sleeping process uses no processor time."""
        until_s = time.process_time() + seconds
        while time.process_time() < until_s:
            pass

    def base_bytes(self) -> int:
        return status_bytes("VmData")

    def free_bytes(self) -> int:
        """Return the memory that one step may use now."""
        return max(0, self._limits()[0] - status_bytes("VmData") - _SMALL_BYTES)

    def measured(self, step: Callable[[], None]) -> int:
        """Run a step and return its peak memory; 5 in clear_refs resets the kernel's peak."""
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before_bytes = status_bytes("VmRSS")
        step()
        return max(0, status_bytes("VmHWM") - before_bytes)

    def settle(self, step: Callable[[], object]) -> None:
        """Allocate what a first step or failure leaves behind, so that no later step pays it."""
        _fence_heap()
        for number in range(_INTERNED):
            sys.intern(f"settle {number}")
        soft, hard = self._limits()
        self._limits((status_bytes("VmData") + MIB, hard))
        try:
            with contextlib.suppress(RuntimeError):
                step()
        finally:
            self._limits((soft, hard))
        gc.collect()

    def lift(self) -> None:
        hard = self._limits()[1]
        self._limits((hard, hard))

    def _limits(self, limits: tuple[int, int] | None = None) -> tuple[int, int]:
        return self._process.rlimit(psutil.RLIMIT_DATA, limits)


def _fence_heap() -> None:
    """Map an inaccessible page directly behind the heap, so that the heap never grows again.

    If the kernel refuses to map a block, malloc puts the block on the heap if it fits there. A
    small block behind it then keeps the heap large: up to 5 MiB after 1000 refusals, which is half
    of the memory that a game leaves.
    """
    libc = ctypes.CDLL(None)
    libc.sbrk.restype = ctypes.c_void_p
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    end = -(-libc.sbrk(ctypes.c_long(0)) // mmap.PAGESIZE) * mmap.PAGESIZE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE
    libc.mmap(end, mmap.PAGESIZE, _PROT_NONE, flags, -1, 0)


class _Network(nn.Module):
    def __init__(self, rows: int) -> None:
        super().__init__()
        wide = _FEATURES * _WIDTH
        self.tables = nn.ModuleList(nn.Embedding(rows, _WIDTH) for _ in range(_FEATURES))
        self.crosses = nn.ParameterList(torch.randn(wide, 1) / wide**0.5 for _ in range(_LAYERS))
        self.biases = nn.ParameterList(torch.zeros(wide) for _ in range(_LAYERS))
        self.head = nn.Linear(wide, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        first = torch.cat([table(rows[:, place]) for place, table in enumerate(self.tables)], dim=1)
        crossed = first
        for cross, bias in zip(self.crosses, self.biases, strict=True):
            # Not GELU, which torch runs with oneDNN: without memory, oneDNN raises an error that
            # does not name memory.
            crossed = functional.silu(first * (crossed @ cross) + bias + crossed)
        logits: torch.Tensor = self.head(crossed).squeeze(1)
        return logits


class Job:
    """Model, optimiser and data; each step trains on fresh items."""

    def __init__(self, rows: int, host: Host) -> None:
        torch.manual_seed(0)
        self._rows = rows
        self._host = host
        self._network = _Network(rows)
        self._adam = torch.optim.Adam(self._network.parameters(), lr=1e-3)
        self.sweeps_s: list[float] = []  # time of Adam in each good step
        self.last_loss = float("nan")
        # In the first steps Adam allocates its moments, and libraries their lasting buffers.
        for _ in range(2):
            self.step(_FIRST_ITEMS)
        self.sweeps_s.clear()

    def step(self, items: int) -> int:
        """Train once and return the peak memory. Raises the device's out-of-memory error."""
        return self._host.measured(lambda: self._train(items))

    def step_s(self, items: int) -> float:
        """Return the median time of a few steps without the first one."""
        times_s = []
        for _ in range(1 + _STEPS):
            began_s = self._host.clock_s()
            self.step(items)
            times_s.append(self._host.clock_s() - began_s)
        return statistics.median(times_s[1:])

    def _train(self, items: int) -> None:
        rows = torch.randint(self._rows, (items, _FEATURES))
        labels = (rows.sum(dim=1) % 2).float()
        # Gradients stay allocated: they count as memory of the state and not of the step.
        self._adam.zero_grad(set_to_none=False)
        loss = functional.binary_cross_entropy_with_logits(self._network(rows), labels)
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
        began_s = self._host.clock_s()
        self._adam.step()
        self.sweeps_s.append(self._host.clock_s() - began_s)
        self.last_loss = float(loss.detach())


@dataclass(frozen=True, slots=True, kw_only=True)
class Scouted:
    """Memory and speed of the job on this machine without pressure.

    `fits` is the largest size whose step needs at most `MEMORY_BYTES`, with tables of `rows` rows.
    An item adds `unit_bytes`. A step takes `fixed_s`, and `unit_s` for each item. `points` has the
    measurements in the order of size: items, items_per_s, step_ms, peak_mib.
    """

    device_name: str
    rows: int
    fits: int
    unit_bytes: float
    fixed_s: float
    unit_s: float
    points: Sequence[Mapping[str, float]]

    def open(self) -> tuple[Host, Job]:
        host = Host()
        return host, Job(self.rows, host)

    def largest_within(self, limit_bytes: float) -> int:
        """Return the largest size whose step needs at most `limit_bytes`.

        Interpolates between measured sizes. A single line through all of them would be too high for
        small sizes, where the optimiser's memory hides the memory of the items.
        """
        known = [(point["items"], point["peak_mib"] * MIB) for point in self.points]
        for (few, less_bytes), (many, more_bytes) in pairwise(known):
            if limit_bytes <= more_bytes:
                share = (limit_bytes - less_bytes) / max(1.0, more_bytes - less_bytes)
                return max(1, int(few + (many - few) * share))
        return int(many + (limit_bytes - more_bytes) / self.unit_bytes)


def scout(connection: Connection) -> None:
    """Measure the job and send a `Scouted`. Runs in its own child process."""
    few, more, most = (
        max(16, int(MEMORY_BYTES * state / _ROW_BYTES))
        for state in (_LEAST_STATE, 0.5, _MOST_STATE)
    )
    host = Host()
    job = Job(more, host)
    items = _SMALL_ITEMS
    while (peak_bytes := job.step(items)) < MEMORY_BYTES / 4:
        items *= 2
    fits = int(MEMORY_BYTES / peak_bytes * items)
    unit_s = (job.step_s(fits) - job.step_s(fits // 4)) / (fits - fits // 4)
    more_s = job.step_s(_SMALL_ITEMS)
    del job
    per_row_s = (more_s - Job(few, host).step_s(_SMALL_ITEMS)) / (more - few)
    missing_s = _HALF_SPEED_SHARE * fits * unit_s - more_s
    rows = min(max(more + int(missing_s / max(per_row_s, 1e-12)), few), most)

    job = Job(rows, host)
    job.step(fits)
    points = []
    for size in (max(1, int(share * fits)) for share in _SHARES):
        peak_mib = statistics.median(job.step(size) for _ in range(3)) / MIB
        step_s = job.step_s(size)
        speed = {"items": size, "items_per_s": size / step_s, "step_ms": step_s * 1e3}
        points.append({**speed, "peak_mib": peak_mib})
    # A line through a quarter and all of the size; at small sizes the optimiser sets the peak.
    low, high = (points[_SHARES.index(share)] for share in (1 / 4, 1.0))
    span = high["items"] - low["items"]
    unit_bytes = (high["peak_mib"] - low["peak_mib"]) * MIB / span
    unit_s = (high["step_ms"] - low["step_ms"]) / 1e3 / span
    fixed_bytes = high["peak_mib"] * MIB - unit_bytes * high["items"]
    connection.send(
        Scouted(
            device_name=host.name, rows=rows,
            fits=int((MEMORY_BYTES - fixed_bytes) / unit_bytes), unit_bytes=unit_bytes,
            fixed_s=max(0.0, high["step_ms"] / 1e3 - unit_s * high["items"]), unit_s=unit_s,
            points=points,
        )
    )  # fmt: skip
