"""What a machine says of itself: this one as it is, and cards through a fake NVML and the real nvidia-ml-py."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.doctor.scene import laptop, workstation
from workers.host.gpu_facts import is_visible
from workers.host.machine import ask_torch, free_bytes, look_around
from workers.units import GIB

ROOT = Path(__file__).parents[2]

#: Looks at the cards of a fake NVML; in a process of its own, because a process has one NVML for ever.
LOOK = """
import json, sys
from dataclasses import asdict
from pathlib import Path
from workers.nvml.fake.library import load
from workers.nvml.fake.prepare import prepare
load(prepare(Path(sys.argv[1]), Path(sys.argv[2])))
from workers.host.gpu_facts import look_at_cards
print(json.dumps(asdict(look_at_cards())))
"""

needs_compiler = pytest.mark.skipif(
    shutil.which("cc") is None and shutil.which("gcc") is None, reason="the fake NVML is built with a C compiler"
)


def looked(folder: Path, script: dict[str, Any], **environment: str) -> dict[str, Any]:
    path = folder / "script.json"
    path.write_text(json.dumps(script))
    own = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    done = subprocess.run(
        [sys.executable, "-c", LOOK, str(path), str(folder)],
        env={**own, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def fake_card(number: int, **changes: Any) -> dict[str, Any]:  # noqa: ANN401 - any key of the script
    return {
        "name": "NVIDIA GeForce RTX 3070",
        "uuid": f"GPU-{number}aaaaaaa-0000-0000-0000-000000000000",
        "total_bytes": 8 * GIB,
        "used_bytes": GIB,
        "compute_capability": "8.6",
        "power_limit_default_w": 220,
        **changes,
    }


@needs_compiler
def test_a_card_and_who_holds_it(tmp_path: Path) -> None:
    strangers = [{"pid": os.getpid(), "used_bytes": GIB}, {"pid": 2**22 + 5, "used_bytes": None}]
    found = looked(tmp_path, {"driver": "580.65.06", "cards": [fake_card(1, processes=strangers)]})
    assert (found["version"], found["error"], found["card_errors"]) == ("580.65.06", None, [])
    (card,) = found["cards"]
    assert (card["name"], card["total_bytes"], card["used_bytes"]) == ("NVIDIA GeForce RTX 3070", 8 * GIB, GIB)
    assert (card["compute_capability"], card["power_limit_w"], card["visible"]) == ([8, 6], 220.0, True)
    assert card["holders"] == [
        {"pid": os.getpid(), "name": psutil.Process().name(), "used_bytes": GIB},
        {"pid": 2**22 + 5, "name": None, "used_bytes": None},
    ]
    # What this card does not tell is unknown, not nothing.
    assert (card["cores"], card["persistence"], card["bus_width_bits"]) == (None, None, None)


@needs_compiler
def test_a_lost_card_is_named_and_the_other_one_answers(tmp_path: Path) -> None:
    found = looked(tmp_path, {"cards": [fake_card(1, lost_after_calls=0), fake_card(2)]})
    assert found["card_errors"] == ["card 0 is lost"]
    assert [card["index"] for card in found["cards"]] == [1]


@needs_compiler
def test_a_hidden_card_is_marked(tmp_path: Path) -> None:
    found = looked(tmp_path, {"cards": [fake_card(1), fake_card(2)]}, CUDA_VISIBLE_DEVICES="1")
    assert [card["visible"] for card in found["cards"]] == [False, True]


@pytest.mark.parametrize(
    ("setting", "visible"),
    [(None, True), ("0", True), ("1", False), ("", False), ("1, 0", True), ("GPU-1aaa", True), ("GPU-2", False)],
)
def test_which_cards_are_visible(setting: str | None, visible: bool) -> None:
    assert is_visible(0, "GPU-1aaaaaaa-0000", setting) is visible


@pytest.mark.torch
def test_this_machine_answers_and_the_answer_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_MEMCHECK", "1")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a secret")
    facts = look_around()
    assert facts.torch.version is not None
    assert facts.ray is not None
    assert facts.setting("PYTORCH_CUDA_MEMCHECK") == "1"
    assert "a secret" not in json.dumps(asdict(facts))
    assert pickle.loads(pickle.dumps(facts)) == facts  # noqa: S301 - our own
    assert facts.ram_total_bytes >= facts.ram_available_bytes > 0


@pytest.mark.torch
def test_a_torch_that_cannot_be_imported_is_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.12: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    torch = ask_torch()
    assert torch.version is None
    assert torch.error == "ImportError: libcudart.so.12: cannot open shared object file"


def test_a_folder_that_is_not_there_yet_is_on_the_disk_of_its_parent(tmp_path: Path) -> None:
    assert free_bytes(str(tmp_path / "not" / "there")) == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.1)


@pytest.mark.parametrize("facts", [laptop(), workstation()])
def test_facts_can_be_sent_and_written(facts: Any) -> None:  # noqa: ANN401 - a machine
    assert pickle.loads(pickle.dumps(facts)) == facts  # noqa: S301 - our own
    assert json.loads(json.dumps(asdict(facts)))["hostname"] == facts.hostname
