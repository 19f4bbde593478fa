"""Adapters: the model's own weights are frozen, small matrices beside its linear layers are
trained.

LoRA (Hu et al., 2021) adds the low-rank product `up x down` to each weight. DoRA (Liu et al., 2024)
also trains the norm of each row of the sum. Models with transformers layers get peft's adapters,
all others `AdaptedLinear`: importing peft would cost a worker without transformers 97 MiB, and DoRA
on gpt2-medium 1.5 GiB more of the card (planned, four samples of 512 tokens). Does not adapt
convolutions or embeddings.
"""

from __future__ import annotations

import importlib
import math
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import ModuleType
from typing import Any, Final, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional

from workers.training.errors import TaskError, optional_library
from workers.training.settings import TrainSettings
from workers.training.tasks import TrainTask

#: Default of `train.adapter_alpha` as a multiple of the rank, as in most recipes.
_SCALE: Final = 2.0

PeftLayer: TypeAlias = Any
"""A layer of peft, which is imported inside functions."""


class AdaptedLinear(nn.Module):
    """A linear layer with an adapter; its own weight and bias are frozen."""

    def __init__(self, base: nn.Linear, rank: int, *, dora: bool, scale: float = _SCALE) -> None:
        """Start with the outputs of `base`: `up` is zero, and the row norms are those of its
        weight.
        """
        super().__init__()
        self.base = base
        self.scale = scale
        weight = base.weight.detach()
        outputs, inputs = weight.shape
        rank = min(rank, inputs, outputs)
        self.down = nn.Parameter(weight.new_empty(rank, inputs))
        self.up = nn.Parameter(weight.new_zeros(outputs, rank))
        nn.init.kaiming_uniform_(self.down, a=math.sqrt(5))  # as nn.Linear does
        self.lengths = nn.Parameter(torch.linalg.vector_norm(weight, dim=1)) if dora else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of a layer with the adapted weight."""
        added = self.scale * functional.linear(functional.linear(x, self.down), self.up)
        if self.lengths is None:
            return self.base(x) + added  # type: ignore[no-any-return]  # a module's call is untyped
        y = functional.linear(x, self.base.weight) + added
        y = y * (self.lengths / self._row_lengths()).to(y.dtype)
        return y if self.base.bias is None else y + self.base.bias.to(y.dtype)

    @torch.no_grad()
    def _row_lengths(self) -> Tensor:
        """Return the norm of each row of the adapted weight, a constant in the backward pass."""
        with torch.autocast(self.up.device.type, enabled=False):
            weight = self.base.weight
            squares_of_base = torch.linalg.vector_norm(weight, dim=1).square()
            crossed = ((weight @ self.down.T) * self.up).sum(1)
            added = ((self.up @ (self.down @ self.down.T)) * self.up).sum(1)
            squares: Tensor = squares_of_base + 2 * self.scale * crossed + self.scale**2 * added
            return squares.clamp(min=torch.finfo(squares.dtype).tiny).sqrt()

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """Return the plain layer with the adapted weight, in fp32."""
        weight = self.base.weight.double() + self.scale * (self.up.double() @ self.down.double())
        if self.lengths is not None:
            weight *= (self.lengths.double() / torch.linalg.vector_norm(weight, dim=1))[:, None]
        self.base.weight = nn.Parameter(weight.float())
        return self.base


def peft_layers(model: nn.Module) -> Iterator[tuple[str, PeftLayer]]:
    """Yield the layers with a peft adapter, each under its first name."""
    tuners = sys.modules.get("peft.tuners.lora")
    for name, module in model.named_modules():
        if tuners is not None and isinstance(module, tuners.LoraLayer):
            yield name, module


@torch.no_grad()
def merge(model: nn.Module) -> bool:
    """Replace adapted layers by linear ones with the merged weight in fp32. No layer keeps 4 bits.

    Return whether one shared its weight with another layer, which keeps the old weight.
    """
    had_4_bits = getattr(model, "is_quantized", False)
    if had_4_bits:
        cast("Any", model).dequantize(torch.float32)
    model.float()
    modules = list(model.modules())
    owners = Counter(id(weight) for each in modules for weight in each.parameters(recurse=False))
    merged = {
        layer: (layer.base.weight, layer.merged)
        for layer in modules
        if isinstance(layer, AdaptedLinear)
    }
    merged |= {
        layer: (layer.get_base_layer().weight, partial(_merge_peft, layer))
        for _, layer in peft_layers(model)
    }
    is_shared = any(owners[id(weight)] > 1 for weight, _ in merged.values())
    _replace(modules, {layer: make() for layer, (_, make) in merged.items()})
    if had_4_bits:
        _restore_conv1d(model)
    return is_shared


def _replace(parents: Sequence[nn.Module], made: Mapping[nn.Module, nn.Module]) -> None:
    """Replace the keys of `made` by its values, under each of their names."""
    for parent in parents:
        for name, child in list(parent.named_children()):
            if child in made:
                setattr(parent, name, made[child])


def _restore_conv1d(model: nn.Module) -> None:
    """Turn linear layers that replaced a `Conv1D` for 4-bit weights back into a `Conv1D`."""
    with torch.device("meta"):
        template = type(model)(model.config)
    for name, conv in template.named_modules():
        linear = model.get_submodule(name)
        if type(linear) is nn.Linear and type(conv) is not nn.Linear:
            conv.weight, conv.bias = nn.Parameter(linear.weight.T.contiguous()), linear.bias
            model.set_submodule(name, conv)


def _merge_peft(layer: PeftLayer) -> nn.Module:
    """Return the base layer of a peft layer, with the merged weight in fp32."""
    base: nn.Module = layer.get_base_layer()
    weight = cast("Tensor", base.weight)
    (name,) = layer.active_adapters
    variant = layer.lora_variant.get(name)
    if variant is None:
        base.weight = nn.Parameter(weight + layer.get_delta_weight(name))
    else:
        base.weight = nn.Parameter(variant.merge_safe(layer, name, weight))
    return base


def new_model(task: TrainTask, settings: TrainSettings) -> nn.Module:
    """Make the task's model, with adapters if the settings ask for them.

    Raises:
        TaskError: No layer can be adapted, none is in the task's blocks, or peft is missing.
    """
    model = task.model()
    if settings.adapter == "none":
        return model
    whole = task.whole(model)
    not_adapted = {module for root in whole for module in root.modules()}
    adaptable = {
        name: module
        for name, module in model.named_modules()
        if module not in not_adapted and _is_linear(module)
    }
    suffixes = tuple(settings.adapter_targets or [""])
    chosen = {name: module for name, module in adaptable.items() if name.endswith(suffixes)}
    blocks = task.blocks(model)
    in_blocks = {module for block in blocks for module in block.modules()}
    if not chosen or (blocks and not in_blocks & set(chosen.values())):
        raise _nothing_to_adapt(task, settings, adaptable)
    model.requires_grad_(requires_grad=False)
    if any(type(module).__module__.startswith("transformers.") for module in model.modules()):
        _adapt_by_peft(model, chosen, settings)
    else:
        _adapt(model, chosen, settings)
    for module, trained in whole.items():
        module.requires_grad_(requires_grad=trained)
    return model


def _adapt(model: nn.Module, chosen: Mapping[str, nn.Module], settings: TrainSettings) -> None:
    """Replace layers by `AdaptedLinear`."""
    adapted = {
        layer: AdaptedLinear(
            cast("nn.Linear", layer),
            settings.adapter_rank,
            dora=settings.adapter == "dora",
            scale=_alpha_of(settings) / settings.adapter_rank,
        )
        for layer in chosen.values()
    }
    _replace(list(model.modules()), adapted)


def _adapt_by_peft(
    model: nn.Module, chosen: Mapping[str, nn.Module], settings: TrainSettings
) -> None:
    peft = import_peft()
    config = peft.LoraConfig(
        r=settings.adapter_rank,
        lora_alpha=_alpha_of(settings),
        target_modules=list(chosen),
        use_dora=settings.adapter == "dora",
        fan_in_fan_out=any(not isinstance(layer, nn.Linear) for layer in chosen.values()),
    )
    is_planned = isinstance(torch.empty(0), FakeTensor)
    if is_planned and settings.adapter == "dora":
        _plan_dequantized_weights()
    with warnings.catch_warnings(), _replacing_weights() if is_planned else nullcontext():
        # peft corrects `fan_in_fan_out` itself; `merge` reports the tied weights of its warning.
        warnings.simplefilter("ignore")
        peft.inject_adapter_in_model(config, model)


def _plan_dequantized_weights() -> None:
    """Make peft's DoRA recognise a 4-bit layer whose tensors have no data."""
    dora = importlib.import_module("peft.tuners.lora.dora")
    usual = dora.dequantize_module_weight
    if usual.__module__ == __name__:
        return

    def dequantize_module_weight(layer: nn.Module) -> Tensor:
        state = getattr(layer.weight, "quant_state", None)
        if state is None or not isinstance(layer.weight, FakeTensor):
            return cast("Tensor", usual(layer))
        return torch.empty(state.shape, dtype=state.dtype)

    dora.dequantize_module_weight = dequantize_module_weight  # type: ignore[attr-defined]


@contextmanager
def _replacing_weights() -> Iterator[None]:
    """Make `Module.to` replace weights when it changes their type: torch's way of exchanging them
    fails for tensors without data.
    """

    def to(module: nn.Module, *_: object, dtype: torch.dtype | None = None) -> nn.Module:
        for each in module.modules():
            for name, weight in each._parameters.items():
                if weight is not None and dtype not in {None, weight.dtype}:
                    each._parameters[name] = nn.Parameter(weight.to(dtype))
        return module

    usual = nn.Module.to
    setattr(nn.Module, "to", to)  # noqa: B010 - mypy has methods constant
    try:
        yield
    finally:
        setattr(nn.Module, "to", usual)  # noqa: B010 - as above


def import_peft() -> ModuleType:
    """Import peft; raise a `TaskError` if it is not installed."""
    return optional_library("peft", "train.adapter on a model of transformers needs peft")


def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy weights into a model with the same names and shapes, 4-bit ones included."""
    with torch.no_grad():
        for name, weight in model.state_dict().items():
            weight.copy_(weights[name])


def _alpha_of(settings: TrainSettings) -> float:
    return settings.adapter_alpha or _SCALE * settings.adapter_rank


def _nothing_to_adapt(
    task: TrainTask, settings: TrainSettings, adaptable: Mapping[str, nn.Module]
) -> TaskError:
    if not adaptable:
        return TaskError(
            f"train.adapter needs nn.Linear modules, and the model of {task.name} has none; leave "
            "it out"
        )
    suffixes = sorted({name.rpartition(".")[2] for name in adaptable})
    return TaskError(
        f"train.adapter: {settings.adapter} reaches no block of {task.name}; its layers that can "
        f"have an adapter are {', '.join(suffixes)}: name some of them in train.adapter_targets"
    )


def _is_linear(module: nn.Module) -> bool:
    # GPT-2 and similar models have their own linear layer, and bitsandbytes has a 4-bit one.
    # Compared by name, to import neither.
    kind = type(module)
    others = ("transformers.pytorch_utils", "Conv1D"), ("bitsandbytes.nn.modules", "Linear4bit")
    return kind is nn.Linear or (kind.__module__, kind.__qualname__) in others
