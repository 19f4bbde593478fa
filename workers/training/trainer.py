"""A training as a state machine: each call computes one part of the current effective batch, the
last one updates.

    trainer = Trainer(find_task(settings, seed), settings, device, seed)
    while not trainer.finished:
        trainer.micro_batch(most_rows)     # at most so many samples at once; after an out-of-memory
        call it with fewer

Does not choose sizes, catch out-of-memory, or write checkpoints. What it computes does not depend
on these numbers, but for rounding; with the same ones in the same order it is the same to the bit.
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
from workers.training.batch_in_parts import BatchInParts, Look, OneBatch
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
from workers.training.optimizers import (
    Average,
    Update,
    decay_rates,
    load_states,
    own_numbers,
)
from workers.training.parts import PartsError, normalises_over_samples
from workers.training.schedule import Course, rate_share
from workers.training.settings import PRESETS, TrainSettings
from workers.training.tasks import TrainTask, Validation, trained_parameters
from workers.training.time_shares import TimeShares

_STATE_VERSION: Final = 2

#: What makes the result depend on which rows are computed together, and so on who computes them.
_NOT_SHARED: Final = {"batch statistics", "unknown"}
_OF_A_TEAM: Final = "this training cannot be shared by a team"

#: The keys that make each hazard harmless.
_KEEP: Final = "train.exact: true, and a number as train.micro"


def refuse_batch_norm(task: TrainTask, model: nn.Module) -> None:
    """Raise a `TaskError` if a model normalises over the samples that are computed together."""
    for name, module in model.named_modules():
        if normalises_over_samples(module):
            raise TaskError(
                f"{_OF_A_TEAM}: {name} of {task.name} ({type(module).__name__}) normalises over "
                "the samples that are computed together, and keeps statistics of them; use GroupNorm "
                "or LayerNorm, or put it into eval mode"
            )


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
        """Make the model and allocate all that outlives a step. `tell` gets events of the compiler
        and of the loader, and hazards: a name, and figures or text by keyword.

        `is_shared`: others compute rows of the same batches. Then `give` says which are computed
        here, and `finish` updates with the sums of all. With a `portion` another process has the
        other blocks of the model: `cut` says which, and `other` asks it.

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

        with nullcontext() if portion is None else uncapped():  # the whole is here for a moment
            model = self._made(new_model)
            self.cut = None if portion is None else Cut(task, settings, model, portion)
        """How the model is divided; `None`: it is here as a whole."""
        self.model = model.to(device).train()
        self.parameters = trained_parameters(task, self.model)
        blocks = task.blocks(self.model) if self.cut is None else self.cut.blocks
        self._levers = ModelLevers(
            settings, self.model, device_type=device.type, on_card=device.type == "cuda"
        )
        self.sums = Accumulator(self.parameters)
        """Those of the batch under way, of the rows that are computed here."""
        look = Look(
            accepts=self._hazards_of,
            tell=self._tell_hazard,
            sees_rounding=not settings.exact,
            # It is computed in fp32, which takes twice the memory of half precision.
            part_share=2 if settings.precision in {"bf16", "fp16"} else 1,
        )
        self._in_parts = BatchInParts(
            self.model,
            order.mixed(seed, 1),
            self.sums,
            # The presets here are known to add up.
            look=None if settings.preset in PRESETS else look,
            draws=True,
        )
        self._batch: OneBatch | None = None
        """The one under way."""
        self._steps_here = 0
        """Optimiser steps since the model was made or a state was loaded."""
        self._in_parts.compute = Compiling(settings, self.model, blocks, tell).run
        self._recomputation = Recomputation(blocks)

        self.optimizer = self._new_optimizer(blocks)
        #: Of its groups; each step has a share of them.
        self._first_rates = [float(group["lr"]) for group in self.optimizer.param_groups]
        self._rate_share = task.schedule or partial(
            rate_share, steps=self.steps, warmup_steps=settings.warmup_steps
        )
        self.host_states = HostStates(self.optimizer, self.parameters, settings.first_share_pct)
        self._average = self._new_average()
        self._update = Update(self.host_states.step, self._average)
        self._scaler = precision.LossScaler(enabled=settings.precision == "fp16")

        self._parking = Parking(device)
        self._shares = TimeShares(device)
        self._last = MicroBatch(rows=0, level=0, updated=False)
        self._accumulation = 0
        self.other: OtherPart | None = None
        """The process that has the other blocks; `None`: it is not there yet, or there is none."""
        self.lent_state: Mapping[str, Any] | None = None
        """The state of that process at this step, where it was loaded or asked for."""
        if is_shared or portion is not None:
            refuse_batch_norm(task, self.model)
        self.course = Course()
        self.hazards: list[str] = []
        """What makes the result depend on the micro-batch, as far as that was found."""

    @property
    def step(self) -> int:
        """Optimiser steps done."""
        return self.course.step

    @property
    def finished(self) -> bool:
        """Whether all steps are done, and the weights are those after them."""
        return self.step >= self.steps and not self._update.cut

    @property
    def at_boundary(self) -> bool:
        """Whether no part of an effective batch is under way, and the weights belong to a step."""
        return self.sums.done == 0 and not self._update.cut

    @property
    def has_state(self) -> bool:
        """Whether `state` can be asked for now. Passes of a shared training, and of blocks that are
        lent, change nothing: it has one also while a batch is under way.
        """
        is_part = self._is_shared or (self.cut is not None and not self.cut.leads)
        return self.at_boundary or (is_part and not self._update.cut)

    @property
    def items_per_sample(self) -> float:
        """Items (samples, tokens) that a sample of this batch counts; 0 before the first."""
        return self._feed.count / self.settings.batch

    @property
    def most_level(self) -> int:
        """How many blocks can be recomputed."""
        return self._recomputation.most

    def micro_batch(self, most_rows: int, level: int = 0) -> MicroBatch:
        """Compute the next part of the effective batch, of at most `most_rows` samples, and update
        after the last part.

        When it fails, finished parts stay, and the next call goes on. An out-of-memory in the
        update itself is the exception: then `load` a saved state.

        Args:
            most_rows: Samples computed at once, at most. Parts are as equal as possible.
            level: How many blocks to recompute, where `train.recompute` is `auto`.

        Raises:
            NotFiniteError: The loss or its gradient is NaN or infinite; the weights were not
                changed.
            UpdateInterruptedError: An update was cut off.
            Exception: Whatever the model, the data set or torch raised.
        """
        self._update.check()
        batch = self._begun()
        level = level_of(self.settings.recompute, level, self._recomputation.most)
        self._recomputation.level = level
        rows = batch.advance(most_rows, self._scaler.scale)
        if (self._is_shared or self.cut is not None) and self._last.rows == 0:
            self._refuse_changes(batch)
        updated = batch.is_done and not self._is_shared
        if updated:
            self._tell_what_is_not_saved(batch)
            self.finish(*() if self.other is None else (self.other.agree,))
        self._last = MicroBatch(rows=rows, level=level, updated=updated)
        return self._last

    @property
    def now(self) -> Pass:
        """The forward pass under way, for the process that has the other blocks."""
        passes, (first, rows) = self._in_parts.dropouts.passes, self._in_parts.dropouts.samples
        return Pass(
            number=passes,
            step=self.step,
            batch=self.sums.beginnings,
            done=self.sums.done,
            first=first,
            rows=rows,
            recomputed=self._recomputation.level / max(1, self._recomputation.most),
            on_host_pct=self.host_states.share_pct,
            widened=self._in_parts.checking,
            trains=self.model.training,
        )

    @contextmanager
    def within(self, now: Pass) -> Iterator[Accumulator]:
        """Have the own blocks compute a forward pass of the process that leads, or the backward
        pass of it; yield the sums to which its gradients are added.

        Raises:
            UpdateInterruptedError: The weights belong to no step.
        """
        self._update.check()
        if self.sums.beginnings != now.batch:
            self.sums.begin(self.settings.batch, 1)
            self.sums.beginnings = now.batch
        self.sums.done = now.done
        self._recomputation.level = math.ceil(now.recomputed * self._recomputation.most)
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
        """Compute in the arithmetic of the settings, or in fp32 where it is widened."""
        kind = "fp32" if widened else self.settings.precision
        with precision.autocast(kind, self.device), self._levers.saving():
            yield

    def void(self, why: str) -> None:
        """Have the state be that of no step: the next part raises `UpdateInterruptedError`."""
        self._update.cut, self._update.why_cut = True, why

    def give(self, first: int, rows: int) -> None:
        """Have these rows of the batch computed here, after those that were given before."""
        self._begun().extend(first, rows)

    @property
    def done_rows(self) -> int:
        """Rows of the batch that are in the own sums."""
        return self.sums.done

    @property
    def has_rows(self) -> bool:
        """Whether rows were given that are not computed yet."""
        return self._batch is not None and not self._batch.is_done

    def write_sums(self, total: Tensor, loss: float, used: Sequence[bool]) -> None:
        """Have sums of all rows, as `sums.read` gives them, in the place of the own ones."""
        self._begun()  # also where no row was computed here
        self.sums.write(total, loss, used)

    def finish(
        self, agreed: Callable[[float, float], tuple[float, float]] = lambda *own: own
    ) -> None:
        """Update with the sums that are there. Can be run again until the update itself begins.

        `agreed`: as in `Accumulator.finish`.

        Raises:
            NotFiniteError, UpdateInterruptedError: As `micro_batch`.
        """
        self._update.check()
        self._set_rates()
        before = own_numbers(self.optimizer) if self._steps_here == 1 else {}
        with self._shares.timing("optimizer"):
            loss = self.sums.finish(
                self._update, self._scaler, step=self.step, clip=self.settings.clip, agreed=agreed
            )
        for name, _ in sorted(before.items() - own_numbers(self.optimizer).items()):
            instead = "keep it in a group of the optimiser if an update depends on it"
            self._tell_not_saved(name, self.optimizer, "update", instead)
        self._last = replace(self._last, updated=True)
        self._steps_here += 1
        self.lent_state = None
        self.course.finished_step(loss, self.settings.batch)
        self._accumulation = len(self._in_parts.parts)
        self._leave_batch()

    def drop_sums(self) -> None:
        """Forget what was computed of the batch under way; it begins again."""
        self._batch = None
        self.sums.begin(0, 1)

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
            data_wait_pct=100 * self._feed.wait_share(),
            copies_pct=self._shares.pct("copies"),
            optimizer_pct=self._shares.pct("optimizer"),
        )

    def operations(self) -> tuple[float, str]:
        """Count the operations that the model takes for a sample, or for an item where lengths
        differ, forward and backward, without what is repeated. Return that, and the kernels that
        attention runs on, such as `flash`; empty: the model has none.

        They are counted as autograd does them: nothing for the gradient of a frozen weight, and no
        backward pass at all below the first one that is trained. Takes the memory of a part of one
        sample. Call it between two optimiser steps.
        """
        batch, self._recomputation.level = self._begun(), 0
        first = part_of(batch.batch, 0, 1)
        with unchanged(self.model), OperationCounter() as counter:
            self.sums.backward(batch.value(first, 0, 1), 1.0, lambda *_: None)
        items = 1 if self.task.shorten is None else max(1, self.task.count(first))
        return counter.get_total_flops() / items, counter.kernels

    def evaluate(self) -> dict[str, float]:
        """Return the task's own figures in the arithmetic of the training, for the averaged weights
        if there are some.
        """
        evaluate = self.task.evaluate
        if evaluate is None:
            return {}
        if isinstance(evaluate, Validation):
            evaluate = partial(evaluate, rows=max(1, self._last.rows))
        average, arithmetic = self._average, self.settings.precision
        weights = nullcontext() if average is None else average.in_place_of_weights()
        self.model.eval()
        try:
            with torch.no_grad(), precision.autocast(arithmetic, self.device), weights:
                return dict(evaluate(self.model))
        finally:
            self.model.train()

    def weights_sha256(self) -> str:
        """Return the SHA-256 of all weights."""
        weights = self.model.state_dict() if self.other is None else self.state()["weights"]
        return weights_sha256(weights)

    @property
    def identity(self) -> Identity:
        """What a checkpoint of this training belongs to."""
        levers: dict[str, Lever] = {**self.settings.fingerprint(), "seed": self.seed}
        if self.task.fingerprint:
            levers["data_fingerprint"] = self.task.fingerprint
        if self.cut is not None:
            return Identity(model=self.task.name, weights=self.cut.forms, levers=levers)
        return Identity.of(self.task.name, self.model.state_dict(), levers)

    def state(self) -> dict[str, Any]:
        """Return all that `load` needs. The tensors are the training's own: copy them before the
        next call.

        Raises:
            RuntimeError: A part of an effective batch is under way.
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
        """Go on from a saved state: of the whole, or of the blocks that are lent where this process
        has no others.

        Raises:
            StateMismatchError: It is not of this model; nothing was changed.
        """
        self._refuse(state)
        lent_state = None
        if self.cut is not None and self.cut.leads:
            state, lent_state = self.cut.parts(state)
        self._update.cut = True  # until all is loaded
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
        self._leave_batch()
        self._steps_here = 0
        self.lent_state = lent_state
        self._update.cut = False

    def begin_with(self, earlier: Path) -> None:
        """Begin with weights that an earlier run has trained. Call it before the first step.

        Raises:
            TaskError: They cannot be used, or are those of another model; nothing was changed.
        """
        model = self._made(partial(begun_model, path=earlier))
        load_weights(self.model, model.state_dict())
        if self._average is not None:
            self._average.load([weight.detach() for weight in self.parameters])

    def park(self) -> int:
        """Move all tensors to host memory, finished parts included; return how many bytes wait
        there.

        Between this and `unpark` only `state` and `progress` may be called.
        """
        self._in_parts.dropouts.forget()
        states = self.optimizer.state.values()
        held: list[Iterable[Tensor]] = [self.model.parameters(), self.model.buffers()]
        held += [tensors_in(list(states)), self.sums.gradients, self.sums.loss]
        if self._average is not None and not self._average.on_host:
            held.append(self._average.tensors)
        return self._parking.park(chain.from_iterable(held), self.host_states.tensors)

    def unpark(self) -> None:
        """Move them back. Without memory for all of them they stay; then call it again."""
        self._parking.unpark()

    def close(self) -> None:
        """End the loader's processes."""
        self._feed.close()

    def _made(self, make: Callable[[TrainTask, TrainSettings], nn.Module]) -> nn.Module:
        """Make a model by the seed; leave torch's random numbers as they were."""
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

    def _refuse(self, state: Mapping[str, Any]) -> None:
        if state.get("version") != _STATE_VERSION:
            raise StateMismatchError(
                f"the saved state has version {state.get('version')}, and this program reads "
                f"{_STATE_VERSION}; go on with the version that wrote it, or begin anew"
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

    def _begun(self) -> OneBatch:
        """Return the batch under way, or the next one."""
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

    def _leave_batch(self) -> None:
        self._feed.batch = None
        self.drop_sums()

    def _loss(self, samples: Batch) -> object:
        """Return the task's loss of samples, or what it takes for one.

        Changes nothing; buffers that the model itself updates are the exception.
        """
        with self._shares.timing("copies"):
            part = on_device(self.task.shortened(samples), self.device)
        # Where parts are compared, rounding is to be small.
        with self.arithmetic(widened=self._in_parts.checking):
            return self.task.loss(self.model, self._levers.ordered(part))

    def _hazards_of(self, found: Sequence[PartsError]) -> dict[str, str]:
        """Return a sentence for each kind of thing that makes the training depend on how its
        batches are split, with what removes it. A training with them is still a training.
        """
        if self._is_shared and (wrong := [each for each in found if each.cause in _NOT_SHARED]):
            raise TaskError(f"{_OF_A_TEAM}: {wrong[0]}")
        # Parts that stay leave random numbers alone, which are not those of before a kill.
        return {
            each.cause: str(each)
            if each.cause == "dropout"
            else f"{each}; or set {_KEEP}, which keeps the parts"
            for each in found
            if each.cause == "dropout" or not self.settings.exact
        }

    def _tell_hazard(self, sentence: str) -> None:
        if sentence not in self.hazards:
            self.hazards.append(sentence)
            self._tell("hazard", reason=sentence)

    def _tell_what_is_not_saved(self, batch: OneBatch) -> None:
        """Tell of numbers of the model that a pass changes and no state has, once: in the second
        step, since some are set by the first pass of a process.
        """
        if self._steps_here != 1 or self.settings.preset in PRESETS:
            return
        for module, name in batch.changed():
            if name not in module._buffers:
                instead = "make it a buffer (register_buffer) if the loss depends on it"
                self._tell_not_saved(name, module, "pass", instead)

    def _tell_not_saved(self, name: str, owner: object, event: str, instead: str) -> None:
        self._tell_hazard(
            f"{name} of {type(owner).__name__} is a number that each {event} changes and no "
            f"checkpoint has, so it begins anew after a kill; {instead}"
        )

    def _refuse_changes(self, batch: OneBatch) -> None:
        """Raise a `TaskError` where a pass changes the model: each member would have its own."""
        if self.settings.preset not in PRESETS and (places := batch.changed()):
            module, name = places[0]
            raise TaskError(
                f"{_OF_A_TEAM}: each pass changes {name} of {type(module).__name__}, of which each "
                "member would have its own; change it after the step, or train on one card"
            )

    def _set_rates(self) -> None:
        """Give the groups of the optimiser their learning rates in this step."""
        share = self._rate_share(self.step)
        for group, first in zip(self.optimizer.param_groups, self._first_rates, strict=True):
            if isinstance(group["lr"], Tensor):  # of an optimiser that compiles its step
                group["lr"].fill_(first * share)
            else:
                group["lr"] = first * share
