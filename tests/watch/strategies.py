"""A strategy for rows with any values that their types allow."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args, get_type_hints

from hypothesis import strategies as st

from orchestrator.core.slot import HeadState
from orchestrator.record.model import Row
from workers.messages import MemoryInfo, Progress, StepCounts, TeamState, WorkerState
from workers.readings import SensorReading

_BY_TYPE = {
    str: st.text(st.characters(), max_size=30),  # lone surrogates included
    bool: st.booleans(),
    int: st.integers(min_value=0),
    float: st.floats(),
    type(None): st.none(),
    WorkerState: st.sampled_from(WorkerState),
    HeadState: st.sampled_from(HeadState),
    TeamState: st.sampled_from(TeamState),
}


def _any(kind: type) -> st.SearchStrategy[Any]:
    """Return a strategy for a dataclass with any values that its types allow."""
    names = {field.name for field in fields(kind)}
    hints = {name: hint for name, hint in get_type_hints(kind).items() if name in names}
    values = {name: get_args(hint) or (hint,) for name, hint in hints.items()}
    return st.builds(
        kind,
        **{name: st.one_of(*(_BY_TYPE[each] for each in kinds)) for name, kinds in values.items()},
    )


_BY_TYPE[Progress] = _any(Progress)
_BY_TYPE[StepCounts] = _any(StepCounts)
_BY_TYPE[MemoryInfo] = _any(MemoryInfo)
_BY_TYPE[SensorReading] = _any(SensorReading)
ANY_ROW = _any(Row)
