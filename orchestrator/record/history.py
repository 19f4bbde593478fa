"""Reads the course of a run back: values over time, and states over time.

A store holds the samples of all slots ordered by time. One slot is read by going from moment to
moment, so that what a look costs does not grow with the number of slots; all slots are read in one
pass. Does not read a run as it is now (`archive.py`). Pure SQL, nothing is kept in memory.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orchestrator.record.archive import (
    StoredEvent,
    events_of,
    reading,
)
from orchestrator.record.model import FIELDS

BUCKETS_MOST = 1_000
_CHANGES_MOST = 50_000
_LATEST_UNIX_S = 253_402_300_799.0
"""The end of the year 9999: no calendar goes further."""

#: Every moment of a sample from :first to :last, one index seek each.
_MOMENTS = """WITH RECURSIVE moments(at) AS (
    SELECT min(at_unix_s) FROM samples WHERE at_unix_s >= :first
    UNION ALL
    SELECT (SELECT min(at_unix_s) FROM samples WHERE at_unix_s > at) FROM moments WHERE at <= :last
)"""

_PART = "min(:count - 1, CAST((at_unix_s - :first) / :width AS INTEGER)) AS part"
_OF_ONE = (
    f"{_MOMENTS} SELECT slot, {_PART}{{figures}} FROM moments JOIN samples ON at_unix_s = at AND "  # noqa: S608 - constants
    "slot = :slot "
    "WHERE at <= :last GROUP BY part"
)
_SLICE = "WHERE at_unix_s >= :first AND at_unix_s < :last"
_OF_EACH = f"SELECT slot, {_PART}{{figures}} FROM samples {_SLICE} GROUP BY slot, part"  # noqa: S608 - constants
_OF_ALL = (
    f"WITH sums AS (SELECT at_unix_s{{sums}} FROM samples {_SLICE} GROUP BY at_unix_s) "  # noqa: S608 - constants
    f"SELECT '' AS slot, {_PART}{{figures}} FROM sums GROUP BY part"
)
#: For all samples: a run may last for days.
_READING_MOST_S = 120.0

#: Keys whose course can be asked for.
SAMPLED_NUMBERS = tuple(key for key, each in FIELDS.items() if each.sampled and key != "state")

#: What the course of a whole run is told by.
TOTALS = ("tflops", "allocated_bytes", "oom_count", "temperature_c", "samples_per_s")


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


def buckets(
    folder: Path, slot: str, keys: Sequence[str], from_unix_s: float, to_unix_s: float, count: int
) -> dict[str, Buckets]:
    """Return sampled numbers of a slot between two moments, in `count` parts (at most
    `BUCKETS_MOST`), by key.

    Raises:
        ValueError: A key is not sampled, or is no number; the times or the count make no sense.
        ArchiveError: The store cannot be read.
    """
    return _read(folder, _OF_ONE, keys, (from_unix_s, to_unix_s), count, slot)[slot]


def courses(
    folder: Path, keys: Sequence[str], from_unix_s: float, to_unix_s: float, count: int
) -> dict[str, dict[str, Buckets]]:
    """Return the same of every slot, by slot, in one pass over all samples.

    Without the very last moment.
    """
    return _read(folder, _OF_EACH, keys, (from_unix_s, to_unix_s), count)


def totals(folder: Path, from_unix_s: float, to_unix_s: float, count: int) -> dict[str, Buckets]:
    """Return sums over all slots, by the keys of `TOTALS`, and the highest temperature.

    As `courses` otherwise.
    """
    return _read(folder, _OF_ALL, TOTALS, (from_unix_s, to_unix_s), count, "")[""]


def sampled_between(folder: Path) -> tuple[float, float] | None:
    """Return the Unix times of the first and the last sample; `None` if there is none."""
    with reading(folder) as store:
        # SQLite finds one of them in the index; both at once it looks for in all samples.
        first, last = store.execute(
            "SELECT (SELECT min(at_unix_s) FROM samples), (SELECT max(at_unix_s) FROM samples)"
        ).fetchone()
    return None if _number(first) is None or _number(last) is None else (float(first), float(last))


def all_state_spans(folder: Path) -> dict[str, tuple[Span, ...]]:
    """Return the states of each slot one after the other, from its first change on, by slot; of
    very many changes the last ones.
    """
    changes: dict[str, list[StoredEvent]] = {}
    with reading(folder) as store:
        for event in events_of(store, "event = 'state' AND slot IS NOT NULL", (), _CHANGES_MOST):
            changes.setdefault(str(event.slot), []).append(event)
    return {slot: _spans(of_slot) for slot, of_slot in changes.items()}


def _read(
    folder: Path,
    statement: str,
    keys: Sequence[str],
    between: tuple[float, float],
    count: int,
    slot: str | None = None,
) -> dict[str, dict[str, Buckets]]:
    """Return what a statement finds, by slot and key; of `slot` also where it finds nothing."""
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
    sums = "".join(
        f", {'max' if key == 'temperature_c' else 'sum'}({key}) AS {key}" for key in keys
    )
    values = {"first": first, "last": last, "width": width_s, "count": count, "slot": slot}
    with reading(folder, _READING_MOST_S) as store:
        lines = store.execute(statement.format(figures=figures, sums=sums), values).fetchall()
    parts: dict[str, dict[int, sqlite3.Row]] = {} if slot is None else {slot: {}}
    for line in lines:
        parts.setdefault(line["slot"], {})[line["part"]] = line
    at_unix_s = tuple(first + (part + 0.5) * width_s for part in range(count))

    def part_values(lines: Mapping[int, sqlite3.Row], column: int) -> tuple[float | None, ...]:
        return tuple(
            _number(lines[part][column]) if part in lines else None for part in range(count)
        )

    return {
        name: {
            key: Buckets(
                at_unix_s, *(part_values(found, 2 + 3 * place + which) for which in range(3))
            )
            for place, key in enumerate(keys)
        }
        for name, found in parts.items()
    }


def _spans(changes: Sequence[StoredEvent]) -> tuple[Span, ...]:
    known = [(at, event) for event in changes if (at := event.at_unix_s)]
    ends: list[float | None] = [at for at, _ in known[1:]]
    return tuple(
        Span(
            state=str(event.details.get("to_state", "")),
            from_unix_s=at,
            to_unix_s=end,
            cause=str(event.details.get("cause", "")),
        )
        for (at, event), end in zip(known, [*ends, None], strict=False)
    )


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
