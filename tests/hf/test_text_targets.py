"""Encoder-decoders with texts as labels have the loss of transformers, in any parts of a batch."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.export.scene import course, gap, loaded, trained
from tests.hf.folders import make_folder
from tests.scene import ROOT
from workers.hf.export import export
from workers.training.errors import TaskError
from workers.training.memory_plan import MemoryPlanner
from workers.training.settings import TrainSettings
from workers.training.tasks import TrainTask, find_task

pytestmark = pytest.mark.usefixtures("one_thread")


def written(folder: Path) -> Path:
    """Write lines of words, each with its last words as the label."""
    words = (ROOT / "LICENSE").read_text(encoding="utf-8").split()
    lines = [
        {"text": " ".join(words[at : at + 9]), "label": " ".join(words[at + 6 : at + 8 + at % 3])}
        for at in range(0, 600, 3)
    ]
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def chosen(tmp_path: Path, family: str, **keys: Any) -> TrainSettings:
    folder = make_folder(tmp_path / "base", family, head="Seq2SeqLM")
    usual = {"batch": 6, "seq": 24, "lr": 0.01, "precision": "fp32", "steps": 6, "labels": "text"}
    own = {"preset": "hf-pairs", "model": str(folder), "data": str(written(tmp_path))}
    return TrainSettings.model_validate({**own, **usual, **keys})


def batch_of(task: TrainTask, rows: int) -> tuple[Tensor, Tensor]:
    return task.collate([task.dataset[row] for row in range(rows)])


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_the_loss_of_a_text_is_that_of_transformers(family: str, tmp_path: Path) -> None:
    task = find_task(chosen(tmp_path, family), 0)
    batch, model = batch_of(task, 5), task.model().eval()
    there, labels = batch[0][:, 0] >= 0, batch[1]
    with torch.no_grad():
        own = task.loss(model, batch) / task.count(batch)
        expected = model(
            input_ids=batch[0][:, 0].clamp(min=0),
            attention_mask=there.long(),
            labels=labels.where(labels >= 0, -100),
        ).loss
    torch.testing.assert_close(own, expected)
    assert task.count(batch) == int((labels >= 0).sum()) > 5


@pytest.mark.parametrize(
    ("family", "keys"),
    [("t5", {"dropout": 0.1}), ("bart", {}), ("t5", {"adapter": "lora"})],
    ids=str,
)
def test_text_targets_are_the_same_however_batches_are_cut(
    family: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    settings = chosen(tmp_path, family, **keys)
    task = find_task(settings, 3)
    # In fp32 Adam makes full steps of gradients that are rounding alone (gap up to 4e-6).
    precise = replace(task, model=lambda: task.model().double())
    whole, cut_run = (course(settings, cut=each, task=precise) for each in (False, True))
    assert cut_run.course.losses == pytest.approx(whole.course.losses, rel=1e-6)
    # The keys of BART have a bias.
    assert all("k_proj.bias" in each for each in (*whole.hazards, *cut_run.hazards))
    assert len(whole.task.blocks(whole.model)) == 4, "of the encoder and the decoder"
    assert MemoryPlanner(find_task(settings, 3), settings, on_card=False).plan(6, 4)


def test_a_trained_encoder_decoder_is_exported(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "base", "t5", head="Seq2SeqLM")
    state = tmp_path / "state"
    run, request = trained(folder, state, pairs=True, adapter="lora", labels="text")
    export(request(tmp_path / "out"))
    inputs, labels = batch_of(run.task, 4)
    given = {"input_ids": inputs[:, 0].clamp(min=0), "decoder_input_ids": labels.clamp(min=0)}
    with torch.no_grad():
        one, other = (
            model.eval()(**given).logits for model in (run.model, loaded(tmp_path / "out"))
        )
    assert gap(one, other) <= 1e-6


def test_a_model_that_cannot_write_is_refused(tmp_path: Path) -> None:
    settings = chosen(tmp_path, "t5")
    bert = make_folder(tmp_path / "bert", "bert", head="")
    with pytest.raises(TaskError, match="transformers has no ModelForSeq2SeqLM for"):
        find_task(settings.model_copy(update={"model": str(bert)}), 0)
