"""The verb `burn`: a verdict on every worker, from ordinary runs in the three phases of the guides.

The verdict follows from the summary and the samples in each run folder. A check without a sensor is
not judged, which is never a pass. Does not measure anything itself, and sets nothing on a card.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final, TypeAlias

from orchestrator.config.duration import format_duration
from orchestrator.config.schema import Config, WorkloadConfig
from orchestrator.core.slot import HeadState
from orchestrator.record import history
from orchestrator.record.archive import read_run
from orchestrator.record.events import read_events
from orchestrator.run import runner
from orchestrator.run.environment import Environment
from orchestrator.view.cells import clean
from workers.messages import STARVED

#: Long enough for the air in a closed case to reach its final temperature.
HEAT_S: Final = 3600.0

#: Length of each run of phase 1: a worker grows to its cap and checks some hundred results.
_PRECISION_S: Final = 30.0
_CHECKED_SHARE: Final = 0.25

#: Edge of the products if the configuration's sizes are meant for another workload.
_SIZE: Final = 8192

#: A processor runs tf32 as fp32, and fp16 as the fastest type of 16 bits that it has.
_TYPES: Final = {"cuda": ("fp32", "tf32", "fp16", "bf16"), "cpu": ("fp32", "fp16")}

#: Limits of a pass, from the guides (docs/guides.md). Heat is sustained if it lasts for
#: `_SUSTAINED_S` without a break, or for more than `_SUSTAINED_PCT` of the time.
_HELD_LEAST_PCT: Final = 90.0
_HOT_C: Final = 80.0
_SUSTAINED_S: Final = 30.0
_SUSTAINED_PCT: Final = 10.0

#: A worker first grows to its cap: in this share of a run its memory is not judged.
_WARM_UP_SHARE: Final = 0.2

_SAMPLES_MOST: Final = 600
_EXIT_INTERRUPTED: Final = 130
_FALLEN: Final = frozenset({*HeadState, *STARVED})

Findings: TypeAlias = Mapping[str, tuple[bool | None, str]]
"""Check -> whether a worker passes it (`None`: it could not be judged), and the reason."""

_WORDS: Final = {True: "pass", False: "fail", None: "not_judged"}


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """One run of a phase."""

    phase: int
    title: str
    """Name for people."""
    purpose: tuple[str, ...]
    """Checks that must be judged for a pass."""
    config: Config


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCourse:
    """The data of one worker from a run folder."""

    row: Mapping[str, Any]
    """The worker's row of summary.json."""
    every_s: float
    samples: Mapping[str, Sequence[float | None]]
    """Key -> one value for each `every_s` of the counted time; `None` is unknown."""
    events: Mapping[str, Sequence[str]]
    """From its events: each `alarm` of its card, each state (`to_state`) that it changed to, and
    the `text` why checks of its results ended early.
    """

    def known(self, key: str) -> list[float]:
        """Return the known sampled values of a key."""
        return [value for value in self.samples.get(key, ()) if value is not None]


def judge(worker: WorkerCourse) -> Findings:
    """Return the finding of each check on a worker."""
    return {
        "memory": _memory(worker.known("reserved_bytes"), worker.row["cap_bytes"]),
        "errors": _errors(worker),
        "results": _results(worker),
        "temperature": _temperature(worker),
    }


def verdict_of(run: PlannedRun, findings: Findings, *, is_whole: bool) -> bool | None:
    """Return whether a worker passes; `None` if the run was cut short or its purpose not judged."""
    if any(is_good is False for is_good, _ in findings.values()):
        return False
    return True if is_whole and all(findings[check][0] for check in run.purpose) else None


def _memory(held: Sequence[float], cap_bytes: int | None) -> tuple[bool | None, str]:
    settled = held[int(_WARM_UP_SHARE * len(held)) :]
    if not settled or not cap_bytes:
        return None, "it never reported its memory"
    if max(held) > cap_bytes:
        return False, "held more than its cap"
    held_pct = 100 * median(settled) / cap_bytes
    text = f"held {held_pct:.1f} % of its cap, more than {_HELD_LEAST_PCT:g} is required"
    return held_pct > _HELD_LEAST_PCT, text


def _errors(worker: WorkerCourse) -> tuple[bool | None, str]:
    # Survived out-of-memory errors do not count: the search for the largest size causes some.
    row = worker.row
    faults = {
        f"ended {row['state']}: {row['reason']}": row["state"] in _FALLEN,
        "did no step": row["steps_ok"] == 0,
        f"errors of the workload: {row['steps_error']}": row["steps_error"],
        "had no memory for any step at times": not STARVED.isdisjoint(worker.events["to_state"]),
        f"restarts: {row['restarts']}": row["restarts"],
        **{f"alarm of its card: {alarm}": True for alarm in worker.events["alarm"]},
    }
    found = [text for text, is_so in faults.items() if is_so]
    return not found, ", ".join(found) or "none"


def _results(worker: WorkerCourse) -> tuple[bool | None, str]:
    checks, wrong = worker.row["verify_checks"], worker.row["verify_errors"]
    if wrong:
        return False, f"{wrong} of {checks} checked results were wrong"
    if worker.events["text"]:
        return None, f"{checks} results checked, then no more: {worker.events['text'][0]}"
    return (True, f"{checks} results checked") if checks else (None, "no result was checked")


def _temperature(worker: WorkerCourse) -> tuple[bool | None, str]:
    warmth = worker.known("temperature_c")
    # Temperatures that are hot for a card are normal for a processor.
    if not warmth or worker.row["temperature_of"] != "card":
        return None, "no sensor reports it"
    hot = [each >= _HOT_C for each in warmth]
    streaks = (len([*group]) for is_hot, group in groupby(hot) if is_hot)
    hot_s, hot_pct = worker.every_s * max(streaks, default=0), 100 * fmean(hot)
    text = f"{max(warmth):.0f} C at most; {_HOT_C:g} C or more for {hot_s:.0f} s on end"
    is_good = hot_s < _SUSTAINED_S and hot_pct <= _SUSTAINED_PCT
    return is_good, f"{text}, {hot_pct:.0f} % of the time"


def workers_of(folder: Path, length_s: float) -> Iterator[WorkerCourse]:
    """Yield the data of every worker of a finished run.

    `length_s` is the planned length of the run. `ArchiveError`: the folder cannot be read.
    """
    run = read_run(folder)
    events = read_events(folder, ["counting", "alarm_raised", "checks_ended", "state"])
    # A run that never began to count has no samples of counted time.
    began_s = next((each.at_unix_s for each in events if each.event == "counting"), None) or 0.0
    count = max(1, min(_SAMPLES_MOST, round(length_s)))
    keys = ("reserved_bytes", "temperature_c", "tflops")
    courses = history.courses(folder, keys, began_s, began_s + length_s, count)
    for record in run.slots:
        row = record.row.to_dict()
        of_slot = [each.details for each in events if each.slot == row["slot"]]
        yield WorkerCourse(
            row=row,
            every_s=length_s / count,
            samples={key: each.mean for key, each in courses.get(row["slot"], {}).items()},
            events={
                key: [str(details[key]) for details in of_slot if key in details]
                for key in ("alarm", "to_state", "text")
            },
        )


def planned_runs(
    config: Config, devices: Collection[str], heat_s: float, wanted: Collection[int]
) -> tuple[PlannedRun, ...]:
    """Return the runs of the phases whose numbers are in `wanted`.

    `devices` are the kinds of the workers' devices, `cuda` or `cpu`. `heat_s` is the length of the
    second phase; the others are never longer.
    """
    workload: dict[str, Any] = {"name": "matmul"}
    nodes = config.model_dump()["nodes"]
    if config.workload.name != "matmul":  # for another workload, sizes mean something else
        workload |= {"size": None, "batch": WorkloadConfig().batch}
        nodes = {name: {**node, "size": _SIZE} for name, node in nodes.items()}
    caps = {
        "verify": {"share": max(config.verify.share, _CHECKED_SHARE)},
        "nodes": {name: {**node, "dtype": None} for name, node in nodes.items()},
    }
    runs, purpose = list[PlannedRun](), ("memory", "errors", "results")
    for dtype in _TYPES["cuda" if "cuda" in devices else "cpu"]:
        precise_s, own = min(heat_s, _PRECISION_S), {**workload, "dtype": dtype}
        precise = _changed(config, precise_s, workload=own, **caps)
        runs.append(PlannedRun(1, f"caps and precision, {dtype}", purpose, precise))
    hot = _changed(config, heat_s, workload=workload, nodes=nodes, compute_share_mode="none")
    runs.append(PlannedRun(2, "heat", ("errors", "temperature"), hot))
    full = _changed(config, min(heat_s, config.run.duration_s))
    runs.append(PlannedRun(3, "full load", ("memory", "errors"), full))
    return tuple(run for run in runs if run.phase in wanted)


def _changed(config: Config, length_s: float, **changes: Any) -> Config:  # noqa: ANN401 - sections
    """Return the configuration with changed keys; a section keeps its other keys."""
    data = config.model_dump()
    for key, value in {**changes, "run": {"duration": f"{length_s:.3f}s"}}.items():
        data[key] = {**data[key], **value} if isinstance(value, dict) else value
    return Config.model_validate(data)


def burn(
    planned: Sequence[PlannedRun],
    make_environment: Callable[[Config], Environment],
    options: runner.Options,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Run the phases and return the result; `say` gets a line for each run and each worker.

    `OrchestratorError`: a run could not start, or ended in an error; the lines of the earlier runs
    were given to `say`.
    """
    rows: list[dict[str, Any]] = []
    is_whole = True
    for run in planned:
        length = format_duration(run.config.run.duration_s)
        say(f"Phase {run.phase} of 3, {run.title}: {length}")
        environment = make_environment(run.config)
        # Only the first run prints the lines about scaling.
        environment = replace(environment, lines=()) if rows else environment
        of_run, is_whole = _run(run, environment, options)
        rows += of_run
        for row in of_run:
            say(row_line(row))
        if not is_whole:
            break
    result = result_dict(rows, is_whole=is_whole)
    say(f"\n{_words(result['outcome'])}")
    return result


def _run(
    run: PlannedRun, environment: Environment, options: runner.Options
) -> tuple[list[dict[str, Any]], bool]:
    """Return the rows of a run, and whether it ran to its end."""
    folders: list[Path] = []
    code = runner.run(environment, replace(options, judge=folders.append))
    (folder,), is_whole = folders, code != _EXIT_INTERRUPTED
    workers = workers_of(folder, run.config.run.duration_s)
    return [row_of(run, folder.name, worker, is_whole=is_whole) for worker in workers], is_whole


def row_of(run: PlannedRun, run_id: str, worker: WorkerCourse, *, is_whole: bool) -> dict[str, Any]:
    """Return a worker for JSON: its verdict in a run, each check, and the reasons if no pass."""
    findings, speeds = judge(worker), worker.known("tflops")
    return {
        "phase": run.phase,
        "title": run.title,
        "run_id": run_id,
        "slot": worker.row["slot"],
        "verdict": _WORDS[verdict_of(run, findings, is_whole=is_whole)],
        **{check: _WORDS[is_good] for check, (is_good, _) in findings.items()},
        "tflops": fmean(speeds) if speeds else None,
        "reasons": [
            f"{check}: {text}" for check, (is_good, text) in findings.items() if not is_good
        ],
    }


def result_dict(rows: Sequence[Mapping[str, Any]], *, is_whole: bool) -> dict[str, Any]:
    """Return the burn-in for JSON, in which `null` is unknown.

    Scripts rely on names and order of the keys: a change of either must increment `schema`.
    """
    verdicts = {row["verdict"] for row in rows}
    outcome = "fail" if "fail" in verdicts else "pass" if verdicts == {"pass"} else "not_judged"
    code = int(outcome != "pass")
    if not is_whole:
        outcome, code = "interrupted", _EXIT_INTERRUPTED
    return {"schema": 2, "outcome": outcome, "exit_code": code, "workers": list(rows)}


def row_line(row: Mapping[str, Any]) -> str:
    """Return the line of a worker for people: the verdict, and the reasons against a pass."""
    speed = [] if row["tflops"] is None else [f"{row['tflops']:.3g} TFLOP/s"]
    return clean(f"{_words(row['verdict'])}  {row['slot']}: {'; '.join([*speed, *row['reasons']])}")


def _words(verdict: str) -> str:
    return verdict.replace("_", " ").upper()
