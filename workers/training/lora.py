"""Adapters: the model's own weights stay, and small matrices beside its linear layers are trained.

LoRA (Hu et al., 2021) adds `up x down` of a low rank to each weight. DoRA (Liu et al., 2024) also
trains the length of each row of the sum. A linear layer is an `nn.Linear`, or the `Conv1D` of
transformers, whose weight lies the other way round. Does not adapt convolutions or embeddings.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from workers.training.errors import TaskError
from workers.training.settings import TrainSettings
from workers.training.tasks import TrainTask

#: Where `train.adapter_alpha` is not set: `alpha` is twice the rank, as most recipes have it.
_SCALE: Final = 2.0


class AdaptedLinear(nn.Module):
    """A linear layer whose own weight and bias are frozen."""

    def __init__(self, base: nn.Module, rank: int, *, dora: bool, scale: float = _SCALE) -> None:
        """Begin as the layer is: `up` is zero, and the rows have the lengths that they have."""
        super().__init__()
        self.base = base
        self.scale = scale
        self.is_transposed = not isinstance(base, nn.Linear)
        weight = self.weight.detach()
        outputs, inputs = weight.shape
        rank = min(rank, inputs, outputs)
        self.down = nn.Parameter(weight.new_empty(rank, inputs))
        self.up = nn.Parameter(weight.new_zeros(outputs, rank))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))  # as nn.Linear does
        self.lengths = nn.Parameter(torch.linalg.vector_norm(weight, dim=1)) if dora else None

    @property
    def weight(self) -> Tensor:
        """The layer's own weight (outputs, inputs)."""
        weight = cast("Tensor", self.base.weight)
        return weight.T if self.is_transposed else weight

    def forward(self, x: Tensor) -> Tensor:
        """Return what the layer with the adapted weight would."""
        added = self.scale * functional.linear(functional.linear(x, self.down), self.up)
        if self.lengths is None:
            return self.base(x) + added  # type: ignore[no-any-return]  # a module's call is untyped
        y = functional.linear(x, self.weight) + added
        y = y * (self.lengths / self._row_lengths()).to(y.dtype)
        bias = cast("Tensor | None", self.base.bias)
        return y if bias is None else y + bias.to(y.dtype)

    @torch.no_grad()
    def _row_lengths(self) -> Tensor:
        """Return the length of each row of the adapted weight, a constant in the backward pass."""
        with torch.autocast(self.up.device.type, enabled=False):
            own = torch.linalg.vector_norm(self.weight, dim=1).square()
            crossed = ((self.weight @ self.down.T) * self.up).sum(1)
            added = ((self.up @ (self.down @ self.down.T)) * self.up).sum(1)
            squares: Tensor = own + 2 * self.scale * crossed + self.scale**2 * added
            return squares.clamp(min=torch.finfo(squares.dtype).tiny).sqrt()

    @torch.no_grad()
    def merged(self) -> Tensor:
        """Return the weight in fp32 that this layer computes with, as the layer's own lies."""
        added = self.scale * (self.up.double() @ self.down.double())
        weight = self.weight.double() + added
        if self.lengths is not None:
            weight *= (self.lengths.double() / torch.linalg.vector_norm(weight, dim=1))[:, None]
        return (weight.T if self.is_transposed else weight).float().contiguous()


def adapted_layers(model: nn.Module) -> dict[str, AdaptedLinear]:
    """Return the layers that have an adapter, each by its first name."""
    modules = model.named_modules()
    return {name: module for name, module in modules if isinstance(module, AdaptedLinear)}


def merge(model: nn.Module) -> bool:
    """Replace adapted layers by linear ones in fp32, each with the sum that it computed with.

    Return whether one shared its weight with another layer, which keeps what it has.
    """
    model.float()
    modules = list(model.modules())
    owners = Counter(id(weight) for each in modules for weight in each.parameters(recurse=False))
    adapted = adapted_layers(model).values()
    is_shared = any(owners[id(module.base.weight)] > 1 for module in adapted)
    for module in adapted:
        module.base.weight = nn.Parameter(module.merged())
    for parent in modules:
        for name, child in list(parent.named_children()):
            if isinstance(child, AdaptedLinear):
                setattr(parent, name, child.base)
    return is_shared


def new_model(task: TrainTask, settings: TrainSettings) -> nn.Module:
    """Make the task's model, with adapters if the settings ask for them.

    Raises:
        TaskError: There is no layer to adapt, or none within the task's blocks.
    """
    model = task.model()
    if settings.adapter == "none":
        return model
    model.requires_grad_(requires_grad=False)
    whole = task.whole(model)
    for module, trained in whole.items():
        module.requires_grad_(requires_grad=trained)
    left = {module for root in whole for module in root.modules()}
    scale = _SCALE
    if settings.adapter_alpha is not None:
        scale = settings.adapter_alpha / settings.adapter_rank
    found, adapted = list[str](), dict[nn.Module, AdaptedLinear]()
    for path, parent in list(model.named_modules()):
        for name, child in list(parent.named_children()):
            if child in left or not _is_linear(child):
                continue
            found.append(f"{path}.{name}".removeprefix("."))
            if not found[-1].endswith(tuple(settings.adapter_targets or [""])):
                continue
            if child not in adapted:
                adapted[child] = AdaptedLinear(
                    child, settings.adapter_rank, dora=settings.adapter == "dora", scale=scale
                )
            setattr(parent, name, adapted[child])
    blocks = task.blocks(model)
    inside = {module for block in blocks for module in block.modules()}
    if adapted and (not blocks or inside & set(adapted.values())):
        return model
    if not found:
        raise TaskError(
            f"train.adapter needs nn.Linear modules, and the model of {task.name} has none; leave "
            "it out"
        )
    ends = sorted({name.rpartition(".")[2] for name in found})
    raise TaskError(
        f"train.adapter: {settings.adapter} reaches no block of {task.name}; its layers that can "
        f"have one are {', '.join(ends)}: name some of them in train.adapter_targets"
    )


def _is_linear(module: nn.Module) -> bool:
    # GPT-2 and its kin have a linear layer of their own; nothing is imported to see it.
    kind = type(module)
    own = (kind.__module__, kind.__qualname__) == ("transformers.pytorch_utils", "Conv1D")
    return kind is nn.Linear or own
