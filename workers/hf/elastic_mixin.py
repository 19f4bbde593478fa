"""`ElasticMixin`: a Trainer of transformers whose batch is split into what fits in memory now.

    class ElasticTrainer(ElasticMixin, Trainer):
        pass

The batch of `per_device_train_batch_size` stays, and so do losses and gradients, to rounding. The
loop, its scheduler, logs and checkpoints are transformers' own. For one device.
"""

from __future__ import annotations

import time
import warnings
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from workers.resilience.retry import Attempts, RetryRules
from workers.training.accumulator import Accumulator
from workers.training.batches import part_of, rows_of
from workers.training.errors import TaskError
from workers.training.keyed_random import Dropouts

#: Samples of the first batch that are computed together and one by one.
_TRIED: Final = 4

#: What their losses may differ by, relatively; in half precision more is rounding.
_TOLERANCE: Final = 1e-4
_HALF_TOLERANCE: Final = 2e-2

_MAX_WAIT_S: Final = 120.0

#: On a card the same shows on the CPU alone where a model draws there; its own numbers are not
#: looked at.
_DRAWS: Final = (
    "the model draws from torch's own random numbers, so the result depends on how a batch is "
    "split; set the dropout of its attention to 0 in the model's config (attn_pdrop, attention_dropout or "
    "attention_probs_dropout_prob)"
)


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
            parts.refuse_unless_they_add_up(batch, num_items_in_batch)
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

    def step(self, batch: dict[str, Any], items: Tensor | int | None) -> Tensor:
        """Compute a batch, and put its gradients where the Trainer looks for them."""
        rows = rows_of(batch)
        if self._attempts is None:
            rules = RetryRules(
                starting_batch_size=rows,
                name="ElasticMixin",
                max_wait_s=_MAX_WAIT_S,
                on_retry=None,
                sleep=time.sleep,
            )
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

    def refuse_unless_they_add_up(self, batch: dict[str, Any], items: Tensor | int | None) -> None:
        """Compare the loss of a few samples with the sum of their own, without dropout."""
        rows = min(_TRIED, rows_of(batch))
        with torch.no_grad():
            before = torch.get_rng_state()
            self._model.train()
            self._dropouts.key(0, 1, self._parameters[0].device)
            self._loss(batch, 0, 1, rows, items)
            if not torch.equal(before, torch.get_rng_state()):
                warnings.warn(_DRAWS, stacklevel=2)
                torch.set_rng_state(before)
            self._model.eval()
            whole = float(self._loss(batch, 0, rows, rows, items))
            apart = sum(float(self._loss(batch, row, 1, rows, items)) for row in range(rows))
        arguments = self._trainer.args
        tolerance = _HALF_TOLERANCE if arguments.bf16 or arguments.fp16 else _TOLERANCE
        if abs(whole - apart) <= tolerance * max(abs(whole), abs(apart)):
            return
        kind = type(self._model).__name__
        if self._is_scaled(items) and abs(apart - rows * whole) <= 0.1 * abs(apart):
            why = f"{kind} ignores num_items_in_batch and returns a mean"
        elif self._is_scaled(items):
            why = f"the loss of {kind} is no sum over the items of a batch"
        else:
            why = f"the loss of {kind} is a mean over items, and samples have unequally many"
        raise TaskError(
            f"the loss of {rows} samples is {whole:.6g}, and their own add up to {apart:.6g}, so "
            f"the result would depend on memory: {why}; give the Trainer a compute_loss_func(outputs, "
            "labels, num_items_in_batch) that sums over items and divides by num_items_in_batch"
        )

    def _advance(
        self, limit: int, batch: dict[str, Any], rows: int, items: Tensor | int | None
    ) -> None:
        """Compute one part."""
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
        part = part_of(batch, first, count)
        with self._trainer.compute_loss_context_manager():
            loss: Tensor = self._trainer.compute_loss(self._model, part, num_items_in_batch=items)
        if self._is_scaled(items):
            return loss
        share: float = count / rows / self._trainer.current_gradient_accumulation_steps
        return loss * share

    def _is_scaled(self, items: Tensor | int | None) -> bool:
        """Whether losses are divided by the items of the batch already, as the Trainer has it."""
        scaled = getattr(self._trainer, "loss_is_scaled_for_ga", None)
        if scaled is not None:
            return bool(scaled)
        counted = self._trainer.model_accepts_loss_kwargs and items is not None
        return bool(counted or self._trainer.compute_loss_func is not None)
