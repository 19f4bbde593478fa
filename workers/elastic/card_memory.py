"""The memory of the current CUDA card, around what any code of this process does on it.

Covers what there is before a part, the most that a part takes, and giving memory back. Never loads
torch and never initialises CUDA. Caps nothing: that is for the devices of `workers/devices`.
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
    """The memory of a loop on the current card; without CUDA nothing is known.

    It restarts the device's own measurement (`torch.cuda.reset_peak_memory_stats`), which the whole
    process shares; what was measured until then is first told to every other one under way, so
    that loops may lie within one another or in other threads. What other threads take on the same
    device counts as well.
    """

    def __init__(self) -> None:
        self._device: int | None = None
        """`None` as long as CUDA is not initialised; then no device holds a tensor."""
        self._before_bytes = self._highest_bytes = 0

    def allowed_bytes(self) -> int | None:
        """Return what more tensors could take now: free on the card or unused in the allocator's
        pool, within the process's cap.

        Segments of the pool that nothing uses count: they are given back before anything is
        refused. Gaps in segments that are partly in use (`inactive_split_bytes`) do not: they
        cannot be given back. Not every backend counts them.
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
        """Run a part."""
        self._highest_bytes = 0
        with _lock:
            torch = _torch_with_cuda()
            if torch is not None and self._device is not None:
                _tell_all(torch, self._device)
                torch.cuda.reset_peak_memory_stats(self._device)
            _under_way.append(self)
        try:
            return part()
        finally:
            with _lock:
                torch = _torch_with_cuda()
                if torch is not None:
                    own = self._device
                    _tell_all(torch, torch.cuda.current_device() if own is None else own)
                _under_way.remove(self)

    def tell(self, device: int, highest_bytes: int) -> None:
        """Take note of what a device measured.

        One that began before CUDA takes the first device that it hears of.
        """
        if self._device is None:
            self._device = device
        if self._device == device:
            self._highest_bytes = max(self._highest_bytes, highest_bytes)

    def peak_bytes(self) -> int | None:
        """Return what the part's tensors took beyond those that were there before; `None` if this
        device's tensors never grew: it tells nothing.
        """
        grown_bytes = self._highest_bytes - self._before_bytes
        return grown_bytes if grown_bytes > 0 else None

    def failed_bytes(self, _failure: Failure) -> None:
        """Return `None`: what others took on the card meanwhile is not known."""

    def release(self) -> None:
        """Give back what a failed attempt no longer holds; call it outside the handler, when
        nothing holds its frames.

        Raises:
            Exception: The device no longer answers; an out-of-memory that only surfaces here is
                dropped.
        """
        gc.collect()
        torch = _torch_with_cuda()
        if torch is None:
            return
        try:
            # An error of an earlier launch surfaces here and not in the next attempt.
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except Exception as error:
            if not oom.classify(error).is_out_of_memory:
                raise


_lock = threading.Lock()
_under_way: list[CurrentCard] = []


def _tell_all(torch: ModuleType, device: int) -> None:
    highest_bytes = int(torch.cuda.max_memory_allocated(device))
    for each in _under_way:
        each.tell(device, highest_bytes)


def _torch_with_cuda() -> ModuleType | None:
    """Return torch if it is loaded and has a CUDA context in this process."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)  # absent while another thread is still importing torch
    return torch if cuda is not None and cuda.is_initialized() else None
