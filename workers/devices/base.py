"""What a device does for the engine: it enforces a cap, measures memory, and runs a small product
that always fits. Also helpers that all devices share.

Loads torch. The lock of a device is a file of this user on this machine; it does not exclude other
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

    Opening a device caps the process; only the end of the process removes the cap.
    """

    #: The torch device of all tensors.
    torch_device: torch.device
    #: The element type that is computed in; `info.dtype` names it.
    torch_dtype: torch.dtype
    info: DeviceInfo
    #: Upper bound of `allowed_bytes`; `rebase` may lower it.
    most_bytes: int

    def enforced(self) -> AbstractContextManager[None]:
        """Hold the process to its cap inside a `with` block; every call of the workload must be
        inside one.

        Memory that the process takes or frees outside does not count against the cap.
        """

    def held_bytes(self) -> int:
        """Bytes in live tensors when control last left the workload, by an error or not."""

    def kept_bytes(self) -> int:
        """Bytes that the process holds apart from its context.

        After a release no step needs any of these.
        """

    def allowed_bytes(self, leave_bytes: int) -> int:
        """Bytes that a step may hold in all: what the worker holds plus what is free, less
        `leave_bytes`, and never more than the cap.
        """

    def step_peak_bytes(self) -> int:
        """Most bytes that the last `timed` call needed: tensors, and on a card gaps between."""

    def rebase(self) -> int:
        """Measure again what the process holds besides tensors; return what the cap lost by it.

        On a CPU, call it only while no tensor of the workload is alive; there the cap never
        shrinks.
        """

    def memory(self) -> MemoryInfo:
        """All figures of memory now. Takes up to a millisecond, so do not call it in every step."""

    def release(self) -> None:
        """Collect garbage, and return the allocator's unused memory to the device."""

    def emergency(self) -> None:
        """Run the prepared small product without allocating, and check its value.

        Raises:
            RuntimeError: The device does not answer: an error of an earlier call, or a new one.
            workers.messages.ContextCorruptedError: The device answers with a wrong value.
        """

    def timed(self, work: Callable[[], T], largest: object = None) -> tuple[T, float]:
        """Run `work` with the cap enforced, wait for the device, and return its result and the
        seconds.

        `largest` identifies the step if it is one of the largest possible; else `None`.
        """


def alone_on(device: str) -> AbstractContextManager[None]:
    """Hold the lock of a device inside a `with` block. `device` identifies it on this machine.
    Workers that start together must not count each other's context as their own.
    """
    key = hashlib.sha256(device.encode()).hexdigest()[:16]
    return locked(
        Path(tempfile.gettempdir()) / f"orchestrator-context-{os.getuid()}-{key}.lock", math.inf
    )


def threads_for(workers_on_host: int) -> int:
    """Return this worker's share of the physical cores here, 1 at the least.

    Ray's `num_cpus` is not used, because it only limits admission: Ray sets OMP_NUM_THREADS to it,
    and seven workers with 8 each would run 56 threads on an ordinary PC.
    """
    return max(1, (psutil.cpu_count(logical=False) or os.cpu_count() or 1) // workers_on_host)


class EmergencyProduct:
    """The product C = A B of a matrix of ones and one of twos: every element is exactly `2 x size`.

    Tests whether the device still computes, without any allocation: the operands, the result and
    (on CUDA) the cuBLAS handle and workspace exist since the device was opened.

    It is in fp32 whatever the workload's type: values are exact up to 2^24, and the kernel always
    exists.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        """Allocate and run once, so that handle, workspace and kernel are loaded. `size` is 128 in
        the hardware guides.
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
        self._result.zero_()  # the result of the last run must not pass for this one
        torch.mm(self._left, self._right, out=self._result)
        corner = self._result[-1, -1].item()
        if corner != 2.0 * self.size:
            raise ContextCorruptedError(
                f"the {self.size}x{self.size} emergency product gave {corner}, not "
                f"{2.0 * self.size}"
            )
