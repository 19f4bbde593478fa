"""A CUDA card as a device: torch's caching allocator under a cap, and a measured context.

`torch.cuda.set_per_process_memory_fraction` makes the allocator refuse memory beyond a share of the
card's total; the share is read back. It does not cover memory outside that allocator (the context,
cuBLAS handles, other libraries), so the cap is the budget less that, measured for each process.
Never changes settings of the card.
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

#: Size of the warm-up products, large enough for the kernels of large products: with lazy loading
#: kernels take memory when they first run.
_WARM_UP_SIZE = 4096

#: Rows checked at once in the warm-up: row by row it would take many thousand launches.
_WARM_UP_ROWS = 256


#: Growth of the card's use within these bounds is taken for a context.
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
        _set_product_precision(spec.workload.dtype)
        threads = threads_for(spec.workers_on_host)
        torch.set_num_threads(threads)
        self._card = card
        # If the driver does not report memory per process (WSL2, containers), the context is the
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
        """In the present pool: bytes that steps had to reserve although as many of its bytes were
        unused.
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
        """See `Device.enforced`: torch's allocator always enforces the cap."""
        return nullcontext()

    def held_bytes(self) -> int:
        return int(torch.cuda.memory_allocated(self.torch_device))

    def kept_bytes(self) -> int:
        """See `Device.kept_bytes`; memory outside torch's allocator does not grow."""
        return self.held_bytes()

    def allowed_bytes(self, leave_bytes: int) -> int:
        """See `Device.allowed_bytes`; asks the driver, so other programs on the card count.

        Gaps in segments that are partly in use do not count: no block is sure to fit there.
        """
        stats = torch.cuda.memory_stats(self.torch_device)
        free_bytes, _ = self._on_card_bytes()
        within_reach = int(stats["reserved_bytes.all.current"]) + free_bytes - leave_bytes
        return max(
            0, min(self.most_bytes, within_reach) - int(stats["inactive_split_bytes.all.current"])
        )

    def step_peak_bytes(self) -> int:
        """See `Device.step_peak_bytes`: the highest bytes in tensors, and the gaps between them.

        The highest reserved bytes alone are too many: larger steps leave their segments in the
        pool, and the allocator frees whole unused ones before it refuses. But if a step made the
        pool grow although part of it was unused, that part had gaps. They last as long as the pool.
        """
        stats = torch.cuda.memory_stats_as_nested_dict(self.torch_device)
        allocated, reserved, splits = (
            int(stats[name]["all"]["peak"])
            for name in ("allocated_bytes", "reserved_bytes", "inactive_split_bytes")
        )
        if reserved > self._reserved_before_bytes:
            grown_in_vain = reserved - max(self._reserved_before_bytes, allocated)
            self._gap_bytes += min(grown_in_vain, splits)
            self._reserved_before_bytes = reserved  # a second call for the same step adds nothing
        peak = min(max(reserved, allocated), allocated + self._gap_bytes)
        self._peak_bytes = max(self._peak_bytes, peak)
        return peak

    def rebase(self) -> int:
        """See `Device.rebase`: kernels and workspaces loaded since are charged to the budget.

        Only NVML's figure for this process is used: other programs change the card's use as well.
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
        """Set the allocator's cap, and read back what it has made of it."""
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
        # An error of an earlier launch is raised here, and not in the next step.
        torch.cuda.synchronize(self.torch_device)
        self._emergency.run()

    def timed(self, work: Callable[[], T], largest: object = None) -> tuple[T, float]:
        """See `Device.timed`; measured by events on the card.

        Time that other programs get on the card in between is included.
        """
        del largest
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        self._reserved_before_bytes = torch.cuda.memory_reserved(self.torch_device)
        # Blocking events: a waiting worker must not spin, or seven of them occupy seven cores.
        event: Any = torch.cuda.Event  # torch has no types for it
        started, ended = (event(enable_timing=True, blocking=True) for _ in range(2))
        started.record()
        result = work()
        ended.record()
        ended.synchronize()
        return result, started.elapsed_time(ended) / 1e3

    def _on_card_bytes(self) -> tuple[int, int]:
        """Return the bytes of the card that are free for this process, and those that all programs
        use.

        To an MPS client with a memory limit CUDA reports only what is free below that limit: then
        the driver is asked too, and the smaller figure counts.
        """
        free_bytes = torch.cuda.mem_get_info(self.torch_device)[0]
        used_bytes = self._total_bytes - free_bytes
        if mps.MEMORY_LIMIT not in os.environ:
            return free_bytes, used_bytes
        driver_bytes = queries.card_free_bytes(self._card), queries.card_used_bytes(self._card)
        return (
            free_bytes if driver_bytes[0] is None else min(free_bytes, driver_bytes[0]),
            used_bytes if driver_bytes[1] is None else driver_bytes[1],
        )

    def _warm_up(self, budget_bytes: int) -> None:
        """Load the kernels and the workspace of the real element type, so that they count as
        context or reserved memory.
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
        freivalds(left, left, product, scratch, 0)  # load their kernels, too
        same_bits(product, again, scratch)
        torch.cuda.synchronize(self.torch_device)
        del left, product, again, scratch
        gc.collect()
        torch.cuda.empty_cache()


def _set_product_precision(dtype: str) -> None:
    """Make products use exactly the requested type, whatever this computer's settings are.

    By default a library may add up the parts of a product in the narrow type (torch's
    `allow_..._reduced_precision_reduction`): errors then exceed the rounding of the result, and
    checks would have to tolerate more.
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
    """Refuse budgets that exceed the real card, although its profile may be larger."""
    allowed = int(spec.memory_fraction * total_bytes)
    if spec.card_budget_bytes > allowed:
        raise IncompatibleError(
            f"{spec.node}: the workers of one card may hold {spec.card_budget_bytes / GIB:.2f} GiB "
            f"in sum, but {spec.memory_fraction:.2f} of the {total_bytes / GIB:.2f} GiB this "
            f"{name} really has is {allowed / GIB:.2f} GiB; lower nodes.{spec.node}.workers or "
            ".vram_per_worker_gib"
        )


def _context_bytes(card: str, used_before_bytes: int | None) -> tuple[int, str]:
    """Return this process's bytes on the card outside torch's allocator, and their source."""
    reserved = torch.cuda.memory_reserved()
    own = queries.process_used_bytes(card)
    if own is not None and own > reserved:
        return own - reserved, "measured: NVML, this process"
    used_now = queries.card_used_bytes(card)
    if used_now is not None and used_before_bytes is not None:
        grown = used_now - used_before_bytes - reserved
        # Other programs may take or free memory meanwhile, workers opened earlier among them.
        if _LEAST_CONTEXT_BYTES <= grown <= _LARGEST_CONTEXT_BYTES:
            return grown, "measured: growth of the card's use"
    return ASSUMED_CONTEXT_BYTES, "assumed: NVML does not report it"
