"""What is known of a run's cards and slots: the values that causes are found from. Pure.

Does not read them (`collect.py`) nor judge them (`shares.py`). `None` means unknown, shares are
0..1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from orchestrator.core.slot import SlotState
from workers.host.facts import Holder

#: The configuration of the run as YAML gives it: sections, and what is in them.
Keys: TypeAlias = Mapping[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """What a pass of torch.profiler has told: shares of the time of the steps that it looked at."""

    copies: float
    """Those that no kernel hides."""
    synchronisations: float
    """The device had nothing to do, and the program still waited for it."""
    idle: float
    """Other time in which the device had nothing to do, the wait for data included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotFacts:
    """One slot, from its first report on."""

    slot: str
    states_s: Mapping[SlotState, float]
    """Seconds in each state. Time in which it had nothing to do (DONE, STOPPED) is not in it."""
    duty_asked: float | None = None
    """`None`: no duty limits it."""
    duty_got: float | None = None
    """Share of the time in which it reported for which its steps took the device; their waits are
    in it.
    """
    data_wait: float | None = None
    """Share of the time in which a training waited for data."""
    copies: float | None = None
    """Share of the time in which a training copied batches to the device."""
    optimizer: float | None = None
    """Share of the time that clipping and updates took."""
    of_best: float | None = None
    """Throughput, of the best of such a worker on this card."""
    own_bytes: int | None = None
    """What its process holds on the card, its context included."""
    profile: Profile | None = None
    """`None`: no pass of torch.profiler was asked for, or it is not over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardFacts:
    """One card, or the processor of a node without one."""

    node: str
    name: str
    """As the driver says, or `CPU`."""
    uuid: str | None = None
    """`None` of a processor."""
    slots: tuple[SlotFacts, ...]
    utilisation: float | None = None
    """Share of the time in which a kernel of any program ran, as NVML says."""
    slowed: float | None = None
    """Share of the time in which heat or power supply slowed the card."""
    clock: float | None = None
    """Mean clock while it worked, of the highest that was sampled."""
    hottest_c: float | None = None
    power_limit_w: float | None = None
    used_bytes: int | None = None
    """By all programs."""
    total_bytes: int | None = None
    torch: str | None = None
    """The version that the run's workers used; `None`: it was not recorded."""
    driver: str | None = None
    """The same of its driver; `None` of a processor as well."""
    holders: tuple[Holder, ...] = ()
    """Other programs that hold memory of this card now; only of a card in this machine, as all
    below.
    """
    usual_power_limit_w: float | None = None
    """The limit that the driver sets by itself."""
    pcie_lanes: int | None = None
    most_pcie_lanes: int | None = None
    """What card and slot could use."""
    is_wsl: bool = False
    """Whether its machine is Linux under Windows."""
    cores: int | None = None
    """Physical cores of its machine; `None`: it is another one than this."""

    @property
    def foreign_bytes(self) -> int | None:
        """What other programs hold; `None` where the card, or a slot, does not tell."""
        own = [slot.own_bytes for slot in self.slots]
        if self.used_bytes is None or any(each is None for each in own):
            return None
        return max(0, self.used_bytes - sum(each for each in own if each is not None))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """One run, with the configuration that it used."""

    run_id: str
    cards: tuple[CardFacts, ...]
    mode: str = "cluster"
    """How it was started: `cluster`, `local`, `rehearse` or `debug`."""
    keys: Keys = field(default_factory=dict)

    @property
    def model(self) -> str | None:
        """What a tuning calls what the run computes: a preset, or `matmul`.

        `None` of another workload.
        """
        name = self.key("workload", "name", "matmul")
        told = self.key("train", "preset") if name == "train" else name
        return told if isinstance(told, str) else None

    def key(self, section: str, name: str, default: object = None) -> object:
        """Return a key of the run's configuration; the default if it is not there."""
        found = self.keys.get(section)
        return found.get(name, default) if isinstance(found, Mapping) else default
