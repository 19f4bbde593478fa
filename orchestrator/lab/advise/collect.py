"""Reads the facts of a run: its store, the course of its values, and the cards of this machine.

Decides nothing, starts nothing, and asks no other machine.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import psutil
import yaml

from orchestrator.core.slot import HeadState, SlotState, slot_state
from orchestrator.lab.advise.facts import CardFacts, Keys, Profile, RunFacts, SlotFacts
from orchestrator.record import history
from orchestrator.record.archive import read_events, read_run
from orchestrator.record.history import Buckets, Span
from orchestrator.record.model import Row
from workers.host.facts import Holder, MachineFacts
from workers.host.machine import look_around
from workers.messages import WorkerState

_COURSES: Final = (
    *(
        "duty_measured",
        "baseline_pct",
        "utilisation_pct",
        "throttle_pct",
        "sm_clock_mhz",
        "temperature_c",
    ),
    "device_used_bytes",
    *("data_wait_pct", "copies_pct", "optimizer_pct"),
)
#: Into so many parts the time of a run is divided.
_PARTS: Final = 120
#: In these a slot has nothing to do.
_OVER: Final = frozenset({WorkerState.DONE, WorkerState.STOPPED})
#: A slot's time begins after these.
_BEFORE: Final = frozenset({HeadState.STARTING, WorkerState.WARMING})

#: A slot gets a new process in these.
_NEW_PROCESS: Final = frozenset({HeadState.STARTING.value, HeadState.RESTARTING.value})

_Course = Mapping[str, Buckets]


def facts_of(folder: Path) -> RunFacts:
    """Return what is known of the run in a run folder; `ArchiveError` if it cannot be read."""
    run = read_run(folder)
    between = history.sampled_between(folder)
    courses: Mapping[str, _Course] = {}
    if between is not None:
        courses = history.courses(folder, _COURSES, between[0], between[1] + 0.001, _PARTS)
    spans = history.all_state_spans(folder)
    ends_unix_s = (
        between[1]
        if run.updated_at_unix_s is None and between is not None
        else run.updated_at_unix_s
    )
    machine, profiles, versions = (
        look_around(with_torch=False),
        _profiles(folder),
        _versions(folder),
    )
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
    return RunFacts(
        run_id=run.facts.run_id, cards=cards, mode=run.facts.mode, keys=_keys(run.facts.config_yaml)
    )


def _keys(text: str) -> Keys:
    """Return the run's own configuration; nothing where it cannot be read."""
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return found if isinstance(found, dict) else {}


def _card(
    rows: Sequence[Row],
    slots: Sequence[SlotFacts],
    of_slots: Sequence[_Course],
    versions: tuple[str | None, str | None],
    here: Mapping[str, Any],
) -> CardFacts:
    first = rows[0]
    is_card = first.gpu_uuid is not None
    clocks = [value for course in of_slots for value in _known(course, "sm_clock_mhz")]
    return CardFacts(
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
) -> SlotFacts:
    told, own = row.progress, None
    begins = [span.from_unix_s for span in spans if span.state in _NEW_PROCESS]
    if (
        row.reserved_bytes is not None
        and row.budget_bytes is not None
        and row.cap_bytes is not None
    ):
        own = row.reserved_bytes + max(
            0, row.budget_bytes - row.cap_bytes
        )  # the rest of the budget is the context
    return SlotFacts(
        slot=row.slot,
        states_s=_states(spans, ends_unix_s),
        duty_asked=row.duty_requested,
        duty_got=_mean([course], "duty_measured"),
        data_wait=_of_all_processes(course, "data_wait_pct", begins, told.data_wait_pct),
        copies=_of_all_processes(course, "copies_pct", begins, told.copies_pct),
        optimizer=_of_all_processes(course, "optimizer_pct", begins, told.optimizer_pct),
        of_best=_share(_mean([course], "baseline_pct")),
        own_bytes=own,
        profile=profiles.get(row.slot),
    )


def _profiles(folder: Path) -> dict[str, Profile]:
    """Return what the last pass of torch.profiler told of each slot."""
    found = {}
    for event in read_events(folder, ["profiled"]):
        pcts = [event.details.get(f"{part}_pct") for part in ("copies", "synchronisations", "idle")]
        known = [pct / 100 for pct in pcts if isinstance(pct, int | float) and 0 <= pct <= 100]
        if event.slot is not None and len(known) == len(pcts):
            found[event.slot] = Profile(copies=known[0], synchronisations=known[1], idle=known[2])
    return found


def _versions(folder: Path) -> dict[str, tuple[str | None, str | None]]:
    """Return torch's and the driver's version of the last process of each slot that told them."""
    found: dict[str, tuple[str | None, str | None]] = {}
    for event in read_events(folder, ["device_opened"]):
        torch, driver = event.details.get("torch"), event.details.get("driver")
        if event.slot is not None and isinstance(torch, str):
            found[event.slot] = (torch, driver if isinstance(driver, str) else None)
    return found


def _of_all_processes(
    course: _Course, key: str, begins: Sequence[float], last_pct: float | None
) -> float | None:
    """Return a share of the time of all processes of a slot.

    Each of them tells it of the time since its own beginning. So the last that it said counts, for
    as long as it lived. Where there is no course of it, what the row says counts.
    """
    parts = course.get(key)
    told: dict[int, tuple[float, int]] = {}
    if parts is not None:
        half_s = (parts.at_unix_s[1] - parts.at_unix_s[0]) / 2
        for at, pct in zip(parts.at_unix_s, parts.mean, strict=True):
            process = bisect_right(begins, at - half_s)
            # A part of the time in which one process followed another is a mean of both.
            if pct is not None and bisect_right(begins, at + half_s) == process:
                told[process] = (pct, told.get(process, (0.0, 0))[1] + 1)
    counted = sum(count for _, count in told.values())
    return (
        sum(pct * count for pct, count in told.values()) / counted / 100
        if counted
        else _share(last_pct)
    )


def _states(spans: Iterable[Span], ends_unix_s: float | None) -> dict[SlotState, float]:
    """Return the seconds in each state, from the first report on."""
    seconds: defaultdict[SlotState, float] = defaultdict(float)
    has_begun = False
    for span in spans:
        try:
            state = slot_state(span.state)
        except ValueError:
            continue  # of a later version
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
    told: dict[str, Any] = {
        "is_wsl": machine.is_wsl,
        "cores": machine.cores_physical or machine.cores_logical,
    }
    if card is not None:
        others = (each for each in card.holders if each.pid != os.getpid() and not _is_of_ray(each))
        told |= {
            "holders": tuple(sorted(others, key=lambda each: -(each.used_bytes or 0))),
            "usual_power_limit_w": card.power_limit_w,
            "pcie_lanes": card.pcie_lanes,
            "most_pcie_lanes": card.most_pcie_lanes,
        }
    return told


def _is_of_ray(holder: Holder) -> bool:
    if (holder.name or "").startswith("ray::"):
        return True
    try:
        return any(part.startswith("ray::") for part in psutil.Process(holder.pid).cmdline())
    except psutil.Error:
        return False
