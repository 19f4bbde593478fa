"""The verb `tune`: from what the user asked to the three passes, the table, and the files that stay."""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import psutil

from orchestrator.config.load import config_from_text, dump_config
from orchestrator.config.schema import Config
from orchestrator.core.placement import Target, plan_slots
from orchestrator.errors import UsageError, one_line
from orchestrator.run.environment import in_rehearsal, on_this_machine
from orchestrator.tuning import levers, passes, products, store
from orchestrator.tuning.claims import load, workload_of
from orchestrator.tuning.claims_page import guide_says
from orchestrator.tuning.drawing import table
from orchestrator.tuning.journal import Journal, PassData
from orchestrator.tuning.kinds import Kind, matmul, training
from orchestrator.tuning.levers import Candidate
from orchestrator.tuning.measuring import SEEDS, BaselineError, Clock, Measuring, Plan
from orchestrator.tuning.parity import noise_of
from orchestrator.tuning.report import Measurements, course_of, pareto_names, rows_of
from orchestrator.tuning.rounds import AGAIN, BASELINE
from orchestrator.tuning.rows import ParityClass, Row
from orchestrator.tuning.tuned_yaml import tuned
from workers.files import replace_whole
from workers.settings import ASSUMED_CONTEXT_BYTES, WorkerSpec
from workers.tuning.messages import NO_ROOM, Opened

BUDGET_S: Final = 900.0
REHEARSAL_BUDGET_S: Final = 270.0

#: When the three passes end, as shares of the budget.
_ALONE, _STACKED, _LEFT_OUT = 0.6, 0.8, 1.0

#: What the process of an arm takes of the host's memory, at the least, and of that memory for all arms.
_ARM_HOST_BYTES: Final = 250 * 2**20
_HOST_SHARE: Final = 0.5
_MOST_AT_ONCE: Final = 40
_FEWEST_AT_ONCE: Final = 2

_ASKED: Final = "asked.json"

_TELL_EVERY_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
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
    wanted: tuple[str, ...] = ()
    created_at: str = ""


def begin(asked: Asked) -> Path:
    """Make the folder of a new tuning."""
    now = datetime.now(UTC)
    folder = store.tunings_folder() / f"{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    folder.mkdir(mode=0o700, parents=True)
    plain = {name: getattr(asked, name) for name in Asked.__dataclass_fields__}
    replace_whole(folder / _ASKED, json.dumps({**plain, "created_at": now.isoformat(timespec="seconds")}))
    return folder


def folder_of(tune_id: str) -> Path:
    """Return the folder of a tuning by its id, or the end of that.

    Raises:
        UsageError: There is none, or there are several.
    """
    found = sorted(each.parent for each in store.tunings_folder().glob(f"*{tune_id}/{_ASKED}"))
    if len(found) != 1:
        known = sorted(each.parent.name for each in store.tunings_folder().glob(f"*/{_ASKED}"))[-3:]
        raise UsageError(
            f"{len(found) or 'no'} tunings end with {tune_id!r} in {store.tunings_folder()}; the newest: "
            f"{', '.join(known) or 'none'}"
        )
    return found[0]


def tune(folder: Path, say: Callable[[str], None], budget_s: float | None = None) -> store.Result:
    """Measure, or go on measuring, and write the result; `say` is told the progress.

    A tuning that goes on may get another budget than it began with.

    Raises:
        UsageError: The baseline cannot be trained here, or the folder cannot be used.
    """
    asked = _asked(folder)
    config = config_from_text(asked.config_text, str(folder / _ASKED))
    target = Target(device=asked.device, one_machine=asked.one_machine)
    spec, at_once = _with_room(plan_slots(config, target)[0].spec)
    journal = Journal(folder)

    def choose(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        named = (levers.picked if trains else levers.chosen)(candidates, asked.wanted)
        return levers.for_rehearsal(named) if asked.rehearse and trains and not asked.wanted else named

    log, trains = folder / "arms.log", asked.workload != products.WORKLOAD
    plan = Plan(
        budget_s=budget_s or asked.budget_s,
        turn_s=0.2 if asked.rehearse else 1.5,
        least_steps=2 if asked.rehearse else 5,
        resolve=0.01,
        confidence=0.95,
        at_once=at_once,
        seed=config.workload.seed,
        seeds=trains,
    )

    def run(kind: Kind) -> store.Result:
        measuring = Measuring(plan, journal, Clock(journal.elapsed_s), kind.make_spec, say)
        return _Course(asked, kind, plan, journal, measuring).run(folder)

    try:
        try:
            result = run(training(config, spec, log, choose) if trains else matmul(config, spec, log, choose))
        except BaselineError as error:
            if not trains or NO_ROOM not in str(error):
                raise
            say("the plain baseline does not fit, so every arm checkpoints its blocks")
            result = run(training(config, spec, log, choose, checkpoint="all"))
    except BaselineError as error:
        raise UsageError(
            f"the baseline cannot be measured: {one_line(str(error))}; see {folder}/arms.log, and go on with "
            f"`tune --resume {folder.name}`"
        ) from error
    store.write(folder, result)
    if trains:
        _write_tuned(folder, asked, result)
    return result


def result_text(folder: Path, result: store.Result) -> str:
    """Return what the verb prints."""
    tuned_file = folder / "tuned.yaml"
    last = [f"Your file with these settings: {tuned_file}"] if tuned_file.exists() else []
    return "\n".join([*table(result), *last])


class _Course:
    """The three passes of one tuning."""

    def __init__(
        self,
        asked: Asked,
        kind: Kind,
        plan: Plan,
        journal: Journal,
        measuring: Measuring,
    ) -> None:
        self._asked = asked
        self._kind = kind
        self._plan = plan
        self._journal = journal
        self._measuring = measuring

    def run(self, folder: Path) -> store.Result:
        """Measure the passes that are not over, and return the rows of all."""
        budget_s = self._plan.budget_s
        possible = [each for each in self._kind.candidates if each.name not in self._kind.impossible]
        first = self._measuring.settle_steps(len(possible))
        alone = self._measuring.run("alone", possible, _ALONE * budget_s)
        rows = self._rows(self._kind.candidates, alone)
        judged = list(zip(self._kind.candidates, rows, strict=True))
        every = [(self._again(), self._rows([self._again()], alone)[0]), *judged]

        yours = self._kind.yours
        best, best_to_yours = None, None
        stacked_sets = passes.cumulative(passes.winners(judged))
        if (stacked_sets or yours is not None) and self._in_time("cumulative"):
            shown = [*stacked_sets, *([] if yours is None else [yours])]
            data = self._measuring.run("cumulative", shown, _STACKED * budget_s)
            every += zip(shown, self._rows(shown, data), strict=True)
            kept = self._stacked(passes.winners(judged), stacked_sets, data)
            best, best_to_yours, more = self._left_out(kept, yours, data)
            every += more
        open_levers = passes.open_questions(judged, self._plan.resolve)
        choice = passes.choose(best, yours, best_to_yours, open_levers)
        return self._result(folder, first, every, choice)

    def _in_time(self, pass_name: str) -> bool:
        """Whether a pass may begin, or has begun."""
        return pass_name in self._journal.passes or self._journal.elapsed_s < self._plan.budget_s

    def _stacked(self, several: Sequence[Candidate], sets: Sequence[Candidate], data: PassData) -> list[Candidate]:
        """Return the levers that did not slow down the set below them."""
        names = [BASELINE, *(each.name for each in sets)]
        found = self._found(data)
        steps = [found.effects([upper], lower).get(upper) for lower, upper in pairwise(names)]
        return passes.kept_after_stacking(several, steps)

    def _left_out(
        self, kept: Sequence[Candidate], yours: Candidate | None, stacked: PassData
    ) -> tuple[Candidate | None, Any, list[tuple[Candidate, Row]]]:
        """Measure the chosen set without each of its levers; return what is best, and how it compares with the file."""
        own = [] if yours is None else [yours]
        if not kept:
            found = None if yours is None else self._found(stacked).effects([BASELINE], yours.name).get(BASELINE)
            return None, found, []
        whole, rests = passes.merged(kept), passes.with_one_left_out(kept)
        if not rests:
            found = None if yours is None else self._found(stacked).effects([whole.name], yours.name).get(whole.name)
            return whole, found, []
        if not self._in_time("one left out"):
            return whole, None, []
        arms = [whole, *rests.values(), *own]
        data = self._measuring.run("one left out", arms, _LEFT_OUT * self._plan.budget_s)
        to_whole = self._found(data).effects([each.name for each in rests.values()], whole.name)
        final = passes.kept_after_leaving_out(kept, {name: to_whole.get(each.name) for name, each in rests.items()})
        named = {tuple(each.changes.items()): each for each in (whole, *rests.values())}
        best = named.get(tuple(passes.merged(final).changes.items()), whole) if final else whole
        rows = list(zip(rests.values(), self._rows(list(rests.values()), data), strict=True))
        if yours is None:
            return best, None, rows
        return best, self._found(data).effects([best.name], yours.name).get(best.name), rows

    def _found(self, data: PassData) -> Measurements:
        seeds = [self._journal.opened[name] for name in (BASELINE, *SEEDS) if name in self._journal.opened]
        return Measurements(
            data=data,
            opened=self._journal.opened,
            noise=noise_of([course_of(each) for each in seeds]),
            resolve=self._plan.resolve,
            confidence=self._plan.confidence,
        )

    def _rows(self, candidates: Sequence[Candidate], data: PassData) -> list[Row]:
        return rows_of(candidates, self._found(data), self._kind.impossible)

    def _again(self) -> Candidate:
        lever, _, setting = AGAIN.partition("=")
        return Candidate(
            lever=lever, setting=setting, changes={}, parity=ParityClass.EXACT if self._kind.trains else None
        )

    def _result(
        self, folder: Path, first: Opened, every: Sequence[tuple[Candidate, Row]], choice: passes.Choice
    ) -> store.Result:
        guides, model = load(), workload_of(self._kind.model)
        data = self._journal.passes.values()
        dropped: dict[str, int] = {}
        for each in data:
            for reason, count in each.dropped.items():
                dropped[reason] = dropped.get(reason, 0) + count
        subject = store.Subject(card=first.card, driver=first.driver, torch=first.torch, model=self._kind.model)
        return store.Result(
            tune_id=folder.name,
            subject=subject,
            device_name=first.device_name,
            created_at=self._asked.created_at,
            duration_s=round(self._journal.elapsed_s, 1),
            rounds=sum(len(each.rounds) for each in data),
            dropped=dropped,
            rows=tuple(replace(row, claim=guide_says(guides, model, row, self._kind.baseline)) for _, row in every),
            chosen={**self._kind.baseline, **choice.changes},
            choice=choice.reason,
            decided=choice.decided,
            pareto=pareto_names([each for each, _ in every], [row for _, row in every], self._journal.opened),
        )


def _write_tuned(folder: Path, asked: Asked, result: store.Result) -> None:
    """Write the user's file with the chosen settings; each changed key says what was measured."""
    config = config_from_text(asked.file_text, "the configuration")
    own = config.train.model_dump()
    changes = {key: value for key, value in result.chosen.items() if own.get(key) != value}
    by_lever: dict[str, Row] = {}
    for row in result.rows:
        by_lever.setdefault(f"{row.lever}={row.setting}", row)
    notes = {}
    for key, value in changes.items():
        found = by_lever.get(f"{key}={str(value).lower() if isinstance(value, bool) else value}")
        told = f"tune {result.tune_id}"
        if found is not None and found.speed_ratio is not None:
            told += f": {found.speed_ratio:.3f} x the baseline's speed, {found.speed_low:.3f} to {found.speed_high:.3f}"
        elif key in levers.PLAIN:
            told += ": as the baseline"
        else:
            told += ": as it was measured"
        notes[key] = told
    replace_whole(folder / "tuned.yaml", tuned(asked.file_text, config, changes, notes))


def _asked(folder: Path) -> Asked:
    try:
        plain = json.loads((folder / _ASKED).read_text(encoding="utf-8"))
        return Asked(**{**plain, "wanted": tuple(plain["wanted"])})
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(f"{folder / _ASKED} cannot be read ({one_line(str(error))[:200]}); run `tune` anew") from error


def asked_of(
    config: Config,
    file_text: str,
    *,
    rehearse: bool,
    budget_s: float | None,
    wanted: Sequence[str],
    workload: str = "train",
) -> Asked:
    """Return what is kept of a command line.

    Raises:
        UsageError: A lever is named that there is none of, or this machine leaves a worker no memory.
    """
    if workload not in {"train", products.WORKLOAD}:
        raise UsageError(f"--workload {workload}: no levers are known of it; valid: train, {products.WORKLOAD}")
    if workload == "train":
        levers.chosen(levers.train_candidates(levers.baseline_of(config.train, on_card=True)), wanted)
    config_from_text(file_text, "the configuration")  # tuned.yaml is made of it without `--set`
    environment = in_rehearsal(config, None) if rehearse else on_this_machine(config)
    return Asked(
        config_text=dump_config(environment.config),
        file_text=file_text,
        device=environment.target.device,
        one_machine=environment.target.one_machine,
        rehearse=rehearse,
        workload=workload,
        budget_s=budget_s or (REHEARSAL_BUDGET_S if rehearse else BUDGET_S),
        wanted=tuple(wanted),
    )


def _with_room(spec: WorkerSpec) -> tuple[WorkerSpec, int]:
    """Return how many candidates may live at the same time, beside the baseline and its repetition, and their spec.

    On a card each keeps a context while it waits. What the card has beside one worker's budget pays for those; where
    that is not enough for the fewest arms, the budget does.
    """
    room = int(_HOST_SHARE * psutil.virtual_memory().available / _ARM_HOST_BYTES)
    if spec.device != "cuda":
        return spec, max(_FEWEST_AT_ONCE, min(_MOST_AT_ONCE, room - 2))
    beside = (spec.card_budget_bytes - spec.budget_bytes) // ASSUMED_CONTEXT_BYTES
    at_once = max(_FEWEST_AT_ONCE, min(_MOST_AT_ONCE, room - 2, beside - 1))
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
