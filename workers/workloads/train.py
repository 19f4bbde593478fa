"""The workload `train`: a step is an optimiser step, in as many parts as memory requires;
checkpoints keep the training across whatever ends its process.

Connects the training (`workers/training`), its checkpoints and its team with the engine. Computes
nothing itself, and decides neither sizes nor levels: the loop does.
"""

from __future__ import annotations

import gc
import importlib
import shutil
import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from pydantic import ValidationError

from workers import oom
from workers.elastic.loop import Loop
from workers.hf.folder import load_code
from workers.messages import BadInputError, Cause, IncompatibleError, Progress, TeamStatus
from workers.policy.base import Run, Stages
from workers.settings import Scalar, TeamSpec
from workers.training import earlier
from workers.training.checkpoints import FROM_HEAD, FROM_RUN, Checkpoints, read_number
from workers.training.errors import (
    NotFiniteError,
    NotLoadedError,
    TrainingError,
    UpdateInterruptedError,
)
from workers.training.host_memory import give_back
from workers.training.lora import import_peft
from workers.training.schedule import offered_micro_batches
from workers.training.settings import FOLDER_PRESETS, TrainSettings
from workers.training.tasks import find_task, refuse_without_data
from workers.training.trainer import Trainer
from workers.workloads.base import StepResult, Workload, WorkloadContext

if TYPE_CHECKING:
    from workers.team.place import TeamMember

#: A member of a team reads its orders after waiting this long for something to compute.
_TEAM_POLL_S: Final = 0.02

#: The reported speed is that of this many last seconds.
_SPEED_WINDOW_S: Final = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """What a training does to save memory in addition to smaller parts."""

    recomputes: bool = False
    """Whether all blocks are recomputed, if `train.recompute` is `auto`."""
    states_on_host_pct: int = 0
    """Per cent of the optimiser's states on the host, if `train.states_on_host` is `auto`."""

    @property
    def keeps(self) -> float:
        """The share of the bytes held between two parts that stays on the device: of weights, sums
        of gradients and two states, the states are half.
        """
        return 1.0 - self.states_on_host_pct / 200


def levels_of(settings: TrainSettings) -> list[Level]:
    """Return the levels that a training may use; each saves more memory than the one before.

    Smaller parts come first, then all blocks are recomputed, then the optimiser's states leave the
    device. In this order each is slower than the one before: parts of one sample took 16 % longer
    than parts of the whole batch (two CPU cores, three layers of width 64), and a recomputed
    forward pass takes a third of a step's time. The policy chooses the level by the memory that
    parts really take.
    """
    levels = [Level()]
    if settings.recompute == "auto":
        levels.append(Level(recomputes=True))
    if settings.states_on_host == "auto":
        levels.append(Level(recomputes=levels[-1].recomputes, states_on_host_pct=100))
    return levels


class Train(Workload):
    """One training for each slot; slots differ by their seeds."""

    def __init__(self, context: WorkloadContext) -> None:
        """Find the task. The model is made in the first step, where out-of-memory is handled.

        Raises:
            BadInputError: The section `train:` cannot be used, or names no task.
        """
        super().__init__(context)
        try:
            self._settings = TrainSettings.model_validate(dict(context.settings))
            self._task = find_task(self._settings, context.seed)
            refuse_without_data(self._task)
        except (ValidationError, TrainingError) as error:
            raise self._incompatible(error) from error
        self._team: TeamMember | None = None
        if context.team is not None:
            self._team = self._member(context.team)
        self._trainer: Trainer | None = None
        self._checkpoints: Checkpoints | None = None
        self._flop = 0.0
        """Floating-point operations of a sample, or of an item if lengths differ."""
        self._sha256: str | None = None
        self._reported_failure: str | None = None
        self._validated_step: int | None = None
        self._save_soon = False
        self._restored = False
        """Whether this process has loaded a checkpoint."""
        self._interrupted: str | None = None
        """Why the update in the last part was interrupted; `None`: it was not."""
        self._redone_steps = 0
        """Steps lost by going back to a checkpoint, and done again."""
        self._speed: deque[tuple[float, int, float]] = deque()
        """Monotonic seconds, and samples and items computed until then."""
        self._levels = levels_of(self._settings)
        self._batch_memory: Mapping[str, int] | None = None
        """At the last batch's end: samples of a part, recomputed blocks, states on the host."""
        self._part_memory: Mapping[str, int] | None = None
        """The same figures of the last part."""
        self._reported_memory: Mapping[str, int] | None = None
        self._computed = 0
        self._computed_items = 0.0
        self._rows_of_step = 0
        """Samples computed here since the last update."""

    @classmethod
    def prepare(cls, settings: Mapping[str, Scalar]) -> None:
        """Import the module of the task, and what torch imports in its first update."""
        importlib.import_module("torch._dynamo")
        preset, adapter = str(settings.get("preset")), settings.get("adapter", "none")
        with suppress(Exception):  # a failure is reported when task and model are made
            if preset in FOLDER_PRESETS:
                load_code(str(settings.get("model")))
            elif ":" in preset:
                importlib.import_module(preset.partition(":")[0])
            if adapter != "none" and "transformers" in sys.modules:
                import_peft()

    @property
    def finished(self) -> bool:  # type: ignore[override]
        """Whether all steps are done, and the last checkpoint is written or refused."""
        return self._sha256 is not None

    @property
    def save_due(self) -> bool:  # type: ignore[override]
        """Whether a requested checkpoint still waits for a moment between two optimiser steps, and
        such a moment may come.
        """
        if self._team is not None and self._team.lends:
            return self._team.save_due
        if not self._save_soon or self._trainer is None or self._checkpoints is None:
            return False
        return self._team is None or self._team.can_save(self._checkpoints.saved_step)

    @property
    def team(self) -> TeamStatus | None:  # type: ignore[override]
        """The status of this member in its team; `None`: it trains by itself."""
        return None if self._team is None else self._team.status()

    @property
    def waits_for(self) -> str:  # type: ignore[override]
        """Which missing member of its team holds up all steps, and what to type; empty: none."""
        return "" if self._team is None else self._team.waits_for

    @property
    def notice(self) -> str:  # type: ignore[override]
        """Why the last checkpoint failed, or what makes the result depend on memory."""
        failure = None if self._checkpoints is None else self._checkpoints.failure
        hazards = [] if self._trainer is None else self._trainer.hazards
        return failure or "; ".join(f"hazard: {each}" for each in hazards[:1])

    @property
    def saved(self) -> Path | None:  # type: ignore[override]
        """The newest checkpoint, if `train.checkpoints` is `head`."""
        if self._checkpoints is None or self._settings.checkpoints != "head":
            return None
        return self._checkpoints.good

    def stages(self) -> Stages:
        """Return the micro-batches, and for each level the share of memory that it keeps on the
        device. `workload.batch` has no effect.
        """
        batches = tuple(offered_micro_batches(self._settings))
        return Stages(batches=batches, keeps=tuple(level.keeps for level in self._levels))

    def run(self, loop: Loop[Run]) -> StepResult:
        """Compute an effective batch in as many parts as memory requires, and update the weights.

        Raises:
            IncompatibleError: The loss is not finite, or the task cannot be trained: repeating the
                step would not help.
            UpdateInterruptedError: The update was interrupted; the next step starts from the last
                checkpoint.
        """
        is_done, was_finished = False, self._trainer is not None and self._trainer.finished
        while not is_done:
            self._await_team()
            try:
                is_done = loop.run(partial(self._part, loop))
            except NotFiniteError as error:
                why = f"{self.context.slot}: {error}; {self._last_checkpoint_text()}"
                raise IncompatibleError(why, cause=Cause.NAN_LOSS) from error
            except TrainingError as error:
                raise self._incompatible(error) from error
            if self._interrupted is not None:
                # Outside the handler, so that the failed update holds no memory.
                interrupted, self._interrupted = self._interrupted, None
                raise UpdateInterruptedError(f"{interrupted}: {self._roll_back()}")
        if was_finished:
            return StepResult()
        trainer = self._open_trainer
        self._log_memory_move(loop.peak_bytes)
        rows, self._rows_of_step = self._rows_of_step, 0
        items = 1.0 if self._task.shorten is None else trainer.items_per_sample
        return StepResult(flop=self._flop * items * rows)

    def _await_team(self) -> None:
        """Wait until this member of a team has something to compute."""
        team, trainer = self._team, self._trainer
        if team is None or trainer is None or (trainer.finished and not team.is_needed):
            return
        team.obey(self.context.team_orders())
        while not team.wait(_TEAM_POLL_S):
            self.context.pause(tells=team.has_news)
            team.obey(self.context.team_orders())

    def _part(self, loop: Loop[Run], run: Run) -> bool:
        """Compute a part of at most `run.batch` samples; return whether it ended the batch."""
        level = self._levels[run.level]
        trainer = self._open(level)
        if trainer.finished and not self._lends:
            loop.was_partial()
            return True  # the work after the last step has failed, and is repeated
        if self._settings.states_on_host == "auto" and not self._lends:
            trainer.host_states.move(level.states_on_host_pct)
        try:
            level_of_part = trainer.most_level if level.recomputes else 0
            if self._team is None:
                part = trainer.micro_batch(run.batch, level_of_part)
            elif (shared := self._team.part(run.batch, level_of_part)) is not None:
                part = shared
            else:
                loop.was_partial()
                return False  # the work was withdrawn, or the training was only opened
        except UpdateInterruptedError as error:
            self._interrupted = str(error)
            return True
        self._part_memory = {
            "micro_batch": run.batch,
            "memory_level": part.level,
            "states_on_host_pct": trainer.host_states.share_pct,
        }
        self._computed += part.rows
        self._rows_of_step += part.rows
        self._computed_items += part.rows * trainer.items_per_sample
        if part.rows < run.batch:
            loop.was_partial()
        return part.updated

    def _log(self, name: str, **figures: Scalar) -> None:
        """Log an event of the training; after a restart its hazards are logged already."""
        if name != "hazard" or not self._restored:
            self.context.tell(name, **figures)

    def _log_memory_move(self, peak_bytes: int | None) -> None:
        """Log a change of the memory figures once it has lasted from one batch to the next."""
        before, self._batch_memory = self._batch_memory, self._part_memory
        if (
            self._batch_memory is None
            or self._batch_memory != before
            or self._batch_memory == self._reported_memory
        ):
            return
        if self._reported_memory is not None:
            self.context.tell("memory_moved", **self._batch_memory, peak_bytes=peak_bytes)
        self._reported_memory = self._batch_memory

    def attend(self) -> None:
        """Show the other member of a divided model that this slot is not held."""
        if self._team is not None:
            self._team.attend()

    def save(self) -> None:
        """Copy the state between two optimiser steps if a checkpoint is due.

        Wait until a requested one is written.
        """
        with nullcontext() if self._team is None else self._team.busy():
            self._save()
        if self._team is not None and self.finished:
            self._team.close()

    @property
    def _lends(self) -> bool:
        """Whether it only computes blocks for the member of its team that trains."""
        return self._team is not None and self._team.lends

    def _save(self) -> None:
        trainer, checkpoints = self._trainer, self._checkpoints
        if trainer is None or not trainer.has_state:
            return
        if self._team is not None and self._team.lends:
            if not self._team.is_needed:
                self._sha256 = trainer.weights_sha256()
            return
        if self._team is None or not self._team.is_computing:
            self._validate(trainer)
        is_requested = self._save_soon or (self._team is not None and self._team.wants_save)
        must_write = trainer.finished or is_requested
        if checkpoints is not None and must_write:
            checkpoints.wait()
            if checkpoints.saved_step == trainer.step and not trainer.finished:
                must_write = self._save_soon = False
        if checkpoints is not None and (must_write or checkpoints.due()):
            checkpoints.save(trainer.state(), trainer.step)
            if must_write:
                checkpoints.wait()
            if checkpoints.failure is not None and checkpoints.failure != self._reported_failure:
                self.context.tell("checkpoint_failed", reason=checkpoints.failure)
            self._reported_failure = checkpoints.failure
            self._save_soon = False
        if is_requested and self._team is not None:
            self._team.saved()
        if trainer.finished:
            self._sha256 = trainer.weights_sha256()

    def _validate(self, trainer: Trainer) -> None:
        """Evaluate the task and log its figures if that is due, and keep the best state."""
        step, every = trainer.step, self._settings.validate_every
        due = trainer.finished or (every is not None and step % every == 0)
        if not due or step == self._validated_step:
            return
        figures = trainer.evaluate()
        self._validated_step = step
        if not figures:
            return
        self.context.tell("evaluated", step=step, **figures)
        self.metrics = dict(figures)
        loss, best = figures.get("validation_loss"), trainer.course.best_loss
        if every is None or loss is None or (best is not None and loss >= best):
            return
        trainer.course.best_loss = loss
        if self._checkpoints is not None:
            self._checkpoints.wait()
            self._checkpoints.save(trainer.state(), step, best=figures)

    def save_soon(self) -> None:
        """Make the next `save` between two optimiser steps write a checkpoint, due or not."""
        self._save_soon = True
        if self._team is not None:
            self._team.save_soon()

    def release(self) -> None:
        """Drop model and state; the next step starts from the last checkpoint."""
        if self._team is not None:
            self._team.leave()
        if self._trainer is not None:
            self._trainer.close()
        self._trainer = None
        gc.collect()  # a model contains reference cycles
        give_back(self.context.device)

    def shed(self) -> None:
        """Keep the state: the memory of a failed step is freed with its frames."""

    def park(self) -> int:
        """Move the state to host memory; there is no state before the first step."""
        return 0 if self._trainer is None else self._trainer.park()

    def unpark(self) -> None:
        """Move the state back to the device."""
        if self._trainer is not None:
            self._trainer.unpark()

    def progress(self) -> Progress:
        """Return the progress and speed of the training."""
        saved = None if self._checkpoints is None else self._checkpoints.saved_step
        if self._trainer is None:
            return Progress(saved_step=saved, redone_steps=self._redone_steps)
        if self._lends:  # samples and weights are reported by the leader
            own = self._trainer.progress()
            return Progress(
                train_step=own.train_step,
                train_steps=own.train_steps,
                loss=own.loss,
                first_loss=own.first_loss,
            )
        samples_per_s, items_per_s = self._speeds()
        left = self._settings.batch * (self._trainer.steps - self._trainer.step)
        share = 1.0 if self._team is None else self._team.share
        return replace(
            self._trainer.progress(),
            redone_steps=self._redone_steps,
            saved_step=saved,
            samples_per_s=samples_per_s,
            tokens_per_s=items_per_s if self._task.items == "tokens" else None,
            eta_s=left * share / samples_per_s if samples_per_s else None,
            weights_sha256=self._sha256,
        )

    def _member(self, team: TeamSpec) -> TeamMember:
        """Join the team.

        Raises:
            IncompatibleError: The address of this member cannot be listened at.
        """
        from workers.team.layers import Leader, Lender  # noqa: PLC0415 - most trainings have no team
        from workers.team.member import DataMember  # noqa: PLC0415

        slot, tell = self.context.slot, self.context.tell
        try:
            if team.split == "data":
                return DataMember(team, slot, tell)
            return (Leader if slot == team.members[0] else Lender)(team, slot, tell)
        except OSError as error:
            raise IncompatibleError(
                f"{self.context.slot}: {team.listen} cannot be listened at for the others of the "
                f"team: {error.strerror}; name another port of this PC in cluster.yaml",
                cause=Cause.BAD_CONFIG,
            ) from error

    def _incompatible(self, error: Exception) -> BadInputError:
        is_code = isinstance(error, NotLoadedError)
        cause = Cause.BAD_CONFIG if is_code else Cause.EXCEPTION
        return BadInputError(f"{self.context.slot}: {error}", cause=cause)

    @property
    def _open_trainer(self) -> Trainer:
        """The training, which a part has opened."""
        assert self._trainer is not None  # noqa: S101 - as above
        return self._trainer

    def _open(self, level: Level) -> Trainer:
        """Return the training; open it first if necessary.

        A new one starts from the last good checkpoint.
        """
        if self._trainer is not None:
            return self._trainer
        settings = self._settings
        if settings.states_on_host == "auto":
            settings = settings.model_copy(update={"states_on_host": level.states_on_host_pct})
        trainer = Trainer(
            self._task, settings, self.context.device, self.context.seed, self._log,
            is_shared=self._team is not None and self._team.portion is None,
            portion=None if self._team is None else self._team.portion,
        )  # fmt: skip
        if self._lends:
            return self._share(trainer)
        if self.context.state_dir is not None:
            self._restore(trainer, self.context.state_dir)
        for sentence in self._task.notes:
            self._log("hazard", reason=sentence)
        self._count_operations(trainer)
        if settings.adapter != "none":
            trained, parameters = (
                sum(weight.numel() for weight in weights)
                for weights in (trainer.parameters, trainer.model.parameters())
            )
            self.context.tell(
                "adapter",
                kind=settings.adapter,
                trained_parameters=trained,
                parameters=parameters,
                trained_pct=100 * trained / parameters,
            )
        return self._share(trainer)

    def _share(self, trainer: Trainer) -> Trainer:
        """Keep this training, and share it with the team if there is one."""
        self._trainer = trainer
        if self._team is not None:
            self._team.open(trainer)
        return trainer

    def _count_operations(self, trainer: Trainer) -> None:
        """Count the operations of a sample; 0 if memory does not suffice: no block is recomputed
        for it, and a training that needs recomputation must train all the same.
        """
        try:
            self._flop, ran = trainer.operations()
        except Exception as error:
            failure = oom.classify(error)
            # torch asserts shapes when it counts an operator; that must not end a training.
            if not failure.is_out_of_memory and not isinstance(error, AssertionError):
                raise
            oom.drop_frames(error)
            self.context.tell("flop_unknown", reason=failure.text)
            return
        if ran:
            self.context.tell("attention", ran=ran)

    def _restore(self, trainer: Trainer, folder: Path) -> None:
        """Load the last good checkpoint; a new run discards all, and may begin by `train.start`."""
        begins = self._checkpoints is None and self.context.fresh
        if self._checkpoints is None:
            self._checkpoints = Checkpoints(
                folder, trainer.identity, save_every_s=self._settings.save_every_s
            )
        if self.context.checkpoint is not None:
            sent = folder / FROM_HEAD
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                shutil.copyfile(self.context.checkpoint, sent)
                if read_number(sent) == earlier.NUMBER:
                    sent.replace(folder / FROM_RUN)
            except OSError as failure:
                reason = f"the head's copy cannot be put into {folder}: {failure.strerror}"
                self.context.tell("checkpoint_refused", reason=reason)
        if begins:
            try:
                self._checkpoints.discard()
            except OSError as failure:
                reason = f"{folder} cannot be cleared: {failure.strerror}"
                self.context.tell("checkpoint_failed", reason=reason)
        elif (state := self._newest_state()) is not None:
            trainer.load(state)
            self._restored = True
            self.context.tell("restored", step=trainer.step)
            return
        if self._settings.start is not None:
            trainer.begin_with(folder / FROM_RUN)
            self.context.tell("began_with", run_and_slot=self._settings.start)

    def _roll_back(self) -> str:
        """Drop the training, whose next step loads the last state; return a text about it."""
        state = self._newest_state()
        step = 0 if state is None else int(state["course"]["step"])
        redone = self._open_trainer.step - step
        self._redone_steps += redone
        self.context.tell("rolled_back", step=step, redone_steps=redone)
        self.release()
        return f"the training went back to step {step}, and does {redone} steps again"

    def _newest_state(self) -> Mapping[str, Any] | None:
        """Return the newest copied state, or that of the newest good checkpoint: a process that has
        loaded a checkpoint and not saved since has no copy.
        """
        checkpoints = self._checkpoints
        if checkpoints is None or (copy := checkpoints.newest_copy()) is not None:
            return None if checkpoints is None else copy
        state, refused = checkpoints.load()
        for sentence in refused:
            self.context.tell("checkpoint_refused", reason=sentence)
        return state

    def _last_checkpoint_text(self) -> str:
        if self._checkpoints is not None:
            self._checkpoints.wait()  # a checkpoint that is being written is the last good one
        if self._checkpoints is None or self._checkpoints.saved_step is None:
            return "there is no checkpoint yet"
        step, folder = self._checkpoints.saved_step, self.context.state_dir
        return f"the last good checkpoint is of step {step}, in {folder}"

    def _speeds(self) -> tuple[float, float]:
        """Return samples and items per second over the last 20 s."""
        now_s = time.monotonic()
        self._speed.append((now_s, self._computed, self._computed_items))
        while len(self._speed) > 2 and now_s - self._speed[0][0] > _SPEED_WINDOW_S:
            self._speed.popleft()
        began_s, samples, items = self._speed[0]
        took_s = now_s - began_s
        if took_s <= 0:
            return 0.0, 0.0
        return (self._computed - samples) / took_s, (self._computed_items - items) / took_s
