"""`ElasticMixin`: a transformers Trainer whose batch is split into parts that fit in memory now.

    class ElasticTrainer(ElasticMixin, Trainer):
        pass

The batch of `per_device_train_batch_size` stays the same, and so do losses and gradients, to
rounding. Loop, scheduler, logs and checkpoints are transformers' own. For one device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from workers.resilience.attempts import RetryRules
from workers.training.batch_in_parts import LoopBatches
from workers.training.batches import Batch, rows_of
from workers.training.errors import TaskError
from workers.training.parts import PartsError

#: More samples than an update has: samples of the Trainer's step n begin at n times this.
_SAMPLES_PER_STEP = 2**24

#: Label that transformers' losses ignore (`ignore_index` of torch's cross entropy).
_IGNORED_LABEL = -100

#: Causes found if a loss is a mean of something else, or no mean at all.
_MEAN_CAUSES = {"mean", "sum", "count", "unknown"}

#: Libraries whose `training_step` a step in parts can replace without loss.
_REPLACEABLE = ("transformers.", "trl.")


class ElasticMixin:
    """Makes training steps elastic; must come before `Trainer` among the bases of a class."""

    on_hazard: ClassVar[Callable[[str], None] | None] = None
    """Called once for each hazard, such as batch statistics or dropout that is not keyed. Without
    it a hazard stops the first step. In a class: `on_hazard = staticmethod(print)`.
    """

    @property
    def checking(self: Any) -> bool:
        """Whether the loss is called to check that parts add up: do not record metrics then."""
        parts = getattr(self, "_elastic_parts", None)
        return parts is not None and parts.batch.checking

    def log(self: Any, *given: Any, **named: Any) -> None:  # noqa: ANN401 - as the Trainer's
        """Do not log what a loss logs during a check of parts."""
        if not self.checking:
            super().log(*given, **named)  # type: ignore[misc]  # of the Trainer

    def training_step(
        self: Any,
        model: nn.Module,
        inputs: Any,  # noqa: ANN401 - what the collator makes
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Compute loss and gradients of a batch, in as many parts as memory requires.

        Raises:
            TaskError: Losses of parts do not add up, so the result would depend on memory.
            OutOfBatchError: A part of one sample did not fit for two minutes.
        """
        batch = self._prepare_inputs(inputs)
        parts = getattr(self, "_elastic_parts", None)
        # A Trainer makes another model, or optimiser, when it trains again.
        if parts is None or parts.model is not model or parts.optimizer is not self.optimizer:
            parts = self._elastic_parts = _Parts(self, model)
        model.train()
        if callable(getattr(self.optimizer, "train", None)):  # a schedule-free optimiser
            self.optimizer.train()
        loss: Tensor = parts.step(batch, num_items_in_batch)
        return loss


def _count_labels(part: Batch) -> float:
    """Return the number of labels in a part that are not ignored."""
    labels = part.get("labels") if isinstance(part, Mapping) else None
    return float((labels != _IGNORED_LABEL).sum()) if isinstance(labels, Tensor) else 0.0


def _count_next_labels(part: Batch) -> float:
    """Return the number of labels in a part that are not ignored and have a predecessor: a language
    model does not predict the first one.
    """
    labels = part.get("labels") if isinstance(part, Mapping) else None
    if not isinstance(labels, Tensor) or labels.dim() < 2:
        return 0.0
    return _count_labels({"labels": labels[..., 1:]})


def _predicts_next(model: nn.Module) -> bool:
    """Whether the loss of a transformers model leaves out the first label of each sample."""
    loss, config = getattr(model, "loss_function", None), getattr(model, "config", None)
    is_causal = getattr(loss, "__name__", "") == "ForCausalLMLoss"
    return is_causal and not getattr(config, "is_encoder_decoder", False)


class _Parts:
    """The batches of one Trainer, for one model and optimiser."""

    def __init__(self, trainer: Any, model: nn.Module) -> None:  # noqa: ANN401 - as above
        if trainer.args.world_size > 1 or trainer.args.n_gpu > 1:
            raise TaskError(
                "ElasticMixin trains on one device, and this Trainer has several; set "
                "CUDA_VISIBLE_DEVICES to one of them"
            )
        bases: Any = super(ElasticMixin, trainer)
        training_step = bases.training_step
        if not training_step.__module__.startswith(_REPLACEABLE):
            raise TaskError(
                f"ElasticMixin takes the place of {training_step.__qualname__}, which would not be "
                "called; move it into a class that stands before ElasticMixin among the bases, "
                "where it calls super().training_step(model, inputs, num_items_in_batch)"
            )
        self._trainer = trainer
        self.model, self.optimizer = model, trainer.optimizer
        rules = partial(RetryRules, name="ElasticMixin")
        self.batch = LoopBatches(
            model,
            [trainer.optimizer],
            trainer.args.seed,
            rules,
            trainer.on_hazard,
            count_name="num_items_in_batch",
        )
        self._samples_of_step = (-1, 0)
        """The Trainer's current step, and the number of samples in its batches so far."""
        self._count_of_mean: Callable[[Batch], float] | None = None
        """Counts the samples or labels over which the model averages, if it ignores the number of
        items that it is given; `None`: it uses that number.
        """

    def step(self, batch: Batch, items: Tensor | int | None) -> Tensor:
        """Compute a batch, and store its gradients in the parameters, as the Trainer expects."""
        step = self._trainer.state.global_step
        used = self._samples_of_step[1] if self._samples_of_step[0] == step else 0
        first, is_scaled = step * _SAMPLES_PER_STEP + used, self._is_scaled(items)
        try:
            loss = self._run(batch, items, first, is_scaled=is_scaled)
        except PartsError as error:
            other = self._as_mean(error, batch, items, first, is_scaled=is_scaled)
            if other is None:
                raise TaskError(self._explained(error)) from error
            loss = other
        self._samples_of_step = step, used + sum(self.batch.parts)
        return loss

    def _explained(self, error: PartsError) -> str:
        """Return what is wrong with the parts of a batch, with a remedy in terms of the Trainer."""
        remedy = ""
        if error.cause in {"mean", "sum", "count"}:
            remedy = "; the Trainer takes a compute_loss_func(outputs, labels, num_items_in_batch)"
        elif error.cause == "dropout" and self._trainer.args.neftune_noise_alpha is not None:
            remedy = "; neftune_noise_alpha draws such numbers: leave it out"
        return f"{type(self.model).__name__}: {error}{remedy}"

    def _as_mean(
        self,
        error: PartsError,
        batch: Batch,
        items: Tensor | int | None,
        first: int,
        *,
        is_scaled: bool,
    ) -> Tensor | None:
        """Compute a batch as a mean over samples or labels, because its parts do not add up as a
        sum. Return `None` if it is neither mean. Nothing was changed before, and all checks run
        again. Earlier batches had the same mean: their samples had equally many labels.
        """
        if error.cause not in _MEAN_CAUSES:
            return None
        before = self._count_of_mean
        # In half precision several means may seem right: the most common one is tried first.
        by_label = [_count_labels, _count_next_labels]
        if _predicts_next(self.model):
            by_label.reverse()
        for self._count_of_mean in (*by_label, rows_of):
            if self._count_of_mean is before or not self._count_of_mean(batch):
                continue
            try:
                return self._run(batch, items, first, is_scaled=is_scaled)
            except PartsError as other:
                if other.cause not in _MEAN_CAUSES:  # it is this mean; something else is wrong
                    raise TaskError(self._explained(other)) from other
        self._count_of_mean = before
        return None

    def _run(
        self,
        batch: Batch,
        items: Tensor | int | None,
        first: int,
        *,
        is_scaled: bool,
    ) -> Tensor:
        batches = self._trainer.current_gradient_accumulation_steps
        scaler = self._trainer.accelerator.scaler
        return self.batch.run(
            batch,
            partial(self._loss, items=items),
            partial(self._finish, is_one_of_several=batches > 1),
            first=first,
            count=1.0 if is_scaled and self._count_of_mean is None else None,
            scale=1.0 if scaler is None else scaler.get_scale(),
            # The Trainer does not divide a mean by the number of batches if it takes it for scaled.
            share=1.0 if is_scaled else 1.0 / batches,
            weight=self._count_of_mean or rows_of,
        )

    def _finish(self, *, is_one_of_several: bool) -> Tensor:
        for weight, total in self.batch.sums.totals():
            if weight.grad is None:
                weight.grad = total.to(weight.dtype, copy=is_one_of_several)
            else:
                weight.grad.add_(total)
        return self.batch.sums.mean.float()

    def _loss(self, part: Batch, items: Tensor | int | None) -> object:
        with self._trainer.compute_loss_context_manager():
            return self._trainer.compute_loss(self.model, part, num_items_in_batch=items)

    def _is_scaled(self, items: Tensor | int | None) -> bool:
        """Whether the loss is already divided by the items of the batch, as the Trainer decides."""
        scaled = getattr(self._trainer, "loss_is_scaled_for_ga", None)
        if scaled is not None:
            return bool(scaled)
        counted = self._trainer.model_accepts_loss_kwargs and items is not None
        return bool(counted or self._trainer.compute_loss_func is not None)
