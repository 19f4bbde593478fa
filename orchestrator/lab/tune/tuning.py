"""The verb `tune`: which levers, each against the user's own settings, and the files that stay.

    STATE/tunings/ID/tune.json     header and rows, as `tune --json` prints them
    STATE/tunings/ID/tuned.yaml    the configuration with the settings that help
    STATE/tunings/ID/arms.log      what the processes printed

A result holds for one card, driver, torch and model. Whether it still helps another one is for the
reader to say.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

from orchestrator.config.load import dump_config
from orchestrator.config.schema import Config
from orchestrator.core.placement import plan_slots
from orchestrator.errors import UsageError, one_line
from orchestrator.lab.tune import levers
from orchestrator.lab.tune.bench import ArmError, Bench
from orchestrator.lab.tune.trial import LeverVerdict, Trial, chosen_of
from orchestrator.run.environment import in_rehearsal, on_this_machine
from workers.files import replace_whole
from workers.learned_limits import default_path
from workers.settings import ASSUMED_CONTEXT_BYTES
from workers.tuning.messages import ArmSpec
from workers.units import MIB

#: The workload that is tuned where nothing is trained.
_MATMUL: Final = "matmul"

#: How long a tuning takes that is given no budget, and a rehearsal of one.
_USUAL_S: Final = 900.0
_REHEARSAL_S: Final = 270.0

#: The baseline and a lever load torch, take their first steps and six rounds: half a minute.
_LEAST_S: Final = 60.0

#: Of the budget: no round begins later.
_LAST: Final = 0.95


class Tuning:
    """One tuning: what is tuned, then what was found."""

    def __init__(
        self,
        config: Config,
        *,
        rehearse: bool,
        budget_s: float | None,
        names: Sequence[str],
        workload: str = "train",
    ) -> None:
        """Take what a command line asks for, and make the folder. Nothing is measured yet.

        Args:
            config: The user's, with overrides.
            rehearse: Whether it has the memory of a rehearsal's worker, and few levers.
            budget_s: How long it may take; `None`: as long as is usual.
            names: Of levers; without any, all.
            workload: `train` or `matmul`.

        Raises:
            UsageError: A lever is named that there is none of, the budget ends before a lever can
                be judged, or this machine leaves a worker no memory.
        """
        budget_s = budget_s or (_REHEARSAL_S if rehearse else _USUAL_S)
        if budget_s < _LEAST_S:
            raise UsageError(
                f"--budget {budget_s:g}s ends before any lever has had its rounds; the least is "
                f"{_LEAST_S:g}s"
            )
        if workload not in {"train", _MATMUL}:
            raise UsageError(
                f"--workload {workload}: no levers are known of it; valid: train, {_MATMUL}"
            )
        self._config = config
        environment = in_rehearsal(config, None) if rehearse else on_this_machine(config)
        spec = plan_slots(environment.config, environment.target)[0].spec
        on_card = spec.device == "cuda"
        if on_card:  # the arm that waits keeps its context on the card
            room_bytes = spec.card_budget_bytes - ASSUMED_CONTEXT_BYTES
            spec = replace(spec, budget_bytes=max(1, min(spec.budget_bytes, room_bytes)))
        self.trains, train = workload == "train", environment.config.train
        if rehearse and not on_card:
            # Without units for bf16 a step in it takes six times as long (measured).
            train = train.model_copy(update={"precision": "fp32"})
        self._own = train.model_dump()
        work = replace(spec.workload, name=workload)
        if not self.trains:
            work = replace(work, dtype="fp32")
        self._spec = replace(spec, duty=None, workload=work)
        known = levers.train_trials(train, on_card=on_card) if self.trains else None
        self.trials = levers.named(known or levers.matmul_trials(), names)
        if rehearse and self.trains and not names:
            self.trials = levers.for_rehearsal(self.trials)
        self._began_s = time.monotonic()
        self._last_s = self._began_s + _LAST * budget_s
        tune_id = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
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
        bench, is_whole = Bench(self._arm), False
        try:
            subject = bench.baseline().subject
            for place, trial in enumerate(possible):
                self._measure(bench, trial, 1 / (len(possible) - place))
                left_s = max(0.0, self._last_s - time.monotonic())
                say(f"{trial.name}: {trial.verdict}, {left_s:.0f} s left")
            is_whole = True
        except ArmError as error:
            raise UsageError(
                f"your settings cannot be measured here: {one_line(str(error))}; see "
                f"{self.folder / 'arms.log'}"
            ) from error
        except KeyboardInterrupt:
            if not any(trial.rounds for trial in possible):
                raise
        finally:
            bench.close()
        self._write(subject, chosen_of(possible), is_whole=is_whole)
        return is_whole

    def _arm(self, trial: Trial | None) -> ArmSpec:
        slot = f"tune/{'baseline' if trial is None else trial.name}"
        spec, log = replace(self._spec, slot=slot), self.folder / "arms.log"
        if not self.trains:
            return ArmSpec(spec=spec, log=log)
        keys = self._own if trial is None else {**self._own, **trial.changes}
        return ArmSpec(spec=spec, log=log, settings=keys)

    def _measure(self, bench: Bench, trial: Trial, share: float) -> None:
        """Measure a lever for a share of the time that is left."""
        now_s, lost = time.monotonic(), None
        if now_s >= self._last_s:
            return
        try:
            bench.measure(trial, now_s + share * (self._last_s - now_s), self._last_s)
        except ArmError as error:
            lost = str(error)
        finally:  # what was measured before Ctrl-C counts
            if lost or trial.rounds:
                trial.judge(lost, in_fp32=self._own["precision"] == "fp32")

    def _write(
        self, subject: Mapping[str, str | None], chosen: Sequence[Trial], *, is_whole: bool
    ) -> None:
        changes = {key: value for each in chosen for key, value in each.changes.items()}
        self.result = {
            "schema": 4,
            "tune_id": self.folder.name,
            # What it holds for.
            **subject,
            "model": self._own["preset"] if self.trains else _MATMUL,
            "duration_s": round(time.monotonic() - self._began_s, 1),
            "whole": is_whole,
            "rows": [trial.to_json() for trial in self.trials],
            "chosen": changes,
        }
        replace_whole(self.folder / "tune.json", self.json_text())
        if self.trains:
            train = self._config.train.model_copy(update=changes)
            tuned = dump_config(self._config.model_copy(update={"train": train}))
            notes = "".join(f"# {trial.name}: {_figures(trial)}\n" for trial in chosen)
            replace_whole(self.folder / "tuned.yaml", notes + tuned)

    def json_text(self) -> str:
        """Return the result as `tune --json` prints it."""
        return json.dumps(self.result, indent=2, allow_nan=False)

    def text(self) -> str:
        """Return what people read: the rows, what helps first, then what was chosen."""
        head = "Tuning {tune_id}: {model} on {device}, {duration_s:.0f} s".format_map(self.result)
        order = list(LeverVerdict)
        rows = sorted(
            self.trials, key=lambda row: (order.index(row.verdict), -(row.speed_ratio or 0))
        )
        lines = [head, "", *(f"{row.verdict:14}  {row.name}: {_figures(row)}" for row in rows)]
        if self.trains:
            chosen = ", ".join(f"{key} {value}" for key, value in self.result["chosen"].items())
            lines += ["", f"Chosen: {chosen or 'your own settings stay'}"]
            lines += [f"Your configuration with these settings: {self.folder / 'tuned.yaml'}"]
        return "\n".join(lines)


def names_in(text: str) -> list[str]:
    """Return the names in a text such as `precision, optimizer=adamw-fused`."""
    return [name.strip() for name in text.split(",") if name.strip()]


def _figures(trial: Trial) -> str:
    """Return what was measured of a lever, and the reason of its verdict if that has one."""
    words = [trial.reason]
    if trial.speed_low is not None:
        speed = (
            f"{trial.speed_ratio:.3f} x the speed ({trial.speed_low:.3f} to {trial.speed_high:.3f})"
        )
        delta_bytes = trial.peak_bytes - trial.baseline_peak_bytes
        words = [
            f"{speed}, peak {trial.peak_bytes / MIB:.1f} MiB ({delta_bytes / MIB:+.1f})",
            *words,
        ]
    return "; ".join(filter(None, words))
