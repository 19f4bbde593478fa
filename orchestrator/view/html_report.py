"""A run in one file: the page of `web` with frozen data, which needs no server and asks for
nothing; beside another run, with the differences in per cent.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape as escaped
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, TypeAlias

from orchestrator.errors import UsageError
from orchestrator.jobs.journal import JOURNAL_NAME, QUEUE_NAME, records
from orchestrator.record import history
from orchestrator.record.archive import Follower, Frame, StoredEvent, StoredRun, read_events
from orchestrator.record.history import Buckets
from orchestrator.record.jobs import QueueSnapshot
from orchestrator.record.model import Row, Snapshot, finite, natural_order
from orchestrator.record.output import LINES_SHOWN, last_lines
from orchestrator.record.summary import write_file
from orchestrator.view.cells import UNICODE, clock, decimals_for, mean, number, share_pct
from orchestrator.view.job_charts import attempt_bars, bars_svg, curves_svg
from orchestrator.view.jobs import with_jobs
from orchestrator.view.web import page_data
from orchestrator.view.web.page_data import OUTCOME_TONES, Cell, Json
from workers.messages import StepCounts
from workers.units import GIB

#: A difference from here on is coloured, in per cent.
_WORTH_COLOUR: Final = 5.0

_Words: TypeAlias = Callable[[float | None], str | None]

_DIFFERENCE: Final = ("difference",)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """What is compared of one run."""

    run: StoredRun
    snapshot: Snapshot
    means: Mapping[str, float | None]
    """Over the whole run, by the keys of `history.TOTALS`: sums over its slots, and the highest
    temperature.
    """
    tflops: Mapping[str, float | None]
    """Mean over the whole run, by slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Figure:
    """One figure of a run or of a slot; more of it is better (1), worse (-1), or neither (0)."""

    title: str
    better: int
    values: Sequence[float | None]
    words: _Words | None = None

    def cells(self) -> list[Cell]:
        """Return its title, the value of each run, and, of two, the difference."""
        decimals = decimals_for(self.values)
        words = self.words or (lambda value: number(value, decimals))
        shown = [words(finite(value)) or UNICODE.missing for value in self.values]
        first = self.values[0]
        return [
            self.title,
            *shown,
            *(difference(first, other, self.better) for other in self.values[1:]),
        ]


def compared(sides: Sequence[Side]) -> Json:
    """Return the figures of one or two runs; of two also those of each slot."""
    names = [UNICODE.clean(side.run.facts.run_id) for side in sides]
    figures = [_Figure(title=title, better=better, values=[get(side) for side in sides], words=words)
               for title, better, get, words in _FIGURES]  # fmt: skip
    table: Json = {
        "titles": ["", *names, *_DIFFERENCE[: len(sides) - 1]],
        "rows": [_verdicts(sides)],
    }
    table["rows"] += [
        figure.cells() for figure in figures if any(value is not None for value in figure.values)
    ]
    return table if len(sides) == 1 else {**table, "slots": _slots(sides)}


def difference(value: float | None, other: float | None, better: int) -> Cell:
    """Return how much more a value is than another one: "+20.0 %", with a tone if that is much."""
    value, other = finite(value), finite(other)
    if value is None or other is None or (other == 0 and value != 0):
        return UNICODE.missing
    more = (
        0.0 if value == other else round(100 * (value - other) / abs(other), 1) + 0.0
    )  # never -0.0
    text = f"{number(more, 1) or UNICODE.missing} %"
    shown = f"+{text}" if more > 0 else text
    return (
        (shown, "good" if more * better > 0 else "bad")
        if better and abs(more) >= _WORTH_COLOUR
        else shown
    )


def _verdicts(sides: Iterable[Side]) -> list[Cell]:
    outcomes = [side.run.outcome for side in sides]
    cells = [(UNICODE.clean(outcome), OUTCOME_TONES.get(outcome, "dim")) for outcome in outcomes]
    return ["outcome", *cells, *([""] if len(cells) > 1 else [])]


def _slots(sides: Sequence[Side]) -> Json:
    rows = [{row.slot: row for row in side.snapshot.rows} for side in sides]
    names = sorted({name for by_slot in rows for name in by_slot}, key=natural_order)
    lines: list[list[Cell]] = []
    for name in names:
        cells: list[Cell] = [UNICODE.clean(name)]
        for better, get, words in _OF_SLOTS:
            values = [
                get(side, by_slot[name]) if name in by_slot else None
                for side, by_slot in zip(sides, rows, strict=True)
            ]
            cells += _Figure(title="", better=better, values=values, words=words).cells()[1:]
        lines.append(cells)
    titles = [
        part
        for title in ("TFLOP/s, mean", "good steps/h", "OOM")
        for part in (title, "other", _DIFFERENCE[0])
    ]
    return {"titles": ["slot", *titles], "rows": lines}


def _per_hour(side: Side, counts: StepCounts) -> float | None:
    return counts.steps_ok / side.run.elapsed_s * 3600.0 if side.run.elapsed_s > 0 else None


def _count(name: str) -> Callable[[Side], float | None]:
    return lambda side: getattr(side.snapshot.counts, name)


def _overall(name: str, times: float = 1.0) -> Callable[[Side], float | None]:
    return lambda side: None if (value := side.means.get(name)) is None else value * times


def _loss(side: Side) -> float | None:
    """Return the mean of the last losses of all slots that train."""
    return mean(finite(row.progress.loss) for row in side.snapshot.rows)


def _whole(value: float | None) -> str | None:
    return None if value is None else number(value, 0)


def _clock(value: float | None) -> str | None:
    return None if value is None else clock(value)


#: Title, whether more is better, value, and its words where they are not a rounded number.
_FIGURES: Final[tuple[tuple[str, int, Callable[[Side], float | None], _Words | None], ...]] = (
    ("time worked", 0, lambda side: side.run.elapsed_s, _clock),
    ("slots", 0, lambda side: len(side.run.slots), _whole),
    ("good steps", 1, _count("steps_ok"), _whole),
    ("good steps an hour", 1, lambda side: _per_hour(side, side.snapshot.counts), None),
    ("success, %", 1, _count("success_rate"), share_pct),
    ("TFLOP/s, mean of the sum", 1, _overall("tflops"), None),
    ("GiB allocated, mean of the sum", 0, _overall("allocated_bytes", 1 / GIB), None),
    ("out of memory", -1, _count("oom_count"), _whole),
    ("emergencies", -1, _count("emergency_count"), _whole),
    ("restarts", -1, lambda side: side.snapshot.restart_count, _whole),
    ("steps lost at most", -1, lambda side: side.snapshot.steps_lost_upper_bound, _whole),
    ("wrong results", -1, _count("verify_errors"), _whole),
    ("hottest temperature, C, mean", -1, _overall("temperature_c"), None),
    ("samples a second, mean of the sum", 1, _overall("samples_per_s"), None),
    ("loss at the end, mean", -1, _loss, None),
)
#: Of a slot: whether more is better, value, and its words.
_OF_SLOTS: Final[tuple[tuple[int, Callable[[Side, Row], float | None], _Words | None], ...]] = (
    (1, lambda side, row: side.tflops.get(row.slot), None),
    (1, lambda side, row: _per_hour(side, row.counts), _whole),
    (-1, lambda _, row: row.counts.oom_count, _whole),
)


def frozen(folder: Path, other: Path | None = None) -> Json:
    """Return the run in a run folder, with its last picture and the course of its values, beside
    another run.

    Raises:
        NothingStoredError: Nothing is stored in one of them yet.
        ArchiveError: One cannot be read.
    """
    frame = Follower(folder).look()
    frame = replace(frame, snapshot=with_jobs(frame.snapshot, frame.queue, UNICODE))
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
        "missing": UNICODE.missing,
        "history": {
            slot: {key: _drawn(key, course) for key, course in of_slot.items()}
            for slot, of_slot in courses.items()
        },
        "beside": dict.fromkeys(("allocated_bytes", "reserved_bytes"), ("cap_bytes", "cap")),
        "events": [page_data.event_of(event) for event in events[-_EVENTS_TOLD:]],
        "cards": page_data.cards_of(frame),
        "summary": _summary(
            frame, events, courses, None if other is None else Follower(other).look()
        ),
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


def _summary(
    frame: Frame,
    events: tuple[StoredEvent, ...],
    slots: Mapping[str, Mapping[str, Buckets]],
    other: Frame | None,
) -> Json:
    """Return the run as a whole: what fell short, its course, and its figures beside those of
    another run.
    """
    frames = [frame] if other is None else [frame, other]
    width_s = max(
        (between[1] - between[0] for one in frames if (between := _between(one.run))), default=1.0
    )
    courses = [_totals(one.run, width_s) for one in frames]
    of_slots = [slots, *(_courses(one.run, ("tflops",), _PARTS_LEAST) for one in frames[1:])]
    charts = []
    for drawn in page_data.totals_of(courses[0]):
        chart = {name: drawn[name] for name in ("label", "t", "mean")}
        if courses[1:] and courses[1]:
            other_mean = page_data.history_of(drawn["field"], courses[1][drawn["field"]])["mean"]
            chart |= {"beside": other_mean, "beside_label": "other run"}
        charts.append(chart)
    begins = frame.run.facts.started_at_unix_s
    return {
        "missed": [UNICODE.clean(one) for one in frame.missed],
        "from": begins,
        "to": begins + width_s,
        "charts": charts,
        "events": [page_data.event_of(event) for event in events if event.slot is None],
        "spans": [],
        "utc_offset_s": page_data.offset_s(begins),
        "figures": compared(list(map(_side, frames, courses, of_slots))),
    }


def _side(
    frame: Frame, whole: Mapping[str, Buckets], slots: Mapping[str, Mapping[str, Buckets]]
) -> Side:
    return Side(
        run=frame.run,
        snapshot=frame.snapshot,
        means={key: mean(course.mean) for key, course in whole.items()},
        tflops={
            slot: mean(courses["tflops"].mean)
            for slot, courses in slots.items()
            if "tflops" in courses
        },
    )


def _totals(run: StoredRun, width_s: float) -> dict[str, Buckets]:
    between = _between(run)
    return (
        {}
        if between is None
        else history.totals(run.folder, between[0], between[0] + width_s, _PARTS_MOST)
    )


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


def write_report(path: Path, folder: Path, other: Path | None) -> None:
    """Write the run in a run folder into one file, beside another run.

    `OrchestratorError` if that is not possible.
    """
    try:
        write_file(path, html(frozen(folder, other), f"run {folder.name}"))
    except OSError as failure:
        raise UsageError(f"{path} cannot be written: {failure.strerror}") from failure
