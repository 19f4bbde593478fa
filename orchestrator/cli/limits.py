"""What `limits` prints: what workers have learned about the sizes that fit, and what was deleted.

Does not keep and match them (`workers/learned_limits/`). Text from the store passes through
`cells.clean`: it may steer a terminal. A store that cannot be read or written is an
`ArchiveError`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from orchestrator.config.duration import format_duration
from orchestrator.errors import ArchiveError
from orchestrator.record.summary import SCHEMA, summary_text
from orchestrator.view.cells import MISSING, SEPARATOR, aligned, clean, flow, number, whole
from orchestrator.view.phrases import counted
from workers.learned_limits import EXPIRY_S, LimitStore, to_plain
from workers.settings import StoredLimit
from workers.units import GIB, MIB

_TITLES = (
    "card",
    "driver",
    "torch",
    "type",
    "workload",
    "cap",
    "size",
    "per unit",
    "age",
    "expires in",
)
_WORDS = frozenset({"card", "driver", "torch", "type", "workload"})


def limits_text(store: LimitStore, now_unix_s: float, width: int | None) -> str:
    """Return a line for each limit, the newest first; a few lines each where the terminal is too
    narrow for that.

    `width` is in cells; `None` if there is no terminal, so that no line is too long.
    """
    limits = _known(store, now_unix_s)
    if not limits:
        return clean(
            "nothing is learned yet; what runs learn about the sizes that fit is kept in "
            f"{store.path}"
        )
    rows = [_cells(limit, now_unix_s) for limit in limits]
    lines = list(aligned([_TITLES, *rows], _WORDS))
    if width is not None and max(map(len, lines)) > width:
        lines = [line for row in rows for line in _block(row, width)]
    return "\n".join(lines)


def limits_json(store: LimitStore, now_unix_s: float) -> str:
    """Return the same as one JSON object; `null` is unknown."""
    limits = [_object(limit, now_unix_s) for limit in _known(store, now_unix_s)]
    return summary_text(
        {"schema": SCHEMA, "path": str(store.path), "expiry_s": EXPIRY_S, "limits": limits}
    )


def cleared_text(store: LimitStore, now_unix_s: float) -> str:
    """Delete all limits, and say how many there were."""
    count, moved = _clear(store, now_unix_s)
    if moved is not None:
        return clean(
            f"what was in {store.path} could not be read and is now {moved}; runs will learn again"
        )
    if count == 0:
        return clean(f"there is nothing to forget in {store.path}")
    return f"{counted(count, 'learned limit')} forgotten; runs will learn again"


def cleared_json(store: LimitStore, now_unix_s: float) -> str:
    """Do the same and say so in one JSON object."""
    count, moved = _clear(store, now_unix_s)
    aside = None if moved is None else str(moved)
    return summary_text(
        {"schema": SCHEMA, "path": str(store.path), "cleared": count, "set_aside_path": aside}
    )


def _known(store: LimitStore, now_unix_s: float) -> tuple[StoredLimit, ...]:
    known = store.all(now_unix_s)
    if store.problem is not None:
        raise ArchiveError(store.problem)
    return known


def _clear(store: LimitStore, now_unix_s: float) -> tuple[int, Path | None]:
    """Return how many limits are gone.

    Or, where none could be read, where that file is now.
    """
    count = store.clear(now_unix_s)
    problem = store.problem
    moved = store.set_aside() if problem is not None else None
    if problem is not None and moved is None:
        raise ArchiveError(problem)
    return count, moved


def _cells(limit: StoredLimit, now_unix_s: float) -> tuple[str, ...]:
    key, age_s = limit.key, now_unix_s - limit.learned_at_unix_s
    cells = (
        key.card,
        key.driver,
        key.torch,
        key.dtype,
        key.workload,
        _bytes(key.cap_bytes),
        whole(limit.learned.size),
        _bytes(limit.learned.unit_bytes),
        _roughly(age_s),
        _roughly(EXPIRY_S - age_s),
    )
    return tuple(MISSING if cell is None else clean(cell) for cell in cells)


def _block(row: Sequence[str], width: int) -> Iterator[str]:
    titled = [
        Text(row[0]),
        *(Text(f"{title} {cell}") for title, cell in zip(_TITLES[1:], row[1:], strict=True)),
    ]
    for index, line in enumerate(flow(titled, width - 2, SEPARATOR)):
        yield f"{'  ' if index else ''}{line.plain}"


def _object(limit: StoredLimit, now_unix_s: float) -> dict[str, Any]:
    age_s = now_unix_s - limit.learned_at_unix_s
    return {**to_plain(limit), "age_s": age_s, "expires_in_s": EXPIRY_S - age_s}


def _roughly(seconds: float) -> str:
    """Return a length of time with its two largest units at most; one in the future is no age."""
    known_s = max(0, int(seconds))
    grain_s = 3_600 if known_s >= 86_400 else 60 if known_s >= 3_600 else 1
    return format_duration(known_s // grain_s * grain_s)


def _bytes(value: float | None) -> str | None:
    if value is None:
        return None
    for unit, unit_bytes in (("GiB", GIB), ("MiB", MIB), ("KiB", 1024)):
        if value >= unit_bytes:
            return f"{number(value / unit_bytes, 2)} {unit}"
    return f"{number(value, 2)} B"
