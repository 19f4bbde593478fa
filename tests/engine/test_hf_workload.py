"""The presets `hf-causal` and `hf-pairs` in the real engine: training, kills, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.engine.scene import events
from tests.engine.trainings import trained, training_spec
from tests.hf.folders import make_folder
from tests.in_child import InChild
from tests.scene import MIB, ROOT
from workers.messages import Status, Verdict
from workers.settings import WorkerSpec

WHOLE = {"duration_s": 600.0}
README = str(ROOT / "README.md")


def spec(**changes: object) -> WorkerSpec:
    keys = {"preset": "hf-causal", "data": str(ROOT / "docs" / "training.md"), **changes}
    return training_spec(213 * MIB, **keys)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_folder(tmp_path_factory.mktemp("gpt2")))


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_folder(tmp_path_factory.mktemp("bert"), "bert", head=""))


def labelled(folder: Path) -> str:
    """Write 400 lines with a text and a label that depends on the text."""
    lines = [
        {"text": ("fine", "poor")[place % 2] * (1 + place % 5), "label": place % 2}
        for place in range(400)
    ]
    path = folder / "lines.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The state folder of the undisturbed training."""
    return tmp_path_factory.mktemp("alone")


@pytest.fixture(scope="module")
def undisturbed(hf_child: InChild, alone: Path, gpt2: str) -> Status:
    """An undisturbed training with evaluations, which change no bit."""
    wanted = spec(model=gpt2, validate_every=2, validation=README)
    (report,) = hf_child(trained, str(alone), wanted, [WHOLE])
    return report


def test_a_folder_is_trained_to_the_end(undisturbed: Status) -> None:
    assert undisturbed.verdict is Verdict.DONE, undisturbed.reason
    assert not events(undisturbed, "not_planned")
    told = undisturbed.progress
    assert (told.train_step, told.saved_step) == (6, 6)
    assert told.tokens_per_s is not None
    last = events(undisturbed, "evaluated")[-1]
    assert 5 < last.detail["validation_loss"] < 6.5


def test_the_best_state_is_kept(undisturbed: Status, alone: Path) -> None:
    losses = {
        told.detail["step"]: told.detail["validation_loss"]
        for told in events(undisturbed, "evaluated")
    }
    assert list(losses) == [2, 4, 6]
    (path,) = alone.rglob("best.pt")
    best = torch.load(path, weights_only=True)
    assert best["figures"]["validation_loss"] == min(losses.values()) == losses[best["step"]]
    assert "transformer.wte.weight" in best["state"]["weights"]


def test_a_classifier_is_trained_and_its_figures_are_told(
    hf_child: InChild, tmp_path: Path, bert: str
) -> None:
    keys = {"preset": "hf-pairs", "model": bert, "data": labelled(tmp_path), "seq": None}
    (report,) = hf_child(trained, str(tmp_path), spec(**keys, adapter="lora"), [WHOLE])
    assert report.verdict is Verdict.DONE, report.reason
    (evaluated,) = events(report, "evaluated")
    assert set(evaluated.detail) == {"step", "validation_loss", "accuracy", "f1"}
    assert 0 <= evaluated.detail["f1"] <= evaluated.detail["accuracy"] <= 1
    (adapter,) = events(report, "adapter")
    head = 48 * 2 + 2 + 48 * 48 + 48  # the classifier and the pooler, in full
    # Rank 8 beside four products of width 48 and two to and from 96, in two blocks.
    assert adapter.detail["trained_parameters"] == head + 2 * 8 * (4 * 96 + 2 * 144)
