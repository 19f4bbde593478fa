"""A training as a state machine: each call computes one part of the current effective batch, and
the call for the last part also updates the weights.

    trainer = Trainer(find_task(settings, seed), settings, device, seed)
    while not trainer.finished:
        trainer.micro_batch(most_rows)  # after an out-of-memory call it with fewer rows

Does not choose sizes, catch out-of-memory, or write checkpoints. The result does not depend on
`most_rows`, except for rounding. With the same sequence of `most_rows` it is bit-identical.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from workers.messages import Progress
from workers.training import order, precision
from workers.training.accumulator import Accumulator
from workers.training.batch_in_parts import BatchInParts, OneBatch, PartsCheckOptions
from workers.training.batches import Batch, on_device, part_of, tensors_in
from workers.training.buffers import unchanged
from workers.training.checkpoints import Identity, Lever, weights_sha256
from workers.training.cut import Cut, OtherPart, Pass, Portion
from workers.training.earlier import begun_model
from workers.training.errors import StateMismatchError, TaskError
from workers.training.host_memory import Parking, uncapped
from workers.training.host_states import HostStates
from workers.training.loader import Feed
from workers.training.lora import load_weights, new_model
from workers.training.model_levers import (
    Compiling,
    ModelLevers,
    OperationCounter,
    Recomputation,
    level_of,
)
from workers.training.optimizers import Average, Update, decay_rates, load_states, number_attributes
from workers.training.parts import PartsError, normalises_over_samples
from workers.training.schedule import Course, rate_share
from workers.training.settings import PRESETS, TrainSettings
from workers.training.tasks import TrainTask, Validation, trained_parameters
from workers.training.time_shares import TimeShares

_STATE_VERSION: Final = 2

#: Causes with which the result depends on the rows that a member of a team computes together.
_NOT_IN_TEAM: Final = {"batch statistics", "unknown"}
_NO_TEAM: Final = "this training cannot be shared by a team"

#: Settings that keep the size of the parts, so that a dependence on that size has no effect.
_KEEPS_PARTS: Final = "train.exact: true, and a number as train.micro"


def refuse_batch_norm(task: TrainTask, model: nn.Module) -> None:
    """Raise a `TaskError` if a model normalises over the samples that are computed together."""
    for name, module in model.named_modules():
        if normalises_over_samples(module):
            raise TaskError(
                f"{_NO_TEAM}: {name} of {task.name} ({type(module).__name__}) normalises over "
                "the samples that are computed together, and keeps statistics of them; use GroupNorm "
                "or LayerNorm, or put it into eval mode"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The part that one call of `Trainer.micro_batch` computed."""

    rows: int
    """Samples computed; 0: all parts were done, and only the update was left."""
    level: int
    """Number of recomputed blocks."""
    updated: bool
    """Whether the call also updated the weights."""


class Trainer:
    """One training on one device."""

    def __init__(
        self,
        task: TrainTask,
        settings: TrainSettings,
        device: torch.device,
        seed: int,
        tell: Callable[..., None] = lambda _, **__: None,
        *,
        is_shared: bool = False,
        portion: Portion | None = None,
    ) -> None:
        """Make the model, and allocate everything that outlives a step. `tell` is called with
        events of the compiler and the loader, and with hazards: a name, and values by keyword.

        `is_shared`: other processes compute rows of the same batches. Then `add_rows` says which
        rows this process computes, and `finish` updates with the sums of all. With a `portion`
        another process has the other blocks of the model: `cut` says which, and `other` asks that
        process.

        Raises:
            TaskError: There is nothing to train, or no data.
        """
        self._feed, self._tell = Feed(task, settings, device, seed, tell), tell
        self._is_shared = is_shared
        precision.set_up(
            settings.precision,
            deterministic=settings.deterministic,
            cudnn_benchmark=settings.searches_kernels,
        )
        self.task = task
        self.settings = settings
        self.device = device
        self.seed = seed
        self.steps = settings.steps
        if settings.epochs is not None:
            self.steps = -(-settings.epochs * len(task.dataset) // settings.batch)

        with nullcontext() if portion is None else uncapped():  # briefly the whole model
            model = self._make_model(new_model)
            self.cut = None if portion is None else Cut(task, settings, model, portion)
        """How the model is divided; `None`: this process has the whole model."""
        self.model = model.to(device).train()
        self.parameters = trained_parameters(task, self.model)
        blocks = task.blocks(self.model) if self.cut is None else self.cut.blocks
        self._levers = ModelLevers(
            settings, self.model, device_type=device.type, on_card=device.type == "cuda"
        )
        self.sums = Accumulator(self.parameters)
        """Sums of the current batch, over the rows that are computed here."""
        options = PartsCheckOptions(
            accept=self._hazards_of,
            report=self._tell_hazard,
            finds_rounding=not settings.exact,
            # The check runs in fp32, which takes twice the memory of half precision.
            memory_factor=2 if settings.precision in {"bf16", "fp16"} else 1,
        )
        self._in_parts = BatchInParts(
            self.model,
            order.mixed(seed, 1),
            self.sums,
            # For these presets it is known that parts add up to the whole batch.
            options=None if settings.preset in PRESETS else options,
            draws=True,
        )
        self._batch: OneBatch | None = None
        """The batch that is being computed; `None`: the next one has not begun."""
        self._steps_here = 0
        """Optimiser steps since the model was made or a state was loaded."""
        self._in_parts.compute = Compiling(settings, self.model, blocks, tell).run
        self._recomputation = Recomputation(blocks)

        self.optimizer = self._new_optimizer(blocks)
        #: Initial learning rates of the optimiser's groups; each step uses a share of them.
        self._initial_rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._rate_share = task.schedule or partial(
            rate_share, steps=self.steps, warmup_steps=settings.warmup_steps
        )
        self.host_states = HostStates(self.optimizer, self.parameters, settings.first_share_pct)
        self._average = self._new_average()
        self._update = Update(self.host_states.step, self._average)
        self._scaler = precision.LossScaler(enabled=settings.precision == "fp16")

        self._parking = Parking(device)
        self._time_shares = TimeShares(device)
        self._last_part = MicroBatch(rows=0, level=0, updated=False)
        self._accumulation = 0
        self.other: OtherPart | None = None
        """The process with the other blocks; `None`: it is not connected yet, or does not exist."""
        self.lent_state: Mapping[str, Any] | None = None
        """State of that process at this step; `None`: it was neither loaded nor asked for."""
        if is_shared or portion is not None:
            refuse_batch_norm(task, self.model)
        self.course = Course()
        self.hazards: list[str] = []
        """Reasons found so far why the result depends on the micro-batch."""

    @property
    def step(self) -> int:
        """Optimiser steps done."""
        return self.course.step

    @property
    def finished(self) -> bool:
        """Whether all steps are done, and the last update was not interrupted."""
        return self.step >= self.steps and not self._update.interrupted

    @property
    def at_boundary(self) -> bool:
        """Whether no part of the next step is computed yet, and the weights belong to a step."""
        return self.sums.done == 0 and not self._update.interrupted

    @property
    def has_state(self) -> bool:
        """Whether `state` can be called now. Passes change nothing in a member of a team or in a
        process with lent blocks, so such a process has a state in the middle of a batch, too.
        """
        is_part = self._is_shared or (self.cut is not None and not self.cut.leads)
        return self.at_boundary or (is_part and not self._update.interrupted)

    @property
    def items_per_sample(self) -> float:
        """Mean items (samples, tokens) per sample of this batch; 0 before the first batch."""
        return self._feed.count / self.settings.batch

    @property
    def most_level(self) -> int:
        """Number of blocks that can be recomputed."""
        return self._recomputation.most_level

    def micro_batch(self, most_rows: int, level: int = 0) -> MicroBatch:
        """Compute the next part of the effective batch, and update the weights after the last part.

        After a failure the finished parts stay, and the next call continues with the failed part.
        The exception is an out-of-memory in the update itself: then `load` a saved state.

        Args:
            most_rows: Upper limit of the samples computed at once. Parts are as equal as possible.
            level: Number of blocks to recompute if `train.recompute` is `auto`.

        Raises:
            NotFiniteError: The loss or its gradient is NaN or infinite; the weights were not
                changed.
            UpdateInterruptedError: An update was interrupted.
            Exception: Whatever the model, the data set or torch raised.
        """
        self._update.check()
        batch = self._current_batch()
        level = level_of(self.settings.recompute, level, self._recomputation.most_level)
        self._recomputation.level = level
        rows = batch.advance(most_rows, self._scaler.scale)
        if (self._is_shared or self.cut is not None) and self._last_part.rows == 0:
            self._refuse_changes(batch)
        updated = batch.is_done and not self._is_shared
        if updated:
            self._report_unsaved(batch)
            self.finish(*() if self.other is None else (self.other.agree,))
        self._last_part = MicroBatch(rows=rows, level=level, updated=updated)
        return self._last_part

    @property
    def current_pass(self) -> Pass:
        """The current forward pass, as the process with the other blocks must know it."""
        passes, (first, rows) = self._in_parts.dropouts.passes, self._in_parts.dropouts.samples
        return Pass(
            number=passes,
            step=self.step,
            batch=self.sums.beginnings,
            done=self.sums.done,
            first=first,
            rows=rows,
            recomputed=self._recomputation.level / max(1, self._recomputation.most_level),
            on_host_pct=self.host_states.share_pct,
            widened=self._in_parts.checking,
            trains=self.model.training,
        )

    @contextmanager
    def lent_pass(self, now: Pass) -> Iterator[Accumulator]:
        """Prepare the blocks of this process for a forward pass of the leader, or for its backward
        pass. Yield the sums to which its gradients are added.

        Raises:
            UpdateInterruptedError: The weights belong to no step.
        """
        self._update.check()
        if self.sums.beginnings != now.batch:
            self.sums.begin(self.settings.batch, 1)
            self.sums.beginnings = now.batch
        self.sums.done = now.done
        self._recomputation.level = math.ceil(now.recomputed * self._recomputation.most_level)
        if now.on_host_pct > self.host_states.share_pct:
            self.host_states.move(now.on_host_pct)
        self._in_parts.dropouts.key(now.first, now.rows, self.device)
        self.model.train(now.trains)
        try:
            yield self.sums
        finally:
            self.model.train()

    @contextmanager
    def arithmetic(self, *, widened: bool) -> Iterator[None]:
        """Compute in the precision of the settings, or in fp32 if `widened`."""
        kind = "fp32" if widened else self.settings.precision
        with precision.autocast(kind, self.device), self._levers.saving():
            yield

    def invalidate(self, why: str) -> None:
        """Mark the weights as invalid: the next part raises `UpdateInterruptedError`."""
        self._update.interrupted, self._update.why_interrupted = True, why

    def add_rows(self, first: int, rows: int) -> None:
        """Append a range of rows of the batch to those that this process computes."""
        self._current_batch().extend(first, rows)

    @property
    def done_rows(self) -> int:
        """Rows of the batch that the sums of this process contain."""
        return self.sums.done

    @property
    def has_rows(self) -> bool:
        """Whether some of the rows that this process computes are not computed yet."""
        return self._batch is not None and not self._batch.is_done

    def write_sums(self, total: Tensor, loss: float, used: Sequence[bool]) -> None:
        """Replace the sums of this process by those of all rows, in the form of `sums.read`."""
        self._current_batch()  # also if no row was computed here
        self.sums.write(total, loss, used)

    def finish(
        self, agreed: Callable[[float, float], tuple[float, float]] = lambda *own: own
    ) -> None:
        """Update the weights with the current sums. Can be repeated until the update itself begins.

        `agreed`: see `Accumulator.finish`.

        Raises:
            NotFiniteError, UpdateInterruptedError: See `micro_batch`.
        """
        self._update.check()
        self._set_rates()
        before = number_attributes(self.optimizer) if self._steps_here == 1 else {}
        with self._time_shares.timing("optimizer"):
            loss = self.sums.finish(
                self._update, self._scaler, step=self.step, clip=self.settings.clip, agreed=agreed
            )
        for name, _ in sorted(before.items() - number_attributes(self.optimizer).items()):
            instead = "keep it in a group of the optimiser if an update depends on it"
            self._report_unsaved_number(name, self.optimizer, "update", instead)
        self._last_part = replace(self._last_part, updated=True)
        self._steps_here += 1
        self.lent_state = None
        self.course.finished_step(loss, self.settings.batch)
        self._accumulation = len(self._in_parts.parts)
        self._discard_batch()

    def drop_sums(self) -> None:
        """Discard what was computed of the current batch; the batch begins again."""
        self._batch = None
        self.sums.begin(0, 1)

    def progress(self) -> Progress:
        """Return the progress of the training, without the figures that need a clock."""
        losses = self.course.losses
        return Progress(
            train_step=self.step,
            train_steps=self.steps,
            epoch=self.course.samples_used / len(self.task.dataset),
            loss=losses[-1] if losses else None,
            first_loss=losses[0] if losses else None,
            micro_batch=self._last_part.rows,
            accumulation=self._accumulation,
            memory_level=self._last_part.level,
            data_wait_pct=100 * self._feed.wait_share(),
            copies_pct=self._time_shares.pct("copies"),
            optimizer_pct=self._time_shares.pct("optimizer"),
        )

    def operations(self) -> tuple[float, str]:
        """Count the floating-point operations of a forward and backward pass for one sample, or for
        one item if samples differ in length. Recomputation is not counted. Return that number, and
        the attention kernels that ran, such as `flash`; empty: the model has no attention.

        The count follows autograd: no gradient of a frozen weight, and no backward pass below the
        first trained weight. Takes the memory of a part of one sample. Call it between two
        optimiser steps.
        """
        batch, self._recomputation.level = self._current_batch(), 0
        first = part_of(batch.batch, 0, 1)
        with unchanged(self.model), OperationCounter() as counter:
            self.sums.backward(batch.value(first, 0, 1), 1.0, lambda *_: None)
        items = 1 if self.task.shorten is None else max(1, self.task.count(first))
        return counter.get_total_flops() / items, counter.kernels

    def evaluate(self) -> dict[str, float]:
        """Return the task's validation figures in the precision of the training; the model has its
        averaged weights if it keeps some.
        """
        evaluate = self.task.evaluate
        if evaluate is None:
            return {}
        if isinstance(evaluate, Validation):
            evaluate = partial(evaluate, rows=max(1, self._last_part.rows))
        average, arithmetic = self._average, self.settings.precision
        weights = nullcontext() if average is None else average.in_place_of_weights()
        self.model.eval()
        try:
            with torch.no_grad(), precision.autocast(arithmetic, self.device), weights:
                return dict(evaluate(self.model))
        finally:
            self.model.train()

    def weights_sha256(self) -> str:
        """Return the SHA-256 of all weights, those of lent blocks included."""
        weights = self.model.state_dict() if self.other is None else self.state()["weights"]
        return weights_sha256(weights)

    @property
    def identity(self) -> Identity:
        """Identity that a checkpoint must have to continue this training."""
        levers: dict[str, Lever] = {**self.settings.fingerprint(), "seed": self.seed}
        if self.task.fingerprint:
            levers["data_fingerprint"] = self.task.fingerprint
        if self.cut is not None:
            return Identity(model=self.task.name, weights=self.cut.forms, levers=levers)
        return Identity.of(self.task.name, self.model.state_dict(), levers)

    def state(self) -> dict[str, Any]:
        """Return everything that `load` needs. The tensors are not copies: copy them before the
        next call.

        Raises:
            RuntimeError: A part of an effective batch is computed, and the step is not done.
        """
        if not self.has_state:
            raise RuntimeError("a training has a state only between two optimiser steps")
        own = {
            "version": _STATE_VERSION,
            "torch": str(torch.__version__),
            "weights": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "average": [] if self._average is None else list(self._average.tensors),
            "scaler": self._scaler.state(),
            "course": asdict(self.course),
        }
        if self.cut is None or self.other is None:
            return own
        self.lent_state = self.lent_state or self.other.state()
        return self.cut.merged(own, self.lent_state)

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state: of the whole model, or, in a process that lends its memory,
        of the lent blocks.

        Raises:
            StateMismatchError: The state is of another model; nothing was changed.
        """
        self._refuse_other_state(state)
        lent_state = None
        if self.cut is not None and self.cut.leads:
            state, lent_state = self.cut.parts(state)
        self._update.interrupted = True  # until all is loaded
        load_weights(self.model, state["weights"])
        if self._average is not None:
            self._average.load(state["average"])
        load_states(self.optimizer, state["optimizer"])
        self.host_states.hold(self.host_states.share_pct)
        self._scaler.load(state["scaler"])
        course = {**state["course"]}
        course.pop("skipped_updates", None)  # of earlier versions
        self.course = Course(**course)
        self._feed.seek(self.course.samples_used)
        self._discard_batch()
        self._steps_here = 0
        self.lent_state = lent_state
        self._update.interrupted = False

    def begin_with(self, earlier: Path) -> None:
        """Begin with the weights of an earlier run. Call it before the first step.

        Raises:
            TaskError: They cannot be used, or are those of another model; nothing was changed.
        """
        model = self._make_model(partial(begun_model, path=earlier))
        load_weights(self.model, model.state_dict())
        if self._average is not None:
            self._average.load([weight.detach() for weight in self.parameters])

    def park(self) -> int:
        """Move all tensors to host memory, sums of finished parts included. Return the host
        memory in bytes that all parked tensors occupy, rounding included.

        Until `unpark` only `state` and `progress` may be called.
        """
        self._in_parts.dropouts.forget()
        states = self.optimizer.state.values()
        held: list[Iterable[Tensor]] = [self.model.parameters(), self.model.buffers()]
        held += [tensors_in(list(states)), self.sums.gradients, self.sums.loss]
        if self._average is not None and not self._average.on_host:
            held.append(self._average.tensors)
        return self._parking.park(chain.from_iterable(held), self.host_states.tensors)

    def unpark(self) -> None:
        """Move all tensors back, or none if the device lacks memory; then call it again."""
        self._parking.unpark()

    def close(self) -> None:
        """End the loader's processes."""
        self._feed.close()

    def _make_model(self, make: Callable[[TrainTask, TrainSettings], nn.Module]) -> nn.Module:
        """Make a model by the seed, and restore torch's random state."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(order.mixed(self.seed, 0) >> 1)
            return make(self.task, self.settings)

    def _new_optimizer(self, blocks: Sequence[nn.Module]) -> Optimizer:
        if self.cut is not None:
            return self.cut.optimizer
        optimizer = self.task.new_optimizer(self.model, self.settings)
        if self.settings.layer_decay < 1:
            decay_rates(optimizer, self.model, blocks, self.settings.layer_decay)
        return optimizer

    def _new_average(self) -> Average | None:
        decay, on_host = self.settings.ema_decay, self.settings.ema_on == "host"
        return None if decay is None else Average(self.parameters, decay, on_host=on_host)

    def _refuse_other_state(self, state: Mapping[str, Any]) -> None:
        if state.get("version") != _STATE_VERSION:
            raise StateMismatchError(
                f"the saved state has version {state.get('version')}, and this program reads "
                f"{_STATE_VERSION}; continue with the version that wrote it, or start again"
            )
        saved = Identity.of(self.task.name, state["weights"]).plain()
        own = Identity.of(self.task.name, self.model.state_dict())
        if self.cut is not None and self.cut.leads:  # the state of the whole
            own = replace(own, weights=self.cut.forms)
        if difference := own.difference(saved):
            raise StateMismatchError(f"the saved state is of another model: {difference}")
        if len(state["average"]) != len(self._average.tensors if self._average else []):
            raise StateMismatchError(
                "the saved state and train.ema_decay differ: one of them has no averaged weights"
            )

    def _current_batch(self) -> OneBatch:
        """Return the current batch; begin the next one if there is none."""
        if self._batch is None:
            if self._feed.batch is None:
                self._feed.take()
            rows = 0 if self._is_shared else self.settings.batch
            self.sums.begin(rows, self._feed.count)
            self._batch = OneBatch(
                owner=self._in_parts,
                batch=self._feed.batch,
                rows=self.settings.batch,
                loss=self._loss,
                first=self.course.samples_used,
                items=self._feed.count,
                weight=self.task.count if self.task.loss_is == "mean" else None,
                ranges=[] if self._is_shared else None,
            )
        return self._batch

    def _discard_batch(self) -> None:
        self._feed.batch = None
        self.drop_sums()

    def _loss(self, samples: Batch) -> object:
        """Return what the task's loss function returns for samples.

        Changes nothing except buffers that the model itself updates.
        """
        with self._time_shares.timing("copies"):
            part = on_device(self.task.shortened(samples), self.device)
        # A comparison of parts needs small rounding errors.
        with self.arithmetic(widened=self._in_parts.checking):
            return self.task.loss(self.model, self._levers.ordered(part))

    def _hazards_of(self, found: Sequence[PartsError]) -> dict[str, str]:
        """Return a sentence with a remedy for each cause that makes the training depend on how its
        batches are split; the training may continue. Raise a `TaskError` if a team cannot have it.
        """
        if self._is_shared and (wrong := [each for each in found if each.cause in _NOT_IN_TEAM]):
            raise TaskError(f"{_NO_TEAM}: {wrong[0]}")
        # Constant parts do not remove dropout: after a kill torch's random numbers begin again.
        return {
            each.cause: str(each)
            if each.cause == "dropout"
            else f"{each}; or set {_KEEPS_PARTS}, which keeps the parts"
            for each in found
            if each.cause == "dropout" or not self.settings.exact
        }

    def _tell_hazard(self, sentence: str) -> None:
        if sentence not in self.hazards:
            self.hazards.append(sentence)
            self._tell("hazard", reason=sentence)

    def _report_unsaved(self, batch: OneBatch) -> None:
        """Report numbers of the model that each pass changes and no checkpoint contains. Checks the
        second step alone, since the first pass of a process initialises some of them.
        """
        if self._steps_here != 1 or self.settings.preset in PRESETS:
            return
        for module, name in batch.changed():
            if name not in module._buffers:
                instead = "make it a buffer (register_buffer) if the loss depends on it"
                self._report_unsaved_number(name, module, "pass", instead)

    def _report_unsaved_number(self, name: str, owner: object, event: str, instead: str) -> None:
        self._tell_hazard(
            f"{name} of {type(owner).__name__} is a number that each {event} changes and no "
            f"checkpoint has, so it begins again after a kill; {instead}"
        )

    def _refuse_changes(self, batch: OneBatch) -> None:
        """Raise a `TaskError` if a pass changes the model: members would get different models."""
        if self.settings.preset not in PRESETS and (places := batch.changed()):
            module, name = places[0]
            raise TaskError(
                f"{_NO_TEAM}: each pass changes {name} of {type(module).__name__}, of which each "
                "member would have its own; change it after the step, or train on one card"
            )

    def _set_rates(self) -> None:
        """Set the learning rates of this step in the groups of the optimiser."""
        share = self._rate_share(self.step)
        for group, first in zip(self.optimizer.param_groups, self._initial_rates, strict=True):
            if isinstance(group["lr"], Tensor):  # the optimiser compiles its step
                group["lr"].fill_(first * share)
            else:
                group["lr"] = first * share
