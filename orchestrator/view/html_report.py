"""A run in one file: the page of `web` with frozen data, which needs no server and asks for
nothing.

The file's policy lets run what was put into it, by its hash, and load nothing at all. The courses
of values are thinned out until they fit: of few slots in 300 parts each, of a thousand in 16. The
shape of the data is in `web/page/source.js`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from html import escape as escaped
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from orchestrator.errors import UsageError
from orchestrator.jobs.journal import JOURNAL_NAME, QUEUE_NAME, records
from orchestrator.record import history
from orchestrator.record.archive import Follower, Frame, StoredEvent, StoredRun, read_events
from orchestrator.record.history import Buckets
from orchestrator.record.jobs import QueueSnapshot
from orchestrator.record.model import finite
from orchestrator.record.output import LINES_SHOWN, last_lines
from orchestrator.record.summary import write_file
from orchestrator.view.cells import (
    MISSING,
    clean,
    clock,
    decimals_for,
    mean,
    number,
    share_pct,
    whole,
)
from orchestrator.view.job_charts import attempt_bars, bars_svg, curves_svg
from orchestrator.view.jobs import with_jobs
from orchestrator.view.web import page_data
from orchestrator.view.web.page_data import OUTCOME_TONES, Json
from workers.units import GIB

_PARTS_MOST: Final = 300
_PARTS_LEAST: Final = 16

#: Of all courses together: about 2.5 MiB of text.
_NUMBERS_MOST: Final = 400_000
_EVENTS_MOST: Final = 2_000

#: So many does the page show.
_EVENTS_TOLD: Final = 300
_EVENTS_OF_SLOT: Final = 30

#: Spans of states, of all slots together and of each.
_SPANS_MOST: Final = 6_000
_SPANS_LEAST: Final = 6

#: Lines that workers printed, of all slots together and of each.
_PRINTED_MOST: Final = 10_000
_PRINTED_LEAST: Final = 3
_PRINTED_CHARS: Final = 200
_OF_SLOT: Final = ("state", "reason", "spans", "events", "traceback", "printed")
_CHARTED: Final = (
    "tflops",
    "allocated_bytes",
    "size",
    "oom_count",
    "temperature_c",
    "power_w",
    "loss",
)
_COURSES: Final = (
    *(*_CHARTED, "cap_bytes", "reserved_bytes", "duty_measured"),
    *("samples_per_s", "tokens_per_s", "data_wait_pct"),
)  # fmt: skip
_PAGE: Final = files("orchestrator.view.web") / "page"
_STYLE: Final = re.compile(r'<link rel="stylesheet" href="([\w.]+)">\n')
_SCRIPT: Final = re.compile(r'<script src="([\w.]+)" defer></script>\n')
_ICON: Final = re.compile(r'<link rel="icon" href="[\w.]+">\n')

#: What would end a script element, or make a browser read it differently, whatever the data hold.
_ESCAPES: Final = {
    "<": "\\u003c",
    ">": "\\u003e",
    "&": "\\u0026",
    "\u2028": "\\u2028",
    "\u2029": "\\u2029",
}


def frozen(folder: Path) -> Json:
    """Return the run in a run folder, with its last picture and the course of its values.

    Raises:
        NothingStoredError: Nothing is stored in it yet.
        ArchiveError: It cannot be read.
    """
    frame = Follower(folder).look()
    frame = replace(frame, snapshot=with_jobs(frame.snapshot, frame.queue))
    rows = frame.snapshot.rows
    events = read_events(folder, limit=_EVENTS_MOST)
    by_slot: defaultdict[str, list[StoredEvent]] = defaultdict(list)
    for event in events:
        if event.slot is not None:
            by_slot[event.slot].append(event)
    courses = _courses(frame.run, _COURSES, parts_for(len(rows) * len(_COURSES)))
    sampled = history.sampled_between(folder)
    spans = history.all_state_spans(folder)
    most = max(_SPANS_LEAST, _SPANS_MOST // max(1, len(rows)))
    lines = max(_PRINTED_LEAST, min(LINES_SHOWN, _PRINTED_MOST // max(1, len(rows))))
    table = page_data.frozen_table(frame)
    headings = {" ".join(column["title"]).strip() for column in table["table"]["columns"]}
    slots = {}
    for row in rows:
        printed = [line[:_PRINTED_CHARS] for line in last_lines(folder, row.slot, lines)]
        its_spans, its_events = (
            spans.get(row.slot, ())[-most:],
            by_slot[row.slot][-_EVENTS_OF_SLOT:],
        )
        of_slot = page_data.slot_of(frame, row.slot, its_spans, its_events, printed)
        if of_slot is not None:
            more = [
                fact for fact in of_slot["facts"] if fact[0] not in headings
            ]  # the others are in the table
            slots[row.slot] = {name: of_slot[name] for name in _OF_SLOT} | {"more": more}
    queue = frame.queue
    return {
        **table,
        "jobs": None if queue is None else _jobs(folder, queue),
        "slots": slots,
        "every_slot": {
            "sampled": sampled,
            "utc_offset_s": page_data.offset_s(frame.snapshot.now_unix_s),
        },
        "times": _times(courses),
        "labels": {key: page_data.field_label(key) for key in _COURSES},
        "charts": _CHARTED,
        "missing": MISSING,
        "history": {
            slot: {key: _drawn(key, course) for key, course in of_slot.items()}
            for slot, of_slot in courses.items()
        },
        "beside": dict.fromkeys(("allocated_bytes", "reserved_bytes"), ("cap_bytes", "cap")),
        "events": [page_data.event_of(event) for event in events[-_EVENTS_TOLD:]],
        "cards": page_data.cards_of(frame),
        "summary": _summary(frame, events),
    }


def _jobs(folder: Path, queue: QueueSnapshot) -> Json:
    """Return the jobs of a queue with two charts: their curves, and what each card did."""
    curves = {
        name: [(step, point["loss"]) for step, point in curve.items() if "loss" in point]
        for name, curve in history.training_curves(folder).items()
    }
    done = attempt_bars(records(folder / QUEUE_NAME / JOURNAL_NAME), queue.now_s)
    names = [standing.job.name for standing in queue.standings]
    drawn = (
        ("curves of the jobs", curves_svg(curves, "loss", names)),
        ("cards", bars_svg(done, names)),
    )
    charts = [
        (label, f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}")
        for label, svg in drawn
        if svg is not None
    ]
    return {**page_data.jobs_of(queue), "charts": charts}


def parts_for(courses: int) -> int:
    """Return into how many parts of time each of so many courses is divided."""
    return max(_PARTS_LEAST, min(_PARTS_MOST, _NUMBERS_MOST // max(1, 3 * courses)))


def _summary(frame: Frame, events: tuple[StoredEvent, ...]) -> Json:
    """Return the run as a whole: what fell short, its course, and its figures."""
    run, between = frame.run, _between(frame.run)
    begins = run.facts.started_at_unix_s
    totals = {} if between is None else history.totals(run.folder, *between, _PARTS_MOST)
    return {
        "missed": [clean(one) for one in frame.missed],
        "from": begins,
        "to": begins + 1.0 if between is None else between[1],
        "charts": [
            {name: drawn[name] for name in ("label", "t", "mean")}
            for drawn in page_data.totals_of(totals)
        ],
        "events": [page_data.event_of(event) for event in events if event.slot is None],
        "spans": [],
        "utc_offset_s": page_data.offset_s(begins),
        "figures": _figures(frame, totals),
    }


def _figures(frame: Frame, totals: Mapping[str, Buckets]) -> Json:
    """Return the figures of the whole run: sums over its slots, and the highest temperature."""
    run, snapshot, counts = frame.run, frame.snapshot, frame.snapshot.counts
    means = {key: mean(course.mean) for key, course in totals.items()}
    allocated_bytes = means.get("allocated_bytes")
    allocated_gib = None if allocated_bytes is None else allocated_bytes / GIB
    an_hour = counts.steps_ok / run.elapsed_s * 3600.0 if run.elapsed_s > 0 else None
    told = {
        "time worked": clock(run.elapsed_s),
        "slots": whole(len(run.slots)),
        "good steps": whole(counts.steps_ok),
        "good steps an hour": _rounded(an_hour),
        "success, %": share_pct(counts.success_rate),
        "TFLOP/s, mean of the sum": _rounded(means.get("tflops")),
        "GiB allocated, mean of the sum": _rounded(allocated_gib),
        "out of memory": whole(counts.oom_count),
        "emergencies": whole(counts.emergency_count),
        "restarts": whole(snapshot.restart_count),
        "steps lost at most": whole(snapshot.steps_lost_upper_bound),
        "wrong results": whole(counts.verify_errors),
        "hottest temperature, C, mean": _rounded(means.get("temperature_c")),
        "samples a second, mean of the sum": _rounded(means.get("samples_per_s")),
        "loss at the end, mean": _rounded(mean(finite(row.progress.loss) for row in snapshot.rows)),
    }
    outcome = (clean(run.outcome), OUTCOME_TONES.get(run.outcome, "dim"))
    return {
        "titles": ["", clean(run.facts.run_id)],
        "rows": [
            ["outcome", outcome],
            *([title, it] for title, it in told.items() if it is not None),
        ],
    }


def _rounded(value: float | None) -> str | None:
    return number(value, decimals_for((value,)))


def _courses(run: StoredRun, keys: Sequence[str], parts: int) -> dict[str, dict[str, Buckets]]:
    between = _between(run)
    by_slot = {} if between is None else history.courses(run.folder, keys, *between, parts)
    return {
        slot: {
            key: course
            for key, course in of_slot.items()
            if any(value is not None for value in course.mean)
        }
        for slot, of_slot in by_slot.items()
    }


def _between(run: StoredRun) -> tuple[float, float] | None:
    """Return when the run began, and a moment after its last sample; `None` before the first."""
    begins, ends = run.facts.started_at_unix_s, run.updated_at_unix_s
    return None if ends is None or ends <= begins else (begins, ends + 0.001)


def _times(courses: Mapping[str, Mapping[str, Buckets]]) -> list[float]:
    """Return the times that all courses have, once."""
    drawn = (course for of_slot in courses.values() for course in of_slot.values())
    return [round(at, 2) for at in next((course.at_unix_s for course in drawn), ())]


def _drawn(key: str, course: Buckets) -> Json:
    """Return a course in few characters: with its least and most only where they differ, and
    without times.
    """
    values = page_data.history_of(key, course)
    columns = {name: [_short(value) for value in values[name]] for name in ("mean", "min", "max")}
    return {
        name: values
        for name, values in columns.items()
        if name == "mean" or values != columns["mean"]
    }


def _short(value: float | None) -> float | None:
    return value if value is None else int(value) if value.is_integer() else float(f"{value:.4g}")


def html(data: dict[str, Any], title: str) -> str:
    """Return the page with its data."""
    page = _read("index.html")
    style = "\n".join(_read(name) for name in _STYLE.findall(page))
    script = "\n".join(_read(name) for name in _SCRIPT.findall(page))
    for text in (style, script):
        if re.search(r"</(script|style)", text, re.IGNORECASE):
            raise ValueError("a file of the page would end its own element")
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "img-src data:; base-uri 'none'"
    )
    frozen = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for char, escape in _ESCAPES.items():
        frozen = frozen.replace(char, escape)
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n<style>{style}</style>\n'
    )
    page = _ICON.sub("", _SCRIPT.sub("", _STYLE.sub("", page)))
    page = page.replace(
        "<title>OOM orchestrator</title>", f"<title>{escaped(title, quote=False)}</title>"
    )
    page = page.replace("</head>", f"{head}</head>", 1)
    end = (
        '<script type="application/json" '
        f'id="frozen">{frozen}</script>\n<script>{script}</script>\n</body>'
    )
    return page.replace("</body>", end, 1)


def _read(name: str) -> str:
    return (_PAGE / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def write_report(path: Path, folder: Path) -> None:
    """Write the run in a run folder into one file.

    `OrchestratorError` if that is not possible.
    """
    try:
        write_file(path, html(frozen(folder), f"run {folder.name}"))
    except OSError as failure:
        raise UsageError(f"{path} cannot be written: {failure.strerror}") from failure
