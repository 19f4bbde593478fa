"""The course of a run for the charts of the page and of the report, as JSON.

A course is of all slots together, or of one slot or job. Reads the run folder. Does not draw: that
is `web/page/charts.js`.
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

PARTS: Final = 200
"""Parts of time of a course; each has a least value, a mean and a most."""
_EVENTS_MOST: Final = 100

_MIB: Final = 1 / MIB
#: Sampled values of a slot: how their chart is called, and what they are multiplied by for it.
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
"""A second line in the chart of a value, and its label."""
_SAMPLED: Final = (*_OF_SLOT, *(key for key, _ in _BESIDE.values()))

_Between: TypeAlias = tuple[float, float] | None
"""From when to when samples are shown; `None`: there are none."""


def course_of_all(folder: Path, last_s: float = math.inf) -> Json:
    """Return the sums over all slots in the last seconds, by default since the first sample.

    Before the first sample there are no charts. `ArchiveError`: the run folder cannot be read.
    """
    between = _between(folder, last_s)
    keys = tuple(_OF_ALL)
    found = {} if between is None else history.courses(folder, keys, *between, PARTS, together=True)
    return _course(between, found.get("", {}), _OF_ALL)


def courses_of(
    folder: Path, slots: Sequence[str], parts: int = PARTS, last_s: float = math.inf
) -> dict[str, Json]:
    """Return what was sampled of some slots, or of jobs, whose slots have their names; with their
    events, and the last lines that their workers printed. As `course_of_all` otherwise.
    """
    between, only = _between(folder, last_s), slots[0] if len(slots) == 1 else None
    found = {} if between is None else history.courses(folder, _SAMPLED, *between, parts, only)
    told: dict[str, Json] = {}
    for slot in slots:
        events = read_events(folder, slot=slot, limit=_EVENTS_MOST)
        errors = read_events(folder, ("workload_error",), slot=slot, limit=1)
        told[slot] = {
            **_course(between, found.get(slot, {}), _OF_SLOT),
            "events": [event_line(event) for event in events],
            "traceback": str(errors[0].details.get("traceback")) if errors else "",
            "printed": "\n".join(last_lines(folder, slot)),
        }
    return told


def _course(
    between: _Between, found: Mapping[str, Buckets], named: Mapping[str, tuple[str, float]]
) -> Json:
    """Return a chart of each value that was sampled, with the times that all of them have."""
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
    """Return from when on samples are shown, and a moment after the last one."""
    sampled = history.sampled_between(folder)
    if sampled is None:
        return None
    if not last_s > 0:
        raise ValueError("last_s must be a number of seconds above 0")
    first, last = sampled
    return max(first, last - last_s), last


def _chart(key: str, found: Mapping[str, Buckets], label: str, times: float) -> Json:
    """Return one chart, with what is beside it; empty where nothing was sampled.

    The band is left out where it would be the line itself.
    """
    line = _scaled(found[key].mean, times)
    known = [value for value in line if value is not None]
    if not known:
        return {}
    lines = [["mean", line]]
    beside, name = _BESIDE.get(key, ("", ""))
    if beside in found and any(found[beside].mean):
        lines.append([name, _scaled(found[beside].mean, times)])
    band = [_scaled(edge, times) for edge in (found[key].low, found[key].high)]
    average = sum(known) / len(known)
    return {
        "label": label,
        "average": number(average, decimals_for((average,))),
        "lines": lines,
        "band": None if band == [line, line] else band,
    }


def _scaled(values: Sequence[float | None], times: float) -> list[float | None]:
    """Return values with so many digits as can be seen in a chart."""
    return [None if value is None else float(f"{value * times:.5g}") for value in values]
