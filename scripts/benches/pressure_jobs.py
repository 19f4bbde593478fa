"""The job under pressure, and what it can know of its memory: on a CPU under a cap, on a card with a neighbour.

The job is a training step of a deep & cross network (arXiv 1708.05123): a dense Adam sweeps over all embedding tables,
however small the batch, and each item's activations take memory. So larger is faster per item, as on a card; how
large the tables are says how precious memory is. Does not choose sizes.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional

from benches.common import MIB, lone_worker
from workers.devices.opening import open_device

FEATURES, WIDTH, LAYERS = 16, 32, 6
"""Of the network. An item is one row of each of `FEATURES` tables, `WIDTH` numbers each."""

STATE_BYTES_PER_ROW = FEATURES * WIDTH * 4 * 4
"""A parameter, its gradient and Adam's two moments, over all tables."""

_FIRST_ITEMS = 64

_SMALL_BYTES = MIB // 2
"""What a step takes of `RLIMIT_DATA` beside its tensors: a page for each mapping, small things on the heap."""

_INTERNED = 60_000
"""Python's table of interned strings is filled up so far: torch leaves it close to doubling, 3.7 MiB at a stroke."""

_PROT_NONE, _MAP_FIXED_NOREPLACE = 0, 0x100000
"""Of mmap(2); Python's module has no names for them."""

_CONTEXT_BYTES = 1024 * MIB
"""More than a CUDA context takes. What is left of it widens the allocator's cap; the neighbour stays where it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What every contestant's process is started with."""

    device: str
    memory_bytes: int
    """All that a step may take when nobody else wants memory."""
    rows: int
    """Of each table."""


class Ground(Protocol):
    """What differs between a CPU and a card."""

    name: str
    torch_device: torch.device
    fused: bool
    """Which Adam: the one that takes no memory of its own, or the default."""

    def clock_s(self) -> float:
        """Return seconds that go forward while the job runs."""

    def wait(self, seconds: float) -> None:
        """Let so much of `clock_s` pass."""

    def base_bytes(self) -> int:
        """Return what the job holds between steps, as whoever caps it counts."""

    def free_bytes(self) -> int:
        """Return what one step may take now: what the device has free, and what this process would use again."""

    def measured(self, step: Callable[[], None]) -> int:
        """Run a step and return the most it took beyond what the job holds."""

    def give_back(self) -> None:
        """Let go of what no tensor needs."""

    def settle(self, step: Callable[[], object]) -> None:
        """Take now what a step or a failure leaves behind once, so that it is not charged to who runs then."""

    def lift(self) -> None:
        """End the cap, where it is this process that is capped."""


class CpuGround:
    """The process's data size against `RLIMIT_DATA`, which is moved from outside.

    Its clock is the process's own processor time, on one thread: what else this machine does, twice as much in one
    minute as in the next, costs nobody anything. On an idle machine it goes as fast as any.
    """

    fused = False

    def __init__(self, spec: JobSpec) -> None:
        import resource  # absent on Windows, where a card needs none of this

        self._resource = resource
        # Sets malloc up: what is freed is the kernel's at once, and small things have room at the wall.
        device = open_device(lone_worker(budget_bytes=spec.memory_bytes))
        self.name, self.torch_device = device.info.name, device.torch_device
        torch.set_num_threads(1)

    def clock_s(self) -> float:
        """See `Ground.clock_s`."""
        return time.process_time()

    def wait(self, seconds: float) -> None:
        """See `Ground.wait`: who sleeps has no processor time."""
        until_s = time.process_time() + seconds
        while time.process_time() < until_s:
            pass

    def base_bytes(self) -> int:
        """See `Ground.base_bytes`."""
        return _status_bytes("VmData")

    def free_bytes(self) -> int:
        """See `Ground.free_bytes`."""
        soft, _ = self._resource.getrlimit(self._resource.RLIMIT_DATA)
        return max(0, soft - _status_bytes("VmData") - _SMALL_BYTES)

    def measured(self, step: Callable[[], None]) -> int:
        """See `Ground.measured`: the kernel keeps the highest resident set until told to forget it (man 5 proc)."""
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before_bytes = _status_bytes("VmRSS")
        step()
        return max(0, _status_bytes("VmHWM") - before_bytes)

    def give_back(self) -> None:
        """See `Ground.give_back`: on a CPU there is no pool."""
        gc.collect()

    def settle(self, step: Callable[[], object]) -> None:
        """See `Ground.settle`."""
        _fence_heap()
        for number in range(_INTERNED):
            sys.intern(f"settle {number}")
        soft, hard = self._resource.getrlimit(self._resource.RLIMIT_DATA)
        self._resource.setrlimit(self._resource.RLIMIT_DATA, (_status_bytes("VmData") + MIB, hard))
        with contextlib.suppress(RuntimeError):
            step()
        self._resource.setrlimit(self._resource.RLIMIT_DATA, (soft, hard))
        self.give_back()

    def lift(self) -> None:
        """See `Ground.lift`."""
        hard = self._resource.getrlimit(self._resource.RLIMIT_DATA)[1]
        self._resource.setrlimit(self._resource.RLIMIT_DATA, (hard, hard))


class CudaGround:
    """torch's allocator on a card whose other tenant comes and goes.

    Each step gives its pool back. A neighbour on Linux can only take what nobody holds, so a job whose pool stays
    would never meet pressure (and the game would not start). All contestants pay alike.
    """

    fused = True

    def __init__(self, spec: JobSpec) -> None:
        budget_bytes = spec.memory_bytes + spec.rows * STATE_BYTES_PER_ROW + _CONTEXT_BYTES
        self._device = open_device(lone_worker(budget_bytes=budget_bytes, device="cuda"))
        self.name, self.torch_device = self._device.info.name, self._device.torch_device

    def clock_s(self) -> float:
        """See `Ground.clock_s`."""
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        """See `Ground.wait`."""
        time.sleep(seconds)

    def base_bytes(self) -> int:
        """See `Ground.base_bytes`."""
        return torch.cuda.memory_reserved()

    def free_bytes(self) -> int:
        """See `Ground.free_bytes`."""
        return self._device.free_bytes()

    def measured(self, step: Callable[[], None]) -> int:
        """See `Ground.measured`: what the allocator took from the card, its gaps included."""
        torch.cuda.reset_peak_memory_stats()
        before_bytes = torch.cuda.memory_reserved()
        step()
        peak_bytes = torch.cuda.max_memory_reserved() - before_bytes
        torch.cuda.empty_cache()
        return peak_bytes

    def give_back(self) -> None:
        """See `Ground.give_back`."""
        self._device.release()

    def settle(self, step: Callable[[], object]) -> None:
        """See `Ground.settle`: torch's pool is given back after each step, and after this one."""
        step()
        self.give_back()

    def lift(self) -> None:
        """See `Ground.lift`: nothing to do; the neighbour is ended by whoever started it."""


def open_ground(spec: JobSpec) -> Ground:
    """Open the device for this process."""
    return CudaGround(spec) if spec.device == "cuda" else CpuGround(spec)


class Network(nn.Module):
    """Embeddings, cross layers, and one number for each item."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        wide = FEATURES * WIDTH
        self.tables = nn.ModuleList(nn.Embedding(rows, WIDTH) for _ in range(FEATURES))
        self.crosses = nn.ParameterList(torch.randn(wide, 1) / wide**0.5 for _ in range(LAYERS))
        self.biases = nn.ParameterList(torch.zeros(wide) for _ in range(LAYERS))
        self.head = nn.Linear(wide, 1)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the logits of items given as one row number for each table."""
        first = torch.cat([table(rows[:, place]) for place, table in enumerate(self.tables)], dim=1)
        crossed = first
        for cross, bias in zip(self.crosses, self.biases, strict=True):
            # Not GELU, which torch hands to oneDNN: refused memory, that fails with words nobody takes for memory.
            crossed = functional.silu(first * (crossed @ cross) + bias + crossed)
        return self.head(crossed).squeeze(1)


class Job:
    """Model, optimiser and data; a step trains on so many fresh items."""

    def __init__(self, spec: JobSpec, ground: Ground) -> None:
        torch.manual_seed(0)
        self._rows = spec.rows
        self._device = ground.torch_device
        self._ground = ground
        self._network = Network(spec.rows).to(self._device)
        self._adam = torch.optim.Adam(self._network.parameters(), lr=1e-3, fused=ground.fused)
        self.sweeps_s: list[float] = []
        """What Adam took in each good step, where a step is done when the call returns."""
        self.last_loss = float("nan")
        # Adam makes its moments in its first step; a library, what it keeps.
        for _ in range(2):
            self.step(_FIRST_ITEMS)
        self.sweeps_s.clear()

    def step(self, items: int) -> int:
        """Train once and return the most memory it took.

        Raises:
            RuntimeError: The device's own out-of-memory.

        """
        return self._ground.measured(lambda: self._train(items))

    def recover(self) -> None:
        """Let go of what a failed step left; call outside the handler of its exception, which holds its tensors."""
        self._ground.give_back()

    def _train(self, items: int) -> None:
        rows = torch.randint(self._rows, (items, FEATURES), device=self._device)
        labels = (rows.sum(dim=1) % 2).float()
        # Gradients stay where they are: they belong to the state and not to the step.
        self._adam.zero_grad(set_to_none=False)
        loss = functional.binary_cross_entropy_with_logits(self._network(rows), labels)
        loss.backward()
        began_s = self._ground.clock_s()
        self._adam.step()
        self.sweeps_s.append(self._ground.clock_s() - began_s)
        self.last_loss = float(loss.detach())  # waits for the card


def _status_bytes(key: str) -> int:
    """Return one line of /proc/self/status, where the kernel counts in KiB."""
    with Path("/proc/self/status").open(encoding="ascii", errors="replace") as status:
        for line in status:
            if line.startswith(key):
                return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}; this benchmark needs Linux")


def _fence_heap() -> None:
    """Map a page that nobody may touch right behind the heap, so that it never grows again.

    Where the kernel refuses a block its own mapping, malloc puts it on the heap if that still fits, a small thing
    settles behind it, and the heap stays so large: up to 5 MiB after a thousand refusals, half of what a game leaves.
    """
    libc = ctypes.CDLL(None)
    libc.sbrk.restype = ctypes.c_void_p
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    end = -(-libc.sbrk(ctypes.c_long(0)) // mmap.PAGESIZE) * mmap.PAGESIZE
    libc.mmap(end, mmap.PAGESIZE, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED_NOREPLACE, -1, 0)
