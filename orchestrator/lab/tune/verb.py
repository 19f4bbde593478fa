"""The verb `tune`: from what the user asked to the three passes, the table, and the files that
stay.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from orchestrator.config.load import config_from_text
from orchestrator.core.placement import Target, plan_slots
from orchestrator.errors import UsageError, one_line
from orchestrator.lab.tune import asked as asked_file
from orchestrator.lab.tune import levers, products, store
from orchestrator.lab.tune.asked import Asked
from orchestrator.lab.tune.course import Course, result_of
from orchestrator.lab.tune.drawing import table
from orchestrator.lab.tune.journal import Journal
from orchestrator.lab.tune.kinds import Kind, matmul, mps_for, training
from orchestrator.lab.tune.levers import Candidate
from orchestrator.lab.tune.measuring import BaselineError, Clock, Measuring, Plan
from orchestrator.lab.tune.tuned_yaml import notes_of, tuned
from workers.files import replace_whole
from workers.settings import ASSUMED_CONTEXT_BYTES, WorkerSpec
from workers.tuning.messages import NO_ROOM

_MOST_AT_ONCE: Final = 40
_FEWEST_AT_ONCE: Final = 2

_TELL_EVERY_S: Final = 10.0


def tune(folder: Path, say: Callable[[str], None], budget_s: float | None = None) -> store.Result:
    """Measure, or go on measuring, and write the result; `say` is told the progress.

    A tuning that goes on may get another budget than it began with.

    Raises:
        UsageError: The baseline cannot be trained here, or the folder cannot be used.
    """
    asked = asked_file.read(folder)
    config = config_from_text(asked.config_text, str(folder / asked_file.FILE))
    target = Target(device=asked.device, one_machine=asked.one_machine)
    spec, at_once = _with_room(plan_slots(config, target)[0].spec)
    journal = Journal(folder)

    def choose(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        named = (levers.picked if trains else levers.chosen)(candidates, asked.wanted)
        return (
            levers.for_rehearsal(named) if asked.rehearse and trains and not asked.wanted else named
        )

    log, trains = folder / "arms.log", asked.workload != products.WORKLOAD
    compared = (
        {"compared_steps": config.tune.parity_steps, "seeds": config.tune.seeds} if trains else {}
    )
    plan = Plan(
        budget_s=budget_s or asked.budget_s,
        turn_s=0.2 if asked.rehearse else 1.5,
        least_steps=2 if asked.rehearse else 5,
        resolve=config.tune.resolve,
        confidence=config.tune.confidence,
        at_once=at_once,
        seed=config.workload.seed,
        **compared,
    )

    def run(kind: Kind) -> store.Result:
        measuring = Measuring(plan, journal, Clock(journal.elapsed_s), kind.make_spec, say)
        found = Course(kind, plan, config.tune.objective, journal, measuring).run()
        return result_of(folder.name, asked.created_at, kind, journal, found)

    def run_training() -> store.Result:
        try:
            return run(training(config, spec, log, choose))
        except BaselineError as error:
            if NO_ROOM not in str(error):
                raise
            say("the plain baseline does not fit, so every arm recomputes its blocks")
            return run(training(config, spec, log, choose, recompute="all"))

    def run_matmul() -> store.Result:
        with mps_for(folder.name, on_card=spec.device == "cuda") as shared:
            return run(matmul(config, spec, log, choose, shared))

    try:
        result = run_training() if trains else run_matmul()
    except BaselineError as error:
        raise UsageError(
            f"the baseline cannot be measured: {one_line(str(error))}; see {folder}/arms.log, and "
            "go on with "
            f"`tune --resume {folder.name}`"
        ) from error
    store.write(folder, result)
    if trains:
        _write_tuned(folder, asked, result)
    return result


def result_text(folder: Path, result: store.Result, width: int | None) -> str:
    """Return what the verb prints; without a width, all columns."""
    tuned_file = folder / "tuned.yaml"
    last = [f"Your file with these settings: {tuned_file}"] if tuned_file.exists() else []
    return "\n".join([*table(result, width), *last])


def _write_tuned(folder: Path, asked: Asked, result: store.Result) -> None:
    """Write the user's file with the chosen settings; each changed key says what was measured."""
    config = config_from_text(asked.file_text, "the configuration")
    own = config.train.model_dump()
    changes = {key: value for key, value in result.chosen.items() if own.get(key) != value}
    notes = notes_of(changes, result.rows, result.tune_id)
    replace_whole(folder / "tuned.yaml", tuned(asked.file_text, config, changes, notes))


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


class Progress:
    """Tells the progress on standard error: on a terminal in one line, else a line now and then."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._told_s: float | None = None

    def __call__(self, text: str) -> None:
        """Show what is under way."""
        now_s = time.monotonic()
        if self._terminal:
            print(f"\r\x1b[2K{one_line(text)[:100]}", end="", file=sys.stderr, flush=True)  # noqa: T201 - the terminal
        elif self._told_s is None or now_s - self._told_s >= _TELL_EVERY_S:
            self._told_s = now_s
            print(one_line(text), file=sys.stderr, flush=True)  # noqa: T201 - the terminal

    def line(self, text: str) -> None:
        """Tell what stays on the screen."""
        print(one_line(text), file=sys.stderr, flush=True)  # noqa: T201 - the terminal

    def close(self) -> None:
        """Leave the line."""
        if self._terminal:
            print(file=sys.stderr)  # noqa: T201 - the terminal
