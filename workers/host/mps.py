"""NVIDIA's Multi-Process Service: whether its control daemon runs here, and what a client needs.

The user starts and stops the daemon; nothing here does. Variables and socket are documented at
docs.nvidia.com/deploy/mps.
"""

from __future__ import annotations

import errno
import math
import os
import socket
from pathlib import Path
from typing import Final

from workers.units import MIB

#: Variable with the memory limit of a client; a process that has it is a client.
MEMORY_LIMIT: Final = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"

#: Folder of the daemon's socket unless CUDA_MPS_PIPE_DIRECTORY is set.
_DEFAULT_PIPES: Final = "/tmp/nvidia-mps"  # noqa: S108 - NVIDIA's own default
_SOCKET: Final = "control"


def missing_daemon() -> str | None:
    """Return why this process cannot be a client of MPS, and what to type; `None`: a daemon
    answers.

    Without a daemon CUDA would start all the same, without any limit.
    """
    pipes = os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or _DEFAULT_PIPES
    with socket.socket(socket.AF_UNIX) as client:
        code = client.connect_ex(str(Path(pipes) / _SOCKET))
    if code in {0, errno.EPROTOTYPE}:  # EPROTOTYPE: a socket of another type listens there
        return None
    return (
        f"workers.mps is true, and no MPS control daemon answers in {pipes} on "
        f"{socket.gethostname()} ({os.strerror(code)}); type there: nvidia-cuda-mps-control -d, or "
        "set workers.mps to false"
    )


def client_variables(thread_share: float | None, memory_limit_bytes: int | None) -> dict[str, str]:
    """Return the environment variables that a client needs before CUDA starts.

    Args:
        thread_share: Share of the card's multiprocessors it may use; a ceiling, no reservation.
        memory_limit_bytes: Most bytes it may allocate on its card through CUDA, CUDA's own
            allocations included. Rounded up to whole MiB, the smallest unit of MPS. Its card is
            number 0: a worker sees no other.
    """
    variables = {}
    if thread_share is not None:
        variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] = f"{100 * thread_share:g}"
    if memory_limit_bytes is not None:
        variables[MEMORY_LIMIT] = f"0={math.ceil(memory_limit_bytes / MIB)}M"
    return variables
