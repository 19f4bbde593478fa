"""Queries to NVML for what torch does not know: the cards, and their use by all programs or by one process.

Each function asks once and closes NVML again. They are used before a sampler exists, and in the head. Every answer may
be `None`: no library, no card, or a platform that does not report it (WSL2 and WDDM give no memory per process). Does
not sample over time (`sampler` does), and never sets anything.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

import pynvml

T = TypeVar("T")

#: Who computes on a card; clients of an MPS server are in a list of their own. The newer function, and that of drivers
#: before 510. (By the names without a version, nvidia-ml-py raises what is no NVMLError if the driver is old.)
PROCESS_LISTS: Final = (
    ("nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetComputeRunningProcesses_v2"),
    ("nvmlDeviceGetMPSComputeRunningProcesses_v3", "nvmlDeviceGetMPSComputeRunningProcesses_v2"),
)

_Question: TypeAlias = Callable[[Any], T | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CardIdentity:
    """One card of this machine: what does not change while it runs. `None`: not reported by the card or its driver."""

    index: int
    """NVML's, in the order of the PCI bus; CUDA's too under CUDA_DEVICE_ORDER=PCI_BUS_ID."""
    uuid: str | None = None
    name: str | None = None
    total_bytes: int | None = None
    compute_capability: tuple[int, int] | None = None
    power_limit_default_w: float | None = None
    power_limit_min_w: float | None = None
    power_limit_max_w: float | None = None
    driver: str | None = None
    lost: bool = False
    """The driver lists the card and says that it does not answer."""


def visible_card() -> str:
    """The card this process computes on, as CUDA_VISIBLE_DEVICES names its first: a UUID, or an index.

    An index means the same card to NVML only under CUDA_DEVICE_ORDER=PCI_BUS_ID, which the actor sets.
    """
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0"


def cards() -> tuple[CardIdentity, ...]:
    """Return all cards of this machine, whatever CUDA_VISIBLE_DEVICES says; none if there is no driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        return tuple(_identity(index) for index in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()


def card_used_bytes(card: str) -> int | None:
    """Bytes of the card in use by all programs, without the driver's own."""
    return _ask(card, used_bytes)


def card_free_bytes(card: str) -> int | None:
    """Bytes of the card that no program uses."""
    return _ask(card, lambda handle: int(pynvml.nvmlDeviceGetMemoryInfo(handle).free))


def process_used_bytes(card: str) -> int | None:
    """Bytes of the card that this process holds, its CUDA context included."""

    def own(handle: Any) -> int | None:  # noqa: ANN401 - nvidia-ml-py has no types
        for newer, older in PROCESS_LISTS:
            processes = _answer(getattr(pynvml, newer), handle)
            used_bytes = own_bytes(_answer(getattr(pynvml, older), handle) if processes is None else processes)
            if used_bytes is not None:
                return used_bytes
        return None

    return _ask(card, own)


def own_bytes(processes: Iterable[Any] | None) -> int | None:
    """Find this process in one of NVML's lists of processes; `None` if it or its memory is not there."""
    for process in processes or ():
        if process.pid == os.getpid():
            used: int | None = process.usedGpuMemory
            return used
    return None


def driver_version(card: str) -> str | None:
    """Version of the driver that the card runs under, such as 580.65.06."""
    return _ask(card, lambda _handle: str(pynvml.nvmlSystemGetDriverVersion()))


def handle_of(card: str) -> Any:  # noqa: ANN401 - nvidia-ml-py has no types
    """Return NVML's handle of a card; NVML has to be open.

    Args:
        card: A UUID, or an index in the order of the PCI bus.

    Raises:
        pynvml.NVMLError: There is no such card, or it is lost.
    """
    if card.startswith(("GPU-", "MIG-")):
        return pynvml.nvmlDeviceGetHandleByUUID(card)
    if not card.isdecimal():  # CUDA_VISIBLE_DEVICES may hold anything, and then CUDA sees no card
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
    return pynvml.nvmlDeviceGetHandleByIndex(int(card))


def used_bytes(handle: Any) -> int:  # noqa: ANN401 - nvidia-ml-py has no types
    """Return what is in use of a card's memory, without what the driver keeps for itself; see `shown_bytes`.

    Args:
        handle: NVML's of the card; NVML has to be open.

    Raises:
        pynvml.NVMLError: The card does not report it.
    """
    try:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used)
    except pynvml.NVMLError:
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)


def shown_bytes(handle: Any, total_bytes: int) -> int:  # noqa: ANN401 - nvidia-ml-py has no types
    """Return what CUDA shows of a card's memory: NVML's total without what the driver keeps for itself.

    Newer drivers count that in the first version of `nvmlDeviceGetMemoryInfo`, and tell it in the second (NVML API
    reference, nvmlMemory_v2_t); older ones leave it out of the first, and have no second.

    Args:
        handle: NVML's of the card; NVML has to be open.
        total_bytes: As the first version reports it.
    """
    try:
        reserved_bytes = int(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).reserved)
    except pynvml.NVMLError:
        return total_bytes
    return max(0, total_bytes - reserved_bytes)


def _ask(card: str, question: _Question[T]) -> T | None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        return question(handle_of(card))
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _identity(index: int) -> CardIdentity:
    driver = _answer(pynvml.nvmlSystemGetDriverVersion)
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid = pynvml.nvmlDeviceGetUUID(handle)
    except pynvml.NVMLError as error:
        gone = error.value in {pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED}
        return CardIdentity(index=index, driver=driver, lost=gone)
    memory = _answer(pynvml.nvmlDeviceGetMemoryInfo, handle)
    default_mw = _answer(pynvml.nvmlDeviceGetPowerManagementDefaultLimit, handle)
    least_mw, most_mw = _answer(pynvml.nvmlDeviceGetPowerManagementLimitConstraints, handle) or (None, None)
    return CardIdentity(
        index=index,
        uuid=str(uuid),
        name=_answer(pynvml.nvmlDeviceGetName, handle),
        total_bytes=None if memory is None else shown_bytes(handle, int(memory.total)),
        compute_capability=_answer(pynvml.nvmlDeviceGetCudaComputeCapability, handle),
        power_limit_default_w=None if default_mw is None else default_mw / 1e3,
        power_limit_min_w=None if least_mw is None else least_mw / 1e3,
        power_limit_max_w=None if most_mw is None else most_mw / 1e3,
        driver=driver,
    )


def _answer(function: Callable[..., T], *arguments: object) -> T | None:
    try:
        return function(*arguments)
    except pynvml.NVMLError:
        return None
