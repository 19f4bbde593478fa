"""A training that begins with the weights of an earlier run takes only its weights, at step 0."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.training.scene import GPT, train, trainer
from workers.training import earlier
from workers.training.checkpoints import Checkpoints
from workers.training.errors import TaskError
from workers.training.trainer import Trainer


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    return tmp_path / "states" / "pc1" / "0.weights"


def trained(weights: Path, **keys: Any) -> Trainer:
    """Train, save as a worker does, and extract the weights as a head does."""
    run = trainer(GPT, steps=6, dropout=0.0, lr=0.02, **keys)
    train(run)
    checkpoints = Checkpoints(weights.parent / "run", run.identity)
    checkpoints.load()
    assert checkpoints.save(run.state(), run.step)
    assert checkpoints.wait(60)
    told = earlier.take_out([weights.parent / "run" / "generation-0.pt"], weights)
    assert told == {"step": 6, "name": "generation-0.pt", "told": []}
    return run


def begun(weights: Path, **keys: Any) -> Trainer:
    run = trainer(GPT, seed=8, dropout=0.0, **keys)
    run.begin_with(weights)
    return run


@torch.no_grad()
def logits(run: Trainer) -> Tensor:
    tokens = torch.randint(0, 200, (4, 12), generator=torch.Generator().manual_seed(1))
    return run.model.eval()(tokens)


@pytest.mark.parametrize("adapter", ["none", "dora"])
def test_step_0_has_the_weights_and_nothing_else(weights: Path, adapter: str) -> None:
    first = trained(weights, adapter=adapter)
    second = begun(weights, adapter=adapter)
    assert second.weights_sha256() == first.weights_sha256()
    assert second.step == 0
    state = second.state()
    own = [each for each in second.model.parameters() if each.requires_grad]
    assert all(map(torch.equal, state["average"], own))
    moments = [each["exp_avg"] for each in state["optimizer"]["state"].values()]
    assert moments
    assert not any(each.any() for each in moments)


@pytest.mark.parametrize("adapter", ["lora", "dora"])
def test_adapters_are_merged_where_all_is_trained(weights: Path, adapter: str) -> None:
    first = trained(weights, adapter=adapter, adapter_alpha=5.0)
    torch.testing.assert_close(logits(begun(weights)), logits(first), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("then", "now", "words"),
    [
        ({}, {"kind": "cnn"}, "its weight blocks"),
        ({}, {"adapter": "lora"}, "adapter='none', and this run has"),
        (
            {"adapter": "lora"},
            {"adapter": "lora", "adapter_rank": 4},
            "adapter_rank=8, and this run has",
        ),
    ],
)
def test_weights_of_another_model_are_refused(
    weights: Path, then: dict[str, Any], now: dict[str, Any], words: str
) -> None:
    trained(weights, **then)
    run = trainer(**now)
    before = run.weights_sha256()
    with pytest.raises(TaskError, match=words):
        run.begin_with(weights)
    assert run.weights_sha256() == before


def test_the_newest_good_checkpoint_is_taken(weights: Path) -> None:
    trained(weights)
    good, damaged = (weights.parent / "run" / f"generation-{each}.pt" for each in (0, 1))
    damaged.write_bytes(good.read_bytes()[:-1])
    question = {"checkpoints": [str(damaged), str(good)], "to": str(weights)}
    told = earlier.answer(question)
    assert told["name"] == "generation-0.pt"
    assert "generation-1.pt is not used" in told["told"][0]
    good.unlink()
    assert "generation-1.pt is not used" in earlier.answer(question)["refused"]


def test_weights_that_are_not_there_are_refused(weights: Path) -> None:
    with pytest.raises(TaskError, match="cannot be read: No such file"):
        begun(weights)
