"""What a burn-in found, as values and as one JSON object. Does not find anything out and does not draw.

The keys of the object are a promise to scripts: names and order stay, `schema` counts up if they must not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from orchestrator.burn.phases import Phase, Take
from orchestrator.burn.verdict import GUIDES, Check, Finding, Judged, Verdict, overall, verdict_of
from orchestrator.watch.model import finite
from orchestrator.watch.summary import SCHEMA

_EXIT_INTERRUPTED = 130


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

    def nodes(self) -> Iterator[tuple[str, tuple[Judged, ...]]]:
        """Yield each node with its workers of all runs."""
        names = dict.fromkeys(worker.row.node for worker in self.workers)
        for name in names:
            yield name, tuple(worker for worker in self.workers if worker.row.node == name)


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
        findings = [finding for phase in self.phases for worker in phase.workers for finding in worker.findings]
        unknown = {finding.check for finding in findings if finding.verdict is Verdict.NOT_JUDGED}
        return tuple(check for check in Check if check in unknown)

    @property
    def outcome(self) -> str:
        """One word: pass, fail, not_judged or interrupted."""
        return "interrupted" if self.interrupted else self.verdict.value

    @property
    def exit_code(self) -> int:
        """0 for a pass and for nothing else."""
        if self.interrupted:
            return _EXIT_INTERRUPTED
        return 0 if self.verdict is Verdict.PASS else 1


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
        "vram_held_least_pct": 100 * GUIDES.vram_held_share,
        "temperature_limit_c": GUIDES.temperature_c,
        "sustained_s": GUIDES.sustained_s,
        "sustained_pct": 100 * GUIDES.sustained_share,
        "throughput_cv_most_pct": 100 * GUIDES.throughput_cv,
        "throughput_drop_most_pct": 100 * GUIDES.throughput_drop,
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
            for name, workers in phase.nodes()
        ],
        "workers": [_worker_dict(phase.phase, taken, worker) for taken in phase.taken for worker in taken.workers],
    }


def _worker_dict(phase: Phase, taken: Taken, worker: Judged) -> dict[str, Any]:
    row, figures = worker.row, worker.figures
    return {
        "slot": row.slot,
        "node": row.node,
        "dtype_asked": taken.take.dtype,
        "dtype": row.dtype,
        "gpu_name": row.gpu_name,
        "device": row.device,
        "verdict": verdict_of(phase, [worker], whole=taken.whole).value,
        "cap_bytes": row.cap_bytes,
        "vram_held_pct": _pct(figures.vram_held_share),
        "steps_ok": row.counts.steps_ok,
        "steps_oom": row.counts.steps_oom,
        "steps_error": row.counts.steps_error,
        "emergency_count": row.counts.emergency_count,
        "emergency_pct": _pct(figures.emergency_share),
        "restarts": row.restarts,
        "verify_checks": row.counts.verify_checks,
        "verify_errors": row.counts.verify_errors,
        "temperature_max_c": finite(figures.temperature_max_c),
        "hot_longest_s": finite(figures.hot_longest_s),
        "hot_pct": _pct(figures.hot_share),
        "slowed_pct": _pct(figures.slowed_share),
        "throttle_max_pct": finite(figures.throttle_max_pct),
        "tflops_mean": finite(figures.tflops_mean),
        "tflops_cv_pct": _pct(figures.tflops_cv),
        "tflops_drop_pct": _pct(figures.tflops_drop),
        **{f"{finding.check}_verdict": finding.verdict.value for finding in worker.findings},
        "reasons": [_reason(finding) for finding in worker.findings if finding.verdict is not Verdict.PASS],
    }


def _reason(finding: Finding) -> str:
    return f"{finding.check}: {finding.text}"


def _pct(share: float | None) -> float | None:
    return None if share is None else finite(100 * share)
