"""What the engine asks of a device: a cap it enforces, memory it measures, and a product that
always fits.

Opens the device a spec asks for. Loads torch, and `devices.cuda` only when it is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol, TypeVar

from workers.messages import DeviceInfo, IncompatibleError, MemoryInfo
from workers.settings import WorkerSpec

if TYPE_CHECKING:
    import torch

T = TypeVar("T")


class Device(Protocol):
    """One process's share of one device.

    Opening it caps the process; there is no way back but to end it.
    """

    #: Where tensors go.
    torch_device: torch.device
    #: The element type really used (`info.dtype` names it).
    torch_dtype: torch.dtype
    info: DeviceInfo
    #: The most that `allowed_bytes` will ever be; `rebase` may lower it.
    most_bytes: int

    def enforced(self) -> AbstractContextManager[None]:
        """Hold the process to its cap for the duration of a `with`; every call of the workload
        belongs into one.

        Memory that the process takes or frees outside does not count against the cap.
        """

    def alone(self) -> AbstractContextManager[None]:
        """Keep other starting workers of this device waiting for the duration of a `with`."""

    def obtain(self, size_bytes: int) -> int:
        """Allocate one block and free it again; return its size, a little less than asked where it
        is rounded.

        Where the allocator has a pool, the block stays there in one piece.

        Raises:
            RuntimeError: The device's own out-of-memory, to be classified by `workers.oom`.
        """

    def held_bytes(self) -> int:
        """Bytes in live tensors when the workload was last left, by an error or not."""

    def kept_bytes(self) -> int:
        """Everything that the process holds beside its context.

        After a release all of it is kept for no step.
        """

    def free_bytes(self) -> int:
        """Bytes this worker could still obtain: what its cap leaves, and no more than the device
        has free.
        """

    def allowed_bytes(self, leave_bytes: int) -> int:
        """Bytes a step may hold in all: what the worker holds plus what is free, less
        `leave_bytes`, within the cap.
        """

    def step_peak_bytes(self) -> int:
        """Most that the last `timed` call needed: in tensors, and on a card in gaps between them."""

    def rebase(self) -> int:
        """Measure again what the process holds besides tensors; return the bytes that the cap lost
        by it.

        On a CPU call it only while no tensor of the workload is alive; its cap loses nothing.
        """

    def memory(self) -> MemoryInfo:
        """Everything known about memory now. Costs up to a millisecond; not for every step."""

    def release(self) -> None:
        """Collect garbage and give the allocator's unused memory back to the device."""

    def emergency(self) -> None:
        """Run the prepared small product, allocating nothing, and check its value.

        Raises:
            RuntimeError: An error that the device has kept for its next call, or a new one: it does
                not answer.
            workers.messages.ContextCorruptedError: It answers, wrongly.
        """

    def timed(self, work: Callable[[], T]) -> tuple[T, float]:
        """Run `work` with the cap enforced, wait for the device, and return the result and the
        seconds it took.
        """


def open_device(spec: WorkerSpec) -> Device:
    """Open and cap the device of `spec` for this process.

    Raises:
        IncompatibleError: There is no such device here, or the budget does not fit it.
    """
    if spec.device == "cuda":
        from workers.devices.cuda import CudaDevice  # noqa: PLC0415 - a CPU worker never loads it

        return CudaDevice(spec)
    if spec.device == "cpu":
        from workers.devices.cpu import CpuDevice  # noqa: PLC0415 - needs Linux; a CUDA worker does not

        return CpuDevice(spec)
    raise IncompatibleError(f"{spec.slot}: unknown device {spec.device!r}; valid: cuda, cpu")
