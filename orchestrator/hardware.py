"""What cards this machine has, asked of NVML. Does not ask torch: the head never loads it."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pynvml

from workers.sensors import shown_bytes


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
    return tuple(card for index, card in enumerate(found) if _is_visible(index, card.uuid))


def _is_visible(index: int, uuid: str) -> bool:
    """Say whether CUDA_VISIBLE_DEVICES leaves a card visible, by index or by the beginning of its UUID."""
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    if setting is None:
        return True
    names = [name.strip() for name in setting.split(",") if name.strip()]
    return str(index) in names or any(uuid.startswith(name) for name in names)


def _card(index: int) -> Card:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return Card(
        name=str(pynvml.nvmlDeviceGetName(handle)),
        uuid=str(pynvml.nvmlDeviceGetUUID(handle)),
        total_bytes=shown_bytes(handle, int(memory.total)),
        free_bytes=int(memory.free),
    )
