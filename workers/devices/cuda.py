"""A CUDA card as a device: torch's caching allocator under a cap, and the context it costs,
measured.

`torch.cuda.set_per_process_memory_fraction` makes the allocator refuse past a share of the card's
total memory; it is read back. It does not cover what lies outside that allocator (the context,
cuBLAS handles, other libraries), so the cap is the budget less that, measured per process. Never
changes the card's settings.
"""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch

from workers.devices.base import EmergencyProduct, alone_on, threads_for
from workers.host import mps
from workers.messages import Cause, DeviceInfo, IncompatibleError, MemoryInfo
from workers.nvml import queries
from workers.settings import ASSUMED_CONTEXT_BYTES, WorkerSpec
from workers.training.precision import allow_tf32
from workers.units import GIB, MIB
from workers.verification.products import freivalds, least_scratch, same_bits

T = TypeVar("T")

_DTYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}

#: The caching allocator maps blocks over 10 MiB in multiples of this (kRoundLarge,
#: c10/cuda/CUDACachingAllocator).
_SEGMENT_BYTES = 2 * 2**20

#: Large enough for the kernels that large products use: with lazy loading they take memory when
#: they first run.
_WARM_UP_SIZE = 4096

#: So many rows at a time are checked there: row by row it would be many thousand launches.
_WARM_UP_ROWS = 256


#: What the growth of the card's use is assumed to be a context.
_LEAST_CONTEXT_BYTES = 64 * 2**20
_LARGEST_CONTEXT_BYTES = 1024 * 2**20


class CudaDevice:
    """This process's share of one card: the first that CUDA_VISIBLE_DEVICES shows.

    Raises:
        IncompatibleError: No card is visible, the budgets do not fit the card, or the context uses
            up the budget.
        RuntimeError: The card is out of memory even for a context, or broken.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        if not torch.cuda.is_available():
            raise IncompatibleError(
                f"{spec.slot}: torch {torch.__version__} sees no CUDA card on "
                f"{socket.gethostname()} "
                f"(CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r}); "
                f"{_why_no_card()}",
                cause=Cause.DRIVER,
            )
        self.torch_device = torch.device("cuda", 0)
        card = queries.visible_card()
        self.torch_dtype = _DTYPES[spec.workload.dtype]
        _compute_as_named(spec.workload.dtype)
        threads = threads_for(spec.workers_on_host)
        torch.set_num_threads(threads)
        self._card = card
        # Where the driver does not report memory per process (WSL2, containers), the context is the
        # growth of the card's use; without the lock, workers that start together would count each
        # other's contexts.
        with alone_on(card):
            used_before_bytes = queries.card_used_bytes(card)
            properties = torch.cuda.get_device_properties(self.torch_device)
            self._total_bytes = int(properties.total_memory)
            _check_card(spec, self._total_bytes, properties.name)
            self._emergency = EmergencyProduct(spec.memory.emergency_size, self.torch_device)
            self._warm_up(spec.budget_bytes)
            context_bytes, source = _context_bytes(card, used_before_bytes)
        cap_bytes = spec.budget_bytes - context_bytes
        if cap_bytes < spec.memory.floor_bytes:
            raise IncompatibleError(
                f"{spec.slot}: the budget of {spec.budget_bytes / MIB:.0f} MiB leaves "
                f"{cap_bytes / MIB:.0f} MiB after a CUDA context of {context_bytes / MIB:.0f} MiB "
                f"({source}), under the floor of {spec.memory.floor_bytes / MIB:.0f} MiB; "
                f"raise nodes.{spec.node}.vram_per_worker_gib or start fewer workers",
                cause=Cause.OUT_OF_MEMORY,
            )
        self._set_cap(cap_bytes)
        self._peak_bytes = 0
        self._reserved_before_bytes = 0
        self._gap_bytes = 0
        """Of the pool as it is: what steps had to reserve although as many bytes of it were unused.
        """
        self.info = DeviceInfo(
            kind="cuda",
            name=properties.name,
            uuid=card if card.startswith("MIG-") else f"GPU-{properties.uuid}",
            total_bytes=self._total_bytes,
            context_bytes=context_bytes,
            context_source=source,
            peak_source="measured: highest allocated bytes of torch's allocator, and gaps in its "
            "segments",
            cap_bytes=self.most_bytes,
            dtype=spec.workload.dtype,
            threads=threads,
            pid=os.getpid(),
            torch_version=str(torch.__version__),  # its own type would make the head load torch
            driver=queries.driver_version(),
        )

    def enforced(self) -> AbstractContextManager[None]:
        """See `Device.enforced`: torch's allocator keeps the cap by itself."""
        return nullcontext()

    def held_bytes(self) -> int:
        return int(torch.cuda.memory_allocated(self.torch_device))

    def kept_bytes(self) -> int:
        """See `Device.kept_bytes`; what lies outside torch's allocator does not grow."""
        return self.held_bytes()

    def allowed_bytes(self, leave_bytes: int) -> int:
        """See `Device.allowed_bytes`; asks the driver, so other tenants of the card count.

        Gaps in segments that are partly in use do not count: no block is sure to fit.
        """
        stats = torch.cuda.memory_stats(self.torch_device)
        free_bytes, _ = self._on_card_bytes()
        within_reach = int(stats["reserved_bytes.all.current"]) + free_bytes - leave_bytes
        return max(
            0, min(self.most_bytes, within_reach) - int(stats["inactive_split_bytes.all.current"])
        )

    def step_peak_bytes(self) -> int:
        """See `Device.step_peak_bytes`: the highest bytes in tensors, and the gaps between them.

        The highest reserved bytes alone say too much: larger steps leave their segments in the
        pool, and whole unused ones are given back before anything is refused. But where a step made
        the pool grow although part of it was unused, that part had gaps. They last as long as the
        pool.
        """
        stats = torch.cuda.memory_stats_as_nested_dict(self.torch_device)
        allocated, reserved, splits = (
            int(stats[name]["all"]["peak"])
            for name in ("allocated_bytes", "reserved_bytes", "inactive_split_bytes")
        )
        if reserved > self._reserved_before_bytes:
            grown_in_vain = reserved - max(self._reserved_before_bytes, allocated)
            self._gap_bytes += min(grown_in_vain, splits)
            self._reserved_before_bytes = reserved  # asked again, the same step adds nothing
        peak = min(max(reserved, allocated), allocated + self._gap_bytes)
        self._peak_bytes = max(self._peak_bytes, peak)
        return peak

    def rebase(self) -> int:
        """See `Device.rebase`: kernels and workspaces that were loaded since take from the budget.

        Only by NVML's figure for this process: the card's use also changes by others.
        """
        own_bytes = queries.process_used_bytes(self._card)
        if own_bytes is None:
            return 0
        reserved_bytes = torch.cuda.memory_reserved(self.torch_device)
        grown_bytes = own_bytes - reserved_bytes - self.info.context_bytes
        if grown_bytes < _SEGMENT_BYTES:
            return 0
        self._set_cap(max(0, self.most_bytes - grown_bytes))
        self.info = replace(
            self.info,
            context_bytes=self.info.context_bytes + grown_bytes,
            context_source="measured: NVML, this process",
            cap_bytes=self.most_bytes,
        )
        if reserved_bytes > self.most_bytes:
            self.release()
        return grown_bytes

    def _set_cap(self, cap_bytes: int) -> None:
        """Have the allocator refuse past so many bytes, and read back what it makes of them."""
        share = min(1.0, cap_bytes / self._total_bytes)
        torch.cuda.set_per_process_memory_fraction(share, self.torch_device)
        fraction = torch.cuda.get_per_process_memory_fraction(self.torch_device)
        self.most_bytes = int(fraction * self._total_bytes)

    def memory(self) -> MemoryInfo:
        stats = torch.cuda.memory_stats(self.torch_device)
        allocated = int(stats["allocated_bytes.all.current"])
        reserved = int(stats["reserved_bytes.all.current"])
        peak, self._peak_bytes = max(self._peak_bytes, allocated), allocated
        return MemoryInfo(
            device_total_bytes=self._total_bytes,
            device_used_bytes=self._on_card_bytes()[1],
            allocated_bytes=allocated,
            reserved_bytes=reserved,
            peak_bytes=peak,
            alloc_retries=int(stats["num_alloc_retries"]),
        )

    def release(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        self._gap_bytes = 0

    def emergency(self) -> None:
        # An error of an earlier launch surfaces here, and not in the next step.
        torch.cuda.synchronize(self.torch_device)
        self._emergency.run()

    def timed(self, work: Callable[[], T], largest: object = None) -> tuple[T, float]:
        """See `Device.timed`; by events on the card.

        Turns that its other tenants take in between are included.
        """
        del largest
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        self._reserved_before_bytes = torch.cuda.memory_reserved(self.torch_device)
        # Blocking events: a waiting worker must not spin, or seven of them take seven cores.
        event: Any = torch.cuda.Event  # no types here
        started, ended = (event(enable_timing=True, blocking=True) for _ in range(2))
        started.record()
        result = work()
        ended.record()
        ended.synchronize()
        return result, started.elapsed_time(ended) / 1e3

    def _on_card_bytes(self) -> tuple[int, int]:
        """Return what the card has free for this process, and what all programs use of it.

        CUDA reports to a client of MPS that has a memory limit what is free below that limit, and
        nothing of the card: there the driver is asked too, and the smaller one counts.
        """
        free_bytes = torch.cuda.mem_get_info(self.torch_device)[0]
        used_bytes = self._total_bytes - free_bytes
        if mps.MEMORY_LIMIT not in os.environ:
            return free_bytes, used_bytes
        told = queries.card_free_bytes(self._card), queries.card_used_bytes(self._card)
        return (
            free_bytes if told[0] is None else min(free_bytes, told[0]),
            used_bytes if told[1] is None else told[1],
        )

    def _warm_up(self, budget_bytes: int) -> None:
        """Load the kernels and the workspace of the real element type, so that they count as
        context or reserve.
        """
        n = _WARM_UP_SIZE
        while 4 * n * n * self.torch_dtype.itemsize > budget_bytes // 4:
            n //= 2
        generator = torch.Generator(device=self.torch_device).manual_seed(0)
        left = torch.empty((n, n), dtype=self.torch_dtype, device=self.torch_device).normal_(
            generator=generator
        )
        product, again = torch.mm(left, left), torch.mm(left, left)
        doubles = least_scratch(n) + _WARM_UP_ROWS * n
        scratch = torch.empty(doubles, dtype=torch.float64, device=self.torch_device)
        freivalds(left, left, product, scratch, 0)  # their kernels, too
        same_bits(product, again, scratch)
        torch.cuda.synchronize(self.torch_device)
        del left, product, again, scratch
        gc.collect()
        torch.cuda.empty_cache()


def _compute_as_named(dtype: str) -> None:
    """Have products computed in exactly the requested type, independent of this computer's
    settings.

    A library may also add the parts of a product in the narrow type (torch's
    `allow_..._reduced_precision_reduction`): results are then further off than their own rounding
    explains, and checks would have to let more through.
    """
    matmul = torch.backends.cuda.matmul
    allow_tf32(allowed=dtype == "tf32")
    matmul.allow_fp16_reduced_precision_reduction = False
    matmul.allow_bf16_reduced_precision_reduction = False
    matmul.allow_fp16_accumulation = False


def _why_no_card() -> str:
    if torch.version.cuda is None:
        return "this torch is a CPU build: install a CUDA build of it there"
    return (
        f"it is built for CUDA {torch.version.cuda}, and the driver is missing or too old for "
        "that: nvidia-smi there shows the newest CUDA it can; update the driver, or install a "
        "torch built for that CUDA"
    )


def _check_card(spec: WorkerSpec, total_bytes: int, name: str) -> None:
    """Refuse budgets that the real card cannot hold, although its profile may be larger."""
    allowed = int(spec.memory_fraction * total_bytes)
    if spec.card_budget_bytes > allowed:
        raise IncompatibleError(
            f"{spec.node}: the workers of one card may hold {spec.card_budget_bytes / GIB:.2f} GiB "
            f"in sum, but {spec.memory_fraction:.2f} of the {total_bytes / GIB:.2f} GiB this "
            f"{name} really has is {allowed / GIB:.2f} GiB; lower nodes.{spec.node}.workers or "
            ".vram_per_worker_gib"
        )


def _context_bytes(card: str, used_before_bytes: int | None) -> tuple[int, str]:
    """What this process holds on the card outside torch's allocator, and how that is known."""
    reserved = torch.cuda.memory_reserved()
    own = queries.process_used_bytes(card)
    if own is not None and own > reserved:
        return own - reserved, "measured: NVML, this process"
    used_now = queries.card_used_bytes(card)
    if used_now is not None and used_before_bytes is not None:
        grown = used_now - used_before_bytes - reserved
        # Others may take or free memory meanwhile, workers that were opened before among them.
        if _LEAST_CONTEXT_BYTES <= grown <= _LARGEST_CONTEXT_BYTES:
            return grown, "measured: growth of the card's use"
    return ASSUMED_CONTEXT_BYTES, "assumed: NVML does not report it"
