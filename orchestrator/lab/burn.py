"""`burn`: PASS or FAIL on every worker, from ordinary runs in the three phases of the guides.

The verdict follows from the summary and the samples in each run's folder. What has no sensor is not
judged, and that is never a pass. Does not measure anything itself, and sets nothing on a card.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final, TypeAlias

from orchestrator.config.duration import format_duration
from orchestrator.config.schema import Config, WorkloadConfig
from orchestrator.core.slot import HeadState
from orchestrator.errors import ArchiveError, OrchestratorError, one_line
from orchestrator.record import history
from orchestrator.record.events import read_events
from orchestrator.record.folders import summary_of
from orchestrator.record.model import Snapshot
from orchestrator.record.summary import SCHEMA, summary_text, write_summary
from orchestrator.run import runner
from orchestrator.run.environment import Environment
from orchestrator.run.terminal import Interrupts
from orchestrator.view.cells import MISSING, clean
from workers.messages import STARVED

#: Long enough for the air in a closed case to become as warm as it will.
HEAT_S: Final = 3600.0

#: Of each run of the first phase: a worker climbs to its cap and checks some hundred results.
_PRECISION_S: Final = 30.0
_CHECKED_SHARE: Final = 0.25

#: Edge of the products where the configuration's sizes are meant for another workload.
_SIZE: Final = 8192

#: A processor runs tf32 as fp32, and fp16 as the fastest type of 16 bits that it has.
_TYPES: Final = {"cuda": ("fp32", "tf32", "fp16", "bf16"), "cpu": ("fp32", "fp16")}

#: Where a pass ends, by the guides (docs/guides.md); keys of the JSON result. Heat is sustained
#: that lasts so many seconds on end, or such a share of the time.
LIMITS: Final = {
    "vram_held_least_pct": 90.0,
    "temperature_limit_c": 80.0,
    "sustained_s": 30.0,
    "sustained_pct": 10.0,
}
#: Of one minute: a card may change its clocks once in a while.
_THROTTLE_MOST_PCT: Final = 5.0

#: A worker climbs to its cap first: this share of a run is not judged for memory.
_WARM_UP_SHARE: Final = 0.2

_SAMPLES_MOST: Final = 600
_EXIT_INTERRUPTED: Final = 130
_FALLEN: Final = frozenset({*HeadState, *STARVED})

Finding: TypeAlias = tuple[bool | None, str]
"""Whether something is good, or `None` where it could not be judged; and why."""

_WORDS: Final = {True: "pass", False: "fail", None: "not_judged"}


@dataclass(frozen=True, slots=True)
class Phase:
    """One of the three."""

    number: int
    title: str
    purpose: tuple[str, ...]
    """Checks without which it has no verdict."""


PHASES: Final = (
    Phase(1, "caps and precision", ("memory", "errors", "results")),
    Phase(2, "heat", ("errors", "temperature")),
    Phase(3, "full load", ("memory", "errors")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """The course of a worker while the run counted, one value each `every_s`; `None`: unknown."""

    every_s: float
    reserved_bytes: Sequence[float | None] = ()
    temperature_c: Sequence[float | None] = ()
    throttle_pct: Sequence[float | None] = ()
    tflops: Sequence[float | None] = ()
    alarms: tuple[str, ...] = ()
    """Names of the alarms that its card raised."""
    was_starved: bool = False
    """Whether there was no memory for any step at times."""
    unchecked: str | None = None
    """Why checks of its results ended early; `None` if they did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedWorker:
    """One worker of a run, judged."""

    row: Mapping[str, Any]
    """As summary.json has it."""
    figures: Mapping[str, float | None]
    """What was measured, by keys of the JSON result."""
    findings: Mapping[str, Finding]
    """By check."""


def judge(row: Mapping[str, Any], samples: Samples) -> JudgedWorker:
    """Return the verdict on each check of a worker; `row` is its row of summary.json."""
    memory = _known(samples.reserved_bytes)
    settled = memory[int(_WARM_UP_SHARE * len(memory)) :]
    cap_bytes = row["cap_bytes"]
    is_over = cap_bytes is not None and max(memory, default=0) > cap_bytes
    # Temperatures that are hot for a card are normal for a processor.
    warmth = _known(samples.temperature_c) if row["temperature_of"] == "card" else []
    hot = [each >= LIMITS["temperature_limit_c"] for each in warmth]
    longest = max((len([*group]) for is_hot, group in groupby(hot) if is_hot), default=0)
    figures = {
        "vram_held_pct": 100 * median(settled) / cap_bytes if settled and cap_bytes else None,
        "temperature_max_c": max(warmth, default=None),
        "hot_longest_s": longest * samples.every_s if hot else None,
        "hot_pct": 100 * fmean(hot) if hot else None,
        "throttle_max_pct": max(_known(samples.throttle_pct), default=None),
        "tflops_mean": fmean(_known(samples.tflops)) if any(samples.tflops) else None,
    }
    findings = {
        "memory": _memory(figures["vram_held_pct"], is_over=is_over),
        "errors": _errors(row, samples),
        "results": _results(row, samples),
        "temperature": _temperature(figures),
        "slowdown": _slowdown(figures["throttle_max_pct"], samples.alarms),
    }
    return JudgedWorker(row=row, figures=figures, findings=findings)


def verdict_of(
    phase: Phase, workers: Collection[JudgedWorker], *, is_whole: bool = True
) -> bool | None:
    """Return the verdict on workers in a phase: none failed, its purpose judged, and ended."""
    if any(is_good is False for one in workers for is_good, _ in one.findings.values()):
        return False
    needed = {one.findings[check][0] for one in workers for check in phase.purpose}
    return True if is_whole and needed == {True} else None


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _memory(held_pct: float | None, *, is_over: bool) -> Finding:
    least_pct = LIMITS["vram_held_least_pct"]
    if held_pct is None or is_over:
        return (False, "held more than its cap") if is_over else (None, "it never told its memory")
    return held_pct > least_pct, f"held {held_pct:.1f} % of its cap, more than {least_pct:g} is due"


def _errors(row: Mapping[str, Any], samples: Samples) -> Finding:
    # An out-of-memory error that was survived does not count: finding the largest size costs some.
    faults = {
        f"ended {row['state']}: {row['reason']}": row["state"] in _FALLEN,
        "did no step": row["steps_ok"] == 0,
        f"errors of the workload: {row['steps_error']}": row["steps_error"],
        "had no memory for any step at times": samples.was_starved,
        f"restarts: {row['restarts']}": row["restarts"],
    }
    found = [text for text, is_so in faults.items() if is_so]
    return not found, ", ".join(found) or "none"


def _results(row: Mapping[str, Any], samples: Samples) -> Finding:
    checks, wrong = row["verify_checks"], row["verify_errors"]
    if wrong:
        return False, f"{wrong} of {checks} checked results were wrong"
    if samples.unchecked is not None:
        return None, f"{checks} results checked, then no more: {samples.unchecked}"
    return (True, f"{checks} results checked") if checks else (None, "no result was checked")


def _temperature(figures: Mapping[str, float | None]) -> Finding:
    most_c, hot_s, hot_pct = (
        figures[key] for key in ("temperature_max_c", "hot_longest_s", "hot_pct")
    )
    if most_c is None or hot_s is None or hot_pct is None:
        return None, "no sensor tells it"
    limit = f"{LIMITS['temperature_limit_c']:g} C or more"
    text = f"{most_c:.0f} C at most; {limit} for {hot_s:.0f} s on end, {hot_pct:.0f} % of the time"
    return hot_s < LIMITS["sustained_s"] and hot_pct <= LIMITS["sustained_pct"], text


def _slowdown(throttle_pct: float | None, alarms: Iterable[str]) -> Finding:
    found = [f"alarm: {name}" for name in alarms]
    if throttle_pct is not None and throttle_pct > _THROTTLE_MOST_PCT:
        found.append(f"the card slowed itself down for {throttle_pct:.0f} % of a minute")
    if found:
        return False, ", ".join(found)
    return (None, "no sensor tells it") if throttle_pct is None else (True, "none")


def judged_workers(folder: Path, length_s: float) -> list[JudgedWorker]:
    """Return the verdict on every worker of a run that is over.

    `length_s` is the planned length; `ArchiveError` if the folder cannot be read.
    """
    summary = summary_of(folder)
    if summary is None:
        raise ArchiveError(f"{folder} has no summary.json: nothing is known of this run")
    events = read_events(folder, ["counting", "alarm_raised", "checks_ended", "state"])
    began_s = next((each.at_unix_s for each in events if each.event == "counting"), None)
    count = max(1, min(_SAMPLES_MOST, round(length_s)))
    keys = ("reserved_bytes", "temperature_c", "throttle_pct", "tflops")
    courses: Mapping[str, Mapping[str, history.Buckets]] = {}
    if began_s is not None:
        courses = history.courses(folder, keys, began_s, began_s + length_s, count)

    def told(slot: str, key: str) -> list[str]:
        return [str(e.details[key]) for e in events if e.slot == slot and key in e.details]

    return [
        judge(
            row,
            Samples(
                every_s=length_s / count,
                **{key: course.mean for key, course in courses.get(row["slot"], {}).items()},
                alarms=tuple(dict.fromkeys(told(row["slot"], "alarm"))),
                was_starved=not STARVED.isdisjoint(told(row["slot"], "to_state")),
                unchecked=next(map(one_line, told(row["slot"], "text")), None),
            ),
        )
        for row in summary["workers"]
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class BurnRun:
    """One run of a phase, planned or judged."""

    phase: Phase
    config: Config
    dtype: str | None = None
    """The number type that is tried; `None` where each node keeps its own."""
    workers: Sequence[JudgedWorker] = ()
    folder: Path | None = None
    """`None` if it has not begun."""
    elapsed_s: float = 0.0
    interrupted: bool = False
    error: str | None = None
    """Why it ended early, or why nothing is known of it."""

    @property
    def is_whole(self) -> bool:
        """Whether it ran to its end."""
        return not self.interrupted and self.error is None


def planned_runs(
    config: Config, device: str, heat_s: float, wanted: Collection[int]
) -> tuple[BurnRun, ...]:
    """Return the runs of the phases with the wanted numbers.

    `device` is `cuda` or `cpu`. `heat_s` is the length of the second phase; the others are never
    longer.
    """
    caps, heat, full = PHASES
    workload: dict[str, Any] = {"name": "matmul"}
    nodes = config.model_dump()["nodes"]
    if config.workload.name != "matmul":  # the sizes of another workload mean something else
        workload |= {"size": None, "batch": WorkloadConfig().batch}
        nodes = {name: {**node, "size": _SIZE} for name, node in nodes.items()}
    share = max(config.verify.share, _CHECKED_SHARE)
    precise_s, full_s = min(heat_s, _PRECISION_S), min(heat_s, config.run.duration_s)
    runs = [
        BurnRun(
            phase=caps,
            dtype=dtype,
            config=_changed(
                config,
                precise_s,
                workload={**workload, "dtype": dtype},
                verify={"share": share},
                nodes={name: {**node, "dtype": None} for name, node in nodes.items()},
            ),
        )
        for dtype in _TYPES[device]
    ]
    hot = _changed(config, heat_s, workload=workload, nodes=nodes, compute_share_mode="none")
    runs += [BurnRun(phase=heat, config=hot), BurnRun(phase=full, config=_changed(config, full_s))]
    return tuple(run for run in runs if run.phase.number in wanted)


def _changed(config: Config, length_s: float, **changes: Any) -> Config:  # noqa: ANN401 - sections
    """Return the configuration with other values, which are added to what a section has."""
    data = config.model_dump()
    for key, value in {**changes, "run": {"duration": f"{length_s:.3f}s"}}.items():
        data[key] = {**data[key], **value} if isinstance(value, dict) else value
    return Config.model_validate(data)


def burn(
    config: Config,
    make_environment: Callable[[Config], Environment],
    heat_s: float,
    wanted: Collection[int],
    options: runner.Options,
) -> int:
    """Run the phases, print and keep the result, and return the exit code: 0 only for PASS.

    Raises:
        OrchestratorError: Nothing could be run. What ends a later run is a failure of its phase.
    """
    started, first = datetime.now(UTC), make_environment(config)
    device = "cpu" if all(plan.spec.device == "cpu" for plan in first.plans) else "cuda"
    planned = planned_runs(config, device, heat_s, wanted)
    runs: list[BurnRun] = []
    interrupts = Interrupts()
    interrupts.install()
    try:
        for each in planned:
            if not options.json:
                length = format_duration(each.config.run.duration_s)
                what = ", ".join(filter(None, [each.phase.title, each.dtype]))
                _say(f"Phase {each.phase.number} of 3, {what}: {length}")
            runs.append(_run(each, make_environment, options, is_first=not runs))
            if interrupts.asked or not runs[-1].is_whole:
                break
    finally:
        interrupts.restore()
    result = result_dict(runs, started.isoformat(timespec="milliseconds"), first.mode.value)
    # Ctrl-C may come between two runs.
    if runs[-1].interrupted or (interrupts.asked and len(runs) < len(planned)):
        result |= {"outcome": "interrupted", "exit_code": _EXIT_INTERRUPTED}
    path = Path(config.run.dir) / f"burn-{started:%Y%m%d-%H%M%S}.json"
    place = str(path)
    try:
        write_summary(path, result)
    except OSError as error:
        place = f"not written, {path}: {error.strerror}"
    # The terminal may be gone; the exit code and the file are not.
    with contextlib.suppress(OSError, ValueError):
        text = summary_text(result) if options.json else "\n".join(result_lines(result))
        print(text, flush=True)  # noqa: T201 - the answer
    if not options.json:
        _say(f"Result: {place}")
    return int(result["exit_code"])


class _LastSnapshot:
    """A watcher that keeps the last picture of a run, which names its folder."""

    last: Snapshot | None = None

    def update(self, snapshot: Snapshot) -> None:
        self.last = snapshot

    close = update


def _run(
    run: BurnRun,
    make_environment: Callable[[Config], Environment],
    options: runner.Options,
    *,
    is_first: bool,
) -> BurnRun:
    """Run a run and judge it; what ends the first one is an error of the verb."""
    watcher, code, error = _LastSnapshot(), 1, None
    try:
        environment = make_environment(run.config)
        # The lines about scaling are printed by the first run only.
        environment = environment if is_first else replace(environment, lines=())
        code = runner.run(environment, replace(options, judge=watcher))
    except OrchestratorError as failure:
        if is_first:
            raise
        error = str(failure)
    except KeyboardInterrupt:
        # The second Ctrl-C: the run is torn down, and what was measured is still reported.
        code = _EXIT_INTERRUPTED
    run = replace(run, interrupted=code == _EXIT_INTERRUPTED, error=error)
    if watcher.last is None:
        return run
    folder = Path(run.config.run.dir) / watcher.last.run_id
    run = replace(run, folder=folder, elapsed_s=watcher.last.elapsed_s)
    try:
        return replace(run, workers=judged_workers(folder, run.config.run.duration_s))
    except ArchiveError as unread:
        return replace(run, error=error or str(unread))


def result_dict(runs: Sequence[BurnRun], started_at: str, mode: str) -> dict[str, Any]:
    """Return the burn-in as JSON knows it, in which `null` is unknown.

    The keys are a promise to scripts: names and order stay, `schema` counts up if they must not.
    """
    phases = [_phase_dict(phase, list(of)) for phase, of in groupby(runs, key=lambda r: r.phase)]
    found = [each for run in runs for worker in run.workers for each in worker.findings.items()]
    unknown = {check for check, (is_good, _) in found if is_good is None}
    verdicts = {phase["verdict"] for phase in phases}
    outcome = "fail" if "fail" in verdicts else "pass" if verdicts == {"pass"} else "not_judged"
    return {
        "schema": SCHEMA,
        "outcome": outcome,
        "exit_code": int(outcome != "pass"),
        "started_at": started_at,
        "mode": mode,
        "not_judged": sorted(unknown),
        **LIMITS,
        "phases": phases,
    }


def _phase_dict(phase: Phase, runs: Sequence[BurnRun]) -> dict[str, Any]:
    workers = [(run, worker) for run in runs for worker in run.workers]
    by_node: dict[str, list[JudgedWorker]] = {}
    for _, worker in workers:
        by_node.setdefault(worker.row["node"], []).append(worker)
    is_whole = all(run.is_whole for run in runs)
    return {
        "phase": phase.number,
        "title": phase.title,
        "verdict": _WORDS[_phase_verdict(phase, runs)],
        "runs": [
            {
                "run_id": None if run.folder is None else run.folder.name,
                "folder": None if run.folder is None else str(run.folder),
                "dtype": run.dtype,
                "duration_s": run.config.run.duration_s,
                "elapsed_s": run.elapsed_s,
                "interrupted": run.interrupted,
                "error": run.error,
            }
            for run in runs
        ],
        "nodes": [
            {"node": node, "verdict": _WORDS[verdict_of(phase, of_node, is_whole=is_whole)]}
            for node, of_node in by_node.items()
        ],
        "workers": [_worker_dict(run, worker) for run, worker in workers],
    }


def _phase_verdict(phase: Phase, runs: Sequence[BurnRun]) -> bool | None:
    if any(run.error is not None for run in runs):
        return False
    workers = [worker for run in runs for worker in run.workers]
    return verdict_of(phase, workers, is_whole=all(run.is_whole for run in runs))


def _worker_dict(run: BurnRun, worker: JudgedWorker) -> dict[str, Any]:
    known = (
        "slot", "node", "dtype", "gpu_name", "device", "cap_bytes", "steps_ok", "steps_oom",
        "steps_error", "emergency_count", "restarts", "verify_checks", "verify_errors",
    )  # fmt: skip
    findings = worker.findings.items()
    return {
        **{key: worker.row[key] for key in known},
        "dtype_asked": run.dtype,
        "verdict": _WORDS[verdict_of(run.phase, [worker], is_whole=run.is_whole)],
        **worker.figures,
        **{f"{check}_verdict": _WORDS[is_good] for check, (is_good, _) in findings},
        "reasons": [f"{check}: {text}" for check, (is_good, text) in findings if not is_good],
    }


def result_lines(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the result for people: of each worker the verdict, and below it why it is no pass."""
    for phase in result["phases"]:
        length = format_duration(sum(run["elapsed_s"] for run in phase["runs"]))
        yield f"\nPhase {phase['phase']}, {phase['title']}, {length}: {_word(phase['verdict'])}"
        yield from (f"  FAIL  {clean(run['error'])}" for run in phase["runs"] if run["error"])
        for worker in phase["workers"]:
            dtype, tflops = worker["dtype_asked"], worker["tflops_mean"]
            told = [worker["slot"], dtype, None if tflops is None else f"{tflops:.3g} TFLOP/s"]
            yield f"  {_word(worker['verdict']):4}  {clean(', '.join(filter(None, told)))}"
            yield from (f"        {clean(reason)}" for reason in worker["reasons"])
    words = {
        "not_judged": "NOT JUDGED: nothing failed, but the purpose of a phase could not be judged",
        "interrupted": "Interrupted: the results are incomplete, and the rest was not judged",
    }
    yield f"\n{words.get(result['outcome'], result['outcome'].upper())}"


def _word(verdict: str) -> str:
    return MISSING if verdict == _WORDS[None] else verdict.upper()


def _say(line: str) -> None:
    """Print a line where the result is not."""
    with contextlib.suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)  # noqa: T201 - the terminal
