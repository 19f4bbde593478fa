"""What cards this machine has, asked of NVML. Does not ask torch: the head never loads it."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pynvml

from workers.host.gpu_facts import is_visible
from workers.nvml.queries import shown_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """One NVIDIA card."""

    name: str
    uuid: str
    total_bytes: int
    free_bytes: int


def cards() -> tuple[Card, ...]:
    """Return the cards of this machine that CUDA_VISIBLE_DEVICES does not hide; none if there is no driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        found = [_card(index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    return tuple(card for index, card in enumerate(found) if is_visible(index, card.uuid, setting))


def _card(index: int) -> Card:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return Card(
        name=str(pynvml.nvmlDeviceGetName(handle)),
        uuid=str(pynvml.nvmlDeviceGetUUID(handle)),
        total_bytes=shown_bytes(handle, int(memory.total)),
        free_bytes=int(memory.free),
    )
