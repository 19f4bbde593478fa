"""The laboratory can be left out: the main job runs without its folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cluster.conftest import SMALL, Starter
from tests.scene import ROOT, python

#: An editable installation would find the folder where the sources are.
_NO_EDITABLE = """
import sys
sys.meta_path = [each for each in sys.meta_path if "Editable" not in getattr(each, "__name__", "")]
"""


@pytest.fixture
def product(tmp_path: Path) -> Path:
    """A copy of the product without orchestrator/lab."""
    for package in ("orchestrator", "workers"):
        ignored = shutil.ignore_patterns("__pycache__", *(["lab"] * (package == "orchestrator")))
        shutil.copytree(ROOT / package, tmp_path / package, ignore=ignored)
    (tmp_path / "sitecustomize.py").write_text(_NO_EDITABLE)
    assert not (tmp_path / "orchestrator" / "lab").exists()
    return tmp_path


@pytest.mark.ray
def test_the_main_job_runs_without_the_laboratory(start: Starter, product: Path) -> None:
    arguments = ("--rehearse", "--duration", "5s", "--json", *SMALL)
    head = start(*arguments, cwd=product, environment={"PYTHONPATH": str(product)})
    code, out, err = head.finish()
    assert code == 0, out + err
    rows = json.loads(out)["workers"]
    assert len(rows) == 3
    assert all(row["steps_ok"] > 0 for row in rows)


@pytest.mark.parametrize(
    "arguments",
    [
        ("tune", "--rehearse"),
        ("burn", "--rehearse"),
        ("run", "--rehearse", "--chaos", "kill:every=5s"),
    ],
    ids=lambda arguments: arguments[-1] if len(arguments) < 3 else arguments[2],
)
def test_what_belongs_to_it_says_so(product: Path, arguments: tuple[str, ...]) -> None:
    shutil.copy(ROOT / "cluster.yaml", product)
    done = python("-m", "orchestrator", *arguments, cwd=product, PYTHONPATH=str(product))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "the laboratory, orchestrator/lab, which is not installed" in done.stderr
