"""Two charts of a queue as SVG: the curves of its trainings, and what each card did.

Pure. Text is escaped; nothing refers to a file. Does not read the journal or the store.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from typing import Final

from orchestrator.jobs.model import Assigned, AttemptEnded, Record, Rested
from orchestrator.view.cells import clean, shorten

_WIDTH: Final = 960
_LEFT: Final = 90
_RIGHT: Final = 170
_CURVES_HEIGHT: Final = 300
_LANE: Final = 30
_POINTS_MOST: Final = 300
_NAMED_MOST: Final = 16
_MINUTES_FROM_S: Final = 1200.0
_GREY: Final = "#7d8590"

#: Told apart on white and on black, also by most who do not see red and green (Okabe and Ito,
#: 2008).
_COLOURS: Final = (
    *("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8a8a00"),
    "#7d8590",
)


@dataclass(frozen=True, slots=True)
class Bar:
    """An attempt of a job on a card."""

    card: str
    job: str
    from_s: float
    to_s: float


def attempt_bars(records: Iterable[Record], now_s: float) -> list[Bar]:
    """Return what was on which card, from the journal; what goes on ends now."""
    begun: dict[str, Assigned] = {}
    bars: list[Bar] = []
    for record in records:
        if isinstance(record, Assigned):
            begun[record.job] = record
        elif isinstance(record, Rested | AttemptEnded) and record.job in begun:
            first = begun.pop(record.job)
            bars.append(Bar(first.card, first.job, first.at_s, record.at_s))
    bars += (Bar(first.card, job, first.at_s, now_s) for job, first in begun.items())
    return bars


def bars_svg(bars: Sequence[Bar], jobs: Sequence[str] = ()) -> str | None:
    """Return what each card did over time, a lane for each job that is there at once; `None` where
    nothing ran. The place among `jobs` decides on the colour.
    """
    if not bars:
        return None
    begins_s, ends_s = min(bar.from_s for bar in bars), max(bar.to_s for bar in bars)
    colours = _colours(jobs, (bar.job for bar in bars))
    lanes: dict[str, list[float]] = {}
    places: list[tuple[Bar, int]] = []
    for bar in sorted(bars, key=lambda bar: bar.from_s):
        free = lanes.setdefault(bar.card, [])
        lane = next((at for at, end_s in enumerate(free) if end_s <= bar.from_s), len(free))
        free[lane:] = [bar.to_s, *free[lane + 1 :]]
        places.append((bar, lane))
    firsts, height = {}, 0
    for card in sorted(lanes):
        firsts[card] = height
        height += _LANE * len(lanes[card])
    drawn = [_text(_LEFT - 8, firsts[card] + 20, card, "end") for card in firsts]
    for bar, lane in places:
        left, right = (_across(at_s, begins_s, ends_s) for at_s in (bar.from_s, bar.to_s))
        y, width = firsts[bar.card] + lane * _LANE + 3, max(1.5, right - left)
        drawn.append(
            f'<rect x="{left:.1f}" y="{y}" width="{width:.1f}" height="{_LANE - 6}" rx="3" '
            f'fill="{colours[bar.job]}"><title>{_escaped(bar.job)}</title></rect>'
        )
        name = shorten(clean(bar.job), int(width / 7.5))
        if len(name) > 1:
            drawn.append(_text(left + 4, y + 16, name, colour="#ffffff"))
    form = "%H:%M" if ends_s - begins_s > _MINUTES_FROM_S else "%H:%M:%S"
    ticks = (begins_s + part * (ends_s - begins_s) / 4 for part in range(5))
    drawn += (
        _text(_across(at_s, begins_s, ends_s), height + 16, _clock(at_s, form), "middle")
        for at_s in ticks
    )
    return _svg(drawn, height + 24)


def curves_svg(
    curves: Mapping[str, Sequence[tuple[int, float]]], metric: str, jobs: Sequence[str] = ()
) -> str | None:
    """Return the curves of jobs over their steps in one chart; `None` where there is none. The
    place among `jobs` decides on the colour.
    """
    known = {name: _thinned(points) for name, points in curves.items() if len(points) > 1}
    if not known:
        return None
    last_step = max(points[-1][0] for points in known.values())
    values = sorted(value for points in known.values() for _, value in points)
    low, high = values[0], values[int(0.98 * (len(values) - 1))]  # the first steps are far above
    span, bottom = (high - low) or 1.0, _CURVES_HEIGHT - 26

    def down(value: float) -> float:
        return 10 + (bottom - 10) * (1 - (min(value, high) - low) / span)

    drawn = [
        f'<path d="M{_LEFT} 10V{bottom}H{_WIDTH - _RIGHT}" fill="none" stroke="{_GREY}"/>',
        *(_text(_LEFT - 8, down(value) + 4, f"{value:.4g}", "end") for value in (low, high)),
        _text(_LEFT - 8, (10 + bottom) / 2, metric, "end"),
        _text(_LEFT, bottom + 18, "0", "middle"),
        _text(_WIDTH - _RIGHT, bottom + 18, f"step {last_step}", "middle"),
    ]
    colours = _colours(jobs, known)
    for at, (name, points) in enumerate(known.items()):
        colour = colours[name]
        path = " ".join(
            f"{_across(step, 0, last_step):.1f},{down(value):.1f}" for step, value in points
        )
        drawn.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6">'
            f"<title>{_escaped(name)}</title></polyline>"
        )
        if at < _NAMED_MOST:
            shown = shorten(clean(name), 20)
            drawn.append(_text(_WIDTH - _RIGHT + 12, 20 + 17 * at, shown, colour=colour))
    return _svg(drawn, _CURVES_HEIGHT)


def _colours(jobs: Iterable[str], drawn: Iterable[str]) -> dict[str, str]:
    names = dict.fromkeys([*jobs, *drawn])
    return {name: _COLOURS[at % len(_COLOURS)] for at, name in enumerate(names)}


def _thinned(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    every = max(1, len(points) // _POINTS_MOST)
    return [*points[:-1:every], points[-1]]


def _across(value: float, first: float, last: float) -> float:
    return _LEFT + (_WIDTH - _RIGHT - _LEFT) * (value - first) / ((last - first) or 1.0)


def _clock(unix_s: float, form: str) -> str:
    return datetime.fromtimestamp(unix_s).astimezone().strftime(form)


def _text(x: float, y: float, text: str, anchor: str = "start", colour: str = _GREY) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{colour}">'
        f"{_escaped(text)}</text>"
    )


def _escaped(text: str) -> str:
    return escape(clean(text))


def _svg(drawn: Iterable[str], height: float) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" '
        f'font-family="system-ui, sans-serif" font-size="12">{"".join(drawn)}</svg>'
    )
