"""Courses as JSON, for the charts of the page and of the report.

A course is the sampled values over time of one slot or job, or of all slots together. Reads the run
folder. Does not draw (`web/page/charts.js`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

from orchestrator.record import history
from orchestrator.record.events import read_events
from orchestrator.record.history import Buckets
from orchestrator.record.output import last_lines
from orchestrator.view.cells import decimals_for, number
from orchestrator.view.document import Json, event_line
from workers.units import MIB

BUCKETS: Final = 200
"""Time buckets of a course; each has a minimum, a mean and a maximum."""
_EVENTS_MOST: Final = 100

_MIB: Final = 1 / MIB
#: Sampled value of a slot -> label of its chart, and the factor to the unit of the chart.
_OF_SLOT: Final = {
    "tflops": ("TFLOP/s", 1.0),
    "allocated_bytes": ("allocated, MiB", _MIB),
    "temperature_c": ("temperature, C", 1.0),
    "power_w": ("power, W", 1.0),
    "loss": ("loss", 1.0),
    "samples_per_s": ("samples a second", 1.0),
    "duty_measured": ("duty, %", 100.0),
    "oom_count": ("OOM", 1.0),
    "size": ("size", 1.0),
    "utilisation_pct": ("card busy, %", 1.0),
    "throttle_pct": ("slowed, % of the time", 1.0),
    "sm_clock_mhz": ("clock, MHz", 1.0),
    "device_used_bytes": ("used of the card, MiB", _MIB),
    "data_wait_pct": ("waits for data, % of the time", 1.0),
}
_OF_ALL: Final = {
    "tflops": ("TFLOP/s of all slots", 1.0),
    "allocated_bytes": ("allocated by all slots, MiB", _MIB),
    "oom_count": ("out of memory, all slots", 1.0),
    "temperature_c": ("hottest temperature, C", 1.0),
    "samples_per_s": ("samples a second of all slots", 1.0),
}
_BESIDE: Final = {"allocated_bytes": ("cap_bytes", "cap")}
"""Sampled value -> the value that is a second line in its chart, and that line's label."""
_SAMPLED: Final = (*_OF_SLOT, *(key for key, _ in _BESIDE.values()))

_Between: TypeAlias = tuple[float, float] | None
"""First and last time of the samples shown, in Unix seconds; `None`: no samples."""


def course_of_all(folder: Path, last_s: float = math.inf) -> Json:
    """Return the course of all slots together in the last `last_s` seconds of samples, by default
    since the first one.

    Without samples there are no charts. `ArchiveError`: the run folder cannot be read.
    """
    between = _between(folder, last_s)
    keys = tuple(_OF_ALL)
    found = (
        {} if between is None else history.courses(folder, keys, *between, BUCKETS, together=True)
    )
    return _course(between, found.get("", {}), _OF_ALL)


def courses_of(
    folder: Path, slots: Sequence[str], buckets: int = BUCKETS, last_s: float = math.inf
) -> dict[str, Json]:
    """Return the course of each slot, with its events and the last lines that its worker printed.

    A job's slot has the name of the job. Otherwise as `course_of_all`.
    """
    between, only = _between(folder, last_s), slots[0] if len(slots) == 1 else None
    found = {} if between is None else history.courses(folder, _SAMPLED, *between, buckets, only)
    courses: dict[str, Json] = {}
    for slot in slots:
        events = read_events(folder, slot=slot, limit=_EVENTS_MOST)
        errors = read_events(folder, ("workload_error",), slot=slot, limit=1)
        courses[slot] = {
            **_course(between, found.get(slot, {}), _OF_SLOT),
            "events": [event_line(event) for event in events],
            "traceback": str(errors[0].details.get("traceback")) if errors else "",
            "printed": "\n".join(last_lines(folder, slot)),
        }
    return courses


def _course(
    between: _Between, found: Mapping[str, Buckets], named: Mapping[str, tuple[str, float]]
) -> Json:
    """Return the charts of all sampled values, with their common times."""
    first, last = between or (0.0, 1.0)
    times = [buckets.at_unix_s for buckets in found.values()][:1]
    charts = [_chart(key, found, *drawn) for key, drawn in named.items() if key in found]
    return {
        "from": first,
        "to": last,
        "times": [round(at, 2) for each in times for at in each],
        "charts": [chart for chart in charts if chart],
    }


def _between(folder: Path, last_s: float) -> _Between:
    """Return the first time to show, and a moment after the last sample."""
    sampled = history.sampled_between(folder)
    if sampled is None:
        return None
    if not last_s > 0:
        raise ValueError("last_s must be a number of seconds above 0")
    first, last = sampled
    return max(first, last - last_s), last


def _chart(key: str, found: Mapping[str, Buckets], label: str, factor: float) -> Json:
    """Return one chart with its second line; empty if nothing was sampled.

    The band from minimum to maximum is left out if both are equal to the mean.
    """
    line = _scaled(found[key].mean, factor)
    known = [value for value in line if value is not None]
    if not known:
        return {}
    lines = [["mean", line]]
    beside, name = _BESIDE.get(key, ("", ""))
    if beside in found and any(found[beside].mean):
        lines.append([name, _scaled(found[beside].mean, factor)])
    band = [_scaled(edge, factor) for edge in (found[key].low, found[key].high)]
    average = sum(known) / len(known)
    return {
        "label": label,
        "average": number(average, decimals_for((average,))),
        "lines": lines,
        "band": None if band == [line, line] else band,
    }


def _scaled(values: Sequence[float | None], factor: float) -> list[float | None]:
    """Return values times a factor, with 5 digits: a chart shows no more."""
    return [None if value is None else float(f"{value * factor:.5g}") for value in values]
