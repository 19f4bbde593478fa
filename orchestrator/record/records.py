"""What a run store keeps of a run and of its slots, as plain values.

The head writes them (`store.py`), a reader gets them back (`archive.py`). Does not cover SQL, files
or their origin.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from workers.messages import ResumeState, StepCounts

STORE_NAME = "run.sqlite"
"""The store's file in the run folder."""

SCHEMA_VERSION = 2
"""Counts up when a reader of the version before could misunderstand the tables."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What is known of a run before its first slice, and needed to resume it after its head was
    killed.
    """

    run_id: str
    started_at_unix_s: float
    """When its first head began."""
    duration_s: float
    """Planned length."""
    elapsed_s: float = 0.0
    """Already worked when this head began: by the heads before it."""
    min_success_rate: float
    """Share of good steps below which the run is degraded, 0..1."""
    mode: str
    device: str | None
    one_machine: bool
    """This and the device as in `core.placement.Target`."""
    config_yaml: str
    chaos: str | None
    nodes_planned: tuple[str, ...]
    head_pid: int
    head_started: str | None
    """When the head's process began, in the kernel's ticks; with the pid it tells a process from
    all others.
    """
    host: str
    """Name of the machine the head runs on: its pid means nothing elsewhere."""


#: Counters of a slot in the order of `SlotProgress.counters`.
COUNTERS = (*StepCounts.__slots__, "restarts", "steps_lost_upper_bound")


class SlotProgress(NamedTuple):
    """What changes with every report of a slot, and must be known before it is sent more."""

    slot: str
    next_sequence: int
    steps_at_risk: int
    """Most good steps that the slices under way may have done and not reported."""
    heard_at_unix_s: float | None
    """Of the last report of the present process; `None` before the first."""
    counters: tuple[int | float, ...]
    """By `COUNTERS`."""


COMMANDS_KNOWN = 1_000
"""Answers that a head remembers, its predecessors' included: an id that comes again gets the same
one.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRecord:
    """A command of the user, with what it was answered."""

    id: str
    at_unix_s: float
    do: str
    slots: tuple[str, ...]
    by: str
    amount_bytes: int | None
    answer: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotRecord:
    """One slot after its last accepted report: enough to show it, and for another head to resume
    it.
    """

    slot: str
    node: str
    state: str
    """A value of `WorkerState`."""
    reason: str
    incarnation: int
    next_sequence: int
    steps_at_risk: int
    counters: Mapping[str, int | float] = field(default_factory=dict)
    resume: ResumeState | None = None
    row: Mapping[str, Any] = field(default_factory=dict)
    """`Row.known()` of the slot."""
    orders: Mapping[str, Any] | None = None
    """What the user has asked of it, as `core.slot.Orders`; `None`: nothing."""
