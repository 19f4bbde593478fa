"""The course of a run for the charts of the page and of the report, as JSON.

A course is of all slots together, of one slot or job, or of the jobs of a queue. Reads the run
folder. Does not draw: that is `web/page/charts.js`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Final, TypeAlias

from orchestrator.jobs.codec import event_name
from orchestrator.jobs.model import Assigned, AttemptEnded, Rested
from orchestrator.record import history
from orchestrator.record.events import StoredEvent, read_events
from orchestrator.record.history import SAMPLED_NUMBERS, Buckets, Span
from orchestrator.record.model import FIELDS
from orchestrator.record.output import last_lines
from orchestrator.view.cells import clean, clock, decimals_for, mean, number
from orchestrator.view.document import Json, event_line, state_tone
from workers.units import MIB

PARTS: Final = 200
"""Parts of time of a course; each has a least value, a mean and a most."""
_CURVE_POINTS_MOST: Final = 300
_EVENTS_MOST: Final = 50
_SPANS_MOST: Final = 200

#: Drawn before any other, as far as something was sampled.
_FIRST: Final = (
    "tflops",
    "allocated_bytes",
    "temperature_c",
    "power_w",
    "loss",
    "samples_per_s",
    "duty_measured",
    "oom_count",
)
_BESIDE: Final = {"allocated_bytes": ("cap_bytes", "cap")}
"""A second line in the chart of a value, and its label."""
_TOTALS: Final = {
    "tflops": "TFLOP/s of all slots",
    "allocated_bytes": "allocated by all slots, MiB",
    "oom_count": "out of memory, all slots",
    "temperature_c": "hottest temperature, C",
    "samples_per_s": "samples a second of all slots",
}
_UNITS: Final = {"bytes": ("MiB", 1 / MIB), "ratio": ("%", 100.0)}
_ASSIGNED, *_ENDED = map(event_name, (Assigned, Rested, AttemptEnded))
_NAMES: Final = {"tflops": "TFLOP/s", "oom_count": "OOM"}


_Between: TypeAlias = tuple[float, float] | None
"""From when to when samples are shown; `None`: there are none."""
_Found: TypeAlias = Mapping[str, Buckets]


def course_of_all(folder: Path, last_s: float = math.inf) -> Json:
    """Return the sums over all slots in the last seconds, by default since the first sample.

    Before the first sample there are no charts.

    Raises:
        ArchiveError: The run folder cannot be read.
    """
    between = _between(folder, last_s)
    found = {} if between is None else history.totals(folder, *between, PARTS)
    charts = [_chart(key, buckets, _TOTALS[key]) for key, buckets in found.items()]
    return _course(between, found, charts)


def course_of(folder: Path, slot: str, last_s: float = math.inf) -> Json:
    """Return what was sampled of one slot, or of a job, whose slot has its name; with its states,
    events, and the last lines that its worker printed. As `course_of_all` otherwise.
    """
    between = _between(folder, last_s)
    found: _Found = {}
    if between is not None:
        found = history.courses(folder, SAMPLED_NUMBERS, *between, PARTS, slot).get(slot, {})
    return _course_of(folder, slot, between, found)


def courses_of(folder: Path, slots: Iterable[str], parts: int) -> dict[str, Json]:
    """Return the same of several slots since the first sample, in one pass over all samples."""
    between = _between(folder, math.inf)
    found: Mapping[str, _Found] = {}
    if between is not None:
        found = history.courses(folder, SAMPLED_NUMBERS, *between, parts)
    return {slot: _course_of(folder, slot, between, found.get(slot, {})) for slot in slots}


def _course_of(folder: Path, slot: str, between: _Between, found: _Found) -> Json:
    keys = [*dict.fromkeys([*_FIRST, *found])]
    charts = [_chart(key, found[key], _label(key), found) for key in keys if key in found]
    spans = history.state_spans(folder, slot).get(slot, ())[-_SPANS_MOST:]
    errors = read_events(folder, ("workload_error",), slot=slot, limit=1)
    course = _course(between, found, charts)
    return {
        **course,
        "spans": [_span(span, course["to"]) for span in spans],
        "events": [
            event_line(event) for event in read_events(folder, slot=slot, limit=_EVENTS_MOST)
        ],
        "traceback": str(errors[0].details.get("traceback")) if errors else "",
        "printed": "\n".join(last_lines(folder, slot)),
    }


def course_of_jobs(folder: Path) -> Json:
    """Return the loss of each job over its steps, and which job was on which card when."""
    curves: dict[str, dict[int, float]] = {}
    for name, curve in history.training_curves(folder).items():
        points = [(step, point["loss"]) for step, point in curve.items() if "loss" in point]
        if points:
            curves[clean(name)] = dict(points[:: 1 + len(points) // _CURVE_POINTS_MOST])
    bars = _bars(read_events(folder, (_ASSIGNED, *_ENDED)))
    known = [at for bar in bars for at in (bar["from"], bar["to"]) if at is not None]
    steps = sorted({step for curve in curves.values() for step in curve})
    lines = [[name, [curve.get(step) for step in steps]] for name, curve in curves.items()]
    chart = {"label": "loss over optimiser steps", "average": "", "steps": steps, "lines": lines}
    between = (min(known), max(known)) if known else None
    return {**_course(between, {}, [chart] if lines else []), "bars": bars}


def _course(between: _Between, found: _Found, charts: Iterable[Json]) -> Json:
    """Return charts with the times that all of them have."""
    first, last = between or (0.0, 1.0)
    times = [buckets.at_unix_s for buckets in found.values()][:1]
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
    first, last = sampled[0], sampled[1] + 0.001
    return max(first, last - last_s), last


def _chart(key: str, buckets: Buckets, label: str, found: _Found = MappingProxyType({})) -> Json:
    """Return one chart, with what is beside it in what was found; empty where nothing was sampled.

    The band is left out where it would be the line itself.
    """
    line = _scaled(key, buckets.mean)
    average = mean(line)
    if average is None:
        return {}
    lines = [["mean", line]]
    beside, name = _BESIDE.get(key, ("", ""))
    if beside in found and mean(found[beside].mean) is not None:
        lines.append([name, _scaled(beside, found[beside].mean)])
    band = [_scaled(key, buckets.low), _scaled(key, buckets.high)]
    return {
        "label": label,
        "average": number(average, decimals_for((average,))),
        "lines": lines,
        "band": None if band == [line, line] else band,
    }


def _scaled(key: str, values: Iterable[float | None]) -> list[float | None]:
    """Return values in the unit of their label, with so many digits as can be seen in a chart."""
    _, times = _UNITS.get(FIELDS[key].unit, ("", 1.0))
    return [None if value is None else float(f"{value * times:.5g}") for value in values]


def _label(key: str) -> str:
    """Return how a chart names what it shows, with the unit."""
    unit = FIELDS[key].unit
    shown, _ = _UNITS.get(unit, (unit, 1.0))
    suffix = "_pct" if unit == "%" else f"_{unit.lower()}"
    name = _NAMES.get(key) or key.removesuffix(suffix).replace("_", " ")
    return f"{name}, {shown}" if shown else name


def _span(span: Span, ends_unix_s: float) -> Json:
    to = max(span.from_unix_s, ends_unix_s) if span.to_unix_s is None else span.to_unix_s
    return {
        "from": span.from_unix_s,
        "to": to,
        "state": (clean(span.state), state_tone(span.state)),
        "time": datetime.fromtimestamp(span.from_unix_s).astimezone().strftime("%H:%M:%S"),
        "lasted": clock(to - span.from_unix_s),
        "cause": clean(span.cause),
    }


def _bars(events: Iterable[StoredEvent]) -> list[Json]:
    """Return the attempts of jobs on cards; `to` is `None` while one goes on."""
    bars: list[Json] = []
    on_card: dict[str | None, Json] = {}
    for event in events:
        job, at_s = event.slot, event.details.get("at_s")
        if event.event == _ASSIGNED:
            card = clean(str(event.details.get("card")))
            on_card[job] = {"card": card, "job": clean(str(job)), "from": at_s, "to": None}
            bars.append(on_card[job])
        elif job in on_card:
            on_card.pop(job)["to"] = at_s
    return bars
