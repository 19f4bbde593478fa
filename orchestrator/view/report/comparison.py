"""Puts the figures of a run beside those of another one, with the differences in per cent. Pure.

Words cells as `web/page_data.py` does. Does not read anything (`facts.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from orchestrator.record.archive import StoredRun
from orchestrator.record.model import Row, Snapshot, finite, natural_order
from orchestrator.view.cells import UNICODE, clock, decimals_for, number, share_pct
from orchestrator.view.web.page_data import OUTCOME_TONES, Cell, Json
from workers.messages import StepCounts
from workers.units import GIB

#: A difference from here on is coloured, in per cent.
_WORTH_COLOUR: Final = 5.0

_Words: TypeAlias = Callable[[float | None], str | None]


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


def _mean(name: str, times: float = 1.0) -> Callable[[Side], float | None]:
    return lambda side: None if (value := side.means.get(name)) is None else value * times


def _loss(side: Side) -> float | None:
    """Return the mean of the last losses of all slots that train."""
    known = [loss for row in side.snapshot.rows if (loss := finite(row.progress.loss)) is not None]
    return sum(known) / len(known) if known else None


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
    ("TFLOP/s, mean of the sum", 1, _mean("tflops"), None),
    ("GiB allocated, mean of the sum", 0, _mean("allocated_bytes", 1 / GIB), None),
    ("out of memory", -1, _count("oom_count"), _whole),
    ("emergencies", -1, _count("emergency_count"), _whole),
    ("restarts", -1, lambda side: side.snapshot.restart_count, _whole),
    ("steps lost at most", -1, lambda side: side.snapshot.steps_lost_upper_bound, _whole),
    ("wrong results", -1, _count("verify_errors"), _whole),
    ("hottest temperature, C, mean", -1, _mean("temperature_c"), None),
    ("samples a second, mean of the sum", 1, _mean("samples_per_s"), None),
    ("loss at the end, mean", -1, _loss, None),
)
#: Of a slot: whether more is better, value, and its words.
_OF_SLOTS: Final[tuple[tuple[int, Callable[[Side, Row], float | None], _Words | None], ...]] = (
    (1, lambda side, row: side.tflops.get(row.slot), None),
    (1, lambda side, row: _per_hour(side, row.counts), _whole),
    (-1, lambda _, row: row.counts.oom_count, _whole),
)
_DIFFERENCE: Final = ("difference",)
