"""What NVML knows of a card that torch does not: use by everybody, and use by one process.

Every answer may be `None`: no library, no card, or a platform that does not tell (WSL2 and WDDM give no memory per
process). Does not sample over time, and never sets anything.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import pynvml

T = TypeVar("T")

_Question: TypeAlias = Callable[[Any], T | None]


def visible_card() -> str:
    """The card this process computes on, as CUDA_VISIBLE_DEVICES names its first: a UUID, or an index.

    An index means the same card to NVML only under CUDA_DEVICE_ORDER=PCI_BUS_ID, which the actor sets.
    """
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0"


def card_used_bytes(card: str) -> int | None:
    """Bytes of the card in use by anybody."""
    return _ask(card, lambda handle: int(pynvml.nvmlDeviceGetMemoryInfo(handle).used))


def process_used_bytes(card: str) -> int | None:
    """Bytes of the card that this process holds, its CUDA context included."""

    def own(handle: Any) -> int | None:  # noqa: ANN401 - nvidia-ml-py has no types
        # Clients of an MPS server are in a list of their own.
        for ask in (pynvml.nvmlDeviceGetComputeRunningProcesses, pynvml.nvmlDeviceGetMPSComputeRunningProcesses):
            for process in ask(handle):
                if process.pid == os.getpid():
                    used: int | None = process.usedGpuMemory
                    return used
        return None

    return _ask(card, own)


def driver_version(card: str) -> str | None:
    """Version of the driver that the card runs under, such as 580.65.06."""
    return _ask(card, lambda _handle: str(pynvml.nvmlSystemGetDriverVersion()))


def _ask(card: str, question: _Question[T]) -> T | None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        by_uuid = card.startswith(("GPU-", "MIG-"))
        handle = pynvml.nvmlDeviceGetHandleByUUID(card) if by_uuid else pynvml.nvmlDeviceGetHandleByIndex(int(card))
        return question(handle)
    except (pynvml.NVMLError, ValueError):
        return None
    finally:
        pynvml.nvmlShutdown()
