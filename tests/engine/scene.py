"""Code that scenarios of the engine share: sequences of turns, names of workloads, events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from workers.engine.engine import Engine
from workers.messages import Begin, Orders, Status, StepCounts, Verdict, WorkerEvent, WorkerState
from workers.settings import WorkerSpec


def begun(spec: WorkerSpec, incarnation: int = 0, **begin: Any) -> Engine:
    """Return the engine of a slot's first process, or of a later incarnation."""
    return Engine(spec, Begin(fresh=not incarnation, **begin), incarnation)


def turn(engine: Engine, *, duration_s: float = 0.0, **orders: Any) -> Status:
    """Run one turn, which by default ends with its first good step.

    The returned status counts this turn alone.
    """
    before = engine.status()
    status = engine.turn(Orders(**orders), duration_s)
    return replace(
        status,
        counts=difference(status.counts, before.counts),
        wall_s=status.wall_s - before.wall_s,
        events=(*before.events, *status.events),
    )


def difference(counts: StepCounts, before: StepCounts) -> StepCounts:
    """Return the counters since `before`."""
    return StepCounts(
        **{
            each.name: getattr(counts, each.name) - getattr(before, each.name)
            for each in fields(StepCounts)
        }
    )


def turns(
    spec: WorkerSpec, orders: Sequence[Mapping[str, Any]], begin: Mapping[str, Any] | None = None
) -> list[Status]:
    """Run turns one after the other in a fresh engine, each with its orders."""
    engine = begun(spec, **(begin or {}))
    return [turn(engine, **each) for each in orders]


def with_ooms(spec: WorkerSpec, rate: float) -> WorkerSpec:
    """Make a share of the workload's steps run out of memory, as `run --chaos` does."""
    return replace(spec, oom_rate=rate, chaos_seed=7)


def own(workload: type) -> str:
    """Return the name of a test module's class, as a user writes it."""
    return f"{workload.__module__.rpartition('.')[2]}:{workload.__name__}"


def events(statuses: Status | Sequence[Status], *names: str) -> list[WorkerEvent]:
    """Return all events, or the events with these names."""
    every = [statuses] if isinstance(statuses, Status) else statuses
    return [
        event for status in every for event in status.events if not names or event.name in names
    ]


def failures(statuses: Sequence[Status]) -> int:
    """Return the number of parts that ran out of memory."""
    return sum(status.counts.steps_oom for status in statuses)


def names(statuses: Status | Sequence[Status]) -> list[str]:
    return [event.name for event in events(statuses)]


def all_is_well(statuses: Sequence[Status]) -> bool:
    """Return whether nothing failed and nothing waited."""
    return all(
        (status.verdict, status.state) == (Verdict.OK, WorkerState.RUNNING)
        and (
            status.counts.steps_oom,
            status.counts.oom_count,
            status.counts.emergency_count,
            status.counts.steps_error,
        )
        == (0, 0, 0, 0)
        for status in statuses
    )
