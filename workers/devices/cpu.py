"""The CPU as a device with a real cap: the kernel refuses memory beyond it, and torch raises its
own out-of-memory.

`RLIMIT_DATA` bounds a process's private writable memory (man 2 getrlimit; since Linux 4.7 it counts
private mappings too). Set to the present size plus the cap, it makes every recovery path of the
engine run for real on a machine without a GPU. Linux only. Bounds neither the resident set nor
shared memory.

The limit holds while the workload computes, and is lifted in between: otherwise the kernel would
refuse what the engine needs to back off. What the process grows by in between is not charged.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar

import psutil
import torch

from workers.devices.base import EmergencyProduct, threads_for
from workers.messages import Cause, DeviceInfo, IncompatibleError, MemoryInfo
from workers.settings import WorkerSpec
from workers.units import MIB

_STATUS: Final = Path("/proc/self/status")
_CLEAR: Final = Path("/proc/self/clear_refs")

#: Resets the highest resident size to the present one (man 5 proc, since Linux 4.0).
_RESET_HIGHEST: Final = "5"

#: In the order in which the kernel writes them (fs/proc/task_mmu.c, task_mem).
_LINES: Final = re.compile(
    r"VmHWM:\s*(\d+) kB\nVmRSS:\s*(\d+) kB\nRssAnon:.*\nRssFile:\s*(\d+) kB\nRssShmem:\s*(\d+) "
    r"kB\nVmData:\s*(\d+) kB"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """One measurement of this process, in bytes.

    Pages of files, such as a library's code, and shared memory are not counted, as under the cap.
    """

    data_bytes: int
    """Private writable memory, written or not, as RLIMIT_DATA counts it (VmData)."""
    resident_bytes: int
    """Private memory in RAM (VmRSS less RssFile and RssShmem)."""
    highest_bytes: int
    """The highest `resident_bytes` since the process began or `reset_highest` was called: VmHWM,
    less what files and shared memory take now.
    """


def process_memory() -> ProcessMemory:
    """Measure this process; takes some 20 microseconds.

    Raises:
        IncompatibleError: The kernel does not report these figures.
    """
    try:
        status = _STATUS.read_text(encoding="ascii", errors="replace")
    except OSError as error:
        raise IncompatibleError(
            f"the CPU device needs Linux's {_STATUS} to cap memory: {error}"
        ) from error
    match = _LINES.search(status)
    if match is None:
        raise IncompatibleError(
            f"the CPU device needs VmHWM to VmData in {_STATUS} (Linux 4.5) to cap memory"
        )
    highest, resident, file, shared, data = (1024 * int(kib) for kib in match.groups())
    other = file + shared
    return ProcessMemory(
        data_bytes=data, resident_bytes=resident - other, highest_bytes=highest - other
    )


def reset_highest() -> None:
    """Reset the highest resident size to the present one.

    Raises:
        OSError: The kernel does not let this process do so, as in some containers.
    """
    _CLEAR.write_text(_RESET_HIGHEST, encoding="ascii")


T = TypeVar("T")

#: Loaded once: each load would make new classes of functions.
_LIBC: Final = ctypes.CDLL(None)

#: glibc's M_MMAP_THRESHOLD (malloc.h). Blocks of at least this size get a mapping of their own, so
#: freeing one returns it to the kernel at once. The default threshold grows to 32 MiB with use, and
#: freed blocks would stay on the heap and count against the worker's cap.
_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLD_BYTES = 64 * 1024

#: While freed blocks are kept: the largest threshold that glibc accepts, and its M_TRIM_THRESHOLD.
_KEPT_THRESHOLD_BYTES = 32 * 2**20
_M_TRIM_THRESHOLD = -1
_TRIM_BYTES = 128 * 1024
_NO_TRIM_BYTES = 2**31 - 1

#: Mapping each block again halves the speed of a small training. So freed blocks are kept after
#: `_STEPS_BEFORE` steps of the largest size, if no step took more than `_SPARE_SHARE` of the cap:
#: then a heap that cannot shrink later does no harm. After `_STEPS_KEPT` more steps one step is
#: measured without.
_STEPS_BEFORE = 8
_SPARE_SHARE = 0.25
_STEPS_KEPT = 256

#: While the data size of the process stays the same, malloc's free lists are measured once in this
#: many steps: walking them takes a twentieth of a small step.
_COUNTED_EVERY = 16

#: glibc's M_ARENA_MAX. When the kernel refuses a mapping, malloc tries the heap of another arena,
#: which grows to 64 MiB and never shrinks below its last living block: measured after 1000
#: refusals, 64 MiB were not returned.
_M_ARENA_MAX = -8

#: The fields of `struct mallinfo2`; `fordblks` is the free memory.
_MALLOC_INFO = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)

#: Subtracted from what a worker may obtain. oneDNN builds a kernel for each new shape, which takes
#: up to 2 MiB with one thread and 4 MiB with two (measured, torch 2.13, bf16, n = 256 to 5568);
#: under 0.5 MiB it crashes the process instead of raising. malloc's header page of each mapping is
#: covered too.
_MARGIN_BYTES = 2 * 2**20
_MARGIN_PER_THREAD_BYTES = 2**20

#: With less than this a worker cannot even run the smallest product.
_LEAST_USABLE_BYTES = 2**20

#: Other threads may increase the data size by this much before it counts against the cap. The bound
#: is needed because a workload that never frees its tensors looks the same: without it each
#: recovery would allow such a workload another cap.
_DRIFT_LIMIT_BYTES = 64 * 2**20

_RESET = "measured: the highest resident size, which is reset before each step"
_NOT_RESET = (
    "not measured: the kernel does not let this process reset its highest resident size "
    "(/proc/self/clear_refs), so memory that a step frees before it returns is missed"
)

#: Kernels that oneDNN caches, unless the user has set it. Its default of 1,024 takes 15 MiB for
#: each new shape of a small GPT's steps, without a limit; a step of a small CNN needs 48 to 64
#: kernels (measured, torch 2.13).
_ONEDNN_CACHE = "64"

#: Newest instruction set for oneDNN, unless the user has set it. Not AMX: its bf16 kernels take
#: memory outside torch, and fail under a small cap with "could not create a primitive".
_ONEDNN_ISA = "AVX512_CORE_BF16"

_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}
_DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


class CpuDevice:
    """This process's share of the machine's RAM.

    Raises:
        IncompatibleError: The budget leaves nothing to work with, or this is not Linux.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", _ONEDNN_CACHE)
        os.environ.setdefault("ONEDNN_MAX_CPU_ISA", _ONEDNN_ISA)
        use_mappings_for_blocks()
        threads = threads_for(spec.workers_on_host)
        torch.set_num_threads(threads)
        self.torch_device = torch.device("cpu")
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        name = re.search(r"^model name.*?: *(.*)", cpuinfo, re.MULTILINE)
        self.torch_dtype = _usable_dtype(spec.workload.dtype, cpuinfo)
        before_bytes = process_memory().data_bytes
        self._emergency = EmergencyProduct(spec.memory.emergency_size, self.torch_device)
        # oneDNN builds here what it keeps, so that this counts as context and not against the cap.
        ones = torch.ones((512, 512), dtype=self.torch_dtype)
        torch.mm(ones, ones)
        del ones
        gc.collect()
        self._now = self._base = process_memory()
        self._failed = False
        """Whether the last block under the limit ended with an exception."""
        self._opened_bytes = self._base.data_bytes
        self._opened_free_bytes = _free_in_malloc_bytes()
        context_bytes = max(0, self._opened_bytes - before_bytes)
        self._cap_bytes = spec.budget_bytes - context_bytes
        self.most_bytes = self._cap_bytes - _MARGIN_BYTES - threads * _MARGIN_PER_THREAD_BYTES
        floor_bytes = max(spec.memory.floor_bytes, _LEAST_USABLE_BYTES)
        if self.most_bytes < floor_bytes:
            raise IncompatibleError(
                f"{spec.slot}: of the budget of {spec.budget_bytes / MIB:.1f} MiB the runtime "
                f"leaves {self.most_bytes / MIB:.1f} MiB, under the floor of "
                f"{floor_bytes / MIB:.1f} MiB; raise nodes.{spec.node}.vram_per_worker_gib (or the "
                "scale), or lower memory.floor_mib",
                cause=Cause.OUT_OF_MEMORY,
            )
        self._peak_bytes = 0
        self._keeps = self._has_kept = False
        """Whether freed blocks are kept now, and whether they ever were."""
        self._largest: object = None
        """`largest` of the last `timed` call."""
        self._steps_alike = self._alike_peak_bytes = 0
        """Steps since `largest` changed, or since blocks were kept or given back; highest peak of
        these steps.
        """
        self._free_before_bytes = self._free_bytes = 0
        """Free in malloc's lists: before any block was kept, and beyond that."""
        self._counted_at_bytes: int | None = None
        """Data size of the process when the free lists were measured last."""
        self._resets_peaks = False
        with suppress(OSError):
            reset_highest()
            self._resets_peaks = True
        with self.enforced():
            cap_read_back_bytes = (
                resource.getrlimit(resource.RLIMIT_DATA)[0] - self._base.data_bytes
            )
        self.info = DeviceInfo(
            kind="cpu",
            name="CPU" if name is None else name[1].strip(),
            uuid=None,
            total_bytes=psutil.virtual_memory().total,
            context_bytes=context_bytes,
            context_source="measured: growth of the data size while the device was opened",
            peak_source=_RESET if self._resets_peaks else _NOT_RESET,
            cap_bytes=cap_read_back_bytes,
            dtype=_DTYPE_NAMES[self.torch_dtype],
            threads=threads,
            pid=os.getpid(),
            torch_version=str(torch.__version__),  # its own type would make the head load torch
        )

    def held_bytes(self) -> int:
        """See `Device.held_bytes`: growth of the process's data under the limit, less blocks that
        malloc keeps.
        """
        return max(0, self._now.data_bytes - self._base.data_bytes - self._free_bytes)

    def kept_bytes(self) -> int:
        """See `Device.kept_bytes`; includes what `rebase` no longer charges to the cap.

        Small tensors are on malloc's heap, which does not shrink below its last living block, not
        even by `malloc_trim`. Free memory there is data of the process, but no tensor needs it.
        """
        free_bytes = _free_in_malloc_bytes() - self._opened_free_bytes
        return max(0, self._now.data_bytes - self._opened_bytes - free_bytes)

    def step_peak_bytes(self) -> int:
        """What was held before the step plus the growth of the resident memory in it, or what is
        held now if that is more.

        The kernel keeps no highest data size. Memory that a step frees without ever writing to it
        is missed.
        """
        highest = self._now.highest_bytes - self._base.resident_bytes if self._resets_peaks else 0
        is_small = highest <= _SPARE_SHARE * self.most_bytes
        self._steps_alike += 1
        if not self._keeps:
            self._alike_peak_bytes = max(self._alike_peak_bytes, highest)
            if self._resets_peaks and is_small and self._steps_alike >= _STEPS_BEFORE:
                self._keep()
        else:
            if not is_small:
                self._give_back()
            elif self._steps_alike > _STEPS_KEPT:
                self._give_back()
                self._steps_alike = _STEPS_BEFORE - 1
            if is_small:
                highest = self._alike_peak_bytes  # kept blocks were in RAM too
        peak = max(self.held_bytes(), highest)
        self._peak_bytes = max(self._peak_bytes, peak)
        return peak

    def allowed_bytes(self, leave_bytes: int) -> int:
        """See `Device.allowed_bytes`; also bounded by the machine's available RAM."""
        available = psutil.virtual_memory().available
        allowed = max(0, min(self.most_bytes, self.held_bytes() + available - leave_bytes))
        if self._alike_peak_bytes > _SPARE_SHARE * allowed:
            self._give_back()
        return allowed

    def memory(self) -> MemoryInfo:
        machine = psutil.virtual_memory()
        held = self.held_bytes()
        peak, self._peak_bytes = max(self._peak_bytes, held), held
        return MemoryInfo(
            device_total_bytes=machine.total,
            device_used_bytes=machine.total - machine.available,
            allocated_bytes=held,
            reserved_bytes=held + self._free_bytes,
            peak_bytes=peak,
            # The CPU allocator asks the kernel once; it has no pool to flush before a second try.
            alloc_retries=0,
        )

    def release(self) -> None:
        self._give_back()
        with self.enforced():  # what this frees was charged to the workload
            gc.collect()

    def _give_back(self) -> None:
        self._steps_alike = 0
        if self._keeps:
            self._keeps = False
            with self.enforced():
                _set_malloc(_MMAP_THRESHOLD_BYTES, _TRIM_BYTES)
                _LIBC.malloc_trim(0)

    def _keep(self) -> None:
        if not self._has_kept:
            self._free_before_bytes = _free_in_malloc_bytes()
        self._keeps, self._has_kept, self._steps_alike = True, True, 0
        _set_malloc(_KEPT_THRESHOLD_BYTES, _NO_TRIM_BYTES)

    def emergency(self) -> None:
        self._emergency.run()

    def timed(self, work: Callable[[], T], largest: object = None) -> tuple[T, float]:
        """See `Device.timed`; on a CPU the work is done when the call returns."""
        if largest is None or largest != self._largest:
            self._give_back()
            self._largest, self._alike_peak_bytes = largest, 0
        if self._resets_peaks:
            reset_highest()
        with self.enforced():
            started = time.perf_counter()
            result = work()
            return result, time.perf_counter() - started

    def rebase(self) -> int:
        """See `Device.rebase`.

        Other threads of the process grow it over the hours (their stacks and heaps count as data).
        Without this, what they took during a step would reduce the cap promised to tensors.
        """
        self._now = process_memory()
        self._free_before_bytes, self._free_bytes = _free_in_malloc_bytes(), 0
        data_bytes = min(self._now.data_bytes, self._opened_bytes + _DRIFT_LIMIT_BYTES)
        held_bytes = self._now.data_bytes - data_bytes
        self._base = replace(
            self._now, data_bytes=data_bytes, resident_bytes=self._now.resident_bytes - held_bytes
        )
        return 0

    @contextmanager
    def enforced(self) -> Iterator[None]:
        """See `Device.enforced`: the kernel refuses memory beyond the cap."""
        before, self._now = self._now, process_memory()
        data_bytes = self._now.data_bytes - before.data_bytes
        resident_bytes = self._now.resident_bytes - before.resident_bytes
        if self._failed:
            # Memory freed since then belonged to the frames of the failed work, so it was charged
            # to the cap.
            data_bytes, resident_bytes = max(0, data_bytes), max(0, resident_bytes)
        self._base = replace(
            self._base,
            data_bytes=self._base.data_bytes + data_bytes,
            resident_bytes=self._base.resident_bytes + resident_bytes,
        )
        self._failed = True  # until this block ends without an error
        soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (self._base.data_bytes + self._cap_bytes, hard))
        try:
            yield
            self._failed = False
        finally:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
            self._now = process_memory()
            is_same = self._keeps and self._now.data_bytes == self._counted_at_bytes
            if self._has_kept and (not is_same or self._steps_alike % _COUNTED_EVERY == 0):
                self._counted_at_bytes = self._now.data_bytes
                self._free_bytes = max(0, _free_in_malloc_bytes() - self._free_before_bytes)


def use_mappings_for_blocks() -> None:
    """Make malloc return each freed block to the kernel."""
    _set_malloc(_MMAP_THRESHOLD_BYTES, _TRIM_BYTES)
    _LIBC.mallopt(_M_ARENA_MAX, 1)


def _set_malloc(threshold_bytes: int, trim_bytes: int) -> None:
    _LIBC.mallopt(_M_MMAP_THRESHOLD, threshold_bytes)
    _LIBC.mallopt(_M_TRIM_THRESHOLD, trim_bytes)


class _MallocInfo(ctypes.Structure):
    """glibc's `struct mallinfo2` (malloc.h)."""

    _fields_ = [(name, ctypes.c_size_t) for name in _MALLOC_INFO]


def _free_in_malloc_bytes() -> int:
    """Return the bytes in malloc's free lists; 0 if libc does not say (glibc before 2.33, musl)."""
    info = getattr(_LIBC, "mallinfo2", None)
    if info is None:
        return 0
    info.restype = _MallocInfo
    return int(info().fordblks)


def _usable_dtype(name: str, cpuinfo: str) -> torch.dtype:
    """Return the type that a CPU computes in for `name`: fp16 is slow there, and becomes bf16 if
    the CPU has the instructions, else fp32.
    """
    if name == "fp16":
        fast_bf16 = any(word in cpuinfo for word in ("avx512_bf16", "amx_bf16", " bf16"))
        return torch.bfloat16 if fast_bf16 else torch.float32
    return _DTYPES[name]
