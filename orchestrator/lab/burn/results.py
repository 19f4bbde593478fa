"""What a burn-in found: as values, as one JSON object, and as tables for people.

The keys of the object are a promise to scripts: names and order stay, `schema` counts up if they
must not. A verdict is a word and a colour; no information is in the colour alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from textwrap import wrap
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from orchestrator.config.duration import format_duration
from orchestrator.config.schema import Config
from orchestrator.lab.burn.verdict import (
    LIMITS,
    BurnCheck,
    BurnPhase,
    BurnVerdict,
    JudgedWorker,
    error_count,
    overall,
    verdict_of,
)
from orchestrator.record.model import finite
from orchestrator.record.summary import SCHEMA
from orchestrator.view.cells import MISSING, clean, decimals_for, number, share_pct, shorten, whole
from orchestrator.view.phrases import counted
from workers.messages import StepCounts

EXIT_INTERRUPTED = 130

#: Of a worker, in their order; the verdicts on each check follow.
_WORKER_KEYS = (
    "slot", "node", "dtype_asked", "dtype", "gpu_name", "device", "verdict", "cap_bytes",
    "vram_held_pct", "steps_ok",
    "steps_oom", "steps_error", "emergency_count", "emergency_pct", "restarts", "verify_checks",
    "verify_errors",
    "temperature_max_c", "hot_longest_s", "hot_pct", "slowed_pct", "throttle_max_pct",
    "tflops_mean", "tflops_cv_pct",
    "tflops_drop_pct",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """One run of a phase."""

    phase: BurnPhase
    config: Config
    dtype: str | None = None
    """The number type that is tried; `None` where each node keeps its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedRun:
    """One run of a phase, judged."""

    take: PlannedRun
    workers: tuple[JudgedWorker, ...]
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

    phase: BurnPhase
    taken: tuple[JudgedRun, ...]

    @property
    def workers(self) -> tuple[JudgedWorker, ...]:
        """Every worker of every run."""
        return tuple(worker for taken in self.taken for worker in taken.workers)

    @property
    def verdict(self) -> BurnVerdict:
        """On the phase as a whole."""
        if any(taken.error is not None for taken in self.taken):
            return BurnVerdict.FAIL
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
    def verdict(self) -> BurnVerdict:
        """On everything."""
        return overall(phase.verdict for phase in self.phases)

    @property
    def not_judged(self) -> tuple[BurnCheck, ...]:
        """What could not be judged of some worker in some phase."""
        workers = [worker for phase in self.phases for worker in phase.workers]
        return tuple(
            check
            for check in BurnCheck
            if any(worker.findings[check].verdict is BurnVerdict.NOT_JUDGED for worker in workers)
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
        return 0 if self.verdict is BurnVerdict.PASS else 1


def by_node(workers: Iterable[JudgedWorker]) -> Iterator[tuple[str, list[JudgedWorker]]]:
    """Yield the workers of each node, the nodes in the order in which they are first met."""
    nodes: dict[str, list[JudgedWorker]] = {}
    for worker in workers:
        nodes.setdefault(worker.row.node, []).append(worker)
    yield from nodes.items()


def by_phase(taken: Sequence[JudgedRun]) -> tuple[PhaseResult, ...]:
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


def _worker_dict(phase: BurnPhase, taken: JudgedRun, worker: JudgedWorker) -> dict[str, Any]:
    row = worker.row
    values = {
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
        **{key: values[key] for key in _WORKER_KEYS},
        **{f"{check}_verdict": finding.verdict.value for check, finding in findings},
        "reasons": [
            f"{check}: {finding.text}"
            for check, finding in findings
            if finding.verdict is not BurnVerdict.PASS
        ],
    }


_STYLES = {
    BurnVerdict.PASS: "green",
    BurnVerdict.FAIL: "bold red",
    BurnVerdict.NOT_JUDGED: "yellow",
}

#: Longest line of text, so that it is easy to read.
_WIDEST = 110

_NODE_CELLS = 20

_TITLES = (
    "node",
    "verdict",
    "VRAM %",
    "errors",
    "wrong",
    "max C",
    "hot %",
    "slow %",
    "TFLOP/s",
    "cv %",
)


def result_lines(result: BurnResult, width: int) -> Iterator[RenderableType]:
    """Yield the result, piece by piece, for a terminal with lines of `width` cells."""
    room = min(width, _WIDEST)
    for phase in result.phases:
        length_s = sum(taken.elapsed_s for taken in phase.taken)
        yield Text()
        head = (
            f"Phase {phase.phase.value}, {phase.phase.title}, {clean(format_duration(length_s))}: "
        )
        yield Text(head, style="bold").append_text(_word(phase.verdict))
        if phase.workers:
            yield _table(phase)
        for line in _reasons(phase):
            for text in wrap(
                line, room, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
            ):
                yield Text(text)
    yield Text()
    for line in wrap(_closing(result), room, break_on_hyphens=False):
        yield Text(line, style="bold")


def _word(verdict: BurnVerdict) -> Text:
    text = MISSING if verdict is BurnVerdict.NOT_JUDGED else verdict.value.upper()
    return Text(text, style=_STYLES[verdict])


def _table(phase: PhaseResult) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for title in _TITLES:
        table.add_column(
            title, justify="left" if title in {"node", "verdict"} else "right", no_wrap=True
        )
    for taken in phase.taken:
        for _, workers in by_node(taken.workers):
            table.add_row(*_cells(phase, taken, workers))
    return table


def _cells(phase: PhaseResult, taken: JudgedRun, workers: Sequence[JudgedWorker]) -> Iterator[Text]:
    """Yield a node's cells: of its workers, always what the worst one shows."""
    figures = [worker.figures for worker in workers]
    counts = StepCounts.total(worker.row.counts for worker in workers)
    checks, wrong = counts.verify_checks, counts.verify_errors
    sums = [one.tflops_mean for one in figures if one.tflops_mean is not None]
    total = sum(sums) if sums else None
    held_pct = min(
        (one.vram_held_pct for one in figures if one.vram_held_pct is not None), default=None
    )
    dtype, used = taken.take.dtype, workers[0].row.dtype
    name = workers[0].row.node
    if dtype is not None:
        name += (
            f" {dtype}" if used in {dtype, None} else f" {dtype} ({used})"
        )  # a processor runs fp16 as bf16
    yield Text(shorten(clean(name), _NODE_CELLS))
    yield _word(verdict_of(phase.phase, workers, whole=taken.whole))
    cells = (
        (BurnCheck.MEMORY, share_pct(None if held_pct is None else held_pct / 100)),
        (
            BurnCheck.ERRORS,
            whole(sum(error_count(worker.row, worker.figures) for worker in workers)),
        ),
        (BurnCheck.RESULTS, f"{whole(wrong)}/{whole(checks)}" if checks or wrong else None),
        (BurnCheck.TEMPERATURE, number(_most(one.temperature_max_c for one in figures), 0)),
        (BurnCheck.TEMPERATURE, number(_most(one.hot_pct for one in figures), 0)),
        (BurnCheck.SLOWDOWN, number(_most(one.slowed_pct for one in figures), 0)),
        (BurnCheck.THROUGHPUT, number(total, decimals_for((total,)))),
        (BurnCheck.THROUGHPUT, number(_most(one.tflops_cv_pct for one in figures), 1)),
    )
    for check, text in cells:
        failed = any(worker.findings[check].verdict is BurnVerdict.FAIL for worker in workers)
        yield Text(text or MISSING, style=_STYLES[BurnVerdict.FAIL] if failed else "")


def _reasons(phase: PhaseResult) -> Iterator[str]:
    """Yield why, the failures first; what is true of many workers is said once."""
    for taken in phase.taken:
        if taken.error is not None:
            yield clean(f"FAIL {phase.phase.title}: {taken.error}")
    judged = [
        (taken.take.dtype, worker, check, finding)
        for taken in phase.taken
        for worker in taken.workers
        for check, finding in worker.findings.items()
    ]
    failures: dict[tuple[BurnCheck, str, str | None], list[str]] = {}  # each node has its own
    for dtype, worker, check, finding in judged:
        if finding.verdict is BurnVerdict.FAIL:
            key = (check, worker.row.node, dtype)
            failures.setdefault(key, []).append(f"{worker.row.slot}: {finding.text}")
    for (check, _, dtype), lines in failures.items():
        more = f" (and {counted(len(lines) - 1, 'more worker')})" if len(lines) > 1 else ""
        yield clean(f"FAIL {check}{f' in {dtype}' if dtype else ''}, {lines[0]}{more}")
    # What could not be judged has the same reason everywhere.
    unknown = [
        (check, finding.text)
        for _, _, check, finding in judged
        if finding.verdict is BurnVerdict.NOT_JUDGED
    ]
    for check, text in dict.fromkeys(unknown):
        yield clean(f"{MISSING} {check} not judged: {text}")


def _closing(result: BurnResult) -> str:
    if result.interrupted:
        return "Interrupted: the results above are incomplete, and the rest was not judged."

    def phases(verdict: BurnVerdict) -> list[str]:
        return [f"phase {phase.phase.value}" for phase in result.phases if phase.verdict is verdict]

    if result.verdict is BurnVerdict.FAIL:
        return "FAIL: " + ", ".join(phases(BurnVerdict.FAIL))
    if result.verdict is BurnVerdict.NOT_JUDGED:
        unknown = " and ".join(phases(BurnVerdict.NOT_JUDGED))
        return f"NOT JUDGED: nothing failed, but {unknown} could not be judged, so this is no pass."
    unknown = ", ".join(result.not_judged)
    return (
        f"PASS: nothing failed; not judged everywhere: {unknown}."
        if unknown
        else "PASS: all of it."
    )


def _most(values: Iterator[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
