"""Facts about one machine: values that cross processes and become JSON.

Covers the values. Does not collect them (`workers.host.machine` does) nor judge them (the head's
doctor does). Imports neither torch, Ray nor NVML.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A process that holds memory of a card."""

    pid: int
    name: str | None
    """`None`: the process is in another container, or gone."""
    used_bytes: int | None
    """`None` under WSL2 and WDDM."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """One card, as its driver reports it."""

    index: int
    """Its number in the order of the PCI bus."""
    name: str
    uuid: str
    total_bytes: int
    used_bytes: int | None = None
    """Used by all programs, the driver's own reserve included."""
    compute_capability: tuple[int, int] | None = None
    persistence: bool | None = None
    """Whether the driver keeps the card initialised while no program uses it."""
    display: bool | None = None
    """Whether the card drives a screen."""
    visible: bool = True
    """Whether CUDA_VISIBLE_DEVICES lets programs see it."""
    holders: tuple[Holder, ...] = ()

    @property
    def free_bytes(self) -> int:
        """Bytes that no program uses; all bytes if the use is unknown."""
        return self.total_bytes - (self.used_bytes or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFacts:
    """The torch of this Python, queried in a separate process."""

    version: str | None = None
    """`None`: torch cannot be imported, see `error`; or it is not known."""
    is_late: bool = False
    """Whether its import took too long, as on a busy machine: then nothing else is known."""
    cuda: str | None = None
    """The CUDA it was built for, such as 12.8; `None`: a build without CUDA."""
    architectures: tuple[str, ...] = ()
    """The architectures it has kernels for, such as sm_86."""
    available: bool = False
    """Whether it can use a card here."""
    error: str | None = None
    """Why it cannot be imported, or its warning about the driver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverFacts:
    """The driver and all cards it shows. `None`: unknown."""

    driver: str | None = None
    driver_cuda: tuple[int, int] | None = None
    """The newest CUDA that the driver can run."""
    nvml_error: str | None = None
    """Why NVML does not answer; `None` if it does."""
    card_errors: tuple[str, ...] = ()
    """A sentence for each card that NVML counts but that does not answer."""
    cards: tuple[CardFacts, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts(DriverFacts):
    """One machine. `None`: unknown."""

    hostname: str
    is_wsl: bool
    python: str
    ray: str | None
    project: str | None
    cores_logical: int
    cores_physical: int | None = None
    ram_available_bytes: int
    pci_cards: int | None = None
    """NVIDIA cards on the PCI bus, with or without a driver."""
    torch: TorchFacts = field(default_factory=TorchFacts)
    cuda_visible_devices: str | None = None
    """The value of CUDA_VISIBLE_DEVICES; `None`: not set."""
    cpu_governors: tuple[str, ...] = ()
    """Governors by which the kernel chooses the clocks of the cores; each once."""
    cpu_scaling_driver: str | None = None
    """Driver that sets these clocks, such as intel_pstate, which also chooses within a governor."""

    @property
    def visible_cards(self) -> tuple[CardFacts, ...]:
        """The cards that programs may use."""
        return tuple(card for card in self.cards if card.visible)
