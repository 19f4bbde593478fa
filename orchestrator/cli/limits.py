"""What `limits` prints: what workers have learned about the sizes that fit, and what was deleted.

Does not keep and match them (`workers/learned_limits/`). Text from the store passes through
`cells.clean`: it may steer a terminal. A store that cannot be read or written is an
`ArchiveError`.
"""

from __future__ import annotations

from typing import Any, Final

from orchestrator.config.duration import format_duration
from orchestrator.errors import ArchiveError
from orchestrator.record.summary import SCHEMA, summary_text
from orchestrator.view.cells import clean, number, whole
from orchestrator.view.phrases import counted
from orchestrator.view.tables import Column, Table, TableRow, row_of
from orchestrator.view.terminal import plain_text, table_lines
from workers.learned_limits import EXPIRY_S, LimitStore, to_plain
from workers.settings import StoredLimit
from workers.units import GIB, MIB

_COLUMNS: Final = (
    Column(key="card", title="card"),
    Column(key="driver", title="driver", priority=7),
    Column(key="torch", title="torch", priority=6),
    Column(key="dtype", title="type", priority=3),
    Column(key="workload", title="workload"),
    Column(key="cap_bytes", title="cap", numeric=True, priority=1),
    Column(key="size", title="size", numeric=True),
    Column(key="unit_bytes", title="per unit", numeric=True, priority=5),
    Column(key="age_s", title="age", numeric=True, priority=2),
    Column(key="expires_in_s", title="expires in", numeric=True, priority=4),
)
"""Their keys are those of a limit in JSON."""


def limits_text(store: LimitStore, now_unix_s: float, width: int | None) -> str:
    """Return a line for each limit, the newest first.

    `width` is that of the terminal; `None` cuts nothing.
    """
    limits = _known(store, now_unix_s)
    if not limits:
        return clean(
            "nothing is learned yet; what runs learn about the sizes that fit is kept in "
            f"{store.path}"
        )
    rows = tuple(_row(limit, now_unix_s) for limit in limits)
    return plain_text(table_lines(Table(name="limits", columns=_COLUMNS, rows=rows), width))


def limits_json(store: LimitStore, now_unix_s: float) -> str:
    """Return the same as one JSON object; `null` is unknown."""
    limits = [_object(limit, now_unix_s) for limit in _known(store, now_unix_s)]
    return summary_text(
        {"schema": SCHEMA, "path": str(store.path), "expiry_s": EXPIRY_S, "limits": limits}
    )


def cleared_text(store: LimitStore, now_unix_s: float) -> str:
    """Delete all limits, and say how many there were."""
    count = _clear(store, now_unix_s)
    if count == 0:
        return clean(f"there is nothing to forget in {store.path}")
    return f"{counted(count, 'learned limit')} forgotten; runs will learn again"


def cleared_json(store: LimitStore, now_unix_s: float) -> str:
    """Do the same and say so in one JSON object."""
    count = _clear(store, now_unix_s)
    return summary_text({"schema": SCHEMA, "path": str(store.path), "cleared": count})


def _known(store: LimitStore, now_unix_s: float) -> tuple[StoredLimit, ...]:
    known = store.all(now_unix_s)
    if store.problem is not None:
        raise ArchiveError(store.problem)
    return known


def _clear(store: LimitStore, now_unix_s: float) -> int:
    count = store.clear(now_unix_s)
    if store.problem is not None:
        raise ArchiveError(store.problem)
    return count


def _row(limit: StoredLimit, now_unix_s: float) -> TableRow:
    told = _object(limit, now_unix_s)
    texts = {
        "cap_bytes": _bytes(told["cap_bytes"]),
        "size": whole(told["size"]),
        "unit_bytes": _bytes(told["unit_bytes"]),
        "age_s": _roughly(told["age_s"]),
        "expires_in_s": _roughly(told["expires_in_s"]),
    }
    return row_of(_COLUMNS, limit.key.card, told, texts)


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
