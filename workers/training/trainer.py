"""A training as a state machine: each call computes one part of the current effective batch, the
last one updates.

    trainer = Trainer(find_task(settings, seed), settings, device, seed)
    while not trainer.finished:
        trainer.micro_batch(limit)     # at most so many samples at once; after an out-of-memory
        call it with fewer

Does not choose sizes, catch out-of-memory, or write checkpoints. What it computes does not depend on
the limits, but for rounding; with the same limits in the same order it is the same to the bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from workers.messages import Progress
from workers.training import order, precision, schedule
from workers.training.accumulator import Accumulator
from workers.training.adapters import new_model
from workers.training.averaging import Average
from workers.training.checkpoints.identity import Identity, Lever
from workers.training.checkpoints.tensor_bytes import weights_sha256
from workers.training.course import Course
from workers.training.errors import StateMismatchError
from workers.training.feed import Feed
from workers.training.forward_pass import ForwardPass
from workers.training.host_states import HostStates
from workers.training.layer_rates import decay_rates, depths
from workers.training.optimizers import Update, adamw, forget_states, load_states
from workers.training.parking import Parking
from workers.training.settings import Precision, TrainSettings
from workers.training.tasks import TrainTask, trained_parameters
from workers.training.time_shares import Part, TimeShares

_STATE_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """What one call did."""

    rows: int
    """Samples computed; 0 where only the update was left to do."""
    level: int
    """Blocks that were recomputed."""
    updated: bool
    """Whether it ended an optimiser step."""


class Trainer:
    """One training on one device."""

    def __init__(
        self, task: TrainTask, settings: TrainSettings, device: torch.device, seed: int
    ) -> None:
        """Make the model and allocate all that outlives a step.

        Raises:
            TaskError: There is nothing to train, or no data.
        """
        self._feed = Feed(task, settings, device, seed)
        self.loader_numbers = self._feed.numbers
        precision.set_up(
            settings.precision,
            deterministic=settings.deterministic,
            cudnn_benchmark=settings.cudnn_benchmark,
        )
        self.task = task
        self.settings = settings
        self.device = device
        self.seed = seed
        self.steps = settings.steps
        if settings.epochs is not None:
            self.steps = -(-settings.epochs * len(task.dataset) // settings.batch)
        self.model = self._new_model().to(device).train()
        self.parameters = trained_parameters(task, self.model)
        self._shares = TimeShares(device)
        self._forward = ForwardPass(task, settings, self.model, self._feed, self._shares, seed)
        self.recomputation, self.compiling = self._forward.recomputation, self._forward.compiling
        self._accumulator = Accumulator(self.parameters, set_to_none=settings.set_to_none)
        lr = settings.lr or task.lr
        optimizer = (task.optimizer or (lambda some: adamw(list(some), settings, lr)))(
            self.parameters
        )
        if settings.layer_decay < 1:
            decay_rates(optimizer, depths(self.model, self._forward.blocks), settings.layer_decay)
        self.host_states = HostStates(optimizer, self.parameters, settings.first_share_pct)
        self._average = None
        if settings.ema_decay is not None:
            self._average = Average(
                self.parameters, settings.ema_decay, on_host=settings.ema_on == "host"
            )
        self._update = Update(optimizer, self._average, self.host_states.step)
        self._scaler = precision.LossScaler(enabled=settings.precision == "fp16")
        self._parking = Parking(device)
        self._last = MicroBatch(rows=0, level=0, updated=False)
        self._accumulation = 0
        self.course = Course()
        self.redone_steps = 0
        """Lost by rolling back, and done again."""
        self._parts: list[tuple[int, int]] = []
        """Rows and level of each finished part of the current effective batch."""

    @property
    def step(self) -> int:
        """Optimiser steps done."""
        return self.course.step

    @property
    def finished(self) -> bool:
        """Whether all steps are done."""
        return self.step >= self.steps

    @property
    def at_boundary(self) -> bool:
        """Whether no part of an effective batch is under way, and the weights belong to a step."""
        return self._accumulator.done == 0 and not self._update.cut

    @property
    def remaining_rows(self) -> int:
        """Samples of the current effective batch that are not computed yet.

        0: only the update is left.
        """
        return self.settings.batch if self._feed.batch is None else self._accumulator.remaining

    @property
    def items_per_sample(self) -> float:
        """Items (samples, tokens) that a sample of the current effective batch counts.

        0 before the first.
        """
        return self._feed.count / self.settings.batch

    def news(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the events of the compiler and of the loader since the last call."""
        return [*self.compiling.news(), *self._feed.news()]

    def micro_batch(self, limit: int, level: int = 0) -> MicroBatch:
        """Compute the next part of the effective batch, of at most `limit` samples, and update
        after the last part.

        When it fails, finished parts stay, and the next call goes on. An out-of-memory in the
        update itself is the exception: see `rollback`.

        Args:
            limit: Samples computed at once, at most. Parts are as equal as possible.
            level: How many blocks to recompute, where `train.recompute` is `auto`.

        Raises:
            NotFiniteError: The loss or its gradient is NaN or infinite; the weights were not
                changed.
            UpdateInterruptedError: An update was cut off.
            Exception: Whatever the model, the data set or torch raised.
        """
        self._update.check()
        self._begin_batch()
        rows = self._accumulator.next_rows(limit)
        level = self.recomputation.level_of(self.settings.recompute, level)
        first = self._accumulator.done
        self._parts = self._parts if first else []
        if rows:
            part = partial(
                self._part, first, rows, level, self.settings.precision, self._scaler.scale
            )
            self._accumulator.add(rows, *self.compiling.run(rows, part))
            self._parts.append((rows, level))
        updated = self._accumulator.remaining == 0
        if updated:
            self._finish()
        self._last = MicroBatch(rows=rows, level=level, updated=updated)
        return self._last

    def replay(self, splits: Iterable[schedule.Run]) -> None:
        """Compute all recorded micro-batches of another run again, to its last step."""
        for limit, level in schedule.unrolled(splits):
            self.micro_batch(limit, level)

    def progress(self) -> Progress:
        """Say how far the training is, as far as that needs no clock."""
        losses = self.course.losses
        return Progress(
            train_step=self.step,
            train_steps=self.steps,
            epoch=self.course.samples_used / len(self.task.dataset),
            loss=losses[-1] if losses else None,
            first_loss=losses[0] if losses else None,
            micro_batch=self._last.rows,
            accumulation=self._accumulation,
            memory_level=self._last.level,
            redone_steps=self.redone_steps,
            data_wait_pct=100 * self._feed.waiting_share(),
            copies_pct=self._shares.pct(Part.COPIES),
            optimizer_pct=self._shares.pct(Part.OPTIMIZER),
        )

    def probe(self, sizes: Sequence[int], scale: float = 1.0) -> dict[str, Tensor]:
        """Return the gradient of the next batch's first samples, computed in fp32 in parts of these
        sizes, on the host.

        Call it between two optimiser steps. It changes nothing, buffers of the model included.
        `scale` is what the loss is scaled by on the way; it is taken out again.
        """
        self._begin_batch()
        try:
            self._accumulator.begin(sum(sizes), self._feed.count)
            with self._forward.buffers_kept():
                for rows in sizes:
                    first = self._accumulator.done
                    self._accumulator.add(rows, *self._part(first, rows, 0, "fp32", scale))
            names = [name for name, each in self.model.named_parameters() if each.requires_grad]
            gradients = [each.to("cpu", copy=True) / scale for each in self._accumulator.gradients]
            return dict(zip(names, gradients, strict=True))
        finally:
            self._accumulator.begin(self.settings.batch, self._feed.count)

    def flop_per_sample(self) -> float:
        """Count the operations that the model takes for a sample, forward and backward, without
        what is repeated.

        The backward pass takes twice those of the forward pass. Call it between two optimiser
        steps.
        """
        self._begin_batch()
        return self._forward.flop_per_sample(self.course.samples_used)

    def attention_kernels(self) -> str:
        """Return the kernels that attention really runs on, such as `flash`; empty: the model has
        none.

        Call it between two optimiser steps.
        """
        self._begin_batch()
        return self._forward.attention_kernels(self.course.samples_used)

    def evaluate(self) -> dict[str, float]:
        """Return the task's own figures, for the averaged weights if there are some."""
        if self.task.evaluate is None:
            return {}
        self.model.eval()
        try:
            with torch.no_grad():
                if self._average is None:
                    return dict(self.task.evaluate(self.model))
                with self._average.in_place_of_weights():
                    return dict(self.task.evaluate(self.model))
        finally:
            self.model.train()

    def weights_sha256(self) -> str:
        """Return the SHA-256 of all weights."""
        return weights_sha256(self.model.state_dict())

    @property
    def identity(self) -> Identity:
        """What a checkpoint of this training belongs to."""
        levers: dict[str, Lever] = {**self.settings.fingerprint(), "seed": self.seed}
        if self.task.fingerprint:
            levers["data_fingerprint"] = self.task.fingerprint
        return Identity.of(self.task.name, self.model.state_dict(), levers)

    def state(self) -> dict[str, Any]:
        """Return all that `load` needs. The tensors are the training's own: copy them before the
        next call.

        Raises:
            RuntimeError: A part of an effective batch is under way.
        """
        if not self.at_boundary:
            raise RuntimeError(
                "a training has a state only between two optimiser steps; see at_boundary"
            )
        return {
            "version": _STATE_VERSION,
            "torch": str(torch.__version__),
            "weights": self.model.state_dict(),
            "optimizer": self._update.optimizer.state_dict(),
            "average": [] if self._average is None else list(self._average.tensors),
            "scaler": self._scaler.state(),
            "course": self.course.plain(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state.

        Raises:
            StateMismatchError: It is not of this model; nothing was changed.
        """
        own = self.model.state_dict()
        self._refuse(state, own)
        self._update.cut = True  # until all is loaded
        with torch.no_grad():
            for name, weight in own.items():
                weight.copy_(state["weights"][name])
            if self._average is not None:
                torch._foreach_copy_(self._average.tensors, list(state["average"]))
        load_states(self._update.optimizer, state["optimizer"])
        self.host_states.hold(self.host_states.share_pct)
        self._scaler.load(state["scaler"])
        self.course = Course(**state["course"])
        self.course.losses, self.course.splits = (
            list(self.course.losses),
            [list(run) for run in self.course.splits],
        )
        self._feed.seek(self.course.samples_used)
        self._accumulator.begin(self.settings.batch, 1)
        self._update.cut = False

    def rollback(self, state: Mapping[str, Any] | None) -> int:
        """Go back to a saved state, or with `None` to the beginning.

        Return how many optimiser steps are redone.
        """
        step = self.step
        self.load(self._first_state() if state is None else state)
        self.redone_steps += step - self.step
        return step - self.step

    @property
    def on_host_bytes(self) -> int:
        """What is in host memory at all times: states of the optimiser, and averaged weights."""
        average = (
            self._average.tensors if self._average is not None and self._average.on_host else []
        )
        return sum(each.nbytes for each in (*self.host_states.tensors, *average))

    def park(self) -> int:
        """Move all tensors to host memory, finished parts included; return how many bytes wait
        there.

        Between this and `unpark` only `state` and `progress` may be called.
        """
        for parameter in self.parameters:
            parameter.grad = None
        self._forward.dropouts.forget()
        self.compiling.park()
        states = self._update.optimizer.state.values()
        held = [*states, self._accumulator.gradients, self._accumulator.loss]
        average = [self._average.tensors] if self._average and not self._average.on_host else []
        return self._parking.park(self.model, [*held, *average], self.host_states.tensors)

    def unpark(self) -> None:
        """Move them back.

        If there is not memory for all of them, they stay and this can be called again.
        """
        self._parking.unpark()

    def close(self) -> None:
        """End the loader's processes."""
        self._feed.close()

    def _new_model(self) -> nn.Module:
        """Make the model with weights that depend on the seed alone, and leave torch's random
        numbers as they were.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(order.mixed(self.seed, 0) >> 1)
            return new_model(self.task, self.settings)

    def _first_state(self) -> dict[str, Any]:
        model = self._new_model()
        weights = model.state_dict()
        trained = [each for each in model.parameters() if each.requires_grad]
        forget_states(self._update.optimizer)
        return {
            "version": _STATE_VERSION,
            "weights": weights,
            "optimizer": self._update.optimizer.state_dict(),
            "average": [] if self._average is None else [each.detach() for each in trained],
            "scaler": precision.LossScaler(enabled=self._scaler.enabled).state(),
            "course": Course().plain(),
        }

    def _refuse(self, state: Mapping[str, Any], own: Mapping[str, Tensor]) -> None:
        if state.get("version") != _STATE_VERSION:
            raise StateMismatchError(
                f"the saved state has version {state.get('version')}, and this program reads "
                f"{_STATE_VERSION}; go on "
                "with the version that wrote it, or begin anew"
            )
        theirs = Identity.of(self.task.name, state["weights"]).plain()
        if difference := Identity.of(self.task.name, own).difference(theirs):
            raise StateMismatchError(f"the saved state is of another model: {difference}")
        if len(state["average"]) != len(self._average.tensors if self._average else []):
            raise StateMismatchError(
                "the saved state and train.ema_decay differ: one of them has no averaged weights"
            )

    def _begin_batch(self) -> None:
        if self._feed.batch is None:
            self._feed.take()
            self._accumulator.begin(self.settings.batch, self._feed.count)

    def _part(
        self, first: int, rows: int, level: int, arithmetic: Precision, scale: float
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Compute loss and gradients of the samples `first` to `first + rows - 1` of the batch.

        Changes nothing.
        """
        with self._forward.levers.region():
            loss = self._forward.loss(first, rows, level, arithmetic, self.course.samples_used)
            return loss.detach(), self._accumulator.gradients_of(loss, scale)

    def _finish(self) -> None:
        """Update the weights with the finished effective batch.

        Until the update itself begins it can be run again.
        """
        share = schedule.learning_rate(
            self.step, highest=1, steps=self.steps, warmup_steps=self.settings.warmup_steps
        )
        with self._shares.timing(Part.OPTIMIZER):
            loss, updated = self._accumulator.finish(
                self._update,
                self._scaler,
                step=self.step,
                clip=self.settings.clip,
                rate_share=share,
            )
        self.course.finished_step(loss, self._parts, updated=updated)
        self._accumulation = len(self._parts)
        self._feed.batch = None
        self._accumulator.begin(self.settings.batch, 1)
