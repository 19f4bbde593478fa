"""The examples of docs/training.md do what the page says."""

from __future__ import annotations

import difflib
import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.engine.trainings import trained, training_spec
from tests.in_child import InChild
from tests.scene import ROOT
from tests.training.scene import trainer
from workers.messages import Verdict
from workers.training import batch_in_parts, elastic
from workers.training.checkpoints import Checkpoints
from workers.training.parts import PartsError

EXAMPLES = ROOT / "docs" / "examples"


def changed(*names: str) -> int:
    """Return the number of lines by which two examples differ."""
    texts = [(EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines() for name in names]
    lines = [line for line in difflib.ndiff(*texts) if line[:1] in "+-" and line[2:].strip()]
    return max(sum(line.startswith(sign) for line in lines) for sign in "+-")


def test_a_script_becomes_elastic_by_at_most_ten_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("nano_plain", "nano_elastic")
    assert changed(*names) <= 10
    monkeypatch.syspath_prepend(str(EXAMPLES))
    plain, other = (importlib.import_module(name) for name in names)
    losses = plain.main(torch.device("cpu"))
    assert losses[-1] < 0.7 * losses[0]
    assert other.main(torch.device("cpu")) == pytest.approx(losses, rel=1e-6)
    # The same if memory holds five samples in a part, and later six.
    failed = []
    real = batch_in_parts.part_of

    def part_of(batch: object, first: int, rows: int) -> object:
        if rows > 5 + (len(failed) > 2):
            failed.append(rows)
            raise torch.OutOfMemoryError("CUDA out of memory. (acted)")
        return real(batch, first, rows)

    monkeypatch.setattr(batch_in_parts, "part_of", part_of)
    assert other.main(torch.device("cpu")) == pytest.approx(losses, rel=1e-6)
    assert failed


def test_the_change_of_the_readme_keeps_the_losses() -> None:
    """Checked with whole batches, and with batches in parts."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```diff\n(.*?)```", page, re.DOTALL)
    lines = [(line[:1], line[1:]) for line in block.splitlines()]
    weights = []
    for left_out, most in (("+", 0), ("-", 8), ("-", 3)):
        text = "\n".join(line for sign, line in lines if sign != left_out)
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        batches = [torch.randn(8, 4) for _ in range(5)]
        text = text.replace("for batch", f"elastic.most_rows = {most}\nfor batch") if most else text
        text = f"def loss_of(part): return model(part).square().mean()\n{text}"
        exec(text, {"torch": torch, "nn": nn, "model": model, "batches": batches})  # noqa: S102 - our own
        weights.append(model.weight.detach())
    for other in weights[1:]:
        torch.testing.assert_close(other, weights[0])


def test_a_checkpoint_is_read_as_the_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trainer(steps=1)
    run.micro_batch(12)
    checkpoints = Checkpoints(tmp_path, run.identity)
    checkpoints.load()
    assert checkpoints.save(run.state(), run.step)
    assert checkpoints.wait(60)
    page = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n([^`]*generation-0[^`]*)```", page)
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {}
    exec(block, scope)  # noqa: S102 - our own document
    run.model.load_state_dict(scope["weights"])
    assert scope["saved"]["step"] == 1


def own_task(folder: str) -> object:
    sys.path.insert(0, str(EXAMPLES))
    keys: dict[str, object] = {"preset": "own_task:rings", "batch": 32, "warmup_steps": 5}
    spec = training_spec(**keys, steps=60, micro="auto", exact=False)
    return trained(folder, spec, [{"duration_s": 600.0}])[-1]


def test_the_documented_task_is_trained_to_its_end(in_child: InChild, tmp_path: Path) -> None:
    text = (EXAMPLES / "own_task.py").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 30
    assert text in re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "training.md").read_text("utf-8"), re.DOTALL
    )
    report = in_child(own_task, str(tmp_path))
    assert report.verdict is Verdict.DONE
    assert report.progress.loss < 0.9 * report.progress.first_loss
    assert [event for event in report.events if event.name == "hazard"] == []


def test_a_loop_over_padded_texts_changes_in_six_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With sum and count it computes the same, even if memory holds few samples."""
    names = ("padded_plain", "padded_elastic")
    assert changed(*names) <= 6
    monkeypatch.syspath_prepend(str(EXAMPLES))
    plain, other = (importlib.import_module(name) for name in names)

    def losses(main: Callable[[torch.device], object]) -> list[float]:
        main(torch.device("cpu"))
        return [float(line.split()[1]) for line in capsys.readouterr().out.splitlines()]

    whole = losses(plain.main)
    assert whole[-1] < 0.5 * whole[0]
    assert losses(other.main) == pytest.approx(whole, rel=1e-5)
    # As on the page, each step has parts of another size.
    made: list[elastic.ElasticStep] = []

    class Cut(elastic.ElasticStep):
        def step(self, *given: Any, **named: Any) -> float:
            self.most_rows = 1 + self.steps % 7
            made.append(self)
            return super().step(*given, **named)

    monkeypatch.setattr(other, "ElasticStep", Cut)
    assert losses(other.main) == pytest.approx(whole, rel=1e-5)
    assert max(made[0].parts) <= 7
    # The mean of the plain loop is refused.
    monkeypatch.setattr(other, "loss_of", plain.loss_of)
    with pytest.raises(PartsError, match="it ignores count; return the sum over the items"):
        losses(other.main)


def test_each_block_about_a_loop_of_ones_own_runs() -> None:
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    section = text.partition("## In a loop of your own, without Ray")[2].partition("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(blocks) == 4
    scope: dict[str, Any] = {}
    for block in blocks:
        exec(block, scope)  # noqa: S102 - our own document
    assert scope["elastic"].parts == [3, 3, 3, 3]
    assert scope["hazards"] == []
