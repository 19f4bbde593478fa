"""Counters by their names, for tests: in the values a dataclass is made of, and of a slot as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from orchestrator.core.slot import Slot
from orchestrator.record.model import Row
from workers.messages import NO_COUNTS, StepCounts


def with_counts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with those that are counters gathered in `counts`."""
    counters = {name: value for name, value in values.items() if name in StepCounts.__slots__}
    others = {name: value for name, value in values.items() if name not in counters}
    return {**others, "counts": StepCounts(**counters)} if counters else others


def with_changes(row: Row, **changes: Any) -> Row:
    """Return a row with some of its fields and counters changed."""
    counters = {name: value for name, value in changes.items() if name in StepCounts.__slots__}
    others = {name: value for name, value in changes.items() if name not in counters}
    return replace(row, counts=replace(row.counts, **counters), **others)


def counters(**known: float) -> dict[str, float]:
    """Return every counter of a slot, 0 where none is given."""
    return {**asdict(NO_COUNTS), "restarts": 0, "steps_lost_upper_bound": 0, **known}


def counters_of(slot: Slot) -> dict[str, float]:
    """Return every counter of a slot."""
    lost = slot.steps_lost_upper_bound
    return {**asdict(slot.counts), "restarts": slot.restarts, "steps_lost_upper_bound": lost}
