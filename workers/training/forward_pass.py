"""The loss of some samples of the current batch, computed as `train:` says: precision, kernels,
recomputation, dropout.

Computes no gradients of its own and changes nothing; buffers that the model itself updates are the
exception.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from workers.training import order, precision
from workers.training.attention import Watch
from workers.training.compiling import Compiling
from workers.training.errors import TaskError
from workers.training.feed import Feed
from workers.training.keyed import Dropouts
from workers.training.loader import on_device
from workers.training.model_levers import ModelLevers
from workers.training.recompute import Recomputation
from workers.training.settings import Precision, TrainSettings
from workers.training.tasks import TrainTask, part_of, rows_of
from workers.training.time_shares import Part, TimeShares


class ForwardPass:
    """One model with its levers, and the data that it reads."""

    def __init__(
        self,
        task: TrainTask,
        settings: TrainSettings,
        model: nn.Module,
        feed: Feed,
        shares: TimeShares,
        seed: int,
    ) -> None:
        """Prepare the model, which lies on its device."""
        self._task = task
        self._settings = settings
        self._model = model
        self._feed = feed
        self._shares = shares
        self._device = device = next(model.parameters()).device
        self.levers = ModelLevers(
            settings, model, device_type=device.type, on_card=device.type == "cuda"
        )
        self.blocks = task.blocks(model)
        self.dropouts = Dropouts(model, order.mixed(seed, 1))
        self.compiling = Compiling(settings, model, self.blocks)
        self.recomputation = Recomputation(self.blocks)

    def loss(
        self, first: int, rows: int, level: int, arithmetic: Precision, samples_used: int
    ) -> Tensor:
        """Return the summed loss of the samples `first` to `first + rows - 1` of the batch.

        Args:
            first: Place in the batch.
            rows: How many.
            level: Blocks that are recomputed.
            arithmetic: What is computed in.
            samples_used: Of all batches before this one; dropout is keyed by it.

        Raises:
            TaskError: What the task returned is no number.
        """
        self.recomputation.level = level
        with self._shares.timing(Part.COPIES):
            samples = self._task.shortened(part_of(self._feed.batch, first, rows))
            part = on_device(samples, self._device, non_blocking=self._settings.non_blocking)
        self.dropouts.key(samples_used + first, rows, self._device)
        with precision.autocast(arithmetic, self._device), self.levers.saving():
            loss = self._task.loss(self._model, self.levers.ordered(part))
        if loss.dim():
            raise TaskError(
                f"the loss of {self._task.name} has the shape {tuple(loss.shape)}; it must be one "
                "number"
            )
        return loss

    def flop_per_sample(self, samples_used: int) -> float:
        """Count the operations of a sample's forward and backward pass.

        The backward pass takes as many as the forward pass for what goes in, and as many for the
        weights; with adapters nearly none for the weights.
        """
        # Of the attention's kernels not all are counted, the matrix products are.
        kernel = sdpa_kernel(SDPBackend.MATH)
        with (
            self.buffers_kept(),
            torch.no_grad(),
            kernel,
            FlopCounterMode(display=False) as counter,
        ):
            self.loss(0, 1, 0, "fp32", samples_used)
        passes = 3.0 if self._settings.adapter == "none" else 2.0
        flop = passes * int(counter.get_total_flops())
        if self._task.shorten is None:
            return flop
        # Lengths differ: the operations of an item are nearly the same.
        batch = self._feed.batch
        return (
            flop
            * self._feed.count
            / rows_of(batch)
            / max(1, self._task.count(part_of(batch, 0, 1)))
        )

    def attention_kernels(self, samples_used: int) -> str:
        """Return the kernels that attention really runs on, such as `flash`.

        Empty: the model has no attention.
        """
        with self.buffers_kept(), self.levers.region(), Watch() as watch:
            self.loss(0, 1, 0, self._settings.precision, samples_used)
        ran: str = watch.ran  # its base class has no types
        return ran

    @contextmanager
    def buffers_kept(self) -> Iterator[None]:
        """Leave the model's buffers, such as the means of a norm, as they were."""
        buffers = [(each, each.clone()) for each in self._model.buffers()]
        try:
            yield
        finally:
            for buffer, saved in buffers:
                buffer.copy_(saved)
