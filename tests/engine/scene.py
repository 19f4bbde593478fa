"""What the scenarios of the engine share: slices in a row, the names of workloads and of events."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from workers.engine.engine import Engine
from workers.messages import Directive, Report, Verdict, WorkerEvent, WorkerState
from workers.settings import WorkerSpec


def slice_of(engine: Engine, sequence: int = 0, **directive: Any) -> Report:
    """Run one slice, which ends with its first good step unless it is told otherwise."""
    fields: dict[str, Any] = {
        "incarnation": 0,
        "sequence": sequence,
        "duration_s": 0.0,
        "resume": None,
        **directive,
    }
    return engine.run_slice(Directive(**fields))


def slices(spec: WorkerSpec, directives: Sequence[Mapping[str, Any]]) -> list[Report]:
    """Run slices one after the other in a fresh engine.

    Each directive names what is different in it.
    """
    engine = Engine(spec)
    return [
        slice_of(engine, sequence, **directive) for sequence, directive in enumerate(directives)
    ]


def with_ooms(spec: WorkerSpec, rate: float) -> WorkerSpec:
    """Let a share of the workload's steps run out of memory, as `run --chaos` does."""
    settings = {**spec.workload.settings, "chaos": json.dumps({"seed": 7, "oom_rate": rate})}
    name = f"workers.workloads.chaos:{spec.workload.name}"
    return replace(spec, workload=replace(spec.workload, name=name, settings=settings))


def own(workload: type) -> str:
    """Name a class of a test's module the way a user does."""
    return f"{workload.__module__.rpartition('.')[2]}:{workload.__name__}"


def events(reports: Report | Sequence[Report], *names: str) -> list[WorkerEvent]:
    """Return the events of these names, or all."""
    every = [reports] if isinstance(reports, Report) else reports
    return [
        event for report in every for event in report.events if not names or event.name in names
    ]


def names(reports: Report | Sequence[Report]) -> list[str]:
    return [event.name for event in events(reports)]


def all_is_well(reports: Sequence[Report]) -> bool:
    """Whether nothing failed and nothing waited."""
    return all(
        (report.verdict, report.state) == (Verdict.OK, WorkerState.RUNNING)
        and (
            report.counts.steps_oom,
            report.counts.oom_count,
            report.counts.emergency_count,
            report.counts.steps_error,
        )
        == (0, 0, 0, 0)
        for report in reports
    )
