"""Sets the power limits of cards through NVML and puts them back: the one place that changes a card.

NVML has to be open, and stay open: without persistence mode a driver forgets the limit when no process has the card
open. Does not decide whether a limit is set, nor remember it beyond this process (`journal.py` does).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pynvml

from workers.nvml.queries import answer, handle_of


class PowerLimitError(Exception):
    """A power limit cannot be set; a sentence with the card, the cause and the numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerChange:
    """The limit of one card before, and what it is set to, in milliwatts as NVML has them."""

    uuid: str
    before_mw: int
    set_mw: int


def plan_changes(node: str, cards: Sequence[str], limit_w: float) -> tuple[PowerChange, ...]:
    """Return what would have to be changed for every card to have this limit; nothing where it has it already.

    Raises:
        PowerLimitError: A card is not there, has no power limit, or not this one.
    """
    changes = []
    for card in cards:
        try:
            handle = handle_of(card)
            name = f"{node}'s {pynvml.nvmlDeviceGetName(handle)}"
            uuid = str(pynvml.nvmlDeviceGetUUID(handle))
            before_mw = int(pynvml.nvmlDeviceGetPowerManagementLimit(handle))
            least_mw, most_mw = pynvml.nvmlDeviceGetPowerManagementLimitConstraints(handle)
        except pynvml.NVMLError as error:
            raise PowerLimitError(f"{node}: the power limit of card {card} cannot be set: {error}") from None
        set_mw = round(1000 * limit_w)
        if not least_mw <= set_mw <= most_mw:
            raise PowerLimitError(
                f"nodes.{node}.power_limit_w {limit_w:g} is out of range: {name} takes {least_mw / 1000:g} to "
                f"{most_mw / 1000:g} W"
            )
        if set_mw != before_mw:
            changes.append(PowerChange(uuid=uuid, before_mw=before_mw, set_mw=set_mw))
    return tuple(changes)


def apply(node: str, change: PowerChange) -> str:
    """Set one limit, read it back, and return a sentence that says so.

    Raises:
        PowerLimitError: The driver refuses, or the card has another limit afterwards.
    """
    name = f"{node}'s card"
    try:
        handle = handle_of(change.uuid)
        name = f"{node}'s {_name_of(handle)}"
        pynvml.nvmlDeviceSetPowerManagementLimit(handle, change.set_mw)
        now_mw = int(pynvml.nvmlDeviceGetPowerManagementLimit(handle))
    except pynvml.NVMLError as error:
        if error.value == pynvml.NVML_ERROR_NO_PERMISSION:
            raise PowerLimitError(
                f"the power limit of {name} can only be set by root: start Ray as root on {node}, type "
                f"`sudo nvidia-smi -pl {change.set_mw / 1000:g}` there yourself, or leave out --apply-power-limit"
            ) from None
        raise PowerLimitError(f"the power limit of {name} cannot be set: {error}") from None
    if now_mw != change.set_mw:
        raise PowerLimitError(
            f"{name} was given a power limit of {change.set_mw / 1000:g} W and has {now_mw / 1000:g} W"
        )
    return f"{name}: power limit {change.set_mw / 1000:g} W until the run ends (before: {change.before_mw / 1000:g} W)"


def restore(node: str, change: PowerChange) -> str | None:
    """Put one limit back unless another program has changed it; return a sentence, `None` if it is as it was before.

    Raises:
        PowerLimitError: It has not been put back.
    """
    try:
        handle = handle_of(change.uuid)
    except pynvml.NVMLError as error:
        if error.value == pynvml.NVML_ERROR_NOT_FOUND:
            return f"{node}: card {change.uuid} is not in this machine any more"
        raise PowerLimitError(_by_hand(f"{node}'s card", change, str(error))) from None
    name = f"{node}'s {_name_of(handle)}"
    before = f"{change.before_mw / 1000:g} W"
    try:
        now_mw = int(pynvml.nvmlDeviceGetPowerManagementLimit(handle))
        if now_mw == change.before_mw:
            return None
        if now_mw != change.set_mw:
            return f"{name}: power limit left at {now_mw / 1000:g} W, which another program has set meanwhile"
        pynvml.nvmlDeviceSetPowerManagementLimit(handle, change.before_mw)
        now_mw = int(pynvml.nvmlDeviceGetPowerManagementLimit(handle))
    except pynvml.NVMLError as error:
        raise PowerLimitError(_by_hand(name, change, str(error))) from None
    if now_mw != change.before_mw:
        raise PowerLimitError(_by_hand(name, change, f"it has {now_mw / 1000:g} W"))
    return f"{name}: power limit back at {before}"


def _name_of(handle: Any) -> str:  # noqa: ANN401 - nvidia-ml-py has no types
    return answer("nvmlDeviceGetName", handle) or "card"


def _by_hand(name: str, change: PowerChange, why: str) -> str:
    return (
        f"the power limit of {name} could not be put back: {why}; type: "
        f"sudo nvidia-smi -i {change.uuid} -pl {change.before_mw / 1000:g}"
    )
