"""What NVML says of this machine's cards, once: identity, properties, and who holds memory.

Every answer but name, UUID and memory may be `None`. A card that does not answer is a sentence and
never hides the others. Does not sample and sets nothing (`nvml.sensors` samples).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

import psutil
import pynvml

from workers.host.facts import CardFacts, DriverFacts, Holder
from workers.nvml import queries
from workers.nvml.queries import Question

_PROPERTIES: Final = {
    "cores": Question(("nvmlDeviceGetNumGpuCores",)),
    "max_sm_clock_mhz": Question(("nvmlDeviceGetMaxClockInfo",), (pynvml.NVML_CLOCK_SM,)),
    "max_memory_clock_mhz": Question(("nvmlDeviceGetMaxClockInfo",), (pynvml.NVML_CLOCK_MEM,)),
    "bus_width_bits": Question(("nvmlDeviceGetMemoryBusWidth",)),
    "power_limit_w": Question(
        ("nvmlDeviceGetPowerManagementDefaultLimit",), convert=lambda limit_mw: limit_mw / 1e3
    ),
    "pcie_lanes": Question(("nvmlDeviceGetCurrPcieLinkWidth",)),
    "most_pcie_lanes": Question(("nvmlDeviceGetMaxPcieLinkWidth",)),
    "persistence": Question(("nvmlDeviceGetPersistenceMode",), convert=bool),
    "display": Question(("nvmlDeviceGetDisplayActive",), convert=bool),
}


def look_at_cards() -> DriverFacts:
    """Ask NVML about the driver and all cards; never raises for what a machine has or lacks."""
    try:
        with queries.opened():
            found = {identity: _card(identity) for identity in queries.cards()}
            cuda = queries.answer("nvmlSystemGetCudaDriverVersion_v2")
            return DriverFacts(
                driver=queries.answer("nvmlSystemGetDriverVersion"),
                driver_cuda=None
                if cuda is None
                else (cuda // 1000, cuda % 1000 // 10),  # 12080 is 12.8
                card_errors=tuple(
                    f"card {identity.index} {'is lost' if identity.lost else 'does not answer'}"
                    for identity, card in found.items()
                    if card is None
                ),
                cards=tuple(card for card in found.values() if card is not None),
            )
    except pynvml.NVMLError as error:
        return DriverFacts(nvml_error=str(error))


def visible_cards() -> tuple[CardFacts, ...]:
    """Return the cards of this machine that CUDA_VISIBLE_DEVICES does not hide.

    None if there is no driver.
    """
    return tuple(card for card in look_at_cards().cards if card.visible)


def _card(identity: queries.CardIdentity) -> CardFacts | None:
    """Ask about one card; `None` if it does not answer, or not even with its name and memory."""
    if identity.uuid is None or identity.name is None or identity.total_bytes is None:
        return None
    try:
        ask = queries.of_card(queries.handle_of(identity.uuid))
    except pynvml.NVMLError:
        return None
    return CardFacts(
        index=identity.index,
        name=identity.name,
        uuid=identity.uuid,
        total_bytes=identity.total_bytes,
        used_bytes=queries.used_bytes(ask),
        compute_capability=identity.compute_capability,
        visible=is_visible(identity.index, identity.uuid, os.environ.get("CUDA_VISIBLE_DEVICES")),
        holders=tuple(_holders(ask)),
        **queries.answers(_PROPERTIES, ask),
    )


def is_visible(index: int, uuid: str, setting: str | None) -> bool:
    """Say whether a value of CUDA_VISIBLE_DEVICES leaves a card visible, by index or by the
    beginning of its UUID.
    """
    if setting is None:
        return True
    names = [name.strip() for name in setting.split(",") if name.strip()]
    return str(index) in names or any(uuid.startswith(name) for name in names)


def _holders(ask: queries.Ask) -> Iterator[Holder]:
    """Yield every process on the card once; one that draws and computes is in several lists."""
    used_bytes: dict[int, int | None] = {}
    for listed in (*queries.PROCESS_LISTS, queries.GRAPHICS_LIST):
        for process in listed.put(ask) or ():
            if used_bytes.get(process.pid) is None:
                used_bytes[process.pid] = process.usedGpuMemory
    for pid, each_bytes in sorted(used_bytes.items()):
        yield Holder(pid=pid, name=_name_of(pid), used_bytes=each_bytes)


def _name_of(pid: int) -> str | None:
    try:
        return psutil.Process(pid).name()
    except (psutil.Error, ValueError):
        return None
