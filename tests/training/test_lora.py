"""Adapters compute what their papers define, train nothing else, and are saved and resumed as any weight."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.training.parity import losses
from tests.training.scene import CPU, GPT, settings, task, trainer
from workers.training.errors import StateMismatchError, TaskError
from workers.training.lora import AdaptedLinear
from workers.training.memory_plan import MemoryPlanner
from workers.training.settings import TrainSettings
from workers.training.tasks import find_task
from workers.training.trainer import Trainer


def adapted(*, dora: bool) -> tuple[AdaptedLinear, torch.Tensor]:
    """Return a layer in the middle of a training, and an input."""
    draw = torch.Generator().manual_seed(0)
    layer = AdaptedLinear(nn.Linear(12, 20, dtype=torch.float64), 3, dora=dora)
    with torch.no_grad():
        layer.up.normal_(generator=draw)
        if layer.lengths is not None:
            layer.lengths.mul_(1.3)
    return layer, torch.randn(5, 12, generator=draw, dtype=torch.float64)


@pytest.mark.parametrize("dora", [False, True], ids=["lora", "dora"])
def test_an_adapted_layer_is_that_of_the_definition(dora: bool) -> None:
    layer, x = adapted(dora=dora)
    weight = layer.base.weight.detach() + 2 * layer.up @ layer.down
    if layer.lengths is not None:
        weight = layer.lengths[:, None] * weight / weight.detach().norm(dim=1, keepdim=True)
    expected = functional.linear(x, weight, layer.base.bias.detach())
    torch.testing.assert_close(layer(x), expected)
    own = [each for name, each in layer.named_parameters() if not name.startswith("base")]
    assert len(own) == 2 + dora
    for one, other in zip(
        torch.autograd.grad(layer(x).square().sum(), own),
        torch.autograd.grad(expected.square().sum(), own),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("adapter", ["lora", "dora"])
def test_an_adapter_begins_as_the_model_and_leaves_its_weights(adapter: str) -> None:
    keys: dict[str, Any] = {"steps": 20, "lr": 0.02, "adapter": adapter, "adapter_rank": 4}
    full, run = trainer(GPT, steps=20), trainer(GPT, **keys)
    course = losses(run)
    assert losses(full)[0] == pytest.approx(course[0], rel=1e-6)
    assert course[-1] < 0.99 * course[0], (
        "as far as it can with a model that has learned nothing before"
    )
    assert losses(trainer(GPT, **keys), limit=12) == pytest.approx(course, rel=1e-6), (
        "whatever the micro-batch is"
    )
    first = trainer(GPT, **keys).model.state_dict()
    changed = {name for name, each in run.model.state_dict().items() if not each.equal(first[name])}
    assert changed == {name for name, each in run.model.named_parameters() if each.requires_grad}
    assert {name.rpartition(".")[2] for name in changed} == {
        "up",
        "down",
        *(["lengths"] if adapter == "dora" else []),
    }
    assert sum(each.numel() for each in run.parameters) < 0.3 * sum(
        each.numel() for each in full.parameters
    )


def test_adapters_are_resumed_to_the_same_bits_at_their_rank() -> None:
    keys: dict[str, Any] = {"steps": 6, "adapter": "dora", "adapter_rank": 4, "ema_on": "host"}
    whole, first, second = (trainer(GPT, **keys) for _ in range(3))
    losses(whole)
    for _ in range(2 * 3):  # parts of 4
        first.micro_batch(5, level=1)
    second.load(first.state())
    losses(second, level=2)
    assert second.weights_sha256() == whole.weights_sha256()
    second.rollback(None)
    losses(second)
    assert second.weights_sha256() == whole.weights_sha256(), "also from the very beginning"
    other = trainer(GPT, **(keys | {"adapter_rank": 2}))
    assert other.identity != whole.identity
    with pytest.raises(StateMismatchError, match=r"down"):
        other.load(whole.state())


def test_a_plan_has_gradients_and_states_of_adapters_alone() -> None:
    plans = {}
    for adapter in ("none", "lora"):
        chosen = TrainSettings(preset="gpt2-medium", adapter=adapter, adapter_rank=8, seq=128)
        plans[adapter] = MemoryPlanner(find_task(chosen, 0), chosen, on_card=True).plan(1, 0)
    numbers = 24 * 8 * ((1024 + 3072) + (1024 + 1024) + 2 * (1024 + 4096))
    assert plans["lora"].gradients_bytes == pytest.approx(4 * numbers, rel=0.01)
    assert plans["lora"].optimizer_bytes == pytest.approx(8 * numbers, rel=0.02)
    assert plans["lora"].weights_bytes == pytest.approx(
        plans["none"].weights_bytes + 4 * numbers, rel=1e-3
    )
    assert plans["lora"].total_bytes < 0.6 * plans["none"].total_bytes


def test_a_model_without_linear_layers_is_refused() -> None:
    conv = replace(task(GPT), model=lambda: nn.Conv1d(1, 1, 1), blocks=lambda _: ())
    with pytest.raises(TaskError, match=r"needs nn.Linear modules"):
        Trainer(conv, settings(adapter="lora"), CPU, 0)


class Chain(nn.Module):
    """Four layers without biases on numbers, for counting."""

    def __init__(self, frozen: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
        for place in frozen:
            self.layers[place].requires_grad_(requires_grad=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(functional.one_hot(tokens[:, :1].squeeze(1) % 64, 64).float())


@pytest.mark.parametrize(
    ("frozen", "passes"),
    # Of each layer one forward, one for its weight if that is trained, one for its input if
    # something below is trained.
    [((), 4 + 4 + 3), ((0, 1), 4 + 2 + 1), ((1, 2), 4 + 2 + 3), ((0, 1, 2), 4 + 1 + 0)],
)
def test_frozen_weights_take_no_pass_of_their_own(frozen: tuple[int, ...], passes: int) -> None:
    chain = replace(
        task(GPT),
        model=partial(Chain, frozen),
        loss=lambda model, part: model(part).square().sum(),
        count=len,
        blocks=lambda _: (),
    )
    run = Trainer(chain, settings(preset="own:task"), CPU, 0)
    assert run.flop_per_sample() == passes * 2 * 64 * 64


def test_adapters_are_counted_with_what_they_really_take() -> None:
    """One forward of all, one backward for inputs, and all three of the adapters."""
    full, lora = (
        trainer(adapter=adapter, adapter_rank=2, dropout=0.0).flop_per_sample()
        for adapter in ("none", "lora")
    )
    added = trainer(adapter="lora", adapter_rank=2, dropout=0.0)
    numbers = sum(weight.numel() for weight in added.parameters)
    assert lora == pytest.approx(2 / 3 * full + 16 * 6 * numbers, rel=0.05)
