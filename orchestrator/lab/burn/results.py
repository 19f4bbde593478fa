"""What a burn-in found, as values and as one JSON object. Does not find anything out and does not
draw.

The keys of the object are a promise to scripts: names and order stay, `schema` counts up if they
must not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from orchestrator.lab.burn.phases import Phase, Take
from orchestrator.lab.burn.verdict import LIMITS, Check, Judged, Verdict, overall, verdict_of
from orchestrator.record.model import finite
from orchestrator.record.summary import SCHEMA

EXIT_INTERRUPTED = 130

#: Of a worker, in their order; the verdicts on each check follow.
_WORKER_KEYS = (
    "slot", "node", "dtype_asked", "dtype", "gpu_name", "device", "verdict", "cap_bytes", "vram_held_pct", "steps_ok",
    "steps_oom", "steps_error", "emergency_count", "emergency_pct", "restarts", "verify_checks", "verify_errors",
    "temperature_max_c", "hot_longest_s", "hot_pct", "slowed_pct", "throttle_max_pct", "tflops_mean", "tflops_cv_pct",
    "tflops_drop_pct",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """One run of a phase, judged."""

    take: Take
    workers: tuple[Judged, ...]
    folder: Path | None
    """Of the run; `None` if it never began."""
    elapsed_s: float
    interrupted: bool = False
    error: str | None = None
    """Why it ended early, in words."""

    @property
    def whole(self) -> bool:
        """Whether it ran to its end."""
        return not self.interrupted and self.error is None


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseResult:
    """A phase: its runs, one for each number type in the first."""

    phase: Phase
    taken: tuple[Taken, ...]

    @property
    def workers(self) -> tuple[Judged, ...]:
        """Every worker of every run."""
        return tuple(worker for taken in self.taken for worker in taken.workers)

    @property
    def verdict(self) -> Verdict:
        """On the phase as a whole."""
        if any(taken.error is not None for taken in self.taken):
            return Verdict.FAIL
        return verdict_of(self.phase, self.workers, whole=self.whole)

    @property
    def whole(self) -> bool:
        """Whether every run of it ran to its end."""
        return all(taken.whole for taken in self.taken)


@dataclass(frozen=True, slots=True, kw_only=True)
class BurnResult:
    """The whole burn-in, as far as it came."""

    started_at: str
    """ISO 8601 in UTC."""
    mode: str
    phases: tuple[PhaseResult, ...]
    interrupted: bool = False
    """The user ended it before its time."""

    @property
    def verdict(self) -> Verdict:
        """On everything."""
        return overall(phase.verdict for phase in self.phases)

    @property
    def not_judged(self) -> tuple[Check, ...]:
        """What could not be judged of some worker in some phase."""
        workers = [worker for phase in self.phases for worker in phase.workers]
        return tuple(
            check
            for check in Check
            if any(worker.findings[check].verdict is Verdict.NOT_JUDGED for worker in workers)
        )

    @property
    def outcome(self) -> str:
        """One word: pass, fail, not_judged or interrupted."""
        return "interrupted" if self.interrupted else self.verdict.value

    @property
    def exit_code(self) -> int:
        """0 for a pass and for nothing else."""
        if self.interrupted:
            return EXIT_INTERRUPTED
        return 0 if self.verdict is Verdict.PASS else 1


def by_node(workers: Iterable[Judged]) -> Iterator[tuple[str, list[Judged]]]:
    """Yield the workers of each node, the nodes in the order in which they are first met."""
    nodes: dict[str, list[Judged]] = {}
    for worker in workers:
        nodes.setdefault(worker.row.node, []).append(worker)
    yield from nodes.items()


def by_phase(taken: Sequence[Taken]) -> tuple[PhaseResult, ...]:
    """Return runs in their order, put together by phase."""
    groups = groupby(taken, key=lambda one: one.take.phase)
    return tuple(PhaseResult(phase=phase, taken=tuple(group)) for phase, group in groups)


def result_dict(result: BurnResult) -> dict[str, Any]:
    """Return the burn-in as JSON knows it; `null` is unknown."""
    return {
        "schema": SCHEMA,
        "outcome": result.outcome,
        "exit_code": result.exit_code,
        "started_at": result.started_at,
        "mode": result.mode,
        "not_judged": [check.value for check in result.not_judged],
        **asdict(LIMITS),
        "phases": [_phase_dict(phase) for phase in result.phases],
    }


def _phase_dict(phase: PhaseResult) -> dict[str, Any]:
    return {
        "phase": phase.phase.value,
        "title": phase.phase.title,
        "verdict": phase.verdict.value,
        "runs": [
            {
                "run_id": None if taken.folder is None else taken.folder.name,
                "folder": None if taken.folder is None else str(taken.folder),
                "dtype": taken.take.dtype,
                "duration_s": taken.take.config.run.duration_s,
                "elapsed_s": finite(taken.elapsed_s),
                "interrupted": taken.interrupted,
                "error": taken.error,
            }
            for taken in phase.taken
        ],
        "nodes": [
            {"node": name, "verdict": verdict_of(phase.phase, workers, whole=phase.whole).value}
            for name, workers in by_node(phase.workers)
        ],
        "workers": [
            _worker_dict(phase.phase, taken, worker)
            for taken in phase.taken
            for worker in taken.workers
        ],
    }


def _worker_dict(phase: Phase, taken: Taken, worker: Judged) -> dict[str, Any]:
    row = worker.row
    known = {
        **{
            name: getattr(row, name)
            for name in ("slot", "node", "dtype", "gpu_name", "device", "cap_bytes", "restarts")
        },
        **asdict(row.counts),
        **{name: finite(value) for name, value in asdict(worker.figures).items()},
        "dtype_asked": taken.take.dtype,
        "verdict": verdict_of(phase, [worker], whole=taken.whole).value,
    }
    findings = worker.findings.items()
    return {
        **{key: known[key] for key in _WORKER_KEYS},
        **{f"{check}_verdict": finding.verdict.value for check, finding in findings},
        "reasons": [
            f"{check}: {finding.text}"
            for check, finding in findings
            if finding.verdict is not Verdict.PASS
        ],
    }
