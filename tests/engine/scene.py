"""What the scenarios of the engine share: turns in a row, the names of workloads and of events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from workers.engine.engine import Engine
from workers.messages import Begin, Orders, Status, StepCounts, Verdict, WorkerEvent, WorkerState
from workers.settings import WorkerSpec


def begun(spec: WorkerSpec, incarnation: int = 0, **begin: Any) -> Engine:
    """Return the engine of a slot's first process, or of another one."""
    return Engine(spec, Begin(fresh=not incarnation, **begin), incarnation)


def turn(engine: Engine, *, duration_s: float = 0.0, **orders: Any) -> Status:
    """Drive one turn, which ends with its first good step unless it is told otherwise.

    Its counters are those of this turn alone.
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
    """Return what was counted since."""
    return StepCounts(
        **{
            each.name: getattr(counts, each.name) - getattr(before, each.name)
            for each in fields(StepCounts)
        }
    )


def turns(
    spec: WorkerSpec, orders: Sequence[Mapping[str, Any]], begin: Mapping[str, Any] | None = None
) -> list[Status]:
    """Drive turns one after the other in a fresh engine; each names what is wanted in it."""
    engine = begun(spec, **(begin or {}))
    return [turn(engine, **each) for each in orders]


def with_ooms(spec: WorkerSpec, rate: float) -> WorkerSpec:
    """Let a share of the workload's steps run out of memory, as `run --chaos` does."""
    return replace(spec, oom_rate=rate, chaos_seed=7)


def own(workload: type) -> str:
    """Name a class of a test's module the way a user does."""
    return f"{workload.__module__.rpartition('.')[2]}:{workload.__name__}"


def events(statuses: Status | Sequence[Status], *names: str) -> list[WorkerEvent]:
    """Return the events of these names, or all."""
    every = [statuses] if isinstance(statuses, Status) else statuses
    return [
        event for status in every for event in status.events if not names or event.name in names
    ]


def failures(statuses: Sequence[Status]) -> int:
    """Return how many parts ran out of memory."""
    return sum(status.counts.steps_oom for status in statuses)


def names(statuses: Status | Sequence[Status]) -> list[str]:
    return [event.name for event in events(statuses)]


def all_is_well(statuses: Sequence[Status]) -> bool:
    """Whether nothing failed and nothing waited."""
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
