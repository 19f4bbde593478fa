"""What the engine asks of a device: a cap it enforces, memory it measures, and a product that
always fits; and what all devices use for that.

Loads torch. The lock of a device is a file of this user on this machine; it keeps out no other
users or programs.
"""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, TypeVar

import psutil
import torch

from workers.files import locked
from workers.messages import ContextCorruptedError, DeviceInfo, MemoryInfo

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

    def held_bytes(self) -> int:
        """Bytes in live tensors when the workload was last left, by an error or not."""

    def kept_bytes(self) -> int:
        """Everything that the process holds beside its context.

        After a release all of it is kept for no step.
        """

    def allowed_bytes(self, leave_bytes: int) -> int:
        """Bytes a step may hold in all: what the worker holds plus what is free, less
        `leave_bytes`, within the cap.
        """

    def step_peak_bytes(self) -> int:
        """Most that the last `timed` call needed: in tensors, on a card in gaps between too."""

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

    def timed(self, work: Callable[[], T], largest: object = None) -> tuple[T, float]:
        """Run `work` with the cap enforced, wait for the device, and return the result and the
        seconds it took.

        `largest`: says which step it is, where that is one of the largest that there are.
        """


def alone_on(device: str) -> AbstractContextManager[None]:
    """Hold the lock of a device, named by whatever identifies it on this machine, for the duration
    of a `with`: workers that start together must not count each other's context.
    """
    key = hashlib.sha256(device.encode()).hexdigest()[:16]
    return locked(
        Path(tempfile.gettempdir()) / f"orchestrator-context-{os.getuid()}-{key}.lock", math.inf
    )


def threads_for(workers_on_host: int) -> int:
    """Return this worker's share of the physical cores here, one at the least.

    Not Ray's `num_cpus`, which only admits: Ray sets OMP_NUM_THREADS to it, and seven workers with
    8 each would run 56 threads on an ordinary PC.
    """
    return max(1, (psutil.cpu_count(logical=False) or os.cpu_count() or 1) // workers_on_host)


class EmergencyProduct:
    """C = A B for square matrices of ones and twos, whose every element is exactly `2 x size`.

    Whether the device still computes, asked without allocating anything: the operands, the result
    and (on CUDA) the cuBLAS handle and workspace exist since the device was opened.

    fp32 whatever the workload's type: the value stays exact up to 2^24, and the kernel is never
    missing.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        """Allocate and run once, so that handle, workspace and kernel are loaded.

        `size` is the guides' 128.
        """
        self.size = size
        self._left = torch.ones((size, size), dtype=torch.float32, device=device)
        self._right = torch.full((size, size), 2.0, dtype=torch.float32, device=device)
        self._result = torch.empty((size, size), dtype=torch.float32, device=device)
        self.run()

    def run(self) -> None:
        """Compute and check the product.

        Raises:
            RuntimeError: The device's own error.
            ContextCorruptedError: The device returned a wrong value.
        """
        self._result.zero_()  # a result left over from the last run must not pass for this one
        torch.mm(self._left, self._right, out=self._result)
        corner = self._result[-1, -1].item()
        if corner != 2.0 * self.size:
            raise ContextCorruptedError(
                f"the {self.size}x{self.size} emergency product gave {corner}, not "
                f"{2.0 * self.size}"
            )
