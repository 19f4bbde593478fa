"""What the engine asks of a device: a cap it enforces, memory it measures, and a product that always fits.

Covers the protocol alone. Does not cover policy (how much to use) nor recovery (in which order to call these).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    import torch

    from workers.messages import DeviceInfo, MemoryInfo

T = TypeVar("T")


class Device(Protocol):
    """One process's share of one device. Opening it caps the process; there is no way back but to end it."""

    #: Where tensors go.
    torch_device: torch.device
    #: The element type really used (`info.dtype` names it).
    torch_dtype: torch.dtype
    info: DeviceInfo

    def enforced(self) -> AbstractContextManager[None]:
        """Hold the process to its cap for the duration of a `with`; every call of the workload belongs into one.

        Memory that the process takes or frees outside does not count against the cap. A device whose allocator enforces
        the cap has nothing to do.
        """
        ...

    def alone(self) -> AbstractContextManager[None]:
        """Keep other starting workers of this device waiting for the duration of a `with`."""
        ...

    def obtain(self, size_bytes: int) -> int:
        """Allocate one block and free it again; return its size, a little less than asked where it is rounded.

        Where the allocator has a pool, the block stays there in one piece.

        Raises:
            RuntimeError: The device's own out-of-memory, to be classified by `workers.oom`.
        """
        ...

    def free_bytes(self) -> int:
        """Bytes this worker could still obtain: what its cap leaves, and no more than the device has free."""
        ...

    def allowed_bytes(self, leave_bytes: int) -> int:
        """Bytes a step may hold in all: what the worker holds plus what is free, bounded by the cap.

        Args:
            leave_bytes: Has to stay free on the device for others. When less is free, the result is less than what is
            held.
        """
        ...

    @property
    def most_bytes(self) -> int:
        """The most that `allowed_bytes` will ever be."""
        ...

    def held_bytes(self) -> int:
        """Bytes the worker's allocator holds now, pool included."""
        ...

    def step_peak_bytes(self) -> int:
        """Highest `held_bytes` since the last call, as far as the device can tell. Cheap enough for every step."""
        ...

    def rebase(self) -> None:
        """Measure what the process holds besides tensors; call only while no tensor of the workload is alive."""
        ...

    def memory(self) -> MemoryInfo:
        """Everything known about memory now. Costs up to a millisecond; not for every step."""
        ...

    def release(self) -> None:
        """Collect garbage and give the allocator's unused memory back to the device."""
        ...

    def clear_pending_error(self) -> None:
        """Make an error that the device has kept for its next call surface here.

        Raises:
            RuntimeError: The kept error, or a new one: the device cannot do the smallest thing.
        """
        ...

    def emergency(self) -> None:
        """Run the prepared small product, allocating nothing, and check its value.

        Raises:
            RuntimeError: The device does not answer.
            workers.errors.ContextCorruptedError: It answers, wrongly.
        """
        ...

    def timed(self, work: Callable[[], T]) -> tuple[T, float]:
        """Run `work` with the cap enforced, wait for the device, and return the result and the seconds it took."""
        ...
