"""Measures and releases the memory of the current CUDA card around any code of this process.

Covers the free memory before a part, the peak of a part, and the release of memory. Never loads
torch and never initialises CUDA. Sets no cap: the devices of `workers/devices` do.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import TypeVar

from workers import oom
from workers.oom import Failure

R = TypeVar("R")


class CurrentCard:
    """The `Memory` of a loop on the current card; without CUDA every figure is unknown.

    Each part resets the peak counter of the device (`torch.cuda.reset_peak_memory_stats`), which
    the whole process shares. Before a reset, the peak so far is recorded in every measurement under
    way, so that loops may be nested or run in other threads. A peak includes what other threads
    allocate on the same device.
    """

    def __init__(self) -> None:
        self._device: int | None = None
        """Index of the card; `None` until CUDA is initialised, when no device holds a tensor."""
        self._before_bytes = self._highest_bytes = 0

    def allowed_bytes(self) -> int | None:
        """Return how many more bytes tensors could take now: those free on the card or unused in
        the allocator's pool, within the process's cap.

        Unused segments of the pool count: the allocator releases them before it refuses a request.
        Gaps in partly used segments (`inactive_split_bytes`) do not count: they cannot be released.
        Not every backend reports them.
        """
        torch = _torch_with_cuda()
        if torch is None:
            return None
        self._device = device = torch.cuda.current_device()
        free_on_card_bytes, total_bytes = torch.cuda.mem_get_info(device)
        stats = torch.cuda.memory_stats(device)
        self._before_bytes, reserved_bytes, gaps_bytes = (
            int(stats.get(f"{name}.all.current", 0))
            for name in ("allocated_bytes", "reserved_bytes", "inactive_split_bytes")
        )
        cap_bytes = int(torch.cuda.get_per_process_memory_fraction(device) * total_bytes)
        new_bytes = min(cap_bytes - reserved_bytes, int(free_on_card_bytes))
        unused_bytes = reserved_bytes - self._before_bytes - gaps_bytes
        return max(0, new_bytes + unused_bytes)

    def measured(self, part: Callable[[], R]) -> R:
        """Run a part, and measure its peak."""
        self._highest_bytes = 0
        with _lock:
            torch = _torch_with_cuda()
            if torch is not None and self._device is not None:
                _record_peaks(torch, self._device)
                torch.cuda.reset_peak_memory_stats(self._device)
            _under_way.append(self)
        try:
            return part()
        finally:
            with _lock:
                torch = _torch_with_cuda()
                if torch is not None:
                    own = self._device
                    _record_peaks(torch, torch.cuda.current_device() if own is None else own)
                _under_way.remove(self)

    def record_peak(self, device: int, highest_bytes: int) -> None:
        """Raise the peak of the part if this device is the one that it runs on.

        A part that began before CUDA was initialised belongs to the first device recorded.
        """
        if self._device is None:
            self._device = device
        if self._device == device:
            self._highest_bytes = max(self._highest_bytes, highest_bytes)

    def peak_bytes(self) -> int | None:
        """Return the peak of the part's tensors, less the bytes allocated before it; `None` if the
        tensors of this device never grew, so that nothing is known.
        """
        grown_bytes = self._highest_bytes - self._before_bytes
        return grown_bytes if grown_bytes > 0 else None

    def failed_bytes(self, _failure: Failure) -> None:
        """Return `None`: the use of the card by other programs meanwhile is unknown."""

    def release(self) -> None:
        """Release the memory of a failed attempt; call it outside the exception handler, after its
        frames are gone.

        Raises:
            Exception: The device does not work any more; an out-of-memory that surfaces only here
                is ignored.
        """
        gc.collect()
        torch = _torch_with_cuda()
        if torch is None:
            return
        try:
            # An error of an earlier kernel launch surfaces here, not in the next attempt.
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except Exception as error:
            if not oom.classify(error).is_out_of_memory:
                raise


_lock = threading.Lock()
_under_way: list[CurrentCard] = []


def _record_peaks(torch: ModuleType, device: int) -> None:
    highest_bytes = int(torch.cuda.max_memory_allocated(device))
    for each in _under_way:
        each.record_peak(device, highest_bytes)


def _torch_with_cuda() -> ModuleType | None:
    """Return torch if it is loaded and has a CUDA context in this process."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)  # absent while another thread is still importing torch
    return torch if cuda is not None and cuda.is_initialized() else None
