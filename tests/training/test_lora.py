"""Adapters compute the formulas of their papers, train nothing else, and are saved and resumed."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.training.scene import CPU, GPT, settings, task, train, trainer
from workers.training.errors import StateMismatchError, TaskError
from workers.training.lora import AdaptedLinear
from workers.training.trainer import Trainer


def adapted(*, dora: bool) -> tuple[AdaptedLinear, torch.Tensor]:
    """Return a partly trained layer and an input."""
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
    course = train(run)
    assert train(full)[0] == pytest.approx(course[0], rel=1e-6)
    assert course[-1] < 0.99 * course[0], (
        "as far as it can with a model that has learned nothing before"
    )
    assert train(trainer(GPT, **keys), limit=12) == pytest.approx(course, rel=1e-6), (
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
    train(whole)
    begin = copy.deepcopy(first.state())
    for _ in range(2 * 3):  # parts of 4
        first.micro_batch(5, level=1)
    second.load(first.state())
    train(second, level=2)
    assert second.weights_sha256() == whole.weights_sha256()
    second.load(begin)
    train(second)
    assert second.weights_sha256() == whole.weights_sha256(), "also from the very beginning"
    other = trainer(GPT, **(keys | {"adapter_rank": 2}))
    assert other.identity != whole.identity
    with pytest.raises(StateMismatchError, match=r"down"):
        other.load(whole.state())


def test_a_model_without_linear_layers_is_refused() -> None:
    conv = replace(task(GPT), model=lambda: nn.Conv1d(1, 1, 1), blocks=lambda _: ())
    with pytest.raises(TaskError, match=r"needs nn.Linear modules"):
        Trainer(conv, settings(adapter="lora"), CPU, 0)
