"""`ElasticMixin`: a Trainer of transformers whose batch is split into what fits in memory now.

    class ElasticTrainer(ElasticMixin, Trainer):
        pass

The batch of `per_device_train_batch_size` stays, and so do losses and gradients, to rounding. The
loop, its scheduler, logs and checkpoints are transformers' own. For one device.
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

#: More samples than an update has: those of the Trainer's step n have numbers from n times this on.
_NUMBERS_OF_STEP = 2**24

#: Labels that losses of transformers leave out (`ignore_index` of torch's cross entropy).
_IGNORED = -100

#: What is found of a loss that is a mean of something else, or no mean at all.
_ANOTHER_MEAN = {"mean", "sum", "count", "unknown"}

#: Libraries whose own `training_step` does nothing that a step in parts lacks.
_CALL_NO_MORE = ("transformers.", "trl.")


class ElasticMixin:
    """Comes before `Trainer` among the bases of a class."""

    on_hazard: ClassVar[Callable[[str], None] | None] = None
    """Told once of batch statistics, of dropout that is not keyed, and the like; without it they
    stop the first step. In a class: `on_hazard = staticmethod(print)`.
    """

    @property
    def checking(self: Any) -> bool:
        """Whether a loss is asked for to see that parts add up: count no figures then."""
        parts = getattr(self, "_elastic_parts", None)
        return parts is not None and parts.batch.checking

    def log(self: Any, *given: Any, **named: Any) -> None:  # noqa: ANN401 - as the Trainer's
        """Leave out what a loss logs of the samples that are compared."""
        if not self.checking:
            super().log(*given, **named)  # type: ignore[misc]  # of the Trainer

    def training_step(
        self: Any,
        model: nn.Module,
        inputs: Any,  # noqa: ANN401 - what the collator makes
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor:
        """Compute loss and gradients of a batch, however many parts it takes.

        Raises:
            TaskError: Losses of parts do not add up, so the result would depend on memory.
            OutOfBatchError: One sample at a time did not fit for two minutes.
        """
        batch = self._prepare_inputs(inputs)
        parts = getattr(self, "_elastic_parts", None)
        # A Trainer makes another model, or optimiser, when it trains again.
        if parts is None or parts.model is not model or parts.optimizer is not self.optimizer:
            parts = self._elastic_parts = _Parts(self, model)
        model.train()
        if callable(getattr(self.optimizer, "train", None)):  # of a schedule-free optimiser
            self.optimizer.train()
        loss: Tensor = parts.step(batch, num_items_in_batch)
        return loss


def _labels_of(part: Batch) -> float:
    """Return how many labels of a part are not ignored."""
    labels = part.get("labels") if isinstance(part, Mapping) else None
    return float((labels != _IGNORED).sum()) if isinstance(labels, Tensor) else 0.0


def _next_labels_of(part: Batch) -> float:
    """Return how many labels of a part are not ignored where each is predicted from those before
    it, as in a language model: none predicts the first one.
    """
    labels = part.get("labels") if isinstance(part, Mapping) else None
    if not isinstance(labels, Tensor) or labels.dim() < 2:
        return 0.0
    return _labels_of({"labels": labels[..., 1:]})


def _predicts_next(model: nn.Module) -> bool:
    """Whether the loss of a model of transformers leaves out the first label of each sample."""
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
        other = bases.training_step
        if not other.__module__.startswith(_CALL_NO_MORE):
            raise TaskError(
                f"ElasticMixin takes the place of {other.__qualname__}, which would not be called; "
                "move it into a class that stands before ElasticMixin among the bases, where it "
                "calls super().training_step(model, inputs, num_items_in_batch)"
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
            counted="num_items_in_batch",
        )
        self._used = (-1, 0)
        """A step of the Trainer, and the samples of its batches until now."""
        self._mean_of: Callable[[Batch], float] | None = None
        """Of how many samples, or labels, the model returns the mean, whatever it is told of the
        items of the batch; `None`: it heeds that.
        """

    def step(self, batch: Batch, items: Tensor | int | None) -> Tensor:
        """Compute a batch, and put its gradients where the Trainer looks for them."""
        step = self._trainer.state.global_step
        used = self._used[1] if self._used[0] == step else 0
        first, is_scaled = step * _NUMBERS_OF_STEP + used, self._is_scaled(items)
        try:
            loss = self._run(batch, items, first, is_scaled=is_scaled)
        except PartsError as error:
            other = self._as_mean(error, batch, items, first, is_scaled=is_scaled)
            if other is None:
                raise TaskError(self._told(error)) from error
            loss = other
        self._used = step, used + sum(self.batch.parts)
        return loss

    def _told(self, error: PartsError) -> str:
        """Return what is wrong with the parts of a batch, and what to do of the Trainer."""
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
        """Compute a batch whose parts do not add up as the mean of its samples, or of its labels;
        `None`: it is neither. Nothing has changed before, and all is looked at once more. Of
        batches before, it was the same mean: their samples had equally many labels.
        """
        if error.cause not in _ANOTHER_MEAN:
            return None
        before = self._mean_of
        # In half precision several may seem to be right: the one that is so most often comes first.
        by_label = [_labels_of, _next_labels_of]
        if _predicts_next(self.model):
            by_label.reverse()
        for self._mean_of in (*by_label, rows_of):
            if self._mean_of is before or not self._mean_of(batch):
                continue
            try:
                return self._run(batch, items, first, is_scaled=is_scaled)
            except PartsError as other:
                if other.cause not in _ANOTHER_MEAN:  # it is this mean; something else is wrong
                    raise TaskError(self._told(other)) from other
        self._mean_of = before
        return None

    def _run(
        self,
        batch: Batch,
        items: Tensor | int | None,
        first: int,
        *,
        is_scaled: bool,
    ) -> Tensor:
        several = self._trainer.current_gradient_accumulation_steps
        scaler = self._trainer.accelerator.scaler
        return self.batch.run(
            batch,
            partial(self._loss, items=items),
            partial(self._finish, is_one_of_several=several > 1),
            first=first,
            count=1.0 if is_scaled and self._mean_of is None else None,
            scale=1.0 if scaler is None else scaler.get_scale(),
            # A mean that it takes for scaled the Trainer divides by no number of batches.
            share=1.0 if is_scaled else 1.0 / several,
            weight=self._mean_of or rows_of,
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
        """Whether losses are divided by the items of the batch already, as the Trainer has it."""
        scaled = getattr(self._trainer, "loss_is_scaled_for_ga", None)
        if scaled is not None:
            return bool(scaled)
        counted = self._trainer.model_accepts_loss_kwargs and items is not None
        return bool(counted or self._trainer.compute_loss_func is not None)
