"""Unusable folders and data are refused in a sentence that names the file and the key."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from tests.hf.folders import make_folder
from tests.scene import ROOT
from workers.hf.folder import transformers
from workers.training.errors import TaskError
from workers.training.lora import new_model
from workers.training.settings import TrainSettings
from workers.training.tasks import find_task, refuse_without_data

Spoil = Callable[[Path], object]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("good"))


def with_key(name: str, **keys: object) -> Spoil:
    def spoil(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | keys))
        (folder / "mine.py").write_text("raise SystemExit('code of the folder was run')")

    return spoil


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def cut_off(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-1000])


def not_a_number(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["transformer.ln_f.weight"][3] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _begin(settings: TrainSettings) -> None:
    task = find_task(settings, 0)
    refuse_without_data(task)
    new_model(task, settings)


def said_of(model: Path, data: Path, **keys: Any) -> str:
    """Return the refusal of a training."""
    settings = TrainSettings(
        **{"preset": "hf-causal", "model": str(model), "data": str(data), **keys}
    )
    with pytest.raises(TaskError) as refusal:
        _begin(settings)
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def added(folder: Path) -> None:
    tokenizer = transformers().AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<call>", "<answer>"])
    tokenizer.save_pretrained(folder)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "tokenizer.json").unlink(), "has no tokenizer.json"),
        (with_key("config.json", model_type="llama"), "config and weights are of two models"),
        (cut_off, "model.safetensors has 326488 bytes, and its header declares 327488"),
        (pickled, "pytorch_model.bin is pickled"),
        (not_a_number, "NaN or infinite weights in transformer.ln_f.weight"),
        (with_key("config.json", auto_map={"AutoConfig": "mine.Config"}), "trust_remote_code"),
        (added, "or call model.resize_token_embeddings(len(tokenizer)) and save the folder again"),
    ],
    ids=["no tokenizer", "other config", "cut off", "pickled", "NaN", "code", "added tokens"],
)
def test_a_folder_is_refused_by_file(good: Path, tmp_path: Path, spoil: Spoil, said: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(good, folder)
    spoil(folder)
    path = tmp_path / "text.txt"
    path.write_text("something to learn " * 99)
    refusal = said_of(folder, path)
    assert refusal.startswith(f"train.model: {folder}")
    assert said in refusal


@pytest.mark.parametrize(
    ("name", "content", "keys", "said"),
    [
        ("empty.txt", "", {}, "holds no text"),
        ("other.jsonl", '{"txt": "a"}', {}, "has the keys 'txt'"),
        ("half.jsonl", '{"text": "half \\ud83d"}', {}, "is no JSON"),
        (
            "labels.csv",
            "text,lable\na,1\nb,0\n",
            {"preset": "hf-pairs"},
            "has no text or number 'label'",
        ),
        (
            "list.jsonl",
            '{"text": ["a"], "label": 1}',
            {"preset": "hf-pairs"},
            "number 'text' (it has 'text', 'label')",
        ),
        ("unquoted.csv", "text,label\na,b,1\nc,0,\n", {"preset": "hf-pairs"}, "put quotes around"),
        (
            "nan.jsonl",
            '{"text": "a", "label": NaN}\n{"text": "b", "label": 0.5}\n',
            {"preset": "hf-pairs"},
            "has the label 'nan', and the training knows numbers",
        ),
        ("long.csv", f"text,label\n{'a' * 200_000},1\n", {"preset": "hf-pairs"}, "line 2 of"),
    ],
)
def test_data_are_refused_by_file(
    good: Path, tmp_path: Path, name: str, content: str, keys: dict[str, Any], said: str
) -> None:
    path = tmp_path / name
    path.write_text(content)
    refusal = said_of(good, path, **keys)
    assert refusal.startswith("train.data: ")
    assert str(path) in refusal
    assert said in refusal


def test_a_number_of_a_label_that_is_none_is_refused(good: Path, tmp_path: Path) -> None:
    folder, path = tmp_path / "model", tmp_path / "labels.csv"
    shutil.copytree(good, folder)
    with_key("config.json", label2id={"a": "first", "b": 1})(folder)
    path.write_text("text,label\none,a\ntwo,b\n")
    said = said_of(folder, path, preset="hf-pairs")
    assert said.startswith(f'train.model: {folder / "config.json"} has a "label2id" with a value')


def test_the_head_refuses_a_folder_that_it_sees(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    keys = ("workload.name=train", "train.preset=hf-causal", "train.data=t", "train.model=model")
    options = [option for key in keys for option in ("--set", key)]
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", "run", "--local", *options],
        check=False, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert "train.model: model has no config.json" in done.stderr


def test_an_adapter_that_reaches_no_block_is_refused(good: Path, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("something to learn " * 99)
    refusal = said_of(good, path, adapter="lora", adapter_targets=["q_proj"])
    assert "reaches no block" in refusal
    assert "c_attn, c_fc, c_proj" in refusal
