"""`ElasticStep`: a training step for a loop of your own, that splits its batch into what fits in
memory now.

    elastic = ElasticStep(model, optimizer, clip=1.0)
    for batch in batches:                                    # tokens and targets
        loss = elastic.step(batch, lambda part: model(*part))  # the mean loss of a part

It replaces the loop over micro-batches, `backward`, clipping, `optimizer.step` and `zero_grad`.
Without Ray.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from torch import Tensor, nn
from torch.optim import Optimizer

from workers.resilience.retry import Attempts, Retry, RetryRules
from workers.training.accumulator import Accumulator
from workers.training.batches import Batch, part_of, rows_of
from workers.training.errors import TaskError
from workers.training.keyed_random import Dropouts
from workers.training.optimizers import Update, allocate_states
from workers.training.parts import PartsCheck, check_parts
from workers.training.precision import LossScaler


class ElasticStep:
    """One optimiser step after the other, each with a whole batch, however many parts it takes."""

    def __init__(  # noqa: PLR0913 - each option has a default
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        clip: float | None = None,
        seed: int = 0,
        fp16: bool = False,
        max_wait_s: float = 120.0,
        on_retry: Callable[[Retry], None] | None = None,
        on_hazard: Callable[[str], None] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Allocate what outlives a step: sums of gradients, and the states of an Adam.

        The model's `nn.Dropout` modules become keyed by seed and sample, so that they do not depend
        on the parts.

        Args:
            model: On the device where it is trained.
            optimizer: Of its parameters. Its learning rate is yours to change between two steps.
            clip: Largest norm of the gradient.
            seed: For dropout.
            fp16: Scale the loss, as torch's GradScaler does.
            max_wait_s: How long a step may wait when not even one sample fits.
            on_retry: Told about each part that ran out of memory, before it is tried with fewer
            samples.
            on_hazard: Told once of batch statistics, of dropout that is not keyed, and the like;
            without it they stop the first step.
            sleep: Waits so many seconds.

        Raises:
            TaskError: The model has no parameter that is trained.
        """
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not parameters:
            raise TaskError("the model has no parameter that is trained")
        self._model = model
        self._dropouts = Dropouts(model, seed)
        self._accumulator = Accumulator(parameters)
        allocate_states(optimizer)
        self._update = Update(optimizer)
        self._scaler = LossScaler(enabled=fp16)
        self._clip = clip
        self._device = parameters[0].device
        self._rules = partial(
            RetryRules, name="ElasticStep", max_wait_s=max_wait_s, on_retry=on_retry, sleep=sleep
        )
        self._attempts: Attempts | None = None
        self._parts_check, self._on_hazard = PartsCheck(), on_hazard
        self.steps = 0
        """Optimiser steps that are done."""
        self.samples_used = 0
        self.parts: list[int] = []
        """Rows of each part of the last step."""
        self.most_rows: int | None = None
        """Of a part, at most; `None`: as many as fit. To try a cut where memory is not short."""

    def step(
        self, batch: Batch, loss: Callable[[Batch], Tensor], count: int | None = None
    ) -> float:
        """Train on a batch and return its loss.

        Args:
            batch: A tensor, or a tuple, list or mapping of tensors, texts or numbers, by sample
            (`workers.training.batches`).
            loss: From a part of it to the mean loss of the part's samples; with `count` to the sum
            over its items.
            count: How many items (such as tokens that are not padding) the whole batch has.

        Raises:
            TaskError: The parts of the batch do not add up (a `PartsError`), or it cannot be cut.
            OutOfBatchError: One sample at a time did not fit for `max_wait_s`. The weights were not
                changed.
            NotFiniteError: The loss or its gradient is NaN or infinite; the weights were not
                changed.
            UpdateInterruptedError: Memory ran out in the update itself: load your last checkpoint,
                model and optimiser.
        """
        self._update.check()
        rows = rows_of(batch)
        if self._attempts is None:
            self._attempts = Attempts(self._rules(starting_batch_size=rows))
        by_items, due = count is not None, self._parts_check.due(batch)

        def advance(limit: int) -> list[float]:
            nonlocal due
            limit = min(limit, self.most_rows or limit)
            if due and limit > 1 and not self._accumulator.done:
                try:
                    self._check(limit, batch, loss, by_items=by_items)
                finally:
                    self._accumulator.begin(rows, count or rows)
                due = False
            return self._advance(limit, batch, loss, by_items=by_items)

        self._accumulator.begin(rows, count or rows)
        self.parts = []
        done: list[float] = []
        while not done:
            # A check and the part after it are one attempt: what is learned is the larger peak.
            done = self._attempts.run(advance)
        self.steps += 1
        self.samples_used += rows
        return done[0]

    def recovered(self) -> None:
        """Say that model and optimiser were loaded from a checkpoint after an
        interrupted update.
        """
        self._update.cut = False

    def _check(
        self, limit: int, batch: Batch, loss: Callable[[Batch], Tensor], *, by_items: bool
    ) -> None:
        """Refuse a batch whose parts do not add up."""

        def value(part: Batch, first: int) -> Tensor:
            self._dropouts.key(self.samples_used + first, rows_of(part), self._device)
            return loss(part)

        weight = None if by_items else rows_of
        found = check_parts(
            self._model, batch, value, weight=weight, rows=limit, accumulator=self._accumulator
        )
        if found and self._on_hazard is None:
            raise found[0]
        for sentence in self._parts_check.done(map(str, found)):
            if self._on_hazard is not None:
                self._on_hazard(sentence)

    def _advance(
        self, limit: int, batch: Batch, loss: Callable[[Batch], Tensor], *, by_items: bool
    ) -> list[float]:
        """Compute one part; after the last one update, and return the loss."""
        rows = self._accumulator.next_rows(limit)
        first = self._accumulator.done
        self.parts = self.parts if first else []
        if rows:
            self._dropouts.key(self.samples_used + first, rows, self._device)
            value = loss(part_of(batch, first, rows)) * (1 if by_items else rows)
            self._accumulator.add(
                rows, value.detach(), self._accumulator.gradients_of(value, self._scaler.scale)
            )
            self.parts.append(rows)
        if self._accumulator.remaining:
            return []
        mean, _ = self._accumulator.finish(
            self._update, self._scaler, step=self.steps, clip=self._clip, rates=None
        )
        return [mean]
