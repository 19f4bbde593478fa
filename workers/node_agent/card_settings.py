"""Sets power limits and memory offsets of cards through NVML and puts them back: the one place that
changes a card.

NVML has to be open, and stay open: without persistence mode a driver forgets a setting when no
process has the card open. Does not decide whether anything is set, nor remember it beyond this
process (`agent.py` does).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import pynvml

from workers.nvml.queries import answer, handle_of


class CardSettingError(Exception):
    """A card cannot be set so; a sentence with the card, the cause and the numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One thing that can be set on a card, and how NVML and people name it."""

    title: str
    unit: str
    per_unit: int
    """NVML's own number for one unit."""
    read: str
    """Name of NVML's function for the value, for its bounds, and for setting it."""
    bounds: str
    write: str
    source: str
    """Where the value comes from, with `{node}` and `{value}` in it."""
    for_root: str
    """What to do where only root may, with `{node}` and `{value}` in it."""
    by_hand: str
    """What to type where it was not put back, with `{uuid}` and `{value}` in it."""

    def words(self, value: int) -> str:
        """Return NVML's number with its unit."""
        return f"{value / self.per_unit:g} {self.unit}"


POWER_LIMIT: Final = "power_limit"
MEMORY_OFFSET: Final = "memory_offset"

SETTINGS: Final[Mapping[str, Setting]] = MappingProxyType(
    {
        POWER_LIMIT: Setting(
            title="power limit",
            unit="W",
            per_unit=1000,
            read="nvmlDeviceGetPowerManagementLimit",
            bounds="nvmlDeviceGetPowerManagementLimitConstraints",
            write="nvmlDeviceSetPowerManagementLimit",
            source="nodes.{node}.power_limit_w {value}",
            for_root="type `sudo nvidia-smi -pl {value}` there yourself, or leave out "
            "--apply-power-limit",
            by_hand="sudo nvidia-smi -i {uuid} -pl {value}",
        ),
        # NVML marks these functions as deprecated from CUDA 13 on; drivers since R515 have them,
        # newer ones only on the newest cards have something else. The number is MHz of the transfer
        # rate, twice that of the memory's clock.
        MEMORY_OFFSET: Setting(
            title="memory offset",
            unit="MHz",
            per_unit=1,
            read="nvmlDeviceGetMemClkVfOffset",
            bounds="nvmlDeviceGetMemClkMinMaxVfOffset",
            write="nvmlDeviceSetMemClkVfOffset",
            source="--sweep memory-offset at {value}",
            for_root="or leave out --sweep memory-offset",
            by_hand="sudo .venv/bin/python -m workers.node_agent.agent --undo, or restart that PC",
        ),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CardChange:
    """A setting of one card before, and what it is set to, in NVML's own numbers."""

    setting: str
    """A key of `SETTINGS`."""
    uuid: str
    before: int
    set_to: int


def plan_changes(
    node: str, cards: Sequence[str], setting: str, value: float
) -> tuple[CardChange, ...]:
    """Return what would have to be changed for every card to be set so; nothing where it is
    already.

    Raises:
        CardSettingError: A card is not there, has no such setting, or not this value.
    """
    kind = SETTINGS[setting]
    changes = []
    for card in cards:
        try:
            handle = handle_of(card)
            name = f"{node}'s {pynvml.nvmlDeviceGetName(handle)}"
            uuid = str(pynvml.nvmlDeviceGetUUID(handle))
            before = int(_nvml(kind.read)(handle))
            least, most = _nvml(kind.bounds)(handle)
        except pynvml.NVMLError as error:
            raise CardSettingError(
                f"{node}: the {kind.title} of card {card} cannot be set: {error}"
            ) from None
        set_to = round(kind.per_unit * value)
        if not least <= set_to <= most:
            source = kind.source.format(node=node, value=f"{value:g}")
            raise CardSettingError(
                f"{source} is out of range: {name} takes {least / kind.per_unit:g} to "
                f"{kind.words(most)}"
            )
        if set_to != before:
            changes.append(CardChange(setting=setting, uuid=uuid, before=before, set_to=set_to))
    return tuple(changes)


def apply(node: str, change: CardChange) -> str:
    """Set one card, read it back, and return a sentence that says so.

    Raises:
        CardSettingError: The driver refuses, or the card has another value afterwards.
    """
    kind = SETTINGS[change.setting]
    name = f"{node}'s card"
    try:
        handle = handle_of(change.uuid)
        name = f"{node}'s {_name_of(handle)}"
        _nvml(kind.write)(handle, change.set_to)
        now = int(_nvml(kind.read)(handle))
    except pynvml.NVMLError as error:
        if error.value == pynvml.NVML_ERROR_NO_PERMISSION:
            what = kind.for_root.format(value=f"{change.set_to / kind.per_unit:g}")
            raise CardSettingError(
                f"the {kind.title} of {name} can only be set by root: start Ray as root on "
                f"{node}, {what}"
            ) from None
        raise CardSettingError(f"the {kind.title} of {name} cannot be set: {error}") from None
    if now != change.set_to:
        raise CardSettingError(
            f"{name} was given a {kind.title} of {kind.words(change.set_to)} and has "
            f"{kind.words(now)}"
        )
    before = kind.words(change.before)
    return f"{name}: {kind.title} {kind.words(change.set_to)} until the run ends (before: {before})"


def restore(node: str, change: CardChange) -> str | None:
    """Put one card back unless another program has changed it; return a sentence, `None` if it is
    as it was before.

    Raises:
        CardSettingError: It has not been put back.
    """
    kind = SETTINGS[change.setting]
    try:
        handle = handle_of(change.uuid)
    except pynvml.NVMLError as error:
        if error.value == pynvml.NVML_ERROR_NOT_FOUND:
            return f"{node}: card {change.uuid} is not in this machine any more"
        raise CardSettingError(_by_hand(f"{node}'s card", change, str(error))) from None
    name = f"{node}'s {_name_of(handle)}"
    try:
        now = int(_nvml(kind.read)(handle))
        if now == change.before:
            return None
        if now != change.set_to:
            return (
                f"{name}: {kind.title} left at {kind.words(now)}, which another program has "
                "set meanwhile"
            )
        _nvml(kind.write)(handle, change.before)
        now = int(_nvml(kind.read)(handle))
    except pynvml.NVMLError as error:
        raise CardSettingError(_by_hand(name, change, str(error))) from None
    if now != change.before:
        raise CardSettingError(_by_hand(name, change, f"it has {kind.words(now)}"))
    return f"{name}: {kind.title} back at {kind.words(change.before)}"


def _nvml(function: str) -> Callable[..., Any]:
    return getattr(pynvml, function)  # type: ignore[no-any-return]  # nvidia-ml-py has no types


def _name_of(handle: Any) -> str:  # noqa: ANN401 - nvidia-ml-py has no types
    return answer("nvmlDeviceGetName", handle) or "card"


def _by_hand(name: str, change: CardChange, why: str) -> str:
    kind = SETTINGS[change.setting]
    typed = kind.by_hand.format(uuid=change.uuid, value=f"{change.before / kind.per_unit:g}")
    return f"the {kind.title} of {name} could not be put back: {why}; type: {typed}"
