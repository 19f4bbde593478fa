"""Rebuilds the state and the environment of a run whose head has ended from its stored record.

The processes of the run have ended with that head. Does not read the store (`record/archive.py`)
and starts nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orchestrator.core.slot import HeadState, Phase, Slot
from orchestrator.core.training import Training
from orchestrator.errors import UsageError
from orchestrator.record.archive import LEAST_TO_RESUME_S, StoredRun
from orchestrator.record.folders import command_for
from orchestrator.record.store import SlotRecord
from orchestrator.run.environment import STARTING, Environment, Mode, config_and_target_of
from workers.messages import WorkerState


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """The state of a run that an earlier head began."""

    elapsed_s: float = 0.0
    updated_at_unix_s: float | None = None
    """When the earlier head last worked, Unix seconds; `None`: there was none."""
    slots: Mapping[str, Slot] = field(default_factory=dict)
    """Slots as their last statuses left them, without processes."""
    team_generation: int = 0
    """The last generation for which a leader was chosen."""


def environment_of(
    stored: StoredRun, more_s: float | None = None, *, stays: bool = False
) -> Environment:
    """Return the environment of the resumed run: its own configuration, on the same target.

    It works for the rest of its time; with `more_s` for that many seconds, even if its time is up.
    A queue that `stays` waits for more work, even if it is over.

    Raises:
        UsageError: The run is under way, ended before it began, is over, or has an unknown mode.
        ConfigError: This version does not accept the run's configuration.
        ArchiveError: The store does not say how the run was made.
    """
    facts = stored.facts
    if stored.outcome == "running":
        raise UsageError(
            f"run {facts.run_id} is under way (process {facts.head_pid} on {facts.host})"
        )
    if stored.was_refused:
        raise UsageError(
            f"run {facts.run_id} ended before it began ({stored.error}); begin another: python -m "
            "orchestrator run"
        )
    look_at_it = f"look at it: {command_for(stored.folder, 'report')}"
    if stored.is_done and not stays:
        raise UsageError(f"run {facts.run_id} has finished all that there was to do; {look_at_it}")
    if more_s is None and stored.remaining_s < LEAST_TO_RESUME_S:
        raise UsageError(
            f"run {facts.run_id} has worked all of its {facts.duration_s:.0f} s (outcome: "
            f"{stored.outcome}); {look_at_it}; or let it go on for longer: --resume {facts.run_id} "
            "--duration 2h"
        )
    if facts.mode not in set(Mode):
        raise UsageError(f"this version knows no run mode {facts.mode!r}; valid: {', '.join(Mode)}")
    config, target = config_and_target_of(facts)
    if more_s is not None:
        duration = f"{stored.elapsed_s + more_s}s"
        config = config.model_copy(
            update={"run": config.run.model_copy(update={"duration": duration})}
        )
    lines = () if facts.mode == Mode.CLUSTER else (STARTING,)
    return Environment(mode=Mode(facts.mode), config=config, target=target, lines=lines)


def past_of(stored: StoredRun) -> Past:
    """Return the run's state so far. Resuming starts quarantined slots again."""
    return Past(
        elapsed_s=stored.elapsed_s,
        updated_at_unix_s=stored.updated_at_unix_s,
        team_generation=stored.team_generation,
        slots={record.slot: _slot(record) for record in stored.slots},
    )


def _slot(record: SlotRecord) -> Slot:
    row, orders = record.row, record.orders
    done = row.state is WorkerState.DONE
    finished: dict[str, Any] = (
        {"phase": Phase.DONE, "state": WorkerState.DONE, "reason": row.reason} if done else {}
    )
    if orders.hold is not None and not done:
        finished = {"state": HeadState.HELD, "reason": "it gets no work until `unpause`"}
    return Slot(
        slot=row.slot,
        orders=orders,
        **finished,
        training=Training(last=row.progress),
        # A status of an earlier process, now gone, must not be taken for one of a new process.
        incarnation=record.incarnation + 1,
        resume=record.resume,
        counts_before=row.counts,
        restarts=row.restarts,
    )
