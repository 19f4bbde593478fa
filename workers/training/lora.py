"""Adapters: the model's own weights stay, and small matrices beside its `nn.Linear` modules are
trained.

LoRA (Hu et al., 2021) adds `up x down` of a low rank to each weight. DoRA (Liu et al., 2024) also
trains the length of each row of the sum. Does not merge them into the weights, and does not adapt
convolutions or embeddings.
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from workers.training.errors import TaskError
from workers.training.settings import TrainSettings
from workers.training.tasks import TrainTask

#: What is added counts twice: `alpha` is twice the rank, as most recipes have it.
_SCALE: Final = 2.0


class AdaptedLinear(nn.Module):
    """A linear layer whose own weight and bias are frozen."""

    def __init__(self, base: nn.Linear, rank: int, *, dora: bool) -> None:
        """Begin as the layer is: `up` is zero, and the rows have the lengths that they have."""
        super().__init__()
        rank = min(rank, base.in_features, base.out_features)
        self.base = base
        self.down = nn.Parameter(base.weight.new_empty(rank, base.in_features))
        self.up = nn.Parameter(base.weight.new_zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))  # as nn.Linear does
        self.lengths = (
            nn.Parameter(torch.linalg.vector_norm(base.weight.detach(), dim=1)) if dora else None
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return what the layer with the adapted weight would."""
        added = _SCALE * functional.linear(functional.linear(x, self.down), self.up)
        if self.lengths is None:
            return self.base(x) + added  # type: ignore[no-any-return]  # a module's call is untyped
        y = functional.linear(x, self.base.weight) + added
        y = y * (self.lengths / self._row_lengths()).to(y.dtype)
        return y if self.base.bias is None else y + self.base.bias.to(y.dtype)

    @torch.no_grad()
    def _row_lengths(self) -> Tensor:
        """Return the length of each row of the adapted weight, a constant in the backward pass."""
        with torch.autocast(self.up.device.type, enabled=False):
            own = torch.linalg.vector_norm(self.base.weight, dim=1).square()
            crossed = ((self.base.weight @ self.down.T) * self.up).sum(1)
            added = ((self.up @ (self.down @ self.down.T)) * self.up).sum(1)
            squares: Tensor = own + 2 * _SCALE * crossed + _SCALE**2 * added
            return squares.clamp(min=torch.finfo(squares.dtype).tiny).sqrt()


def new_model(task: TrainTask, settings: TrainSettings) -> nn.Module:
    """Make the task's model, with adapters if the settings ask for them.

    Raises:
        TaskError: There is no layer to adapt.
    """
    model = task.model()
    if settings.adapter == "none":
        return model
    model.requires_grad_(requires_grad=False)
    adapted: dict[nn.Module, AdaptedLinear] = {}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                if child not in adapted:
                    adapted[child] = AdaptedLinear(
                        child, settings.adapter_rank, dora=settings.adapter == "dora"
                    )
                setattr(parent, name, adapted[child])
    if not adapted:
        raise TaskError(
            f"train.adapter needs nn.Linear modules, and the model of {task.name} has none; leave "
            "it out"
        )
    return model
