"""Each lever of the model keeps its promise: the same bits, the same losses, or a better model."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations
from statistics import fmean
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.training.scene import CNN, CPU, GPT, in_shared_memory, train, trainer
from workers.training.keyed_random import KeyedDropout, row_keys
from workers.training.settings import TrainSettings
from workers.training.tasks import find_task, next_token_loss
from workers.training.trainer import Trainer

STEPS = 30
EXACT: list[tuple[str, dict[str, Any]]] = [
    (GPT, {"activations_on_host": True}),
    (GPT, {"activations_on_host": True, "precision": "bf16"}),
    (CNN, {"activations_on_host": True, "ema_on": "host"}),
]
NUMERIC: list[tuple[str, dict[str, Any]]] = [
    (GPT, {"precision": "bf16"}),
    (GPT, {"optimizer": "adamw-foreach"}),
]


def late_gap(one: list[float], other: list[float]) -> float:
    """Return the mean difference in the second half."""
    half = len(one) // 2
    return fmean(abs(a - b) for a, b in zip(one[half:], other[half:], strict=True))


@cache
def seed_noise(kind: str) -> float:
    """Return the mean gap between the losses of three seeds."""
    courses = [train(trainer(kind, seed=seed, steps=STEPS)) for seed in (1, 2, 3)]
    return fmean(late_gap(one, other) for one, other in combinations(courses, 2))


@pytest.mark.parametrize(("kind", "lever"), EXACT, ids=str)
def test_an_exact_lever_changes_no_bit(kind: str, lever: dict[str, Any]) -> None:
    common = {"steps": 8, "precision": lever.get("precision", "fp32")}
    plain, levered = trainer(kind, **common), trainer(kind, **(common | lever))
    assert train(plain) == train(levered, level=1), "also together with a recomputed block"
    assert plain.weights_sha256() == levered.weights_sha256()
    assert all(
        one.equal(other)
        for one, other in zip(plain.state()["average"], levered.state()["average"], strict=True)
    )
    assert plain.identity == levered.identity, (
        "a training may go on with it from a checkpoint without it"
    )


@pytest.mark.parametrize(("kind", "lever"), NUMERIC, ids=str)
def test_a_numeric_lever_changes_a_tenth_of_another_seed(kind: str, lever: dict[str, Any]) -> None:
    plain, levered = trainer(kind, seed=1, steps=STEPS), trainer(kind, seed=1, steps=STEPS, **lever)
    assert late_gap(train(plain), train(levered)) <= 0.1 * seed_noise(kind)
    assert plain.identity != levered.identity


def test_smoothed_labels_are_those_of_the_definition() -> None:
    smoothed, plain, uniform = (
        find_task(TrainSettings(preset="gpt-nano", label_smoothing=share), 0).loss
        for share in (0.1, 0.0, 1 - 1e-12)
    )
    task = find_task(TrainSettings(preset="gpt-nano"), 0)
    model, tokens = task.model(), torch.stack([task.dataset[0], task.dataset[1]])
    expected = 0.9 * plain(model, tokens) + 0.1 * uniform(model, tokens)
    torch.testing.assert_close(smoothed(model, tokens), expected)


def test_r_drop_adds_the_divergence_of_two_passes() -> None:
    chosen = TrainSettings(
        preset="gpt-nano", batch=4, steps=6, precision="fp32", dropout=0.2, r_drop=2.0
    )
    task = find_task(chosen, 0)
    runs = [Trainer(task, chosen, CPU, 0) for _ in range(2)]
    whole, split = train(runs[0], limit=4), train(runs[1], limit=1)
    assert whole == pytest.approx(split, rel=1e-6)
    # Without dropout both passes are equal, so that R-Drop adds nothing.
    model, tokens = task.model().eval(), torch.stack([task.dataset[0], task.dataset[1]])
    torch.testing.assert_close(task.loss(model, tokens), next_token_loss(model, tokens))
    model.train()
    for each, dropout in enumerate(
        each for each in model.modules() if isinstance(each, KeyedDropout)
    ):
        dropout.keys = row_keys(0, [each], torch.arange(2))[0]
    logits = model(tokens[:, :-1].repeat_interleave(2, dim=0))
    one, other = torch.log_softmax(logits, -1).view(2, 2, *logits.shape[1:]).unbind(1)
    divergence = sum(
        functional.kl_div(a, b, reduction="sum", log_target=True)
        for a, b in ((one, other), (other, one))
    )
    crossed = [
        functional.nll_loss(each.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
        for each in (one, other)
    ]
    torch.testing.assert_close(task.loss(model, tokens), sum(crossed) / 2 + 2.0 * divergence / 2)
    assert divergence > 0


def test_an_average_on_the_host_is_parked_and_resumed() -> None:
    alone, run = trainer(steps=4), trainer(steps=4, ema_on="host")
    train(alone)
    run.micro_batch(12)
    run.park()
    run.unpark()
    run.load(run.state())
    before = run.weights_sha256()
    tokens = torch.stack([run.task.dataset[0]])
    run.task = replace(
        run.task, evaluate=lambda model: {"loss": float(next_token_loss(model, tokens))}
    )
    alone.task = run.task
    run.evaluate()
    assert run.weights_sha256() == before, "the weights are back in their place"
    train(run)
    assert run.evaluate() == alone.evaluate()
    assert all(map(in_shared_memory, run.state()["average"])), "where no cap counts it"


def test_each_block_learns_slower_than_the_one_after_it() -> None:
    # The length of Adam's first step is its learning rate.
    run = trainer(GPT, layer_decay=0.5, weight_decay=0.0, warmup_steps=0, clip=None, dropout=0.0)
    before = {name: each.detach().clone() for name, each in run.model.named_parameters()}
    run.micro_batch(12)
    moved = {
        name: float((each.detach() - before[name]).abs().max())
        for name, each in run.model.named_parameters()
    }
    top = moved["norm.weight"]
    shares = {"blocks.1.widen.weight": 0.5, "blocks.0.merge.weight": 0.25, "tokens.weight": 0.125}
    assert {name: moved[name] / top for name in shares} == pytest.approx(shares, rel=0.02)


def test_keys_of_earlier_versions_are_passed_over_where_they_say_what_holds() -> None:
    as_it_was = {"attention": "auto", "channels_last": "auto", "persistent": True}
    assert TrainSettings(**as_it_was) == TrainSettings(), "a run of before can be exported"
    assert TrainSettings().fingerprint()["attention"] == "'auto'", "and gone on from"
