"""Each lever of the model keeps what it promises: the same bits, the same course, or a better model of its own kind."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from tests.training.parity import STEPS, late_gap, losses, seed_noise
from tests.training.scene import CNN, CPU, GPT, trainer
from workers.training.errors import TaskError
from workers.training.settings import TrainSettings
from workers.training.tasks import find_task
from workers.training.trainer import Trainer

EXACT = [(GPT, {"set_to_none": False})]
NUMERIC: list[tuple[str, dict[str, Any]]] = [
    (GPT, {"attention": "math"}),
    (CNN, {"channels_last": True}),
]
OBJECTIVE: list[tuple[str, dict[str, Any]]] = [
    ("gpt-nano", {"label_smoothing": 0.1}),
    ("gpt-nano", {"layer_decay": 0.95}),
    ("cnn-small", {"layer_decay": 0.9}),
]


@cache
def validated(preset: str, lever: str | None = None, value: float = 0.0) -> tuple[float, float]:
    """Train for a while; return the validation loss before and after."""
    settings = TrainSettings(
        preset=preset, batch=8, steps=30, warmup_steps=5, precision="fp32", **({lever: value} if lever else {})
    )
    run = Trainer(find_task(settings, 0), settings, CPU, 0)
    before = run.evaluate()["validation_loss"]
    losses(run, limit=8)
    return before, run.evaluate()["validation_loss"]


@pytest.mark.parametrize(("kind", "lever"), EXACT, ids=str)
def test_an_exact_lever_changes_no_bit(kind: str, lever: dict[str, Any]) -> None:
    plain, levered = trainer(kind, steps=8), trainer(kind, steps=8, **lever)
    assert losses(plain) == losses(levered)
    assert plain.weights_sha256() == levered.weights_sha256()
    assert plain.identity == levered.identity, "a training may go on with it from a snapshot without it"


@pytest.mark.parametrize(("kind", "lever"), NUMERIC, ids=str)
def test_a_numeric_lever_stays_within_a_tenth_of_what_another_seed_changes(kind: str, lever: dict[str, Any]) -> None:
    plain, levered = trainer(kind, seed=1, steps=STEPS), trainer(kind, seed=1, steps=STEPS, **lever)
    assert late_gap(losses(plain), losses(levered)) <= 0.1 * seed_noise(kind)
    assert plain.identity != levered.identity


@pytest.mark.parametrize(("preset", "lever"), OBJECTIVE, ids=str)
def test_a_lever_of_the_objective_is_compared_by_the_loss_of_unseen_samples(preset: str, lever: dict[str, Any]) -> None:
    before, plain = validated(preset)
    same, levered = validated(preset, *next(iter(lever.items())))
    assert before == same, "what is measured does not depend on the lever"
    assert levered < 0.9 * before
    assert 0.5 * plain < levered < 2 * plain
    assert levered != plain


def test_smoothed_labels_are_those_of_the_definition() -> None:
    smoothed, plain, uniform = (
        find_task(TrainSettings(preset="gpt-nano", label_smoothing=share), 0).loss for share in (0.1, 0.0, 1 - 1e-12)
    )
    task = find_task(TrainSettings(preset="gpt-nano"), 0)
    model, tokens = task.model(), torch.stack([task.dataset[0], task.dataset[1]])
    expected = 0.9 * plain(model, tokens) + 0.1 * uniform(model, tokens)
    torch.testing.assert_close(smoothed(model, tokens), expected)
    with pytest.raises(TaskError, match="no labels to smooth"):
        find_task(TrainSettings(preset="cnn-small", label_smoothing=0.1), 0)


def test_each_block_learns_slower_than_the_one_after_it() -> None:
    # Adam's first step is as long as its rate.
    run = trainer(GPT, layer_decay=0.5, weight_decay=0.0, warmup_steps=0, clip=None, dropout=0.0)
    before = {name: each.detach().clone() for name, each in run.model.named_parameters()}
    run.micro_batch(12)
    moved = {name: float((each.detach() - before[name]).abs().max()) for name, each in run.model.named_parameters()}
    top = moved["norm.weight"]
    shares = {"blocks.1.widen.weight": 0.5, "blocks.0.merge.weight": 0.25, "tokens.weight": 0.125}
    assert {name: moved[name] / top for name in shares} == pytest.approx(shares, rel=0.02)


def test_the_kernel_of_attention_that_really_ran_is_told() -> None:
    ran = {asked: trainer(GPT, attention=asked).attention_kernels() for asked in ("auto", "math", "flash", "cudnn")}
    assert ran == {"auto": "flash", "math": "math", "flash": "flash", "cudnn": "flash"}, "a CPU has these two alone"
    assert trainer(CNN).attention_kernels() == ""


def test_a_checkpointed_block_computes_its_attention_again_with_the_same_kernel() -> None:
    plain, levered = trainer(GPT, attention="math", steps=4), trainer(GPT, attention="math", steps=4)
    assert losses(plain) == losses(levered, level=2)


def test_cudnn_tries_its_kernels_only_if_it_is_asked_to() -> None:
    asked = trainer(CNN, cudnn_benchmark=True)
    assert torch.backends.cudnn.benchmark
    plain = trainer(CNN)
    assert not torch.backends.cudnn.benchmark
    assert asked.identity != plain.identity


@pytest.mark.parametrize("lever", [{"cudnn_benchmark": True}, {"attention": "cudnn"}], ids=str)
def test_what_changes_bits_from_run_to_run_is_refused_with_deterministic(lever: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="deterministic: true promises the same bits"):
        TrainSettings(deterministic=True, **lever)
