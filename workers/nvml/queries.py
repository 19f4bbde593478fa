"""Queries to NVML for what torch does not know: a card's use by all programs or by one process.

A missing answer is `None`: no library, no card, or a platform that does not report it (WSL2 and
WDDM report no memory of processes). Functions that take the name of a card open NVML and close it
again; they are for the head, and for the time before sensors are opened. Does not sample over time
(`sensors.py` does), and sets nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

import pynvml

T = TypeVar("T")

#: Errors by which the driver reports that the card no longer answers.
GONE: Final = frozenset({pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED})

#: Members of NVML's union of values, by nvmlValueType_t.
_VALUE_MEMBERS: Final = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")


class Card:
    """Queries one card; NVML must be open."""

    def __init__(self, handle: Any) -> None:  # noqa: ANN401 - nvidia-ml-py has no types
        self.handle = handle

    def ask(self, functions: str, *arguments: object) -> Any:  # noqa: ANN401 - as above
        """Return the card's answer; `None` if there is none.

        Args:
            functions: Names of NVML functions, separated by blanks, the newest first: older drivers
                have only the older ones.
            arguments: Arguments after the handle.

        Raises:
            pynvml.NVMLError: The card is lost.
        """
        for function in functions.split():
            known = getattr(pynvml, function, None)
            if known is None:
                continue
            try:
                return known(self.handle, *arguments)
            except pynvml.NVMLError as error:
                if error.value in GONE:
                    raise
        return None

    def field(self, field: int) -> float | None:
        """Return one of NVML's field values; `None` if the card does not report it.

        Raises:
            pynvml.NVMLError: The card is lost.
        """
        for value in self.ask("nvmlDeviceGetFieldValues", (field,)) or ():
            if value.nvmlReturn in GONE:
                raise pynvml.NVMLError(value.nvmlReturn)
            if value.nvmlReturn == pynvml.NVML_SUCCESS:
                return float(getattr(value.value, _VALUE_MEMBERS[value.valueType]))
        return None

    def processes(self, *, drawing: bool = False) -> dict[int, int | None]:
        """Return the ids of the processes that compute on the card, with the bytes they hold.

        `drawing` adds graphics processes. A value of `None`: the driver lists no memory for it.
        """
        # Clients of an MPS server are in a separate list. For names without a version, nvidia-ml-py
        # raises something else than an NVMLError if the driver is older than 510.
        held: dict[int, int | None] = {}
        for kind in ("Compute", "MPSCompute", *(["Graphics"] if drawing else [])):
            name = f"nvmlDeviceGet{kind}RunningProcesses"
            for process in self.ask(f"{name}_v3 {name}_v2") or ():
                if held.get(process.pid) is None:
                    held[process.pid] = process.usedGpuMemory
        return held

    def total_bytes(self) -> int | None:
        """Return the bytes of the card's memory that CUDA shows; for a MIG instance, of its part.

        Newer drivers include their own reserve in the total of the first version of
        `nvmlDeviceGetMemoryInfo`, and report it in the second (NVML API reference,
        nvmlMemory_v2_t); older ones exclude it from the first, and have no second.
        """
        memory = self.ask("nvmlDeviceGetMemoryInfo")
        newer = self.ask("nvmlDeviceGetMemoryInfo", pynvml.nvmlMemory_v2)
        kept_bytes = 0 if newer is None else int(newer.reserved)
        return None if memory is None else max(0, int(memory.total) - kept_bytes)

    def used_bytes(self) -> int | None:
        """Return the bytes of the card in use, without the driver's own reserve."""
        memory = self.ask("nvmlDeviceGetMemoryInfo", pynvml.nvmlMemory_v2) or self.ask(
            "nvmlDeviceGetMemoryInfo"
        )
        return None if memory is None else int(memory.used)

    def free_bytes(self) -> int | None:
        """Return the bytes of the card that no program uses."""
        memory = self.ask("nvmlDeviceGetMemoryInfo")
        return None if memory is None else int(memory.free)


def visible_card() -> str:
    """Return the card this process computes on, the first in CUDA_VISIBLE_DEVICES: a UUID or an
    index.

    An index means the same card to NVML only with CUDA_DEVICE_ORDER=PCI_BUS_ID, which the actor
    sets.
    """
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0"


@contextmanager
def opened() -> Iterator[None]:
    """Keep NVML open inside a `with` block; blocks may nest, because NVML counts how often it was
    opened.

    Raises:
        pynvml.NVMLError: There is no library, or no driver.
    """
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def find_card(name: str) -> Card:
    """Return the card with this UUID or index in the order of the PCI bus; NVML must be open.

    Raises:
        pynvml.NVMLError: There is no such card, or it is lost.
    """
    if name.startswith(("GPU-", "MIG-")):
        return Card(pynvml.nvmlDeviceGetHandleByUUID(name))
    if not name.isdecimal():  # CUDA_VISIBLE_DEVICES may hold anything, and then CUDA sees no card
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
    return Card(pynvml.nvmlDeviceGetHandleByIndex(int(name)))


def card_used_bytes(card: str) -> int | None:
    """Return the bytes of the card in use by all programs, without the driver's own reserve."""
    return _once(lambda: find_card(card).used_bytes())


def card_free_bytes(card: str) -> int | None:
    """Return the bytes of the card that no program uses."""
    return _once(lambda: find_card(card).free_bytes())


def card_total_bytes(card: str) -> int | None:
    """Return the bytes of the card that CUDA shows; for a MIG instance, of its part."""
    return _once(lambda: find_card(card).total_bytes())


def process_used_bytes(card: str) -> int | None:
    """Return the bytes of the card that this process holds, its CUDA context included."""
    return _once(lambda: find_card(card).processes().get(os.getpid()))


def driver_version() -> str | None:
    """Return the version of the driver, such as 580.65.06."""
    return _once(lambda: str(pynvml.nvmlSystemGetDriverVersion()))


def _once(ask: Callable[[], T]) -> T | None:
    with suppress(pynvml.NVMLError), opened():
        return ask()
    return None
