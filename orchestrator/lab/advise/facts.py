"""What is known of a run: its store, the course of its values, and the cards of this machine.

Starts nothing, and asks no other machine. `None` means unknown, shares are 0..1.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Final, TypeAlias

import psutil
import yaml

from orchestrator.core.slot import HeadState, SlotState, slot_state
from orchestrator.record import history
from orchestrator.record.archive import read_events, read_run
from orchestrator.record.history import Buckets, Span
from orchestrator.record.model import Row
from workers.host.facts import Holder, MachineFacts
from workers.host.machine import look_around
from workers.messages import WorkerState

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
class SlotHistory:
    """One slot, from its first report on."""

    slot: str
    states_s: Mapping[SlotState, float]
    """Seconds in each state. Time in which it had nothing to do (DONE, STOPPED) is not in it."""
    duty_asked: float | None = None
    """`None`: no duty limits it."""
    duty_got: float | None = None
    """Of the time in which it reported, the share of its steps, with their waits."""
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
class CardHistory:
    """One card, or the processor of a node without one."""

    node: str
    name: str
    """As the driver says, or `CPU`."""
    uuid: str | None = None
    """`None` of a processor."""
    slots: tuple[SlotHistory, ...]
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
    """Other programs that hold its memory now; as all below, only of a card in this machine."""
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
class RunHistory:
    """One run, with the configuration that it used."""

    run_id: str
    cards: tuple[CardHistory, ...]
    mode: str = "cluster"
    """How it was started: `cluster`, `local` or `rehearse`."""
    keys: Keys = field(default_factory=dict)

    @property
    def model(self) -> str | None:
        """What a tuning calls what the run computes: a preset, or `matmul`.

        `None` of another workload.
        """
        name = self.key("workload", "name", "matmul")
        model = self.key("train", "preset") if name == "train" else name
        return model if isinstance(model, str) else None

    def key(self, section: str, name: str, default: object = None) -> object:
        """Return a key of the run's configuration; the default if it is not there."""
        keys = self.keys.get(section)
        return keys.get(name, default) if isinstance(keys, Mapping) else default


_COURSES: Final = (
    "duty_measured", "baseline_pct", "utilisation_pct", "throttle_pct", "sm_clock_mhz",
    "temperature_c", "device_used_bytes", "data_wait_pct", "copies_pct", "optimizer_pct",
)  # fmt: skip
#: Into so many parts the time of a run is divided.
_PARTS: Final = 120
#: In these a slot has nothing to do.
_OVER: Final = frozenset({WorkerState.DONE, WorkerState.STOPPED})
#: A slot's time begins after these.
_BEFORE: Final = frozenset({HeadState.STARTING, WorkerState.WARMING})

#: A slot gets a new process in these.
_NEW_PROCESS: Final = frozenset({HeadState.STARTING.value, HeadState.RESTARTING.value})

_Course = Mapping[str, Buckets]


def facts_of(folder: Path) -> RunHistory:
    """Return what is known of the run in a run folder; `ArchiveError` if it cannot be read."""
    run = read_run(folder)
    between = history.sampled_between(folder)
    courses: Mapping[str, _Course] = {}
    if between is not None:
        courses = history.courses(folder, _COURSES, between[0], between[1] + 0.001, _PARTS)
    spans = history.all_state_spans(folder)
    ends_unix_s = run.updated_at_unix_s
    if ends_unix_s is None and between is not None:
        ends_unix_s = between[1]
    machine, profiles = look_around(with_torch=False), _profiles(folder)
    versions = _versions(folder)
    is_here = run.facts.one_machine and run.facts.host == machine.hostname
    by_card: defaultdict[tuple[str, str | None], list[Row]] = defaultdict(list)
    for row in run.snapshot().rows:
        by_card[row.node, row.gpu_uuid].append(row)
    cards = tuple(
        _card(
            rows,
            [
                _slot(
                    row, courses.get(row.slot, {}), spans.get(row.slot, ()), ends_unix_s, profiles
                )
                for row in rows
            ],
            [courses.get(row.slot, {}) for row in rows],
            next((versions[row.slot] for row in rows if row.slot in versions), (None, None)),
            _here(uuid, machine, is_here=is_here),
        )
        for (_, uuid), rows in by_card.items()
    )
    return RunHistory(
        run_id=run.facts.run_id, cards=cards, mode=run.facts.mode, keys=_keys(run.facts.config_yaml)
    )


def _keys(text: str) -> Keys:
    """Return the run's own configuration; nothing where it cannot be read."""
    with suppress(yaml.YAMLError):
        keys = yaml.safe_load(text)
        return keys if isinstance(keys, dict) else {}
    return {}


def _card(
    rows: Sequence[Row],
    slots: Sequence[SlotHistory],
    of_slots: Sequence[_Course],
    versions: tuple[str | None, str | None],
    here: Mapping[str, Any],
) -> CardHistory:
    first = rows[0]
    is_card = first.gpu_uuid is not None
    clocks = [value for course in of_slots for value in _known(course, "sm_clock_mhz")]
    return CardHistory(
        node=first.node,
        name=first.gpu_name or "CPU",
        uuid=first.gpu_uuid,
        slots=tuple(slots),
        utilisation=_share(_mean(of_slots, "utilisation_pct")) if is_card else None,
        slowed=_share(_mean(of_slots, "throttle_pct")) if is_card else None,
        clock=fmean(clocks) / max(clocks) if clocks and max(clocks) > 0 else None,
        hottest_c=max(
            (value for course in of_slots for value in _known(course, "temperature_c")),
            default=None,
        ),
        power_limit_w=first.power_limit_w if is_card else None,
        used_bytes=_whole(_mean(of_slots, "device_used_bytes")) if is_card else None,
        total_bytes=first.device_total_bytes,
        torch=versions[0],
        driver=versions[1],
        **here,
    )


def _slot(
    row: Row,
    course: _Course,
    spans: Sequence[Span],
    ends_unix_s: float | None,
    profiles: Mapping[str, Profile],
) -> SlotHistory:
    progress, own_bytes = row.progress, row.reserved_bytes
    begins = [span.from_unix_s for span in spans if span.state in _NEW_PROCESS]
    if own_bytes is not None:
        # The rest of the budget is the context.
        is_known = row.budget_bytes is not None and row.cap_bytes is not None
        context_bytes = max(0, (row.budget_bytes or 0) - (row.cap_bytes or 0))
        own_bytes = own_bytes + context_bytes if is_known else None
    return SlotHistory(
        slot=row.slot,
        states_s=_states(spans, ends_unix_s),
        duty_asked=row.duty_requested,
        duty_got=_mean([course], "duty_measured"),
        data_wait=_of_all_processes(course, "data_wait_pct", begins, progress.data_wait_pct),
        copies=_of_all_processes(course, "copies_pct", begins, progress.copies_pct),
        optimizer=_of_all_processes(course, "optimizer_pct", begins, progress.optimizer_pct),
        of_best=_share(_mean([course], "baseline_pct")),
        own_bytes=own_bytes,
        profile=profiles.get(row.slot),
    )


def _profiles(folder: Path) -> dict[str, Profile]:
    """Return what the last pass of torch.profiler told of each slot."""
    profiles = {}
    for event in read_events(folder, ["profiled"]):
        pcts = {part: event.details.get(f"{part}_pct") for part in Profile.__slots__}
        shares = {
            part: pct / 100
            for part, pct in pcts.items()
            if isinstance(pct, int | float) and 0 <= pct <= 100
        }
        if event.slot is not None and len(shares) == len(pcts):
            profiles[event.slot] = Profile(**shares)
    return profiles


def _versions(folder: Path) -> dict[str, tuple[str | None, str | None]]:
    """Return torch's and the driver's version of the last process of each slot that told them."""
    versions: dict[str, tuple[str | None, str | None]] = {}
    for event in read_events(folder, ["device_opened"]):
        torch, driver = event.details.get("torch"), event.details.get("driver")
        if event.slot is not None and isinstance(torch, str):
            versions[event.slot] = (torch, driver if isinstance(driver, str) else None)
    return versions


def _of_all_processes(
    course: _Course, key: str, begins: Sequence[float], last_pct: float | None
) -> float | None:
    """Return a share of the time of all processes of a slot.

    Each of them tells it of the time since its own beginning. So the last that it said counts, for
    as long as it lived. Where there is no course of it, what the row says counts.
    """
    parts = course.get(key)
    shares: dict[int, tuple[float, int]] = {}
    """Of each process the last share, and how many parts of the course it lived."""
    if parts is not None:
        half_s = (parts.at_unix_s[1] - parts.at_unix_s[0]) / 2
        for at, pct in zip(parts.at_unix_s, parts.mean, strict=True):
            process = bisect_right(begins, at - half_s)
            # A part of the time in which one process followed another is a mean of both.
            if pct is not None and bisect_right(begins, at + half_s) == process:
                shares[process] = (pct, shares.get(process, (0.0, 0))[1] + 1)
    parts_count = sum(count for _, count in shares.values())
    if not parts_count:
        return _share(last_pct)
    return sum(pct * count for pct, count in shares.values()) / parts_count / 100


def _states(spans: Iterable[Span], ends_unix_s: float | None) -> dict[SlotState, float]:
    """Return the seconds in each state, from the first report on."""
    seconds: defaultdict[SlotState, float] = defaultdict(float)
    has_begun = False
    for span in spans:
        state = slot_state(span.state)
        has_begun = has_begun or state not in _BEFORE
        until = span.to_unix_s if span.to_unix_s is not None else ends_unix_s
        if has_begun and state not in _OVER and until is not None and until > span.from_unix_s:
            seconds[state] += until - span.from_unix_s
    return dict(seconds)


def _known(course: _Course, key: str) -> list[float]:
    return [value for value in course[key].mean if value is not None] if key in course else []


def _mean(courses: Iterable[_Course], key: str) -> float | None:
    values = [value for course in courses for value in _known(course, key)]
    return fmean(values) if values else None


def _share(pct: float | None) -> float | None:
    return None if pct is None else pct / 100


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _here(uuid: str | None, machine: MachineFacts, *, is_here: bool) -> dict[str, Any]:
    """Return what this machine says of a card, or of its processor where the run has used that;
    nothing of another's.

    Who holds the card is neither this run's workers nor this process.
    """
    card = next((each for each in machine.cards if each.uuid == uuid), None)
    if card is None and (uuid is not None or not is_here):
        return {}
    fields: dict[str, Any] = {
        "is_wsl": machine.is_wsl,
        "cores": machine.cores_physical or machine.cores_logical,
    }
    if card is not None:
        others = (each for each in card.holders if each.pid != os.getpid() and not _is_of_ray(each))
        fields |= {
            "holders": tuple(sorted(others, key=lambda each: -(each.used_bytes or 0))),
            "usual_power_limit_w": card.power_limit_w,
            "pcie_lanes": card.pcie_lanes,
            "most_pcie_lanes": card.most_pcie_lanes,
        }
    return fields


def _is_of_ray(holder: Holder) -> bool:
    if (holder.name or "").startswith("ray::"):
        return True
    try:
        return any(part.startswith("ray::") for part in psutil.Process(holder.pid).cmdline())
    except psutil.Error:
        return False
