"""Reads the course of a run back: values over time, and states over time.

Samples are stored in the order of time, so that a look at a part of it is one walk through the
index. Does not read a run as it is now (`archive.py`). Nothing is kept in memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from orchestrator.record.events import read_events
from orchestrator.record.model import FIELDS
from orchestrator.record.store import reading

BUCKETS_MOST: Final = 1_000
_CHANGES_MOST: Final = 50_000
_LATEST_UNIX_S: Final = 253_402_300_799.0
"""The end of the year 9999: no calendar goes further."""

_OF_EACH: Final = "samples WHERE at_unix_s >= :first AND at_unix_s < :last"
_OF_ALL: Final = f"(SELECT '' AS slot, at_unix_s{{sums}} FROM {_OF_EACH} GROUP BY at_unix_s)"  # noqa: S608 - ours
_BUCKETS: Final = """SELECT slot, min(:count - 1, CAST((at_unix_s - :first) / :width AS INTEGER))
    AS part{figures} FROM {samples} GROUP BY slot, part"""

#: Keys whose course can be asked for.
SAMPLED_NUMBERS: Final = tuple(
    key for key, each in FIELDS.items() if each.sampled and key != "state"
)

#: What the course of a whole run is told by.
TOTALS: Final = ("tflops", "allocated_bytes", "oom_count", "temperature_c", "samples_per_s")


@dataclass(frozen=True, slots=True)
class Buckets:
    """A value over time, as so many equal parts of it; `None` where nothing was sampled."""

    at_unix_s: tuple[float, ...]
    """The middle of each part."""
    low: tuple[float | None, ...]
    mean: tuple[float | None, ...]
    high: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A slot in one state for some time."""

    state: str
    from_unix_s: float
    to_unix_s: float | None
    """`None`: it still lasted when the store was written last."""
    cause: str


def courses(
    folder: Path,
    keys: Sequence[str],
    from_unix_s: float,
    to_unix_s: float,
    count: int,
    slot: str | None = None,
) -> dict[str, dict[str, Buckets]]:
    """Return sampled numbers between two moments, without the last one, in `count` parts (at most
    `BUCKETS_MOST`), by slot and key: of every slot that was sampled then, or of one.

    `ValueError`: a key is not sampled, or is no number; the times or the count make no sense;
    `ArchiveError`: the store cannot be read.
    """
    samples = _OF_EACH if slot is None else f"{_OF_EACH} AND slot = :slot"
    return _read(folder, samples, keys, (from_unix_s, to_unix_s), count, slot)


def totals(folder: Path, from_unix_s: float, to_unix_s: float, count: int) -> dict[str, Buckets]:
    """Return sums over all slots, by the keys of `TOTALS`, and the highest temperature.

    As `courses` otherwise; empty where nothing was sampled.
    """
    sums = ((f"{'max' if key == 'temperature_c' else 'sum'}({key})", key) for key in TOTALS)
    samples = _OF_ALL.format(sums="".join(f", {total} AS {key}" for total, key in sums))
    return _read(folder, samples, TOTALS, (from_unix_s, to_unix_s), count).get("", {})


def sampled_between(folder: Path) -> tuple[float, float] | None:
    """Return the Unix times of the first and the last sample; `None` if there is none."""
    with reading(folder) as store:
        # SQLite finds one of them in the index; both at once it looks for in all samples.
        first, last = store.execute(
            "SELECT (SELECT min(at_unix_s) FROM samples), (SELECT max(at_unix_s) FROM samples)"
        ).fetchone()
    return None if first is None else (float(first), float(last))


def state_spans(folder: Path) -> dict[str, list[Span]]:
    """Return the states of each slot one after the other, from its first change on, by slot.

    Of very many changes, the last ones.
    """
    spans: dict[str, list[Span]] = {}
    for event in read_events(folder, ("state",), limit=_CHANGES_MOST):
        if event.slot is not None and (at_unix_s := event.at_unix_s) is not None:
            to, cause = (str(event.details.get(key, "")) for key in ("to_state", "cause"))
            known = spans.setdefault(event.slot, [])
            if known:
                known[-1] = replace(known[-1], to_unix_s=at_unix_s)
            known.append(Span(state=to, from_unix_s=at_unix_s, to_unix_s=None, cause=cause))
    return spans


def _read(
    folder: Path,
    samples: str,
    keys: Sequence[str],
    between: tuple[float, float],
    count: int,
    slot: str | None = None,
) -> dict[str, dict[str, Buckets]]:
    """Return the courses of what is selected of the samples."""
    for key in keys:
        if key not in SAMPLED_NUMBERS:
            raise ValueError(
                f"{key[:40]!r} is not sampled; sampled are {', '.join(SAMPLED_NUMBERS)}"
            )
    first, last = between
    if not (1 <= count <= BUCKETS_MOST and 0 <= first < last <= _LATEST_UNIX_S):
        raise ValueError(
            f"buckets must be 1 to {BUCKETS_MOST}, between the years 1970 and 9999, and end after "
            "they begin"
        )
    width_s = (last - first) / count
    figures = "".join(f", min({key}), avg({key}), max({key})" for key in keys)
    statement = _BUCKETS.format(figures=figures, samples=samples)
    values = {"first": first, "last": last, "width": width_s, "count": count, "slot": slot}
    found: dict[str, list[list[float | None]]] = {}
    with reading(folder) as store:
        for name, part, *numbers in store.execute(statement, values):
            columns = found.setdefault(name, [[None] * count for _ in numbers])
            for column, number in zip(columns, numbers, strict=True):
                column[part] = _number(number)
    at_unix_s = tuple(first + (part + 0.5) * width_s for part in range(count))
    return {
        name: {
            key: Buckets(at_unix_s, *map(tuple, columns[3 * place : 3 * place + 3]))
            for place, key in enumerate(keys)
        }
        for name, columns in found.items()
    }


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
