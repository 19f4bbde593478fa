"""What both devices use: the lock of a device, the threads of a worker, and the emergency product.

The lock is a file of this user on this machine; it does not keep out other users or programs.
"""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import torch

from workers.files import locked
from workers.messages import ContextCorruptedError


def alone_on(device: str) -> AbstractContextManager[None]:
    """Hold the lock of a device, named by whatever identifies it on this machine, for the duration
    of a `with`.

    Workers that start together must neither count each other's context nor grow into the same free
    bytes.
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
