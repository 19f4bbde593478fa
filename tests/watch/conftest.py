"""Rows and snapshots for the watchers' tests: a healthy worker, and whatever a test says is different."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import strategies as st
from rich.console import Console, RenderableType

from orchestrator.core.slot import HeadState
from orchestrator.watch.model import Row, Snapshot
from tests.counting import with_counts
from workers.messages import StepCounts, WorkerState

GIB = 2**30

HEALTHY: dict[str, Any] = {
    "slot": "pc1/0",
    "node": "pc1",
    "gpu_name": "NVIDIA GeForce RTX 3090",
    "gpu_uuid": "GPU-0",
    "device": "cuda",
    "state": WorkerState.RUNNING,
    "reason": "steady",
    "policy": "adaptive",
    "size": 8192,
    "batch": 128,
    "dtype": "fp16",
    "tflops": 9.61,
    "baseline_pct": 97.2,
    "allocated_bytes": int(1.9 * GIB),
    "reserved_bytes": int(2.4 * GIB),
    "claim_bytes": int(2.5 * GIB),
    "cap_bytes": int(2.63 * GIB),
    "budget_bytes": int(3.33 * GIB),
    "device_used_bytes": 21 * GIB,
    "device_total_bytes": 24 * GIB,
    "steps_ok": 400,
    "duty_requested": 0.6,
    "duty_measured": 0.587,
    "peak_pct": 62.4,
    "temperature_c": 71.0,
    "temperature_of": "card",
    "margin_c": 24.0,
    "power_w": 281.4,
    "power_limit_w": 350.0,
    "throttle_pct": 3.0,
    "verify_checks": 412,
    "heartbeat_age_s": 0.8,
}

_BY_TYPE = {
    str: st.text(st.characters(), max_size=30),  # lone surrogates included
    int: st.integers(min_value=0),
    float: st.floats(),
    type(None): st.none(),
    WorkerState: st.sampled_from(WorkerState),
    HeadState: st.sampled_from(HeadState),
}


def _any(kind: type) -> st.SearchStrategy[Any]:
    """Return a strategy for a dataclass with anything in it that its types allow."""
    hints = get_type_hints(kind)
    values = {name: get_args(hint) or (hint,) for name, hint in hints.items()}
    return st.builds(kind, **{name: st.one_of(*(_BY_TYPE[each] for each in kinds)) for name, kinds in values.items()})


_BY_TYPE[StepCounts] = _any(StepCounts)
ANY_ROW = _any(Row)


RowMaker = Callable[..., Row]
SnapshotMaker = Callable[..., Snapshot]
Drawer = Callable[[RenderableType, int], list[str]]


@pytest.fixture
def make_row() -> RowMaker:
    """Make a healthy row with some fields changed."""
    return lambda **changed: Row(**with_counts({**HEALTHY, **changed}))


@pytest.fixture
def make_snapshot() -> SnapshotMaker:
    """Make a snapshot of rows, ten seconds into a run of thirty."""

    def make(*rows: Row, **changed: object) -> Snapshot:
        usual: dict[str, Any] = {
            "run_id": "run-1",
            "started_at": 1_700_000_000.0,
            "elapsed_s": 10.0,
            "duration_s": 30.0,
            "nodes_planned": ("pc1", "pc2"),
            "nodes_seen": ("pc1", "pc2"),
            "rows": rows,
        }
        given = {**usual, **changed}
        given.setdefault("now_unix_s", given["started_at"] + given["elapsed_s"])
        return Snapshot(**given)

    return make


@pytest.fixture(scope="session")
def any_row() -> st.SearchStrategy[Row]:
    """Return a strategy for rows with anything in them that their types allow."""
    return ANY_ROW


@pytest.fixture
def draw() -> Drawer:
    """Print to a real console of a width and return its lines, without colour."""

    def drawn(renderable: RenderableType, width: int) -> list[str]:
        stream = io.StringIO()
        Console(file=stream, width=width, color_system=None).print(renderable)
        return stream.getvalue().splitlines()

    return drawn
