"""What `limits` prints: what workers have learned about the sizes that fit, and what was deleted.

Does not keep and match them (`workers/learned_limits/`). A store that cannot be read or written is
an `ArchiveError`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from orchestrator.cli.printing import Part
from orchestrator.config.duration import format_duration
from orchestrator.errors import ArchiveError
from orchestrator.view.cells import clean, number
from orchestrator.view.phrases import counted
from orchestrator.view.tables import Column, Table, TableRow, row_of
from workers.learned_limits import EXPIRY_S, LimitStore
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


def known(store: LimitStore, now_unix_s: float) -> dict[str, Any]:
    """Return all limits for JSON, the newest first; `None` is unknown."""
    limits = []
    for limit in map(asdict, store.all(now_unix_s)):
        age_s = now_unix_s - limit["learned_at_unix_s"]
        ages_s = {"age_s": age_s, "expires_in_s": EXPIRY_S - age_s}
        limits.append({**limit.pop("key"), **limit.pop("learned"), **limit, **ages_s})
    return _told(store, expiry_s=EXPIRY_S, limits=limits)


def cleared(store: LimitStore, now_unix_s: float) -> dict[str, Any]:
    """Delete all limits, and return for JSON how many there were."""
    return _told(store, cleared=store.clear(now_unix_s))


def _told(store: LimitStore, **found: Any) -> dict[str, Any]:  # noqa: ANN401 - values of JSON
    if store.problem is not None:
        raise ArchiveError(store.problem)
    return {"path": str(store.path), **found}


def shown(told: Mapping[str, Any]) -> Part:
    """Return for people what one of these has told."""
    count, path = told.get("cleared"), told["path"]
    if count is not None:
        return (
            f"{counted(count, 'learned limit')} forgotten; runs will learn again"
            if count
            else clean(f"there is nothing to forget in {path}")
        )
    if not told["limits"]:
        return clean(
            f"nothing is learned yet; what runs learn about the sizes that fit is kept in {path}"
        )
    return Table(name="limits", columns=_COLUMNS, rows=tuple(map(_row, told["limits"])))


def _row(limit: Mapping[str, Any]) -> TableRow:
    texts = {
        "cap_bytes": _bytes(limit["cap_bytes"]),
        "size": number(limit["size"]),
        "unit_bytes": _bytes(limit["unit_bytes"]),
        "age_s": _roughly(limit["age_s"]),
        "expires_in_s": _roughly(limit["expires_in_s"]),
    }
    return row_of(_COLUMNS, limit["card"], limit, texts)


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
