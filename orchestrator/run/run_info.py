"""The inputs of a supervisor: the identity of the run, its past, and the rules of its slots.

Plain values. Reads no store (`resume.py` does) and no file (`config.load` does).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from orchestrator.config.schema import Config
from orchestrator.core.slot import Rules, Slot
from workers.units import MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """The state of a run that another head began."""

    elapsed_s: float = 0.0
    slots: Mapping[str, Slot] = field(default_factory=dict)
    """As their last reports left them, without a process."""
    incomplete: bool = False
    """Whether its records are incomplete already."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """What identifies a run."""

    run_id: str
    started_at_unix_s: float
    """When its first head began."""
    duration_s: float
    """Planned length, all heads together."""
    past: Past = field(default_factory=Past)

    @property
    def remaining_s(self) -> float:
        """Seconds that are still to be worked when this head begins."""
        return max(0.0, self.duration_s - self.past.elapsed_s)


def rules_of(config: Config, past: Past) -> Rules:
    """Return the numbers of `run:` that concern a slot."""
    run = config.run
    return Rules(
        slice_s=run.slice_s,
        hang_timeout_s=run.hang_timeout_s,
        stale_after_s=run.stale_after_s,
        start_timeout_s=run.start_timeout_s,
        restart_backoff_s=run.restart_backoff_s,
        restart_backoff_max_s=run.restart_backoff_max_s,
        max_deaths=run.max_deaths,
        death_window_s=run.death_window_s,
        max_workload_errors=run.max_workload_errors,
        leak_flag_bytes=None if run.leak_flag_mib is None else int(run.leak_flag_mib * MIB),
        leak_limit_bytes=None if run.leak_limit_mib is None else int(run.leak_limit_mib * MIB),
        seed=config.workload.seed,
        has_counted=past.elapsed_s > 0,
    )
