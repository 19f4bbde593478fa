"""What NVML says of this machine's cards, once: identity, properties, and who holds memory.

Every answer but name, UUID and memory may be `None`. A card that does not answer is a sentence and never hides the
others. Does not sample and sets nothing (`nvml.sampler` samples).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import psutil
import pynvml

from workers.host.facts import CardFacts, Holder
from workers.nvml import queries

T = TypeVar("T")

#: Who draws on a card, as `queries.PROCESS_LISTS` has who computes.
_GRAPHICS_LIST = ("nvmlDeviceGetGraphicsRunningProcesses_v3", "nvmlDeviceGetGraphicsRunningProcesses_v2")


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverFacts:
    """The driver and every card it shows."""

    version: str | None = None
    cuda: tuple[int, int] | None = None
    error: str | None = None
    """Why NVML does not answer at all."""
    card_errors: tuple[str, ...] = ()
    cards: tuple[CardFacts, ...] = ()


def look_at_cards() -> DriverFacts:
    """Ask NVML about the driver and all cards; never raises for what a machine has or lacks."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return DriverFacts(error=str(error))
    try:
        identities = queries.cards()
        found = [_card(identity) for identity in identities]
        return DriverFacts(
            version=_or_none(lambda: str(pynvml.nvmlSystemGetDriverVersion())),
            cuda=_or_none(_driver_cuda),
            card_errors=tuple(
                f"card {identity.index} {'is lost' if identity.lost else 'does not answer'}"
                for identity, card in zip(identities, found, strict=True)
                if card is None
            ),
            cards=tuple(card for card in found if card is not None),
        )
    finally:
        pynvml.nvmlShutdown()


def _card(identity: queries.CardIdentity) -> CardFacts | None:
    """Ask about one card; `None` if it does not answer, or not even with its name and memory."""
    uuid, name, total_bytes = identity.uuid, identity.name, identity.total_bytes
    handle = None if uuid is None else _or_none(lambda: queries.handle_of(uuid))
    if handle is None or uuid is None or name is None or total_bytes is None:
        return None
    return CardFacts(
        index=identity.index,
        name=name,
        uuid=uuid,
        total_bytes=total_bytes,
        used_bytes=_or_none(lambda: queries.used_bytes(handle)),
        compute_capability=identity.compute_capability,
        cores=_or_none(lambda: int(pynvml.nvmlDeviceGetNumGpuCores(handle))),
        max_sm_clock_mhz=_or_none(lambda: int(pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_SM))),
        max_memory_clock_mhz=_or_none(lambda: int(pynvml.nvmlDeviceGetMaxClockInfo(handle, pynvml.NVML_CLOCK_MEM))),
        bus_width_bits=_or_none(lambda: int(pynvml.nvmlDeviceGetMemoryBusWidth(handle))),
        power_limit_w=identity.power_limit_default_w,
        persistence=_or_none(lambda: bool(pynvml.nvmlDeviceGetPersistenceMode(handle))),
        display=_or_none(lambda: bool(pynvml.nvmlDeviceGetDisplayActive(handle))),
        visible=is_visible(identity.index, uuid, os.environ.get("CUDA_VISIBLE_DEVICES")),
        holders=tuple(_holders(handle)),
    )


def is_visible(index: int, uuid: str, setting: str | None) -> bool:
    """Say whether a value of CUDA_VISIBLE_DEVICES leaves a card visible, by index or by the beginning of its UUID."""
    if setting is None:
        return True
    names = [name.strip() for name in setting.split(",") if name.strip()]
    return str(index) in names or any(uuid.startswith(name) for name in names)


def _holders(handle: Any) -> Iterator[Holder]:  # noqa: ANN401 - nvidia-ml-py has no types
    """Yield every process on the card once; one that draws and computes is in several lists."""
    used_bytes: dict[int, int | None] = {}
    for names in (*queries.PROCESS_LISTS, _GRAPHICS_LIST):
        for process in _first_answer(names, handle):
            known = used_bytes.get(process.pid)
            used_bytes[process.pid] = process.usedGpuMemory if known is None else known
    for pid, each_bytes in sorted(used_bytes.items()):
        yield Holder(pid=pid, name=_name_of(pid), used_bytes=each_bytes)


def _first_answer(names: Sequence[str], handle: Any) -> list[Any]:  # noqa: ANN401 - nvidia-ml-py has no types
    """Return what the first function that this driver has says; nothing if it has none of them."""
    for name in names:
        found: list[Any] | None = _or_none(partial(getattr(pynvml, name), handle))
        if found is not None:
            return found
    return []


def _name_of(pid: int) -> str | None:
    try:
        return psutil.Process(pid).name()
    except (psutil.Error, ValueError):
        return None


def _driver_cuda() -> tuple[int, int]:
    version = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())  # 12080 is 12.8
    return version // 1000, version % 1000 // 10


def _or_none(question: Callable[[], T]) -> T | None:
    try:
        return question()
    except pynvml.NVMLError:
        return None
