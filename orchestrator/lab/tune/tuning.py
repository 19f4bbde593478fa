"""The verb `tune`: from the command line to the passes, the table, and the files that stay."""

from __future__ import annotations

import json
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import psutil
import yaml
from pydantic import TypeAdapter

from orchestrator.config.load import config_from_text, dump_config
from orchestrator.config.schema import Config
from orchestrator.core.placement import Target, plan_slots
from orchestrator.errors import ConfigError, UsageError, one_line
from orchestrator.lab.tune import levers
from orchestrator.lab.tune.levers import MATMUL, TuningTask
from orchestrator.lab.tune.measuring import BaselineError, Journal, Measuring, Plan
from orchestrator.lab.tune.passes import Passes, your_file
from orchestrator.lab.tune.results import (
    LeverRow,
    TuningResult,
    result_table,
    tunings_folder,
    write_result,
)
from orchestrator.run.environment import in_rehearsal, on_this_machine
from workers.files import replace_whole
from workers.settings import ASSUMED_CONTEXT_BYTES, WorkerSpec
from workers.tuning.messages import NO_ROOM, ArmSpec
from workers.units import MIB

#: In the folder of a tuning, for `--resume`.
REQUEST: Final = "request.json"

#: A rehearsal is for looking at the tool, and its figures hold for no card.
_REHEARSAL_S: Final = 270.0

#: The baseline and its repetition load torch, take their first steps and compete in three rounds,
#: which an interval needs: half a minute at best. A lever has no turn in less than this.
_LEAST_S: Final = 60.0

#: Candidates that live at the same time.
_MOST_AT_ONCE: Final = 40
_FEWEST_AT_ONCE: Final = 2

#: Of free RAM, for all workers of an arm.
_HOST_SHARE: Final = 0.5

_TELL_EVERY_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningRequest:
    """What a tuning was asked for; kept in its folder, for `--resume`."""

    config_text: str
    """The configuration as it is measured: overrides applied, and scaled in a rehearsal."""
    file_text: str
    """The user's file, for tuned.yaml."""
    device: str | None
    one_machine: bool
    rehearse: bool
    workload: str = "train"
    """`train` or `matmul`."""
    budget_s: float
    levers: tuple[str, ...] = ()
    """Names of those to measure; all if there is none."""
    created_at: str = ""


def names_in(text: str) -> list[str]:
    """Return the names in a text such as `precision, optimizer=adamw-fused`."""
    return [name.strip() for name in text.split(",") if name.strip()]


def request_of(
    config: Config,
    file_text: str,
    *,
    rehearse: bool,
    budget_s: float | None,
    names: Sequence[str],
    workload: str = "train",
) -> TuningRequest:
    """Return what is kept of a command line; what it leaves open the section `tune:` says.

    Raises:
        UsageError: A lever is named that there is none of, the budget ends before a lever can be
            judged, or this machine leaves a worker no memory.
    """
    if budget_s is not None and budget_s < _LEAST_S:
        raise UsageError(
            f"--budget {budget_s:g}s ends before any lever has had its rounds; the least is "
            f"{_LEAST_S:g}s"
        )
    if workload not in {"train", MATMUL}:
        raise UsageError(
            f"--workload {workload}: no levers are known of it; valid: train, {MATMUL}"
        )
    if workload == "train":
        where = "--levers" if names else "tune.levers"
        if not names and config.tune.levers != "all":
            names = names_in(config.tune.levers)
        baseline = levers.baseline_of(config.train, on_card=True)
        levers.check_names(levers.train_candidates(baseline), names, where)
    config_from_text(file_text, "the configuration")  # tuned.yaml is made of it without `--set`
    environment = in_rehearsal(config, None) if rehearse else on_this_machine(config)
    usual_s = min(config.tune.budget_s, _REHEARSAL_S) if rehearse else config.tune.budget_s
    return TuningRequest(
        config_text=dump_config(environment.config),
        file_text=file_text,
        device=environment.target.device,
        one_machine=environment.target.one_machine,
        rehearse=rehearse,
        workload=workload,
        budget_s=budget_s or usual_s,
        levers=tuple(names),
    )


def begin(request: TuningRequest) -> Path:
    """Make the folder of a new tuning."""
    now = datetime.now(UTC)
    folder = tunings_folder() / f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    folder.mkdir(mode=0o700, parents=True)
    request = replace(request, created_at=now.isoformat(timespec="seconds"))
    replace_whole(folder / REQUEST, json.dumps(asdict(request)))
    return folder


def folder_of(tune_id: str) -> Path:
    """Return the folder of a tuning by its id, or the end of that.

    Raises:
        UsageError: There is none, or there are several.
    """
    fitting = sorted(path.parent for path in tunings_folder().glob(f"*{tune_id}/{REQUEST}"))
    if len(fitting) != 1:
        newest = sorted(path.parent.name for path in tunings_folder().glob(f"*/{REQUEST}"))[-3:]
        raise UsageError(
            f"{len(fitting) or 'no'} tunings end with {tune_id!r} in {tunings_folder()}; the "
            f"newest: {', '.join(newest) or 'none'}"
        )
    return fitting[0]


def _read_request(folder: Path) -> TuningRequest:
    try:
        return TypeAdapter(TuningRequest).validate_json((folder / REQUEST).read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{folder / REQUEST} cannot be read ({one_line(str(error))[:200]}); run `tune` anew"
        ) from error


def tune(folder: Path, say: Callable[[str], None], budget_s: float | None = None) -> TuningResult:
    """Measure, or go on measuring, and write the result; `say` is told the progress.

    A tuning that goes on may get another budget than it began with.

    Raises:
        UsageError: The baseline cannot be trained here, or the folder cannot be used.
    """
    request = _read_request(folder)
    config = config_from_text(request.config_text, str(folder / REQUEST))
    target = Target(device=request.device, one_machine=request.one_machine)
    spec, at_once = _with_room(plan_slots(config, target)[0].spec)
    journal, log, trains = Journal(folder), folder / "arms.log", request.workload != MATMUL
    plan = Plan(
        budget_s=budget_s or request.budget_s,
        turn_s=0.2 if request.rehearse else 1.5,
        least_steps=2 if request.rehearse else 5,
        resolve=config.tune.resolve,
        confidence=config.tune.confidence,
        at_once=at_once,
        seed=config.workload.seed,
    )
    if trains:
        plan = replace(plan, compared_steps=config.tune.parity_steps, seeds=config.tune.seeds)

    def run(task: TuningTask) -> TuningResult:
        measuring = Measuring(plan, journal, task.make_spec, say)
        passes = Passes(task, plan, config.tune.objective, journal, measuring)
        return passes.run(folder.name, request.created_at)

    def run_training() -> TuningResult:
        try:
            return run(_training(config, spec, log, request))
        except BaselineError as error:
            if NO_ROOM not in str(error):
                raise
            say("the plain baseline does not fit, so every arm recomputes its blocks")
            return run(_training(config, spec, log, request, recompute="all"))

    def run_matmul() -> TuningResult:
        return run(_matmul(config, spec, log, request))

    try:
        result = run_training() if trains else run_matmul()
    except BaselineError as error:
        raise UsageError(
            f"the baseline cannot be measured: {one_line(str(error))}; see {log}, and go on with "
            f"`tune --resume {folder.name}`"
        ) from error
    write_result(folder, result)
    if trains:
        file = config_from_text(request.file_text, "the configuration")
        own = file.train.model_dump()
        changes = {key: value for key, value in result.chosen.items() if own.get(key) != value}
        notes = notes_of(changes, result.rows, result.tune_id)
        text = tuned_yaml(request.file_text, file, changes, notes)
        replace_whole(folder / "tuned.yaml", text)
    return result


def result_text(folder: Path, result: TuningResult, width: int | None) -> str:
    """Return what the verb prints; without a width, all columns."""
    tuned_file = folder / "tuned.yaml"
    last = [f"Your file with these settings: {tuned_file}"] if tuned_file.exists() else []
    return "\n".join([*result_table(result, width), *last])


def _with_room(spec: WorkerSpec) -> tuple[WorkerSpec, int]:
    """Return how many candidates the device lets live beside the baseline and its repetition, and
    their spec.

    On a card each keeps a context while it waits. What the card has beside one worker's budget pays
    for those; where that is not enough for the fewest arms, the budget does.
    """
    if spec.device != "cuda":
        return spec, _MOST_AT_ONCE
    beside = (spec.card_budget_bytes - spec.budget_bytes) // ASSUMED_CONTEXT_BYTES
    at_once = max(_FEWEST_AT_ONCE, min(_MOST_AT_ONCE, beside - 1))
    lacking_bytes = max(0, at_once + 1 - beside) * ASSUMED_CONTEXT_BYTES
    return replace(spec, budget_bytes=max(1, spec.budget_bytes - lacking_bytes)), at_once


def _training(
    config: Config, spec: WorkerSpec, log: Path, request: TuningRequest, *, recompute: str = "none"
) -> TuningTask:
    """Return the tuning of `train:`.

    Where the plain baseline does not fit, `recompute` is `all` in it and in all arms that do not
    say otherwise.
    """
    on_card, seed = spec.device == "cuda", config.workload.seed
    baseline = {**levers.baseline_of(config.train, on_card=on_card), "recompute": recompute}
    candidates = levers.named(levers.train_candidates(baseline), request.levers)
    if request.rehearse and not request.levers:
        candidates = levers.for_rehearsal(candidates)
    reasons = {
        each.name: levers.unavailable(each, baseline, on_card=on_card) for each in candidates
    }
    workload = replace(spec.workload, name="train")

    def make_spec(name: str, changes: Mapping[str, Any], more_seed: int) -> ArmSpec:
        return ArmSpec(
            name=name,
            spec=replace(spec, slot=f"tune/{name}", duty=None, workload=workload),
            settings={**baseline, **changes},
            plain=baseline,
            seed=seed + more_seed,
            log=log,
        )

    return TuningTask(
        model=config.train.preset,
        trains=True,
        dtype_key="precision",
        baseline=baseline,
        candidates=candidates,
        impossible={name: reason for name, reason in reasons.items() if reason is not None},
        yours=your_file(baseline, config.train.model_dump()),
        make_spec=make_spec,
    )


def _matmul(config: Config, spec: WorkerSpec, log: Path, request: TuningRequest) -> TuningTask:
    """Return the tuning of matmul on one card, or on the CPU."""
    on_card, seed = spec.device == "cuda", config.workload.seed
    baseline = levers.matmul_baseline(spec.workload.size)
    candidates = levers.matmul_candidates(baseline, spec.duty)
    levers.check_names(candidates, request.levers, "--levers")
    candidates = levers.named(candidates, request.levers)
    free_bytes = int(_HOST_SHARE * psutil.virtual_memory().available)

    def make_spec(name: str, changes: Mapping[str, Any], more_seed: int) -> ArmSpec:
        keys = {**baseline, **changes}
        workload = replace(spec.workload, name=MATMUL, dtype=keys["dtype"], size=keys["size"])
        own = replace(spec, slot=f"tune/{name}", duty=keys["duty"], workload=workload)
        return ArmSpec(name=name, spec=own, seed=seed + more_seed, log=log)

    return TuningTask(
        model=MATMUL,
        trains=False,
        dtype_key="dtype",
        baseline=baseline,
        candidates=candidates,
        impossible=levers.matmul_impossible(
            candidates,
            on_card=on_card,
            room_bytes=spec.card_budget_bytes if on_card else free_bytes,
            budget_bytes=spec.budget_bytes,
        ),
        yours=None,
        make_spec=make_spec,
    )


# tuned.yaml

_SECTION: Final = re.compile(r"^train:[ \t]*(#.*)?$", re.MULTILINE)

#: A line that belongs to no section: it begins at the left edge, and is no comment.
_NEXT: Final = re.compile(r"^[^\s#]", re.MULTILINE)


def tuned_yaml(
    text: str, config: Config, changes: Mapping[str, Any], notes: Mapping[str, str]
) -> str:
    """Return the text of a file that loads as `config` with `changes` in `train:`.

    Lines are edited, so that comments and everything else stay. Where the section is written in a
    way that lines cannot be edited (in braces, with anchors), the whole file is written anew.

    Args:
        text: The user's file.
        config: What it loads as, with the overrides that were given.
        changes: Keys of `train:` with their new values.
        notes: What is said beside each key.
    """
    train = {**config.train.model_dump(), **changes}
    wanted = Config.model_validate({**config.model_dump(), "train": train})
    edited = _edited(text, changes, notes)
    try:
        if config_from_text(edited, "tuned.yaml") == wanted:
            return edited
    except ConfigError:
        pass
    return _edited(dump_config(wanted), changes, notes)


def notes_of(changes: Mapping[str, Any], rows: Sequence[LeverRow], tune_id: str) -> dict[str, str]:
    """Return what is said beside each changed key: its own measurement, where it has one."""
    by_name = {row.name: row for row in reversed(rows)}
    notes = {}
    for key, value in changes.items():
        row = by_name.get(f"{key}={str(value).lower() if isinstance(value, bool) else value}")
        other = "as the baseline" if key in levers.PLAIN else "as it was measured"
        figures = [] if row is None else list(_figures(row))
        notes[key] = f"tune {tune_id}: {', '.join(figures) or other}"
    return notes


def _figures(row: LeverRow) -> Iterator[str]:
    if row.speed_ratio is not None and row.speed_low is not None and row.speed_high is not None:
        span = f"{row.speed_low:.3f} to {row.speed_high:.3f}"
        yield f"{row.speed_ratio:.3f} x the baseline's speed ({span})"
    if row.peak_bytes is not None and row.peak_delta_bytes is not None:
        yield f"{row.peak_delta_bytes / MIB:+.1f} MiB peak memory"


def _edited(text: str, changes: Mapping[str, Any], notes: Mapping[str, str]) -> str:
    text = text if text.endswith("\n") or not text else f"{text}\n"
    begins = _SECTION.search(text)
    if begins is None:
        return f"{text}train:\n" + "".join(_line("  ", key, changes[key], notes) for key in changes)
    following = _NEXT.search(text, begins.end())
    end = len(text) if following is None else following.start()
    head, section, rest = text[: begins.end() + 1], text[begins.end() + 1 : end], text[end:]
    indent = next(iter(re.findall(r"^([ ]+)\w", section, re.MULTILINE)), "  ")
    for key, value in changes.items():
        line = _line(indent, key, value, notes)
        there = re.search(rf"^{indent}{re.escape(key)}:.*\n", section, re.MULTILINE)
        start, stop = (0, 0) if there is None else there.span()
        section = section[:start] + line + section[stop:]
    return head + section + rest


def _line(indent: str, key: str, value: object, notes: Mapping[str, str]) -> str:
    plain = yaml.safe_dump({key: value}, default_flow_style=False, allow_unicode=True).strip()
    note = " ".join(notes.get(key, "").split())
    return f"{indent}{plain}  # {note}\n" if note else f"{indent}{plain}\n"


class ProgressLine:
    """Tells the progress on standard error: on a terminal in one line, else a line now and then."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._last_s = float("-inf")

    def __call__(self, text: str) -> None:
        """Show what is under way."""
        now_s = time.monotonic()
        if self._terminal:
            print(f"\r\x1b[2K{one_line(text)[:100]}", end="", file=sys.stderr, flush=True)  # noqa: T201 - the terminal
        elif now_s - self._last_s >= _TELL_EVERY_S:
            self._last_s = now_s
            self.line(text)

    def line(self, text: str) -> None:
        """Tell what stays on the screen."""
        print(one_line(text), file=sys.stderr, flush=True)  # noqa: T201 - the terminal

    def close(self) -> None:
        """Leave the line."""
        if self._terminal:
            print(file=sys.stderr)  # noqa: T201 - the terminal
