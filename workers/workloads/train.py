"""The workload `train`: a step is one part of an effective batch, and what is trained survives
whatever ends it.

Puts together the training (`workers/training`), its checkpoints, and what the engine asks of a
workload. Computes nothing itself, and decides neither sizes nor levels.
"""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from workers.messages import IncompatibleError, Progress
from workers.policy.base import Rung
from workers.training.checkpoints.store import FROM_HEAD, Checkpoints
from workers.training.errors import NotFiniteError, TrainingError, UpdateInterruptedError
from workers.training.feed import host_share
from workers.training.hazards import hazards
from workers.training.host_memory import give_back
from workers.training.memory_plan import MemoryPlanner
from workers.training.memory_prediction import Prediction
from workers.training.settings import PRESETS, TrainSettings
from workers.training.speeds import Point
from workers.training.staircase import Staircase, planned, unplanned
from workers.training.step_profile import StepProfile
from workers.training.tasks import find_task
from workers.training.trainer import Trainer
from workers.workloads.base import StepResult, Workload, WorkloadContext

#: The speed that is told is that of the last so many seconds.
_SPEED_WINDOW_S: Final = 20.0


class Train(Workload):
    """One training for each slot; the seed makes each a different one."""

    def __init__(self, context: WorkloadContext) -> None:
        """Find what is trained. The model is made by the first step, where running out of memory is
        survived.

        Raises:
            IncompatibleError: The section `train:` cannot be used, or names no task.
        """
        super().__init__(context)
        try:
            self._settings = TrainSettings.model_validate(dict(context.settings))
            self._task = find_task(self._settings, context.seed)
        except (ValidationError, TrainingError) as error:
            raise IncompatibleError(f"{context.slot}: {error}") from error
        self._trainer: Trainer | None = None
        self._checkpoints: Checkpoints | None = None
        self._level = 0
        self._flop_per_unit = 0.0
        self._sha256: str | None = None
        self._told_failure: str | None = None
        self._save_soon = False
        self._prediction: Prediction | None = None
        self._speed: deque[tuple[float, int, float]] = deque()
        """Monotonic seconds, and samples and items computed until then."""
        self._staircase: Staircase | None = None
        self._point: Point | None = None
        """Of the last step, and whether it ended an optimiser step."""
        self._updated = False
        self._computed = 0
        self._computed_items = 0.0
        # Not again after a process that may have died of it: under a small cap of host memory the
        # profiler can.
        steps = self._settings.profile if context.fresh else 0
        self._profile = StepProfile(steps, context.device, context.state_dir)

    @property
    def finished(self) -> bool:  # type: ignore[override]
        """Whether all steps are done, and the last checkpoint is written or refused."""
        return self._sha256 is not None

    @property
    def save_due(self) -> bool:  # type: ignore[override]
        """Whether a checkpoint was asked for, and there was no moment between two optimiser steps
        since.
        """
        return self._save_soon and self._trainer is not None and self._checkpoints is not None

    @property
    def notice(self) -> str:  # type: ignore[override]
        """What went wrong with the last checkpoint."""
        return (self._checkpoints.report.failure if self._checkpoints is not None else None) or ""

    @property
    def saved(self) -> Path | None:  # type: ignore[override]
        """The newest checkpoint, where `train.checkpoints` is `head`."""
        if self._checkpoints is None or self._settings.checkpoints != "head":
            return None
        return self._checkpoints.newest_file()

    def rungs(self, batch: int) -> Sequence[Rung]:
        """Offer micro-batches, recomputed blocks and states on the host.

        `workload.batch` has no say.
        """
        del batch
        settings, on_card = self._settings, self.context.device.type == "cuda"
        try:
            planner = MemoryPlanner(self._task, settings, on_card=on_card)
            self._staircase = planned(planner, settings, host_share(on_card=on_card).ram_bytes)
        except Exception as error:  # noqa: BLE001 - a user's model may do what tensors without data cannot
            self.context.tell("not_planned", reason=f"{type(error).__name__}: {error}")
            self._staircase = unplanned(settings)
        else:
            self._prediction = Prediction(planner)
        return self._staircase.rungs

    def reordered(self) -> Sequence[Rung] | None:
        """Offer other rungs where measured speeds say so."""
        return None if self._staircase is None else self._staircase.reordered()

    def set_level(self, level: int) -> None:
        """Take the number of blocks that the next step recomputes, and the states that are on the
        host.
        """
        self._level = level

    def step(self, size: int, batch: int) -> StepResult:
        """Compute a part of at most `batch` samples, and update the weights after the last one of
        an effective batch.

        Raises:
            IncompatibleError: The loss is not finite, or the task cannot be trained: no other step
                would do better.
            UpdateInterruptedError: The update was cut off; the training went back to its last
                checkpoint.
        """
        del size
        try:
            trainer = self._opened()
        except TrainingError as error:
            raise IncompatibleError(f"{self.context.slot}: {error}") from error
        try:
            if trainer.finished:
                return StepResult()  # what follows the last step has failed, and comes again
            self._begin_profile(trainer)
            point = self._point = Point.of(batch, self._level)
            if (
                self._settings.states_on_host == "auto"
                and point.share_pct != trainer.host_states.share_pct
            ):
                trainer.host_states.hold(point.share_pct)
            part = trainer.micro_batch(batch, point.level)
        except NotFiniteError as error:
            raise IncompatibleError(f"{self.context.slot}: {error}; {self._last_good()}") from error
        except UpdateInterruptedError as error:
            sentence = f"{error}: {self._rolled_back(trainer)}"
        except TrainingError as error:
            raise IncompatibleError(f"{self.context.slot}: {error}") from error
        else:
            if self._prediction is not None:
                self._prediction.note(batch, part, trainer.host_states.share_pct)
            for name, figures in trainer.news():
                self.context.tell(name, **figures)
            self._computed += part.rows
            self._computed_items += part.rows * trainer.items_per_sample
            self._updated = part.updated
            return StepResult(
                flop=self._flop_per_unit * self._units_per_sample(trainer) * part.rows,
                partial=part.rows < min(batch, self._settings.batch),
            )
        raise UpdateInterruptedError(sentence)

    def measured(self, peak_bytes: int, seconds: float) -> None:
        """Tell once what the plan of memory says and what steps really take.

        Tell each move of memory.
        """
        if self._staircase is not None and self._point is not None:
            moved = self._staircase.note(self._point, seconds, peak_bytes, updated=self._updated)
            if moved is not None:
                self.context.tell("memory_moved", **moved)
        if self._prediction is not None and self._prediction.measured(peak_bytes):
            prediction, self._prediction = self._prediction, None
            self.context.tell("memory_predicted", **prediction.told())

    def save(self) -> None:
        """Copy the state between two optimiser steps if a checkpoint is due.

        Wait for one that was asked for.
        """
        trainer, checkpoints = self._trainer, self._checkpoints
        if trainer is None or not trainer.at_boundary:
            return
        self._end_profile(trainer)
        waits = trainer.finished or self._save_soon
        if checkpoints is not None and (waits or checkpoints.due()):
            if waits:
                checkpoints.wait()
            checkpoints.save(trainer.state(), trainer.step)
            if waits:
                checkpoints.wait()
            self._tell_failure(checkpoints)
            self._save_soon = False
        if trainer.finished:
            if figures := trainer.evaluate():
                self.context.tell("evaluated", step=trainer.step, **figures)
            self._sha256 = trainer.weights_sha256()

    def save_soon(self) -> None:
        """Have the next `save` between two optimiser steps not wait until a checkpoint is due."""
        self._save_soon = True

    def release(self) -> None:
        """Drop model and state; the next step goes on from the last checkpoint."""
        if self._trainer is not None:
            self._trainer.close()
        self._trainer = None
        gc.collect()  # a model refers to itself
        give_back(self.context.device)
        try:
            self._profile.abandon()
        except Exception as error:  # noqa: BLE001 - whatever the profiler raises, the training goes on
            self.context.tell("profile_failed", reason=f"{type(error).__name__}: {error}")

    def shed(self) -> None:
        """Keep the state: what a failed step has left is gone with its frames."""

    def park(self) -> int:
        """Move the state to host memory; there is none before the first step."""
        return 0 if self._trainer is None else self._trainer.park()

    def unpark(self) -> None:
        """Move the state back to the device."""
        if self._trainer is not None:
            self._trainer.unpark()

    def progress(self) -> Progress:
        """Tell how far the training is, and how fast."""
        saved = None if self._checkpoints is None else self._checkpoints.report.saved_step
        if self._trainer is None:
            return Progress(saved_step=saved)
        told = self._trainer.progress()
        samples_per_s, items_per_s = self._speeds()
        left = self._settings.batch * (self._trainer.steps - self._trainer.step)
        return replace(
            told,
            saved_step=saved,
            samples_per_s=samples_per_s,
            tokens_per_s=items_per_s if self._task.items == "tokens" else None,
            eta_s=left / samples_per_s if samples_per_s else None,
            weights_sha256=self._sha256,
        )

    def _begin_profile(self, trainer: Trainer) -> None:
        if trainer.at_boundary:
            try:
                self._profile.begin(trainer.step)
            except Exception as error:  # noqa: BLE001 - whatever the profiler raises, the training goes on
                self.context.tell("profile_failed", reason=f"{type(error).__name__}: {error}")

    def _end_profile(self, trainer: Trainer) -> None:
        try:
            told = self._profile.end(trainer.step, finished=trainer.finished)
        except Exception as error:  # noqa: BLE001 - as above
            self.context.tell("profile_failed", reason=f"{type(error).__name__}: {error}")
        else:
            if told is not None:
                self.context.tell("profiled", **told)

    def _opened(self) -> Trainer:
        """Return the training.

        The first time, and after a release, go on from the last good checkpoint.
        """
        if self._trainer is not None:
            return self._trainer
        settings = self._settings
        if settings.states_on_host == "auto":
            settings = settings.model_copy(
                update={"states_on_host": Point.of(1, self._level).share_pct}
            )
        trainer = Trainer(self._task, settings, self.context.device, self.context.seed)
        if self.context.state_dir is not None:
            self._go_on(trainer, self.context.state_dir)
        if self._settings.preset not in PRESETS:
            for sentence in hazards(trainer):
                self.context.tell("hazard", reason=sentence)
        if trainer.loader_numbers.reason:
            self.context.tell("loader", **asdict(trainer.loader_numbers))
        self._flop_per_unit = trainer.flop_per_sample() / self._units_per_sample(trainer)
        if self._settings.adapter != "none":
            trained, all_of = (
                sum(each.numel() for each in some)
                for some in (trainer.parameters, trainer.model.parameters())
            )
            self.context.tell(
                "adapter",
                kind=self._settings.adapter,
                trained_parameters=trained,
                parameters=all_of,
                trained_pct=100 * trained / all_of,
            )
        if ran := trainer.attention_kernels():
            self.context.tell("attention", asked=self._settings.attention, ran=ran)
        self._trainer = trainer
        return trainer

    def _units_per_sample(self, trainer: Trainer) -> float:
        """Return what the operations of a sample go by: its items where lengths differ, else
        nothing.
        """
        return 1.0 if self._task.shorten is None else trainer.items_per_sample

    def _go_on(self, trainer: Trainer, folder: Path) -> None:
        """Load the last good checkpoint, unless this is the beginning of a run."""
        begins = self._checkpoints is None and self.context.fresh
        if self._checkpoints is None:
            self._checkpoints = Checkpoints(
                folder, trainer.identity, save_every_s=self._settings.save_every_s
            )
        if begins:
            try:
                self._checkpoints.discard()
            except OSError as failure:
                self.context.tell(
                    "checkpoint_failed", reason=f"{folder} cannot be cleared: {failure.strerror}"
                )
            if (lack := self._checkpoints.lacks_room(trainer.state())) is not None:
                self.context.tell("checkpoint_room", reason=lack)
            return
        if self.context.checkpoint is not None:
            with suppress(OSError):  # nothing can be written there either, and that is told
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                (folder / FROM_HEAD).write_bytes(self.context.checkpoint)
        loaded = self._checkpoints.load()
        for sentence in loaded.sentences():
            self.context.tell("checkpoint_refused", reason=sentence)
        if loaded.state is not None:
            trainer.load(loaded.state)
            self.context.tell("restored", step=trainer.step)

    def _rolled_back(self, trainer: Trainer) -> str:
        """Go back to the last checkpoint, and say so."""
        state = None
        if self._checkpoints is not None:
            # A process that began at a checkpoint and has not saved since has no copy.
            state = self._checkpoints.newest_copy() or self._checkpoints.load().state
        redone = trainer.rollback(state)
        self.context.tell("rolled_back", step=trainer.step, redone_steps=redone)
        return f"the training went back to step {trainer.step}, and does {redone} steps again"

    def _last_good(self) -> str:
        if self._checkpoints is not None:
            self._checkpoints.wait()  # one that is being written is the last good one
        report = None if self._checkpoints is None else self._checkpoints.report
        if report is None or report.saved_step is None:
            return "there is no checkpoint yet"
        return (
            f"the last good checkpoint is of step {report.saved_step}, in {self.context.state_dir}"
        )

    def _tell_failure(self, checkpoints: Checkpoints) -> None:
        failure = checkpoints.report.failure
        if failure is not None and failure != self._told_failure:
            self.context.tell("checkpoint_failed", reason=failure)
        self._told_failure = failure

    def _speeds(self) -> tuple[float, float]:
        """Return samples and items a second, of the last seconds."""
        now_s = time.monotonic()
        self._speed.append((now_s, self._computed, self._computed_items))
        while len(self._speed) > 2 and now_s - self._speed[0][0] > _SPEED_WINDOW_S:
            self._speed.popleft()
        began_s, samples, items = self._speed[0]
        if now_s <= began_s:
            return 0.0, 0.0
        return (self._computed - samples) / (now_s - began_s), (self._computed_items - items) / (
            now_s - began_s
        )
