"""What `run` refuses before it makes a folder or starts anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.scene import ROOT, orchestrator

CARD = {"name": "NVIDIA GeForce RTX 3090", "uuid": "GPU-3090f00d-0000-4000-8000-000000003090", "total_bytes": 2**34}


def refused(folder: Path, *arguments: str) -> str:
    """Return the words with which `run` refuses these arguments."""
    runs = folder / "runs"
    options = ("--config", str(ROOT / "cluster.yaml"), "--json", "--run-dir", str(runs), "--duration", "30s")
    done = orchestrator("run", *options, *arguments)
    assert done.returncode == 2, done.stdout + done.stderr
    assert not runs.exists()
    return str(json.loads(done.stdout)["error"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--chaos", "kill:every=20s"), "--yes-really"),
        (("--chaos", "node:pc2@3s", "--yes-really"), "only a rehearsal owns the raylets"),
        (("--rehearse", "--chaos", "node:pc3@3s"), "there is no such node; did you mean pc2?; valid: pc2"),
        (("--rehearse", "--chaos", "node:pc1@3s"), "its raylet carries the head"),
    ],
)
def test_faults_that_cannot_be_injected(tmp_path: Path, arguments: tuple[str, ...], sentence: str) -> None:
    assert sentence in refused(tmp_path, *arguments)


@pytest.mark.parametrize(
    ("script", "mode", "words"),
    [
        ('{"cards": []}', "--rehearse", "cards"),
        ("{", "--rehearse", "hot.json"),
        (json.dumps({"cards": [CARD]}), "--local", "--fake-sensors only makes sense with --rehearse"),
    ],
)
def test_sensors_that_cannot_be_faked(tmp_path: Path, script: str, mode: str, words: str) -> None:
    path = tmp_path / "hot.json"
    path.write_text(script)
    assert words in refused(tmp_path, mode, "--fake-sensors", str(path))
