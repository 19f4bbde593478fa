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
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from torch import nn
from torch.optim import Optimizer

from workers.resilience.attempts import Retry, RetryRules
from workers.training.batch_in_parts import LoopBatches
from workers.training.batches import Batch
from workers.training.errors import TaskError
from workers.training.optimizers import Update, refuse_closure
from workers.training.precision import LossScaler

#: In the first group of the optimiser, so that every checkpoint of it holds the number.
_SAMPLES: Final = "elastic_samples_used"


class ElasticStep(LoopBatches):
    """One optimiser step after the other, each with a whole batch, however many parts it takes.

    For users: `parts`, the rows of each part of the last step; `most_rows`, to try a cut where
    memory is not short; `checking`, while the loss is asked for to see that parts add up: count no
    figures then.
    """

    def __init__(  # noqa: PLR0913 - each option has a default
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
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
            model: What the loss computes with, on the device where it is trained; of several
            models an `nn.ModuleList`.
            optimizer: What is trained is what its groups hold and what wants a gradient then,
            also where it is not of the model. Several that step together: a list of them. Groups
            and learning rates are yours to change between two steps.
            clip: Largest norm of the gradient of all that is trained.
            seed: For dropout.
            fp16: Scale the loss, as torch's GradScaler does.
            max_wait_s: How long a step may wait when not even one sample fits.
            on_retry: Told about each part that ran out of memory, before it is tried with fewer
            samples.
            on_hazard: Told once of batch statistics, of dropout that is not keyed, and the like;
            without it they stop the first step.
            sleep: Waits so many seconds.

        Raises:
            TaskError: The optimiser calls the loss itself, as LBFGS does, or is hidden from
                Lightning.
        """
        optimizers: list[Any] = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        for each in optimizers:
            refuse_closure(each)
        trainer = getattr(model, "_trainer", None)  # of a module of Lightning
        known = getattr(trainer, "optimizers", ())
        if any(each is other for each in optimizers for other in known):
            raise TaskError(
                "Lightning does not see the steps of this optimizer, and would count none; hand "
                "over self.optimizers() in place of self.optimizers().optimizer"
            )
        rules = partial(
            RetryRules, name="ElasticStep", max_wait_s=max_wait_s, on_retry=on_retry, sleep=sleep
        )
        super().__init__(model, optimizers, seed, rules, on_hazard)
        self._update = Update(self._step_all)
        self._scaler = LossScaler(enabled=fp16)
        self._clip = clip
        self.steps = 0
        """Optimiser steps that are done."""

    @property
    def samples_used(self) -> int:
        """Samples of all steps that are done, by which dropout is keyed. It is kept in the
        optimiser's first group, and so in every checkpoint of the optimiser.
        """
        return int(self._optimizers[0].param_groups[0].get(_SAMPLES, 0))

    @samples_used.setter
    def samples_used(self, samples: int) -> None:
        self._optimizers[0].param_groups[0][_SAMPLES] = samples

    def step(
        self, batch: Batch, loss: Callable[[Batch], object], count: float | None = None
    ) -> float:
        """Train on a batch and return its loss.

        Args:
            batch: A tensor, or a tuple, list or mapping of tensors, texts or numbers, by sample
            (`workers.training.batches`). One whose samples cannot be told is computed at once.
            loss: From a part of it to the mean loss of the part's samples; with `count` to the sum
            over its items. A mapping's `loss` is taken, as of transformers' outputs.
            count: How many items (such as tokens that are not padding) the whole batch has, or the
            sum of their weights.

        Raises:
            TaskError: The parts of the batch do not add up (a `PartsError`), it cannot be cut,
                nothing is trained, or a gradient is there already.
            OutOfBatchError: One sample at a time did not fit for `max_wait_s`. The weights were not
                changed.
            NotFiniteError: The loss or its gradient is NaN or infinite; the weights were not
                changed.
            UpdateInterruptedError: Memory ran out in the update itself: load your last checkpoint,
                model and optimiser.
        """
        self._update.check()
        self._refuse_gradients()
        if any(
            getattr(each, "gradient_state", None) and not each.gradient_state.sync_gradients
            for each in self._optimizers
        ):
            raise TaskError(
                "accelerate would leave out this step; hand over the whole batch, without "
                "accelerator.accumulate()"
            )
        mean: float = self.run(
            batch,
            loss,
            self._finish,
            first=self.samples_used,
            count=count,
            scale=self._scaler.scale,
        )
        self.steps += 1
        self.samples_used += sum(self.parts)
        return mean

    def state_dict(self) -> dict[str, float]:
        """Return what goes into a checkpoint beside those of model and optimiser."""
        return {"steps": self.steps, "samples_used": self.samples_used, **self._scaler.state()}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from a checkpoint, whose model and optimiser were loaded before."""
        self.steps, self.samples_used = int(state["steps"]), int(state["samples_used"])
        self._scaler.load(state)
        self.recovered()

    def recovered(self) -> None:
        """Say that model and optimiser were loaded from a checkpoint after an
        interrupted update.
        """
        self._update.cut = False

    def _refuse_gradients(self) -> None:
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        if any(each.grad is not None for group in groups for each in group["params"]):
            raise TaskError(
                "a parameter has a gradient of a backward() of your own; hand over a loss that "
                "includes it, or call optimizer.zero_grad() before the step"
            )

    def _finish(self) -> float:
        self._refuse_gradients()
        return self.sums.finish(self._update, self._scaler, step=self.steps, clip=self._clip)

    def _step_all(self) -> None:
        for optimizer in self._optimizers:  # a scheduler that was made later replaced the method
            optimizer.step()
