"""Queries to NVML for what torch does not know: the cards, and their use by all programs or by one
process.

Covers how NVML is asked. No answer is `None`: no library, no card, or a platform that does not
report it (WSL2 and WDDM give no memory per process). What takes no handle opens NVML and closes it
again; that is for before a sampler exists, and for the head. Does not sample over time
(`sensors.py` does), and never sets anything.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypeVar

import pynvml

T = TypeVar("T")

#: Asks one card: the name of a function of NVML, then what follows the handle. Returns `None` if
#: there is no answer.
Ask: TypeAlias = Callable[..., Any]

#: The driver says that the card does not answer any more.
GONE: Final = frozenset({pynvml.NVML_ERROR_GPU_IS_LOST, pynvml.NVML_ERROR_RESET_REQUIRED})


@dataclass(frozen=True, slots=True)
class Question:
    """One query about a card."""

    functions: tuple[str, ...]
    """Names in NVML, the newest first. The older ones are for older drivers."""
    arguments: tuple[int, ...] = ()
    """What follows the handle."""
    convert: Callable[[Any], Any] = int
    """From NVML's unit to ours."""

    def put(self, ask: Ask) -> Any:  # noqa: ANN401 - nvidia-ml-py has no types
        """Return the first answer, converted; `None` if there is none."""
        answers = (ask(function, *self.arguments) for function in self.functions)
        told = next((answer for answer in answers if answer is not None), None)
        return None if told is None else self.convert(told)


def _process_list(kind: str) -> Question:
    name = f"nvmlDeviceGet{kind}RunningProcesses"
    return Question((f"{name}_v3", f"{name}_v2"), convert=list)


#: Who computes on a card; clients of an MPS server are in a list of their own. The second function
#: of each is that of drivers before 510. (By the names without a version, nvidia-ml-py raises what
#: is no NVMLError if the driver is old.)
PROCESS_LISTS: Final = (_process_list("Compute"), _process_list("MPSCompute"))
#: Who draws on a card.
GRAPHICS_LIST: Final = _process_list("Graphics")


@dataclass(frozen=True, slots=True, kw_only=True)
class CardIdentity:
    """One card of this machine: what does not change while it runs.

    `None`: not reported by the card or its driver.
    """

    index: int
    """NVML's, in the order of the PCI bus; CUDA's too under CUDA_DEVICE_ORDER=PCI_BUS_ID."""
    uuid: str | None = None
    name: str | None = None
    total_bytes: int | None = None
    compute_capability: tuple[int, int] | None = None
    compute_mode: int | None = None
    """nvmlComputeMode_t: 0 default, 2 prohibited, 3 exclusive to one process."""
    lost: bool = False
    """The driver lists the card and says that it does not answer."""


def visible_card() -> str:
    """The card this process computes on, as CUDA_VISIBLE_DEVICES names its first: a UUID, or an
    index.

    An index means the same card to NVML only under CUDA_DEVICE_ORDER=PCI_BUS_ID, which the actor
    sets.
    """
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0"


@contextmanager
def opened() -> Iterator[None]:
    """Keep NVML open for the length of the block; NVML counts how often it was opened.

    Raises:
        pynvml.NVMLError: There is no library, or no driver.
    """
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def answer(function: str, *arguments: object) -> Any:  # noqa: ANN401 - nvidia-ml-py has no types
    """Return what NVML answers.

    `None` for any error, and if neither nvidia-ml-py nor the driver has the function.
    """
    known = getattr(pynvml, function, None)
    with suppress(pynvml.NVMLError):
        return None if known is None else known(*arguments)
    return None


def of_card(handle: Any) -> Ask:  # noqa: ANN401 - nvidia-ml-py has no types
    """Return what asks the card with this handle, without raising; NVML has to be open."""
    return lambda function, *arguments: answer(function, handle, *arguments)


def answers(questions: Mapping[str, Question], ask: Ask) -> dict[str, Any]:
    """Return the answer to each of several questions, by its name."""
    return {name: question.put(ask) for name, question in questions.items()}


def cards() -> tuple[CardIdentity, ...]:
    """Return all cards of this machine, whatever CUDA_VISIBLE_DEVICES says.

    None if there is no driver.
    """
    with suppress(pynvml.NVMLError), opened():
        return tuple(_identity(index) for index in range(pynvml.nvmlDeviceGetCount()))
    return ()


def card_used_bytes(card: str) -> int | None:
    """Bytes of the card in use by all programs, without the driver's own."""
    return _ask_once(card, used_bytes)


def card_free_bytes(card: str) -> int | None:
    """Bytes of the card that no program uses."""
    return _ask_once(
        card, Question(("nvmlDeviceGetMemoryInfo",), convert=lambda memory: int(memory.free)).put
    )


def card_total_bytes(card: str) -> int | None:
    """Bytes of the card that CUDA shows; of an instance of MIG its part."""
    return _ask_once(card, _shown_bytes)


def process_used_bytes(card: str) -> int | None:
    """Bytes of the card that this process holds, its CUDA context included."""
    return _ask_once(card, own_bytes)


def own_bytes(ask: Ask) -> int | None:
    """Return what this process holds of a card, by the first of NVML's lists that tells it."""
    for listed in PROCESS_LISTS:
        for process in listed.put(ask) or ():
            if process.pid == os.getpid() and process.usedGpuMemory is not None:
                return int(process.usedGpuMemory)
    return None


def driver_version() -> str | None:
    """Version of the driver, such as 580.65.06."""
    with suppress(pynvml.NVMLError), opened():
        return str(pynvml.nvmlSystemGetDriverVersion())
    return None


def handle_of(card: str) -> Any:  # noqa: ANN401 - nvidia-ml-py has no types
    """Return NVML's handle of a card, named by UUID or by index in the order of the PCI bus; NVML
    has to be open.

    Raises `pynvml.NVMLError` if there is no such card, or it is lost.
    """
    if card.startswith(("GPU-", "MIG-")):
        return pynvml.nvmlDeviceGetHandleByUUID(card)
    if not card.isdecimal():  # CUDA_VISIBLE_DEVICES may hold anything, and then CUDA sees no card
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
    return pynvml.nvmlDeviceGetHandleByIndex(int(card))


def used_bytes(ask: Ask) -> int | None:
    """Return what is in use of a card's memory, without what the driver keeps for itself."""
    memory = ask("nvmlDeviceGetMemoryInfo", pynvml.nvmlMemory_v2) or ask("nvmlDeviceGetMemoryInfo")
    return None if memory is None else int(memory.used)


def _ask_once(card: str, question: Callable[[Ask], T]) -> T | None:
    with suppress(pynvml.NVMLError), opened():
        return question(of_card(handle_of(card)))
    return None


def _identity(index: int) -> CardIdentity:
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        uuid = str(pynvml.nvmlDeviceGetUUID(handle))
    except pynvml.NVMLError as error:
        return CardIdentity(index=index, lost=error.value in GONE)
    ask = of_card(handle)
    return CardIdentity(
        index=index,
        uuid=uuid,
        name=ask("nvmlDeviceGetName"),
        total_bytes=_shown_bytes(ask),
        compute_capability=ask("nvmlDeviceGetCudaComputeCapability"),
        compute_mode=ask("nvmlDeviceGetComputeMode"),
    )


def _shown_bytes(ask: Ask) -> int | None:
    """Return what CUDA shows of a card's memory: NVML's total without what the driver keeps for
    itself.

    Newer drivers count that in the first version of `nvmlDeviceGetMemoryInfo`, and tell it in the
    second (NVML API reference, nvmlMemory_v2_t); older ones leave it out of the first, and have no
    second.
    """
    memory, newer = (
        ask("nvmlDeviceGetMemoryInfo"),
        ask("nvmlDeviceGetMemoryInfo", pynvml.nvmlMemory_v2),
    )
    reserved_bytes = 0 if newer is None else int(newer.reserved)
    return None if memory is None else max(0, int(memory.total) - reserved_bytes)
