"""`ElasticMixin`: a Trainer of transformers whose batch is split into what fits in memory now.

    class ElasticTrainer(ElasticMixin, Trainer):
        pass

The batch of `per_device_train_batch_size` stays, and so do losses and gradients, to rounding. The
loop, its scheduler, logs and checkpoints are transformers' own. For one device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
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
        batch = dict(self._prepare_inputs(inputs))
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


class _Parts:
    """The batches of one Trainer, for one model and optimiser."""

    def __init__(self, trainer: Any, model: nn.Module) -> None:  # noqa: ANN401 - as above
        if trainer.args.world_size > 1 or trainer.args.n_gpu > 1:
            raise TaskError(
                "ElasticMixin trains on one device, and this Trainer has several; set "
                "CUDA_VISIBLE_DEVICES to one of them"
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

    def step(self, batch: dict[str, Any], items: Tensor | int | None) -> Tensor:
        """Compute a batch, and put its gradients where the Trainer looks for them."""
        step = self._trainer.state.global_step
        used = self._used[1] if self._used[0] == step else 0
        first, is_scaled = step * _NUMBERS_OF_STEP + used, self._is_scaled(items)
        try:
            loss = self._run(batch, items, first, is_scaled=is_scaled)
        except PartsError as error:
            other = self._as_mean(error, batch, items, first) if is_scaled else None
            if other is None:
                remedy = (
                    "; the Trainer takes a compute_loss_func(outputs, labels, num_items_in_batch)"
                )
                told = remedy if error.cause in {"mean", "sum", "count"} else ""
                raise TaskError(f"{type(self.model).__name__}: {error}{told}") from error
            loss = other
        self._used = step, used + sum(self.batch.parts)
        return loss

    def _as_mean(
        self, error: PartsError, batch: dict[str, Any], items: Tensor | int | None, first: int
    ) -> Tensor | None:
        """Compute a batch whose parts do not add up as the mean of its samples, or of its labels;
        `None`: it is neither. Nothing has changed before, and all is looked at once more.
        """
        if self._mean_of is not None or error.cause not in {"mean", "sum", "count", "unknown"}:
            return None
        for self._mean_of in (rows_of, _labels_of):
            with suppress(PartsError):
                return self._run(batch, items, first, is_scaled=True)
        self._mean_of = None
        return None

    def _run(
        self,
        batch: dict[str, Any],
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
