"""The CPU as a device with a real cap: past it the kernel refuses, and torch raises its own
out-of-memory.

`RLIMIT_DATA` bounds a process's private writable memory (man 2 getrlimit; since Linux 4.7 it counts
private mappings too). Set to the present size plus the cap, it makes every recovery path of the
engine happen for real on a machine without a GPU. Linux only. Does not bound the resident set, nor
memory that other processes share.

The limit holds while the workload computes, and is lifted in between. Otherwise the kernel would
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

#: Makes the highest resident size the present one (man 5 proc, since Linux 4.0).
_RESET_HIGHEST: Final = "5"

#: In the order in which the kernel writes them (fs/proc/task_mmu.c, task_mem).
_LINES: Final = re.compile(
    r"VmHWM:\s*(\d+) kB\nVmRSS:\s*(\d+) kB\nRssAnon:.*\nRssFile:\s*(\d+) kB\nRssShmem:\s*(\d+) "
    r"kB\nVmData:\s*(\d+) kB"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessMemory:
    """One look; bytes.

    Pages of files, such as a library's code, and shared memory are not counted: a cap does not hold
    them either.
    """

    data_bytes: int
    """Private writable memory, written or not, as RLIMIT_DATA counts it (VmData)."""
    resident_bytes: int
    """In RAM (VmRSS less RssFile and RssShmem)."""
    highest_bytes: int
    """The most that was in RAM at once since the process began or `reset_highest`.

    VmHWM, less what files and shared memory take now.
    """


def process_memory() -> ProcessMemory:
    """Look; takes some 20 microseconds.

    Raises:
        IncompatibleError: The kernel does not say.
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
    """Make the highest resident size the present one.

    Raises:
        OSError: The kernel does not let this process do that: not every container's does.
    """
    _CLEAR.write_text(_RESET_HIGHEST, encoding="ascii")


T = TypeVar("T")

#: Loaded once: each time makes classes anew.
_LIBC: Final = ctypes.CDLL(None)

#: glibc's M_MMAP_THRESHOLD (malloc.h). Blocks at least this large get a mapping of their own, so
#: freeing one gives it back to the kernel at once. The default threshold grows to 32 MiB with use,
#: and what a worker released would stay on its heap and count against its cap.
_M_MMAP_THRESHOLD = -3
_MMAP_THRESHOLD_BYTES = 64 * 1024

#: While freed blocks are kept: the largest threshold that glibc takes, and its M_TRIM_THRESHOLD.
_KEPT_THRESHOLD_BYTES = 32 * 2**20
_M_TRIM_THRESHOLD = -1
_TRIM_BYTES = 128 * 1024
_NO_TRIM_BYTES = 2**31 - 1

#: To map each block anew halves the speed of a small training. So what steps of the largest size
#: free is kept after so many of them, if none took more than this share of the cap: then what keeps
#: the heap from shrinking later is not missed. After so many more one is measured without.
_STEPS_BEFORE = 8
_SPARE_SHARE = 0.25
_STEPS_KEPT = 256

#: While the data of the process stays the same, malloc's lists are counted after so many steps: to
#: walk through them takes a twentieth of a small step.
_COUNTED_EVERY = 16

#: glibc's M_ARENA_MAX. Where the kernel refuses a mapping, malloc looks for room on the heap of
#: another arena, which grows to 64 MiB and never shrinks below its last living block: seen after
#: 1000 refusals, 64 MiB not given back.
_M_ARENA_MAX = -8

#: The fields of `struct mallinfo2`; `fordblks` is what is free.
_MALLOC_INFO = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)

#: Kept out of what a worker may obtain, and why: oneDNN builds a kernel for each new shape, taking
#: up to 2 MiB with one thread and 4 MiB with two (measured, torch 2.13, bf16, n = 256 to 5568);
#: under 0.5 MiB it crashes the process instead of raising. malloc's header page of each mapping
#: comes out of this too.
_MARGIN_BYTES = 2 * 2**20
_MARGIN_PER_THREAD_BYTES = 2**20

#: With less than this a worker could not even run the smallest product.
_LEAST_USABLE_BYTES = 2**20

#: How far other threads may push the data size up before it counts against the cap. It is bounded,
#: because a workload that never frees its tensors looks the same, and without a bound each recovery
#: would allow it another cap.
_DRIFT_LIMIT_BYTES = 64 * 2**20

_RESET = "measured: the highest resident size, which is reset before each step"
_NOT_RESET = (
    "not measured: the kernel does not let this process reset its highest resident size "
    "(/proc/self/clear_refs), so memory that a step frees before it returns is not seen"
)

#: Kernels that oneDNN keeps ready, unless the user has said it. Its own 1,024 take 15 MiB for each
#: new shape of a small GPT's steps, without a limit; a step of a small CNN needs between 48 and
#: 64 (measured, torch 2.13).
_ONEDNN_CACHE = "64"

#: The newest instructions that oneDNN uses, unless the user has said it: not AMX, whose kernels for
#: bf16 take memory beside torch, and under a small cap fail with "could not create a primitive".
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
        # The kernel library builds what it keeps, so that this is charged to the context and not to
        # the cap.
        ones = torch.ones((512, 512), dtype=self.torch_dtype)
        torch.mm(ones, ones)
        del ones
        gc.collect()
        self._now = self._base = process_memory()
        self._failed = False
        """Whether what was done last under the limit ended by an exception."""
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
        """Whether freed blocks stay with the process, and whether they ever did."""
        self._largest: object = None
        """What `timed` was told last."""
        self._steps_alike = self._alike_peak_bytes = 0
        """Steps since it was told another, or blocks were kept or given back; and the most that any
        of them took."""
        self._free_before_bytes = self._free_bytes = 0
        """In malloc's lists: before any block was kept, and beyond that."""
        self._counted_at_bytes: int | None = None
        """Data of the process when they were counted last."""
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
        """See `Device.held_bytes`: growth of the process's data under the limit, less what malloc
        has kept.
        """
        return max(0, self._now.data_bytes - self._base.data_bytes - self._free_bytes)

    def kept_bytes(self) -> int:
        """See `Device.kept_bytes`; what `rebase` no longer charges to the cap is included.

        Small tensors lie on malloc's heap, which does not shrink below its last living block, by
        `malloc_trim` neither. What is free there is data of the process, but no tensor keeps it.
        """
        free_bytes = _free_in_malloc_bytes() - self._opened_free_bytes
        return max(0, self._now.data_bytes - self._opened_bytes - free_bytes)

    def step_peak_bytes(self) -> int:
        """What was held before the step and the growth of the resident memory in it, or what is
        held now if more.

        The kernel keeps no highest data size. Memory that was freed within the step without ever
        being written is not seen.
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
                highest = self._alike_peak_bytes  # what was kept was in RAM too
        peak = max(self.held_bytes(), highest)
        self._peak_bytes = max(self._peak_bytes, peak)
        return peak

    def allowed_bytes(self, leave_bytes: int) -> int:
        """See `Device.allowed_bytes`; the machine's available RAM bounds it too."""
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
            # The CPU allocator asks the kernel once; it has no pool to flush and try again.
            alloc_retries=0,
        )

    def release(self) -> None:
        self._give_back()
        with self.enforced():  # what is freed here was held by the workload
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
        """See `Device.timed`; a CPU is done when the call returns."""
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

        Other threads of the process grow it over the hours (their stacks and heaps count as data);
        without this, what they took during a step would eat the cap that was promised to tensors.
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
        """See `Device.enforced`: the kernel refuses what goes past the cap."""
        before, self._now = self._now, process_memory()
        data_bytes = self._now.data_bytes - before.data_bytes
        resident_bytes = self._now.resident_bytes - before.resident_bytes
        if self._failed:
            # What shrank since then was freed with the frames of the work that failed: it was held
            # under the cap.
            data_bytes, resident_bytes = max(0, data_bytes), max(0, resident_bytes)
        self._base = replace(
            self._base,
            data_bytes=self._base.data_bytes + data_bytes,
            resident_bytes=self._base.resident_bytes + resident_bytes,
        )
        self._failed = True  # until this ends well
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
    """Have malloc give each block that is freed back to the kernel."""
    _set_malloc(_MMAP_THRESHOLD_BYTES, _TRIM_BYTES)
    _LIBC.mallopt(_M_ARENA_MAX, 1)


def _set_malloc(threshold_bytes: int, trim_bytes: int) -> None:
    _LIBC.mallopt(_M_MMAP_THRESHOLD, threshold_bytes)
    _LIBC.mallopt(_M_TRIM_THRESHOLD, trim_bytes)


class _MallocInfo(ctypes.Structure):
    """glibc's `struct mallinfo2` (malloc.h)."""

    _fields_ = [(name, ctypes.c_size_t) for name in _MALLOC_INFO]


def _free_in_malloc_bytes() -> int:
    """Return what malloc's free lists hold; 0 where libc does not say (glibc before 2.33, musl)."""
    info = getattr(_LIBC, "mallinfo2", None)
    if info is None:
        return 0
    info.restype = _MallocInfo
    return int(info().fordblks)


def _usable_dtype(name: str, cpuinfo: str) -> torch.dtype:
    """The type a CPU runs in place of `name`: it has no fast fp16, and bf16 only where the
    instructions exist.
    """
    if name == "fp16":
        fast_bf16 = any(word in cpuinfo for word in ("avx512_bf16", "amx_bf16", " bf16"))
        return torch.bfloat16 if fast_bf16 else torch.float32
    return _DTYPES[name]
