"""What a supervisor must know of its run's past, and how a run whose head has ended gives it: from
its stored record.

The processes that were at work when the head ended have ended with it. Does not read the store
(`record/archive.py`) and starts nothing.
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
from orchestrator.run.environment import STARTING, Environment, Mode, ground_of
from workers.messages import WorkerState


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """The state of a run that another head began."""

    elapsed_s: float = 0.0
    updated_at_unix_s: float | None = None
    """When its head was last at work."""
    slots: Mapping[str, Slot] = field(default_factory=dict)
    """As their last statuses left them, without a process."""
    team_generation: int = 0
    """The last in which a member of a team was named to lead it."""


def environment_of(
    stored: StoredRun, more_s: float | None = None, *, stays: bool = False
) -> Environment:
    """Return the environment of the resumed run: its own configuration, on the same target.

    It works for the rest of its time, or for `more_s` from now on, also if its time is up. A queue
    that `stays` waits for more work, also if it is over.

    Raises:
        UsageError: It cannot be resumed: it is under way, or over, or of a mode of another version.
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
    look = f"look at it: {command_for(stored.folder, 'report')}"
    if stored.is_done and not stays:
        raise UsageError(f"run {facts.run_id} has finished all that there was to do; {look}")
    if more_s is None and stored.remaining_s < LEAST_TO_RESUME_S:
        raise UsageError(
            f"run {facts.run_id} has worked all of its {facts.duration_s:.0f} s (outcome: "
            f"{stored.outcome}); {look}; or let it go on for longer: --resume {facts.run_id} "
            "--duration 2h"
        )
    if facts.mode not in set(Mode):
        raise UsageError(f"this version knows no run mode {facts.mode!r}; valid: {', '.join(Mode)}")
    config, target = ground_of(facts)
    if more_s is not None:
        duration = f"{stored.elapsed_s + more_s}s"
        config = config.model_copy(
            update={"run": config.run.model_copy(update={"duration": duration})}
        )
    lines = () if facts.mode == Mode.CLUSTER else (STARTING,)
    return Environment(mode=Mode(facts.mode), config=config, target=target, lines=lines)


def past_of(stored: StoredRun) -> Past:
    """Return the run's state so far. Quarantined slots start again: that is part of resuming."""
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
        # The earlier processes are gone, and their statuses must not be mistaken for those of new
        # ones.
        incarnation=record.incarnation + 1,
        resume=record.resume,
        counts_before=row.counts,
        restarts=row.restarts,
    )
