"""A small multi-layer perceptron, trained on random rows: the example of docs/workloads.md."""

from __future__ import annotations

import torch
from torch import nn

from workers.workloads.base import StepResult, Workload

LAYERS = 4


class Mlp(Workload):
    """`size` is the width of every layer, `batch` the rows of one training step."""

    model: nn.Sequential | None = None

    def step(self, size: int, batch: int) -> StepResult:
        """Train on one batch."""
        where = {"device": self.context.device, "dtype": self.context.dtype}
        if self.model is None or self.model[0].in_features != size:
            self.release()  # free the old weights before the new ones are made
            torch.manual_seed(self.context.seed)
            blocks = [(nn.Linear(size, size, **where), nn.ReLU()) for _ in range(LAYERS)]
            self.model = nn.Sequential(*(layer for block in blocks for layer in block))
        rows = torch.randn(batch, size, **where)
        loss = (self.model(rows) - rows).square().mean()
        loss.backward()
        with torch.no_grad():
            for weight in self.model.parameters():
                weight.sub_(weight.grad, alpha=0.01)
                weight.grad = None
        return StepResult(flop=6.0 * LAYERS * batch * size * size)

    def release(self) -> None:
        """Drop the weights; the next step initialises them again."""
        self.model = None

    def needed_bytes(self, size: int, batch: int) -> int:
        """Return the bytes of weights, gradients, and two activations of each layer."""
        return 2 * LAYERS * (size + batch) * size * self.context.dtype.itemsize
