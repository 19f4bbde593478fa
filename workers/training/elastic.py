"""`ElasticStep`: a training step for your own loop that splits its batch into parts that fit in
memory.

    elastic = ElasticStep(model, optimizer, clip=1.0)
    for batch in batches:                                    # tokens and targets
        loss = elastic.step(batch, lambda part: model(*part))  # the mean loss of a part

It replaces the loop over micro-batches, `backward`, clipping, `optimizer.step` and `zero_grad`.
Needs no Ray.
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

#: Key in the first group of the optimiser, so that every checkpoint of the optimiser has the
#: number.
_SAMPLES: Final = "elastic_samples_used"


class ElasticStep(LoopBatches):
    """Runs optimiser steps with whole batches, in as many parts as memory requires.

    Attributes for users: `parts` has the rows of each part of the last step. Set `most_rows` to try
    small parts without a shortage. `checking` is true while the loss is called to check that parts
    add up: do not record metrics then.
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

        The model's `nn.Dropout` modules become keyed by seed and sample, so that their masks do not
        depend on the parts.

        Args:
            model: The model that the loss uses, on the device where it is trained; several models
                in an `nn.ModuleList`.
            optimizer: Trains the parameters of its groups that require a gradient, also if they are
                not in the model. A list, if several step together. You may change groups and
                learning rates between two steps.
            clip: Largest norm of the gradient of all trained parameters.
            seed: For dropout.
            fp16: Scale the loss, as torch's GradScaler does.
            max_wait_s: Seconds that a step may wait when not even one sample fits.
            on_retry: Called for each part that ran out of memory, before a smaller part is tried.
            on_hazard: Called once for each hazard, such as batch statistics or dropout that is not
                keyed; without it, a hazard raises in the first step.
            sleep: Waits for some seconds.

        Raises:
            TaskError: The optimiser calls the loss itself, as LBFGS does, or is hidden from
                Lightning.
        """
        optimizers: list[Any] = list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        for each in optimizers:
            refuse_closure(each)
        trainer = getattr(model, "_trainer", None)  # set by Lightning
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
        """Number of finished optimiser steps."""

    @property
    def samples_used(self) -> int:
        """Samples of all finished steps; dropout is keyed by this. The number is in the optimiser's
        first group, and so in every checkpoint of the optimiser.
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
                (`workers.training.batches`). Computed as a whole if its samples cannot be counted.
            loss: Returns the mean loss of the samples of a part; with `count`, the sum over its
                items. From a mapping, such as the outputs of transformers, `loss` is used.
            count: Number of items of the whole batch (such as tokens that are not padding), or the
                sum of their weights.

        Raises:
            TaskError: The parts of the batch do not add up (a `PartsError`), it cannot be cut,
                nothing is trained, or a gradient exists already.
            OutOfBatchError: Not even one sample fitted within `max_wait_s`. The weights are
                unchanged.
            NotFiniteError: The loss or its gradient is NaN or infinite. The weights are unchanged.
            UpdateInterruptedError: Memory ran out in the update itself: load your last checkpoint
                of model and optimiser.
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
        """Return what a checkpoint needs besides the states of model and optimiser."""
        return {"steps": self.steps, "samples_used": self.samples_used, **self._scaler.state()}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from a checkpoint; load its model and optimiser before."""
        self.steps, self.samples_used = int(state["steps"]), int(state["samples_used"])
        self._scaler.load(state)
        self.recovered()

    def recovered(self) -> None:
        """Confirm that model and optimiser were loaded from a checkpoint after an interrupted
        update.
        """
        self._update.interrupted = False

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
        for optimizer in self._optimizers:  # look up `step`: schedulers replace it
            optimizer.step()
