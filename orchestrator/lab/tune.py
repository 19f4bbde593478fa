"""The verb `tune`: measures each lever against the user's own settings, in alternating turns.

    STATE/tunings/ID/tune.json     header and rows, as `tune --json` prints them
    STATE/tunings/ID/tuned.yaml    the configuration with the settings that help
    STATE/tunings/ID/arms.log      the output of the processes

The process of the baseline lives for the whole tuning, the process of a lever for its rounds. If a
lever's process refuses, dies or hangs, only this lever is lost. A result is valid for one card,
driver, torch and model. Decides no verdict (`levers`).
"""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from orchestrator.config.load import dump_config
from orchestrator.config.schema import Config
from orchestrator.config.team import without_team
from orchestrator.core.placement import plan_slots
from orchestrator.errors import UsageError, one_line
from orchestrator.lab import levers
from orchestrator.lab.levers import LEAST_ROUNDS, LeverVerdict, Trial, chosen_of
from orchestrator.record.summary import summary_text
from orchestrator.run.environment import in_rehearsal, on_this_machine
from workers.files import replace_whole
from workers.learned_limits import default_path
from workers.settings import ASSUMED_CONTEXT_BYTES, WorkerSpec
from workers.tuning.messages import Refused, Turn, fork_context, run_arm
from workers.units import MIB

#: Default budget of a tuning, and of one with `--rehearse`.
_USUAL_S: Final = 900.0
_REHEARSAL_S: Final = 270.0

#: Time for a process to end before it is killed.
_END_S: Final = 5.0

#: Longest wait for an answer of an arm; the longest measured compilation took 170 s.
_PATIENCE_S: Final = 300.0

#: Short, because on a busy machine ratios of turns of 2.5 s scattered twice as far as ratios of
#: turns of 0.5 s (measured).
_TURN_S: Final = 0.3

#: After this many rounds with 5 % of noise, the interval extends 1 % to either side.
_MOST_ROUNDS: Final = 120


class ArmError(Exception):
    """An arm has refused, died, or not answered."""


class _Arm:
    """One process, or several that work at the same time."""

    def __init__(self, spec: WorkerSpec, log: Path, copies: int) -> None:
        context = fork_context()
        self._members = []
        for _ in range(copies):
            ours, theirs = context.Pipe()
            # Not a daemon: daemons may have no children, but a data loader starts some. The process
            # ends when its connection is closed.
            process = context.Process(target=run_arm, args=(theirs, spec, log), name=spec.slot)
            process.start()
            theirs.close()
            self._members.append((ours, process))

    def turn(self) -> Turn:
        """Make all processes work for one turn at the same time; add their speeds and memory.

        `ArmError`: a process cannot do so, or has ended.
        """
        turns: list[Turn] = []
        for connection, _ in self._members:
            with suppress(
                BrokenPipeError, ConnectionResetError
            ):  # its last answer can still be received
                connection.send(_TURN_S)
        for connection, process in self._members:
            try:
                if not connection.poll(_PATIENCE_S):
                    raise ArmError(f"it gave no answer for {_PATIENCE_S:.0f} s")
                answer = connection.recv()
            except (EOFError, ConnectionResetError) as error:
                process.join(_END_S)
                code = process.exitcode or 0
                how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                raise ArmError(f"its process was ended by {how}") from error
            if isinstance(answer, Refused):
                raise ArmError(answer.reason)
            turns.append(answer)
        speed = sum(each.speed for each in turns)
        return replace(turns[0], speed=speed, peak_bytes=sum(each.peak_bytes for each in turns))

    def close(self) -> None:
        """Close the connections, so that processes end after their turn; kill those that do not."""
        for connection, _ in self._members:
            connection.close()
        for _, process in self._members:
            process.join(_END_S)
            if process.is_alive():
                process.kill()
                process.join(_END_S)


class Tuning:
    """One tuning, from the trials to the result."""

    def __init__(
        self,
        config: Config,
        *,
        rehearse: bool,
        budget_s: float | None,
        names: Sequence[str],
        workload: str = "train",
    ) -> None:
        """Prepare a tuning and create its folder. Nothing is measured yet.

        With `rehearse`, the worker has the memory of a rehearsal, and there are few levers. Without
        `budget_s` the default applies; without `names`, all levers are measured. `UsageError`: a
        name matches no lever, or this machine has no memory for a worker.
        """
        if workload not in {"train", "matmul"}:
            raise UsageError(f"--workload {workload} has no levers; valid: train, matmul")
        self._config = config
        environment = (in_rehearsal if rehearse else on_this_machine)(without_team(config))
        spec = plan_slots(environment.config, environment.target)[0].spec
        on_card = spec.device == "cuda"
        if on_card:  # the waiting arm keeps its CUDA context on the card
            room_bytes = spec.card_budget_bytes - ASSUMED_CONTEXT_BYTES
            spec = replace(spec, budget_bytes=max(1, min(spec.budget_bytes, room_bytes)))
        self.trains, train = workload == "train", environment.config.train
        if rehearse and not on_card:
            # On a CPU without bf16 units a step in bf16 takes six times as long (measured).
            train = train.model_copy(update={"precision": "fp32"})
        self._own = train.model_dump()
        work = replace(spec.workload, name=workload)
        work = work if self.trains else replace(work, dtype="fp32")
        self._spec = replace(spec, duty=None, workload=work)
        several = [Trial(lever="workers", setting=str(n), changes={}, copies=n) for n in (2, 3)]
        known = levers.train_trials(train, on_card=on_card) if self.trains else several
        self.trials = levers.named(known, names)
        if rehearse and self.trains and not names:
            self.trials = levers.for_rehearsal(self.trials)
        self._began_s = time.monotonic()
        budget_s = budget_s or (_REHEARSAL_S if rehearse else _USUAL_S)
        # The levers share the first 85 %; the rest is for levers that still lack rounds.
        self._shared_s, self._last_s = (self._began_s + part * budget_s for part in (0.85, 1.0))
        tune_id = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
        self.folder = default_path().parent / "tunings" / tune_id
        self.folder.mkdir(mode=0o700, parents=True)
        self._arm: _Arm | None = None
        self._turns: list[Turn] = []
        """The turns of the present process of the baseline."""
        self.result: dict[str, Any] = {}
        """The object of `tune --json`, after `run`."""

    def run(self, say: Callable[[str], None]) -> bool:
        """Measure, write the files, and return whether all levers were measured.

        Ctrl-C ends the measurement; rounds until then count. `say` gets a line for each lever.
        `UsageError`: the user's own settings cannot be measured here.
        """
        possible = [each for each in self.trials if each.verdict is not LeverVerdict.UNAVAILABLE]
        is_whole = False
        try:
            subject = self._baseline().subject
            for place, trial in enumerate(possible):
                self._measure(trial, 1 / (len(possible) - place))
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
            self._close()
        self._write(subject, chosen_of(possible), is_whole=is_whole)
        return is_whole

    def _arm_of(self, trial: Trial | None) -> _Arm:
        """Start the arm of a lever, or of the baseline."""
        name, changes = ("baseline", {}) if trial is None else (trial.name, trial.changes)
        settings = {**self._own, **changes} if self.trains else {}
        workload = replace(self._spec.workload, settings=settings)
        spec = replace(self._spec, slot=f"tune/{name}", workload=workload)
        return _Arm(spec, self.folder / "arms.log", 1 if trial is None else trial.copies)

    def _baseline(self) -> Turn:
        """Run and return a turn of the baseline; start its process if there is none."""
        try:
            self._arm = self._arm or self._arm_of(None)
            self._turns.append(self._arm.turn())
            return self._turns[-1]
        except ArmError as error:
            self._close()
            raise ArmError(f"the baseline: {error}") from error

    def _close(self) -> None:
        if self._arm is not None:
            self._arm.close()
        self._arm = None
        self._turns.clear()

    def _measure(self, trial: Trial, share: float) -> None:
        """Measure a lever for a share of the remaining time, and judge it.

        The measurements never decide when the rounds end: stopping as soon as the interval looks
        good would lower its probability below 95 %.
        """
        lost, now_s = None, time.monotonic()
        until_s = now_s + share * (self._shared_s - now_s)
        if now_s >= self._last_s:
            return
        arm = self._arm_of(trial)
        try:
            while trial.rounds < _MOST_ROUNDS and time.monotonic() < (
                until_s if trial.rounds >= LEAST_ROUNDS else self._last_s
            ):
                # The order of the two alternates.
                if trial.rounds % 2:
                    own, other = arm.turn(), self._baseline()
                else:
                    other, own = self._baseline(), arm.turn()
                trial.add_round(own, other, self._turns[trial.rounds])
        except ArmError as error:
            lost = str(error)
        finally:  # rounds before Ctrl-C count
            arm.close()
            if lost or trial.rounds:
                trial.judge(lost, in_fp32=self._own["precision"] == "fp32")

    def _write(
        self, subject: Mapping[str, str | None], chosen: Sequence[Trial], *, is_whole: bool
    ) -> None:
        changes = {key: value for each in chosen for key, value in each.changes.items()}
        self.result = {
            "schema": 4,
            "tune_id": self.folder.name,
            # The card, driver and torch for which the result is valid.
            **subject,
            "model": self._own["preset"] if self.trains else "matmul",
            "duration_s": round(time.monotonic() - self._began_s, 1),
            "whole": is_whole,
            "rows": [trial.to_json() for trial in self.trials],
            "chosen": changes,
        }
        replace_whole(self.folder / "tune.json", summary_text(self.result))
        if self.trains:
            train = self._config.train.model_copy(update=changes)
            tuned = dump_config(self._config.model_copy(update={"train": train}))
            notes = "".join(f"# {trial.name}: {_figures(trial)}\n" for trial in chosen)
            replace_whole(self.folder / "tuned.yaml", notes + tuned)

    def text(self) -> str:
        """Return the result for people: the rows, the best verdict first, then the choice."""
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


def _figures(trial: Trial) -> str:
    """Return the measurements of a lever as text, with the reason of its verdict if it has one."""
    if trial.speed_low is None:
        return trial.reason
    between = f"({trial.speed_low:.3f} to {trial.speed_high:.3f})"
    delta_mib = (trial.peak_bytes - trial.baseline_peak_bytes) / MIB
    peak = f"peak {trial.peak_bytes / MIB:.1f} MiB ({delta_mib:+.1f})"
    speed = f"{trial.speed_ratio:.3f} x the speed {between}, {peak}"
    return "; ".join(filter(None, (speed, trial.reason)))
