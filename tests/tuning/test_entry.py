"""What the process of an arm has in its environment when it loads CUDA."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from workers.tuning import messages
from workers.tuning.messages import ArmSpec


def test_an_arm_has_the_environment_of_a_worker(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With another allocator or order of cards, something else would be measured than what runs."""
    monkeypatch.setattr(messages, "_ARM", "tests.tuning.telling_arm")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
    ours, theirs = multiprocessing.Pipe()
    spec = ArmSpec(
        name="baseline", spec=None, log=tmp_path / "log", settings={"deterministic": True}
    )  # type: ignore[arg-type]
    child = multiprocessing.get_context("fork").Process(
        target=messages.run_arm, args=(theirs, spec)
    )
    child.start()
    environment = ours.recv()
    child.join()
    assert "PYTORCH_CUDA_ALLOC_CONF" not in environment
    assert environment["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert environment["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
