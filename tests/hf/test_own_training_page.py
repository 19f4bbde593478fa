"""The examples of docs/own-training.md do what the page says."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.load import load_config
from tests.fork_server import ForkServer
from tests.hf.folders import make_folder
from tests.scene import ROOT
from workers.training.tasks import find_task
from workers.training.trainer import Trainer

EXAMPLES = ROOT / "docs" / "examples"
PAGE = (ROOT / "docs" / "own-training.md").read_text(encoding="utf-8")


def prepare(folder: Path, family: str, head: str = "CausalLM") -> None:
    make_folder(folder / "model", family, head=head)
    lines = [{"text": f"{place} is a number " * 3, "label": place % 2} for place in range(64)]
    (folder / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)))


def test_a_block_of_the_page_is_a_file() -> None:
    blocks = re.findall(r"```(?:yaml|python)\n(.*?)```", PAGE, re.DOTALL)
    names = ("own_causal.yaml", "own_pairs.yaml", "hf_trainer_elastic.py")
    assert blocks == [(EXAMPLES / name).read_text(encoding="utf-8") for name in names]


@pytest.mark.parametrize(
    ("name", "family", "head"), [("own_causal", "llama", "CausalLM"), ("own_pairs", "bert", "")]
)
@pytest.mark.torch
def test_a_configuration_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, family: str, head: str
) -> None:
    import torch

    prepare(tmp_path, family, head)
    monkeypatch.chdir(tmp_path)
    config: Any = load_config(str(EXAMPLES / f"{name}.yaml"))
    settings = config.train.model_copy(update={"steps": 1, "precision": "fp32"})
    trainer = Trainer(find_task(settings, 0), settings, torch.device("cpu"), 0)
    while not trainer.finished:
        trainer.micro_batch(5)
    assert trainer.course.losses[-1] < 7


def test_the_two_trainers_tell_the_same_loss(tmp_path: Path, hf_fork_server: ForkServer) -> None:
    prepare(tmp_path, "gpt2")
    losses = []
    for name in ("hf_trainer.py", "hf_trainer_elastic.py"):
        code = (EXAMPLES / name).read_text(encoding="utf-8")
        done = hf_fork_server.run(
            code, cwd=tmp_path, environment=os.environ | {"PYTHONPATH": str(ROOT)}
        )
        assert done.returncode == 0, done.stderr
        losses.append(float(done.stdout.splitlines()[-1]))
    # Both draw different dropout masks.
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
