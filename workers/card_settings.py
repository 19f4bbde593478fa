"""Sets power limits and memory offsets of this machine's cards through NVML, and restores them; no
other module changes a card's settings.

The old values of a card are saved to a file before a change, and restored when the run ends. If its
process was killed, the next run on this machine or `orchestrator stop` restores them. NVML stays
open meanwhile: without persistence mode a driver resets a setting when no process has the card
open. Does not decide whether anything is set.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import pynvml

from workers.files import locked, read_small, replace_whole
from workers.host.processes import is_alive
from workers.keeper.processes import start_time
from workers.learned_limits import default_path
from workers.nvml.queries import find_card, opened

_MOST_BYTES: Final = 2**20
#: Longest wait for another process that sets or restores cards.
_LOCK_S: Final = 30.0


class CardSettingError(Exception):
    """A card setting is impossible; the text names the card, the cause and the numbers."""


@dataclass(frozen=True, slots=True)
class _Setting:
    """One setting of a card, and NVML's functions for it."""

    title: str
    unit: str
    per_unit: int
    """NVML's number for one unit."""
    read: Callable[[Any], int]
    bounds: Callable[[Any], tuple[int, int]]
    write: Callable[[Any, int], None]

    def words(self, value: int) -> str:
        """Return an NVML number as text with its unit."""
        return f"{value / self.per_unit:g} {self.unit}"


#: Keyed by the configuration keys of a node in cluster.yaml.
_SETTINGS: Final = {
    "power_limit_w": _Setting(
        "power limit",
        "W",
        1000,
        pynvml.nvmlDeviceGetPowerManagementLimit,
        pynvml.nvmlDeviceGetPowerManagementLimitConstraints,
        pynvml.nvmlDeviceSetPowerManagementLimit,
    ),
    # NVML marks these functions as deprecated from CUDA 13 on; drivers since R515 have them. The
    # number is the transfer rate in MHz, twice the memory clock.
    "memory_offset_mhz": _Setting(
        "memory offset",
        "MHz",
        1,
        pynvml.nvmlDeviceGetMemClkVfOffset,
        pynvml.nvmlDeviceGetMemClkMinMaxVfOffset,
        pynvml.nvmlDeviceSetMemClkVfOffset,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedSettings:
    """The settings of one node's cards until the run ends; `None` keeps the present one."""

    node: str
    cards: int
    """Number of cards that the node lends to the cluster: the first ones that are visible by
    CUDA_VISIBLE_DEVICES.
    """
    power_limit_w: float | None = None
    memory_offset_mhz: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """The old and the new value of one setting of a card, in NVML's numbers. Saved in a file from
    before the change until it is restored.
    """

    node: str
    pid: int
    started: str | None
    """Start time of the process that sets it, as of `processes.start_time`."""
    key: str
    uuid: str
    before: int
    set_to: int

    @property
    def path(self) -> Path:
        return _folder() / f"{self.pid}-{self.uuid}-{self.key}.json"

    @property
    def is_left(self) -> bool:
        """Whether the process was killed before it restored this setting."""
        return not is_alive(self.pid, self.started)


def set_cards(wanted: WantedSettings) -> tuple[str, ...]:
    """Set every card of the node, or none; return one sentence for each change.

    First restores the settings that a killed run has left. Keeps NVML open in this process.

    Raises:
        CardSettingError: A setting is impossible, or another run has set the cards.
        OSError: The old values cannot be saved; then nothing is changed.
        pynvml.NVMLError: The driver does not answer.
    """
    pynvml.nvmlInit()
    with _one_at_a_time():
        lines = _all_put_back(lambda change: change.is_left)
        for other in _changes():
            raise CardSettingError(
                f"{wanted.node}: another run has set the cards of this PC (process {other.pid}); "
                "try again when it has ended"
            )
        changes = tuple(_planned(wanted))
        try:
            for change in changes:
                replace_whole(change.path, json.dumps(asdict(change)))
            return (*lines, *map(_apply, changes))
        except (CardSettingError, OSError):
            _all_put_back(lambda change: change in changes)
            raise


def put_back_own() -> tuple[str, ...]:
    """Restore the settings that this process has changed; return a sentence for each, also for a
    failure.
    """
    with _one_at_a_time():
        return _all_put_back(lambda change: change.pid == os.getpid() and not change.is_left)


def put_back_left() -> tuple[str, ...]:
    """Restore the settings left by killed processes on this machine; return a sentence for each."""
    if not any(change.is_left for change in _changes()):
        return ()
    try:
        with opened(), _one_at_a_time():
            return _all_put_back(lambda change: change.is_left)
    except (OSError, pynvml.NVMLError) as error:
        return (f"what a run that was killed has set on cards cannot be put back: {error}",)


def _folder() -> Path:
    # Several machines may share a home folder.
    return default_path().parent / "kept" / socket.gethostname()


def _one_at_a_time() -> AbstractContextManager[None]:
    return locked(_folder() / "lock", _LOCK_S)


def _changes() -> Iterator[_Change]:
    """Yield the changes to restore on this machine; ignore other files."""
    for path in sorted(_folder().glob("*.json")):
        with suppress(OSError, ValueError, TypeError):
            change = _Change(**json.loads(read_small(path, _MOST_BYTES)))
            if change.key in _SETTINGS:
                yield change


def _planned(wanted: WantedSettings) -> Iterator[_Change]:
    """Yield the changes that are necessary for the wanted settings."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    visible = [name.strip() for name in names if name.strip()]
    for card in (visible or list(map(str, range(wanted.cards))))[: wanted.cards]:
        for key, setting in _SETTINGS.items():
            value = getattr(wanted, key)
            if value is None:
                continue
            with _refusal(wanted.node, f"the {setting.title} of card {card}"):
                handle = find_card(card).handle
                name, uuid = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetUUID(handle)
                before, (least, most) = setting.read(handle), setting.bounds(handle)
            set_to = round(setting.per_unit * value)
            if not least <= set_to <= most:
                raise CardSettingError(
                    f"nodes.{wanted.node}.{key} {value:g} is out of range: {name} takes "
                    f"{least / setting.per_unit:g} to {setting.words(most)}"
                )
            if set_to != before:
                yield _Change(
                    node=wanted.node,
                    pid=os.getpid(),
                    started=start_time(os.getpid()),
                    key=key,
                    uuid=str(uuid),
                    before=int(before),
                    set_to=set_to,
                )


def _apply(change: _Change) -> str:
    """Make one change, and return a sentence about it."""
    setting = _SETTINGS[change.key]
    with _refusal(change.node, f"the {setting.title} of card {change.uuid}"):
        handle = find_card(change.uuid).handle
        name = f"{change.node}'s {pynvml.nvmlDeviceGetName(handle)}"
        setting.write(handle, change.set_to)
        now, before = setting.words(setting.read(handle)), setting.words(change.before)
    return f"{name}: {setting.title} {now} until the run ends (before: {before})"


@contextmanager
def _refusal(node: str, what: str) -> Iterator[None]:
    """Turn an NVML error into a CardSettingError about `what`."""
    try:
        yield
    except pynvml.NVMLError as error:
        advice = ""
        if error.value == pynvml.NVML_ERROR_NO_PERMISSION:
            advice = f"; only root may: start Ray as root on {node}, or leave out this setting"
        raise CardSettingError(f"{node}: {what} cannot be set: {error}{advice}") from None


def _all_put_back(which: Callable[[_Change], bool]) -> tuple[str, ...]:
    return tuple(line for change in _changes() if which(change) for line in _put_back(change))


def _put_back(change: _Change) -> Iterator[str]:
    """Restore one setting and delete its file, unless that fails; yield a sentence about it."""
    setting = _SETTINGS[change.key]
    before = setting.words(change.before)
    where = f"{change.node}: the {setting.title} of card {change.uuid}"
    if change.is_left:
        where = f"left by a run that was killed: {where}"
    try:
        handle = find_card(change.uuid).handle
        now = setting.read(handle)
        if now == change.set_to != change.before:
            setting.write(handle, change.before)
            yield f"{where} is back at {before}"
        elif now != change.before:
            yield f"{where} stays at {setting.words(now)}, which another program set"
    except pynvml.NVMLError as error:
        if error.value != pynvml.NVML_ERROR_NOT_FOUND:  # the card is no longer in this PC
            fix = "type as root: python -m orchestrator stop"
            yield f"{where} is not back at {before}: {error}; {fix}"
            return
    change.path.unlink(missing_ok=True)
