"""What makes a training depend on its micro-batch is found and named."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.training.scene import CNN, CPU, GPT, replay, settings, task, trainer
from workers.training.memory_plan import _LiveBytes
from workers.training.trainer import Trainer, hazards


class WithKeyBias(nn.Module):
    """A model with one parameter, or a part of one, whose gradient is nothing but rounding."""

    def __init__(self, *, one_projection: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, 16)
        widths = [48] if one_projection else [16, 16, 16]
        self.projections = nn.ModuleList(nn.Linear(16, width) for width in widths)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        query, key, value = torch.cat([each(x) for each in self.projections], dim=-1).chunk(
            3, dim=-1
        )
        return functional.linear(
            x + functional.scaled_dot_product_attention(query, key, value), self.tokens.weight
        )


class Classic(nn.Module):
    def __init__(self, *, functional_dropout: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, 16)
        self.norm = nn.Identity() if functional_dropout else nn.BatchNorm1d(16)
        self.functional_dropout = functional_dropout

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.tokens(tokens).transpose(1, 2)).transpose(1, 2)
        x = functional.dropout(x, 0.1) if self.functional_dropout else x
        return functional.linear(x, self.tokens.weight)


class WithUnusedBiases(WithKeyBias):
    """Four parameters whose gradients are nothing but rounding."""

    def __init__(self) -> None:
        super().__init__(one_projection=False)
        self.shifts = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        logits = super().forward(tokens)
        for shift in self.shifts:  # which softmax takes out again
            logits = logits + shift
        return logits


def test_many_parameters_that_are_rounding_are_one_hazard() -> None:
    own = replace(task(GPT), model=WithUnusedBiases, blocks=lambda _: ())
    run = Trainer(own, settings(preset="own:task"), CPU, 1)
    run.micro_batch(12)
    (sentence,) = run.hazards
    assert re.search(r"projections.1.bias \(and of [123] other parameters\) is nothing", sentence)
    assert "or set train.exact: true, and a number as train.micro" in sentence
    ((name, figures),) = run.news()
    assert (name, figures) == ("hazard", {"reason": sentence})
    replay(run, [[12, 0, 3]])
    assert run.news() == []


def test_parts_that_stay_make_only_torchs_random_numbers_a_hazard() -> None:
    for functional_dropout in (False, True):
        own = replace(
            task(GPT),
            model=lambda drops=functional_dropout: Classic(functional_dropout=drops),
            blocks=lambda _: (),
        )
        run = Trainer(own, settings(preset="own:task", exact=True, micro=4), CPU, 1)
        run.micro_batch(4)
        assert len(run.hazards) == functional_dropout


@pytest.mark.parametrize("kind", [GPT, CNN])
def test_the_presets_have_none_and_are_left_as_they_are(kind: str) -> None:
    probed, alone = trainer(kind, steps=2), trainer(kind, steps=2)
    assert hazards(probed) == []
    for each in (probed, alone):
        replay(each, [[12, 0, 2]])
    assert probed.weights_sha256() == alone.weights_sha256()


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (
            lambda: WithKeyBias(one_projection=False),
            "of the gradient of projections.1.bias is nothing but rounding",
        ),
        (
            lambda: WithKeyBias(one_projection=True),
            "of the gradient of projections.0.bias is nothing but rounding",
        ),
        (
            lambda: Classic(functional_dropout=False),
            r"norm \(BatchNorm1d\) normalises over the samples",
        ),
        (
            lambda: Classic(functional_dropout=True),
            "the model draws from torch's own random numbers",
        ),
    ],
    ids=["key bias", "key bias in one projection", "batch norm", "functional dropout"],
)
def test_a_hazard_is_named_alone_and_the_model_stays_as_it_was(
    model: type[nn.Module], named: str
) -> None:
    own = replace(task(GPT), model=model, blocks=lambda _: ())
    run = Trainer(own, settings(precision="bf16"), CPU, 1)
    before = run.weights_sha256()
    (sentence,) = hazards(run)
    assert re.search(named, sentence)
    assert run.weights_sha256() == before


def test_it_is_found_in_the_memory_of_a_part_that_recomputes() -> None:
    run = Trainer(task(GPT, 0.0, layers=8, seq=256), settings(dropout=0.0), CPU, 1)
    run._begin_batch()
    live = _LiveBytes(1)

    def peak_bytes(compute: Callable[[], object]) -> int:
        with live:
            before = live.begin()
            compute()
            return live.peak_bytes - before

    of_part = peak_bytes(lambda: run._part(0, 4, 8, "fp32", 1.0))
    assert peak_bytes(lambda: run._part(0, 4, 0, "fp32", 1.0)) > 2 * of_part
    assert peak_bytes(lambda: hazards(run, 4, 8)) < 1.5 * of_part
    assert peak_bytes(run.attention_kernels) < of_part
