"""`ElasticMixin`: a Trainer of transformers whose batch is split into what fits in memory now.

    class ElasticTrainer(ElasticMixin, Trainer):
        pass

The batch of `per_device_train_batch_size` stays, and so do losses and gradients, to rounding. The
loop, its scheduler, logs and checkpoints are transformers' own. For one device.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workers.resilience.retry import Attempts, RetryRules
from workers.training.accumulator import Accumulator
from workers.training.batches import Batch, part_of, rows_of
from workers.training.errors import TaskError
from workers.training.keyed_random import Dropouts
from workers.training.parts import PartsError, check_parts


class ElasticMixin:
    """Comes before `Trainer` among the bases of a class."""

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
        if parts is None:
            parts = self._elastic_parts = _Parts(self, model)
        model.train()
        loss: Tensor = parts.step(batch, num_items_in_batch)
        return loss


class _Parts:
    """The sums of one Trainer, and the size of its parts."""

    def __init__(self, trainer: Any, model: nn.Module) -> None:  # noqa: ANN401 - as above
        if trainer.args.world_size > 1 or trainer.args.n_gpu > 1:
            raise TaskError(
                "ElasticMixin trains on one device, and this Trainer has several; set "
                "CUDA_VISIBLE_DEVICES to one of them"
            )
        self._trainer = trainer
        self._model = model
        self._dropouts = Dropouts(model, trainer.args.seed)
        self._parameters = [weight for weight in model.parameters() if weight.requires_grad]
        self._sums = Accumulator(self._parameters)
        self._attempts: Attempts | None = None
        self._samples_used = 0
        self._checked = False

    def step(self, batch: dict[str, Any], items: Tensor | int | None) -> Tensor:
        """Compute a batch, and put its gradients where the Trainer looks for them."""
        rows = rows_of(batch)
        if self._attempts is None:
            rules = RetryRules(name="ElasticMixin", starting_batch_size=rows)
            self._attempts = Attempts(rules)
        self._sums.begin(rows, 1)
        while self._sums.remaining:
            self._attempts.run(partial(self._advance, batch=batch, rows=rows, items=items))
        self._samples_used += rows
        is_one_of_several = self._trainer.current_gradient_accumulation_steps > 1
        for weight, total in zip(self._parameters, self._sums.gradients, strict=True):
            if weight.grad is None:
                weight.grad = total.to(weight.dtype, copy=is_one_of_several)
            else:
                weight.grad.add_(total)
        return self._sums.loss[0].float()

    def _check(self, limit: int, batch: dict[str, Any], items: Tensor | int | None) -> None:
        """Refuse a Trainer whose parts do not add up; warn of what else depends on the cut."""

        def loss(part: Batch, first: int) -> Tensor:
            self._dropouts.key(first, rows_of(part), self._parameters[0].device)
            return self._loss_of(part, items)

        try:
            found = check_parts(
                self._model,
                batch,
                loss,
                weight=None if self._is_scaled(items) else rows_of,
                counted="num_items_in_batch",
                rows=limit,
                accumulator=self._sums,
            )
        except PartsError as error:
            raise TaskError(
                f"{type(self._model).__name__}: {error}; the Trainer takes a compute_loss_func("
                "outputs, labels, num_items_in_batch) in its place"
            ) from error
        for hazard in found:
            warnings.warn(str(hazard), stacklevel=2)

    def _advance(
        self, limit: int, batch: dict[str, Any], rows: int, items: Tensor | int | None
    ) -> None:
        """Compute one part; before the first of all, see that parts add up."""
        if not self._checked and limit > 1:
            try:
                self._check(limit, batch, items)
            finally:
                self._sums.begin(rows, 1)
            self._checked = True
        count = self._sums.next_rows(limit)
        first = self._sums.done
        self._dropouts.key(self._samples_used + first, count, self._parameters[0].device)
        loss = self._loss(batch, first, count, rows, items)
        scaler = self._trainer.accelerator.scaler
        scale = 1.0 if scaler is None else float(scaler.scale(torch.ones_like(loss)))
        self._sums.add(count, loss.detach(), self._sums.gradients_of(loss, scale))

    def _loss(
        self, batch: dict[str, Any], first: int, count: int, rows: int, items: Tensor | int | None
    ) -> Tensor:
        """Return what a part adds to the loss of its batch of so many rows."""
        loss = self._loss_of(part_of(batch, first, count), items)
        if self._is_scaled(items):
            return loss
        share: float = count / rows / self._trainer.current_gradient_accumulation_steps
        return loss * share

    def _loss_of(self, part: Batch, items: Tensor | int | None) -> Tensor:
        with self._trainer.compute_loss_context_manager():
            loss: Tensor = self._trainer.compute_loss(self._model, part, num_items_in_batch=items)
        return loss

    def _is_scaled(self, items: Tensor | int | None) -> bool:
        """Whether losses are divided by the items of the batch already, as the Trainer has it."""
        scaled = getattr(self._trainer, "loss_is_scaled_for_ga", None)
        if scaled is not None:
            return bool(scaled)
        counted = self._trainer.model_accepts_loss_kwargs and items is not None
        return bool(counted or self._trainer.compute_loss_func is not None)
