"""Where the job under pressure stands, and what it can know there: on a CPU under a cap, on a card with a neighbour.

Everything else about the benchmark is the same on both. Neither moves the cap: that is done from outside.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from benches.common import lone_worker
from workers.devices.opening import open_device
from workers.units import MIB

_SMALL_BYTES = MIB // 2
"""What a step takes of `RLIMIT_DATA` beside its tensors: a page for each mapping, small things on the heap."""

_UNUSED_BUDGET_BYTES = 256 * MIB

_INTERNED = 60_000
"""Python's table of interned strings is filled up so far: torch leaves it close to doubling, 3.7 MiB at a stroke."""

_PROT_NONE, _MAP_FIXED_NOREPLACE = 0, 0x100000
"""Of mmap(2); Python's module has no names for them."""

_CONTEXT_BYTES = 1024 * MIB
"""More than a CUDA context takes. What is left of it widens the allocator's cap; the neighbour stays where it is."""


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

    def await_work(self) -> None:
        """Wait until all that was begun is done, so that `clock_s` counts it."""

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

    def __init__(self) -> None:
        import resource  # absent on Windows, where a card needs none of this

        self._resource = resource
        # Sets malloc up: what is freed is the kernel's at once, and small things have room at the wall. Its own cap,
        # which holds only where it is asked for, is not used.
        device = open_device(lone_worker(budget_bytes=_UNUSED_BUDGET_BYTES))
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

    def await_work(self) -> None:
        """See `Ground.await_work`: a processor is done when the call returns."""

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
        try:
            with contextlib.suppress(RuntimeError):
                step()
        finally:
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

    def __init__(self, memory_bytes: int, state_bytes: int) -> None:
        budget_bytes = memory_bytes + state_bytes + _CONTEXT_BYTES
        self._device = open_device(lone_worker(budget_bytes=budget_bytes, device="cuda"))
        self.name, self.torch_device = self._device.info.name, self._device.torch_device

    def clock_s(self) -> float:
        """See `Ground.clock_s`."""
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        """See `Ground.wait`."""
        time.sleep(seconds)

    def await_work(self) -> None:
        """See `Ground.await_work`."""
        torch.cuda.synchronize()

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


def open_ground(device: str, memory_bytes: int, state_bytes: int) -> Ground:
    """Open the device for this process.

    Args:
        device: "cpu" or "cuda".
        memory_bytes: All that a step may take when nobody else wants memory.
        state_bytes: What the job holds between steps.

    """
    return CudaGround(memory_bytes, state_bytes) if device == "cuda" else CpuGround()


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
