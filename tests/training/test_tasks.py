"""Training tasks: the presets, and a user's own task."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from tests.training.scene import CPU, GPT, replay
from tests.training.scene import settings as small_settings
from tests.training.scene import task as small_task
from workers.training.errors import StateMismatchError, TaskError
from workers.training.settings import PRESETS, TrainSettings
from workers.training.tasks import find_task
from workers.training.trainer import Trainer

OWN_TASK = """
from dataclasses import replace

import torch
from torch import nn
from workers.training.tasks import TrainTask


class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        x = torch.tensor([index / 64 - 0.5])
        return {"x": x, "y": x.abs()}


def task(settings):
    return TrainTask(
        name="points",
        model=lambda: nn.Sequential(nn.Linear(1, 16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 1)),
        dataset=Points(),
        loss=lambda model, batch: (model(batch["x"]) - batch["y"]).square().sum(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.9),
        evaluate=lambda model: {"at_zero": model(torch.zeros(1, 1)).item()},
    )


def uses(settings):
    return replace(task(settings), uses=frozenset({"dropout", "data"}))


def scheduled(settings):
    return replace(task(settings), schedule=lambda step: 1.0)


def plain(settings):
    return replace(task(settings), optimizer=None)


empty = TrainTask(name="empty", model=lambda: nn.ReLU(), dataset=Points(), loss=None)
number = 3
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_task.py").write_text(OWN_TASK)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_task", raising=False)


@pytest.mark.parametrize(
    ("preset", "millions"),
    [
        ("gpt-nano", 0.22), ("gpt-mini", 10.8), ("gpt2-small", 124.4), ("gpt2-medium", 354.8), ("gpt-1b", 1313.6),
    ],
)  # fmt: skip
def test_a_preset_has_its_size_and_no_bias_of_keys(preset: str, millions: float) -> None:
    assert preset in PRESETS
    with torch.device("meta"):
        model = find_task(TrainSettings(preset=preset), 0).model()
    assert sum(each.numel() for each in model.parameters()) / 1e6 == pytest.approx(
        millions, abs=0.06
    )
    assert not [name for name, _ in model.named_parameters() if "query_key_value.bias" in name]


@pytest.mark.usefixtures("own_module")
def test_a_users_own_task_is_trained_evaluated_and_resumed() -> None:
    settings = TrainSettings(
        preset="own_task:task", epochs=10, batch=16, precision="fp32", warmup_steps=0
    )
    run = Trainer(find_task(settings, 0), settings, CPU, 0)
    assert run.steps == 40
    replay(run, [[16, 0, 20]])
    other = Trainer(find_task(settings, 0), settings, CPU, 0)
    other.load(run.state())
    for each in (run, other):
        replay(each, [[16, 0, 20]])
        assert each.finished
    assert run.weights_sha256() == other.weights_sha256()
    assert run.course.losses[1] < run.course.losses[0] / 5
    assert abs(run.evaluate()["at_zero"]) < 0.2
    assert run.model.training


@pytest.mark.usefixtures("own_module")
@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        (
            {"preset": "own_task:nothing"},
            "'own_task:nothing' cannot be loaded on this machine: AttributeError",
        ),
        ({"preset": "no_such:task"}, "ModuleNotFoundError: No module named 'no_such'"),
        ({"preset": "own_task:number"}, "TypeError: 'int' object is not callable"),
        ({"preset": "own_task:empty"}, "the model of empty has no parameter that is trained"),
        (
            {"preset": "gpt-nano", "seq": 65},
            "train.seq is 65, and gpt-nano reads at most 64 tokens",
        ),
        ({"preset": "own_task:task", "dropout": 0.1}, "dropout is 0.1, and the task .* not use it"),
        ({"preset": "own_task:task", "data": "here"}, "leave it out, or name it in `uses`"),
        ({"preset": "own_task:uses", "label_smoothing": 0.1}, "train.label_smoothing is 0.1"),
        ({"preset": "own_task:task", "lr": 1e-4}, "or set it in its optimizer"),
        ({"preset": "own_task:scheduled", "warmup_steps": 3}, "or set it in its schedule"),
        (
            {"bucketing": True},
            "those of gpt-nano have one length, or do not report it; set train.documents ",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_sentence(
    keys: dict[str, object], sentence: str
) -> None:
    settings = TrainSettings(**keys)  # type: ignore[arg-type]
    with pytest.raises(TaskError, match=sentence) as refused:
        Trainer(find_task(settings, 0), settings, CPU, 0)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"packing": True, "bucketing": True}, "valid: one of them"),
        (
            {"documents": "lines", "data": "here", "r_drop": 1.0, "dropout": 0.1},
            "valid: one of them",
        ),
        ({"packing": True}, "also set train.data and train.documents"),
        ({"documents": "lines"}, "documents: windows, or also set train"),
        ({"preset": "cnn-landmarks"}, r"also set train.data \(a folder with pictures"),
        ({"preset": "hf-causal", "model": "a", "data": "b", "weights": "nf4"}, "lora or dora"),
        ({"r_drop": 1.0}, "two passes with different dropout"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        TrainSettings(**keys)


@pytest.mark.usefixtures("own_module")
def test_keys_that_a_task_says_it_uses_are_its_own() -> None:
    found = find_task(TrainSettings(preset="own_task:uses", dropout=0.1, data="here"), 0)
    assert found.uses == {"dropout", "data"}
    find_task(TrainSettings(preset="own_task:plain", lr=1e-4, weight_decay=0.0), 0)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"uses": frozenset({"micro"})}, "uses micro; valid: data, documents"),
        ({"optimizer": list, "named_optimizer": list}, "has optimizer and named_optimizer"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS computes the loss several times in a step"),
        ({"optimizer": lambda of: [torch.optim.SGD(of)]}, "gives a list; give one optimizer of"),
    ],
)
def test_fields_that_make_no_sense_are_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TaskError, match=sentence):
        Trainer(replace(small_task(GPT), **fields), small_settings(), CPU, 0)


def of_groups(named: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    """Return an AdamW whose groups have different names, rates, betas and weight decay."""
    norms, others = [], []
    for name, parameter in named:
        (norms if "norm" in name else others).append((name, parameter))
    groups = [
        {"params": others, "weight_decay": 0.3, "betas": (0.8, 0.9), "lr": 1e-2},
        {"params": norms, "weight_decay": 0.0, "lr": 1e-3},
    ]
    return torch.optim.AdamW(groups)


def test_groups_by_name_keep_their_rates_and_survive_a_checkpoint() -> None:
    own = replace(small_task(GPT), named_optimizer=of_groups, schedule=lambda step: 0.5**step)
    chosen = small_settings(layer_decay=0.9)
    run = Trainer(own, chosen, CPU, 0)
    groups = run.state()["optimizer"]["param_groups"]
    assert len(groups) > 2, "split by layer_decay"
    assert all(len(group["params"]) == len(group["param_names"]) for group in groups)
    assert {group["weight_decay"] for group in groups if "norm" in group["param_names"][0]} == {0}
    assert {group["betas"] for group in groups} == {(0.8, 0.9), (0.9, 0.999)}
    first = [group["lr"] for group in groups]
    replay(run, [[12, 0, 3]])
    assert [group["lr"] / 0.25 for group in run.state()["optimizer"]["param_groups"]] == first
    saved = copy.deepcopy(run.state())
    other = Trainer(own, chosen, CPU, 0)
    other.load(saved)
    for each in (run, other):
        replay(each, [[12, 0, 2]])
    assert run.weights_sha256() == other.weights_sha256()


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"preset": "gpt-mini"}, "of another model: its weight blocks"),
        ({"preset": "gpt-nano", "ema_decay": 0.9}, "one of them has no averaged weights"),
    ],
)
def test_a_state_of_another_model_is_refused_and_changes_nothing(
    keys: dict[str, object], sentence: str
) -> None:
    settings = TrainSettings(preset="gpt-nano")
    run = Trainer(find_task(settings, 0), settings, CPU, 0)
    before = run.weights_sha256()
    others = TrainSettings(**keys)  # type: ignore[arg-type]
    state = Trainer(find_task(others, 1), others, CPU, 1).state()
    with pytest.raises(StateMismatchError, match=sentence):
        run.load(state)
    with pytest.raises(StateMismatchError, match="has version 0, and this program reads 2"):
        run.load(state | {"version": 0})
    assert run.weights_sha256() == before
    assert run.at_boundary


def test_nothing_draws_from_torchs_own_random_numbers() -> None:
    settings = TrainSettings(preset="gpt-nano", steps=2, dropout=0.1, batch=4)
    before = torch.get_rng_state()
    replay(Trainer(find_task(settings, 0), settings, CPU, 0), [[3, 1, 4]])
    assert torch.get_rng_state().equal(before)
