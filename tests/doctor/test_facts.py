"""The facts of a real machine: the one that runs this test."""

from __future__ import annotations

import json
import pickle
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from workers.host import machine
from workers.host.machine import free_bytes, look_around, query_torch


@pytest.mark.torch
def test_this_machine_answers_and_the_answer_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "a secret")
    facts = look_around()
    assert facts.torch.version is not None
    assert facts.ray is not None
    assert facts.cuda_visible_devices == "0"
    assert "a secret" not in json.dumps(asdict(facts))
    assert pickle.loads(pickle.dumps(facts)) == facts  # noqa: S301 - our own
    assert facts.ram_available_bytes > 0


@pytest.mark.torch
def test_a_torch_that_cannot_be_imported_is_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text(
        "raise ImportError('libcudart.so.12: cannot open shared object file')"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    torch = query_torch()
    assert torch.version is None
    assert torch.error == "ImportError: libcudart.so.12: cannot open shared object file"


def test_a_torch_that_takes_too_long_is_not_taken_for_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "_TORCH_TIMEOUT_S", 0.001)
    assert query_torch().is_late


def test_a_folder_not_there_yet_is_on_its_parents_disk(tmp_path: Path) -> None:
    assert free_bytes(str(tmp_path / "not" / "there")) == pytest.approx(
        shutil.disk_usage(tmp_path).free, rel=0.1
    )
