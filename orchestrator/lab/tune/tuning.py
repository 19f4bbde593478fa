"""The verb `tune`: which levers, each against the user's own settings, and the files that stay.

    STATE/tunings/ID/tune.json     header and rows, as `tune --json` prints them
    STATE/tunings/ID/tuned.yaml    the user's file with the chosen settings
    STATE/tunings/ID/arms.log      what the processes printed

A result holds for one card, driver, torch and model. Whether it still helps another one is for the
reader to say.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

from orchestrator.config.load import config_from_text
from orchestrator.config.schema import Config
from orchestrator.core.placement import plan_slots
from orchestrator.errors import UsageError, one_line
from orchestrator.lab.tune import levers
from orchestrator.lab.tune.bench import ArmError, Bench
from orchestrator.lab.tune.trial import LeverVerdict, Trial, chosen_of
from orchestrator.lab.tune.tuned_yaml import tuned_yaml
from orchestrator.run.environment import in_rehearsal, on_this_machine
from orchestrator.view.phrases import counted
from orchestrator.view.tables import Column, Table, row_of
from orchestrator.view.terminal import plain_text, table_lines
from workers.files import replace_whole
from workers.learned_limits import default_path
from workers.settings import ASSUMED_CONTEXT_BYTES
from workers.training.settings import TrainSettings
from workers.tuning.messages import ArmSpec, Opened
from workers.units import MIB

#: The workload that is tuned where nothing is trained.
_MATMUL: Final = "matmul"

#: The length of a rehearsal that is given no budget.
_REHEARSAL_S: Final = 270.0

#: The baseline and a lever load torch, take their first steps and six rounds: half a minute.
_LEAST_S: Final = 60.0

#: Of the budget: no round begins later, and none of a single lever of a training.
_LAST: Final = 0.95
_LAST_OF_LEVERS: Final = 0.85

#: A lever that compiles gets so many times the time of another one.
_SLOW_WEIGHT: Final = 4.0

_COLUMNS: Final = (
    Column(key="name", title="lever", most_cells=40),
    Column(key="verdict", title="verdict"),
    Column(key="speed_ratio", title="speed", unit="x", numeric=True),
    Column(key="speed_low", title="interval"),
    Column(key="peak_bytes", title="peak", unit="MiB", numeric=True, priority=1),
    Column(key="rounds", title="rounds", numeric=True, priority=2),
    Column(key="samples_per_s", title="samples", unit="a second", numeric=True, priority=3),
    Column(key="host_bytes", title="host", unit="MiB", numeric=True, priority=4),
    Column(key="once_s", title="once", unit="s", numeric=True, priority=5),
)


class Tuning:
    """One tuning: what is tuned, then what was found."""

    def __init__(
        self,
        config: Config,
        file_text: str,
        *,
        rehearse: bool,
        budget_s: float | None,
        names: Sequence[str],
        workload: str = "train",
    ) -> None:
        """Take what a command line asks for, and make the folder. Nothing is measured yet.

        Args:
            config: The user's, with overrides.
            file_text: The user's file as it is, without overrides and scaling.
            rehearse: Whether it has the memory of a rehearsal's worker, and few levers.
            budget_s: How long it may take; `None`: as long as the configuration says.
            names: Of levers; without any, those of the configuration.
            workload: `train` or `matmul`.

        Raises:
            UsageError: A lever is named that there is none of, the budget ends before a lever can
                be judged, or this machine leaves a worker no memory.
        """
        if budget_s is not None and budget_s < _LEAST_S:
            raise UsageError(
                f"--budget {budget_s:g}s ends before any lever has had its rounds; the least is "
                f"{_LEAST_S:g}s"
            )
        if workload not in {"train", _MATMUL}:
            raise UsageError(
                f"--workload {workload}: no levers are known of it; valid: train, {_MATMUL}"
            )
        self._file = config_from_text(file_text, "the configuration")
        self._file_text, self._rules = file_text, config.tune
        environment = in_rehearsal(config) if rehearse else on_this_machine(config)
        config = environment.config
        spec = plan_slots(config, environment.target)[0].spec
        on_card = spec.device == "cuda"
        if on_card:  # the arm that waits keeps its context on the card
            room_bytes = spec.card_budget_bytes - ASSUMED_CONTEXT_BYTES
            spec = replace(spec, budget_bytes=max(1, min(spec.budget_bytes, room_bytes)))
        self.trains, where = workload == "train", "--levers"
        if self.trains:
            self._asked = config.train.model_dump()
            self._own = dict(self._asked)
            if rehearse and not on_card:
                # Without units for bf16 a step in it takes six times as long (measured).
                self._own["precision"] = "fp32"
            baseline = TrainSettings.model_validate(self._own)
            trials = levers.train_trials(baseline, on_card=on_card)
            work = replace(spec.workload, name=workload)
            if not names and self._rules.levers != "all":
                names, where = names_in(self._rules.levers), "tune.levers"
        else:
            self._asked = self._own = {"dtype": "fp32"}
            trials = levers.matmul_trials()
            work = replace(spec.workload, name=workload, **self._own)
        self._spec = replace(spec, duty=None, workload=work)
        self.trials = levers.named(trials, names, where)
        if rehearse and self.trains and not names:
            self.trials = levers.for_rehearsal(self.trials)
        usual_s = min(self._rules.budget_s, _REHEARSAL_S) if rehearse else self._rules.budget_s
        self._budget_s = budget_s or usual_s
        self._created_at, self._began_s = datetime.now(UTC), time.monotonic()
        tune_id = f"{self._created_at:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
        self.folder = default_path().parent / "tunings" / tune_id
        self.folder.mkdir(mode=0o700, parents=True)
        self.result: dict[str, Any] = {}
        """As `tune --json` prints it, once it has run."""

    def run(self, say: Callable[[str], None]) -> bool:
        """Measure, write the files, and return whether all of it was measured.

        Ctrl-C ends the measuring; what is known until then is the result. `say` is told each row.

        Raises:
            UsageError: The user's own settings cannot be measured here.
        """
        possible = [each for each in self.trials if each.verdict is not LeverVerdict.UNAVAILABLE]
        bench = Bench(self._arm, self._rules, self._budget_s, len(possible))
        is_whole = False
        try:
            opened = bench.baseline()
            weights = [_SLOW_WEIGHT if each.slow else 1.0 for each in possible]
            last = _LAST_OF_LEVERS if self.trains else _LAST
            for place, trial in enumerate(possible):
                say(self._measure(bench, trial, weights[place] / sum(weights[place:]), last))
            chosen = chosen_of(possible, self._rules)
            if len(chosen) > 1:
                whole = levers.together(chosen)
                self.trials.append(whole)
                say(self._measure(bench, whole, 1.0, _LAST))
                chosen = chosen if whole.gain(self._rules) else chosen[:1]
            is_whole = True
        except ArmError as error:
            raise UsageError(
                f"your settings cannot be measured here: {one_line(str(error))}; see "
                f"{self.folder / 'arms.log'}"
            ) from error
        except KeyboardInterrupt:
            if bench.opened is None:
                raise
            opened, chosen = bench.opened, chosen_of(possible, self._rules)[:1]
        finally:
            bench.close()
        self._write(opened, chosen, is_whole=is_whole)
        return is_whole

    def _arm(self, trial: Trial | None) -> ArmSpec:
        keys = self._own if trial is None else {**self._own, **trial.changes}
        slot = f"tune/{'baseline' if trial is None else trial.name}"
        spec, log = replace(self._spec, slot=slot), self.folder / "arms.log"
        if not self.trains:
            return ArmSpec(spec=spec, log=log)
        return ArmSpec(spec=spec, log=log, settings=keys, first_steps=self._rules.parity_steps)

    def _measure(self, bench: Bench, trial: Trial, share: float, last: float) -> str:
        """Measure a lever for a share of the time until `last`, itself a share of the budget;
        return a line that says so.
        """
        now_s, last_s = time.monotonic(), self._began_s + last * self._budget_s
        lost = None
        try:
            if now_s < last_s:
                lost = bench.measure(trial, now_s + share * (last_s - now_s), last_s)
        finally:  # what was measured before Ctrl-C counts
            if lost or trial.peak_bytes is not None:
                trial.judge(self._rules, lost, in_fp32=self._own.get("precision") == "fp32")
        left_s = max(0.0, last_s - time.monotonic())
        return f"{trial.name}: {trial.verdict}, {left_s:.0f} s left"

    def _write(self, opened: Opened, chosen: Sequence[Trial], *, is_whole: bool) -> None:
        names = ", ".join(each.name for each in chosen) or "your own settings stay"
        changes = {key: value for each in chosen for key, value in each.changes.items()}
        unknown = [each for each in self.trials if each.verdict is LeverVerdict.TOO_FEW_ROUNDS]
        self.result = {
            "schema": 3,
            "tune_id": self.folder.name,
            # What it holds for.
            "subject": {
                "card": opened.card,
                "driver": opened.driver,
                "torch": opened.torch,
                "model": self._own["preset"] if self.trains else _MATMUL,
            },
            "device_name": opened.device_name,
            "created_at": self._created_at.isoformat(timespec="seconds"),
            "duration_s": round(time.monotonic() - self._began_s, 1),
            "rounds": sum(trial.rounds for trial in self.trials),
            "rows": [trial.to_json() for trial in self.trials],
            "chosen": {**self._asked, **changes},
            "choice": f"Chosen for {self._rules.objective}: {names}",
            # Whether every lever that could have been chosen was measured well enough to tell.
            "decided": is_whole and not unknown,
        }
        replace_whole(self.folder / "tune.json", self.json_text())
        if self.trains:
            replace_whole(self.folder / "tuned.yaml", self._tuned_yaml(chosen))

    def _tuned_yaml(self, chosen: Sequence[Trial]) -> str:
        """Return the user's file with what was measured and chosen, and what each key brings."""
        written = self._file.train.model_dump()
        changes = {key: value for key, value in self._asked.items() if written.get(key) != value}
        notes = dict.fromkeys(changes, "as it was measured")
        for trial in chosen:
            changes |= trial.changes
            note = (
                f"{trial.speed_ratio:.3f} x the speed ({trial.speed_low:.3f} to "
                f"{trial.speed_high:.3f}), {(trial.peak_delta_bytes or 0) / MIB:+.1f} MiB peak memory"
            )
            notes |= dict.fromkeys(trial.changes, note)
        notes = {key: f"tune {self.folder.name}: {note}" for key, note in notes.items()}
        return tuned_yaml(self._file_text, self._file, changes, notes)

    def json_text(self) -> str:
        """Return the result as `tune --json` prints it."""
        return json.dumps(self.result, indent=2, allow_nan=False)

    def text(self, width: int | None) -> str:
        """Return what people read: the rows, then their reasons, then what was chosen.

        `width`: columns of the terminal; `None`: there is none, and no column is left out.
        """
        result = self.result
        head = (
            f"Tuning {result['tune_id']}: {result['subject']['model']} on "
            f"{result['device_name']}; {counted(result['rounds'], 'round')} in "
            f"{result['duration_s']:.0f} s"
        )
        lines = plain_text(table_lines(tuning_table(self.trials), width))
        text = f"{head}\n\n{lines}\n\n{result['choice']}"
        if self.trains:
            text += f"\nYour file with these settings: {self.folder / 'tuned.yaml'}"
        return text


def names_in(text: str) -> list[str]:
    """Return the names in a text such as `precision, optimizer=adamw-fused`."""
    return [name.strip() for name in text.split(",") if name.strip()]


def tuning_table(trials: Sequence[Trial]) -> Table:
    """Return the table of a result: what helps first, of equal verdicts the fastest first."""
    order = list(LeverVerdict)
    ordered = sorted(
        trials, key=lambda trial: (order.index(trial.verdict), -(trial.speed_ratio or 0.0))
    )
    rows = []
    for trial in ordered:
        texts = {
            "speed_ratio": _text("{:.3f}", trial.speed_ratio),
            "speed_low": _text("{:.3f} to {:.3f}", trial.speed_low, trial.speed_high),
            "peak_bytes": _mib(trial.peak_bytes, trial.peak_delta_bytes),
            "samples_per_s": _text("{:.4g}", trial.samples_per_s),
            "host_bytes": _mib(trial.host_bytes, trial.host_delta_bytes),
            "once_s": _text("{:.1f}", trial.once_s),
        }
        values = {"name": trial.name, **trial.to_json()}
        rows.append(row_of(_COLUMNS, trial.name, values, texts, reason=trial.reason))
    return Table(name="tuning", columns=_COLUMNS, rows=tuple(rows))


def _mib(size_bytes: int | None, more_bytes: int | None) -> str | None:
    """Return a size with its difference to the baseline's, such as `24.7 (-1.5)`."""
    sizes = (None if each is None else each / MIB for each in (size_bytes, more_bytes))
    return _text("{:.1f} ({:+.1f})", *sizes)


def _text(form: str, *values: float | None) -> str | None:
    return None if None in values else form.format(*values)
