"""Reads the history of a run: values over time, and how long each slot was in each state.

Samples are stored in order of time, so reading an interval is one scan of the index. Does not read
the present state of a run (`archive.py`). Keeps nothing in memory.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from orchestrator.record.events import read_events
from orchestrator.record.store import reading

_CHANGES_MOST: Final = 50_000

_OF_EACH: Final = "samples WHERE at_unix_s >= :first AND at_unix_s < :last"
_OF_ALL: Final = f"(SELECT '' AS slot, at_unix_s{{sums}} FROM {_OF_EACH} GROUP BY at_unix_s)"  # noqa: S608 - ours
_BUCKETS: Final = """SELECT slot, min(:count - 1, CAST((at_unix_s - :first) / :width AS INTEGER))
    AS part{figures} FROM {samples} GROUP BY slot, part"""


@dataclass(frozen=True, slots=True)
class Buckets:
    """A value over time, divided into equal intervals; `None` in an interval without samples."""

    at_unix_s: tuple[float, ...]
    """The middle of each interval."""
    low: tuple[float | None, ...]
    mean: tuple[float | None, ...]
    high: tuple[float | None, ...]


def courses(
    folder: Path,
    keys: Sequence[str],
    from_unix_s: float,
    to_unix_s: float,
    count: int,
    slot: str | None = None,
    *,
    together: bool = False,
) -> dict[str, dict[str, Buckets]]:
    """Return the samples of `keys` in `count` intervals from `from_unix_s` to before `to_unix_s`,
    by slot and key: of every slot that was sampled then, or only of `slot`.

    `together` combines all slots into one without a name: sums, and the highest temperature.
    `ArchiveError`: the store cannot be read, or a key is not sampled.
    """
    samples = _OF_EACH if slot is None else f"{_OF_EACH} AND slot = :slot"
    if together:
        sums = (f", {'max' if key == 'temperature_c' else 'sum'}({key}) AS {key}" for key in keys)
        samples = _OF_ALL.format(sums="".join(sums))
    first, width_s = from_unix_s, (to_unix_s - from_unix_s) / count
    figures = "".join(f", min({key}), avg({key}), max({key})" for key in keys)
    statement = _BUCKETS.format(figures=figures, samples=samples)
    values = {"first": first, "last": to_unix_s, "width": width_s, "count": count, "slot": slot}
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


def sampled_between(folder: Path) -> tuple[float, float] | None:
    """Return the Unix time of the first sample, and a time just after the last; `None`: none."""
    with reading(folder) as store:
        # Two queries: SQLite uses the index for one of min and max, and scans all rows for both.
        first, last = store.execute(
            "SELECT (SELECT min(at_unix_s) FROM samples), (SELECT max(at_unix_s) FROM samples)"
        ).fetchone()
    return None if first is None else (float(first), float(last) + 0.001)


def time_in_states(folder: Path, until_unix_s: float) -> Mapping[str, Mapping[str, float]]:
    """Return for how many seconds each slot was in each state since its first change of state; the
    last state counts until `until_unix_s`.

    Only the last `_CHANGES_MOST` changes count.
    """
    changes = [
        (event.slot, at_unix_s, str(event.details.get("to_state", "")))
        for event in read_events(folder, ("state",), limit=_CHANGES_MOST)
        if event.slot is not None and (at_unix_s := event.at_unix_s) is not None
    ]
    ends = [(slot, until_unix_s, "") for slot in {slot for slot, *_ in changes}]
    since: dict[str, tuple[str, float]] = {}
    spent_s = defaultdict[str, dict[str, float]](lambda: defaultdict(float))
    for slot, at_unix_s, state in (*changes, *ends):
        if slot in since:
            before, from_unix_s = since[slot]
            spent_s[slot][before] += max(0.0, at_unix_s - from_unix_s)
        since[slot] = state, at_unix_s
    return spent_s


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
