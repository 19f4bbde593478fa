"""The attention kernels that a folder's model uses, observed by its calls of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.hf.folders import make_folder
from workers.training.settings import Precision, TrainSettings
from workers.training.tasks import find_task
from workers.training.trainer import Trainer


@pytest.mark.parametrize(("precision", "shares"), [("fp32", False), ("bf16", True)])
def test_heads_share_keys_where_a_card_has_a_kernel_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: Precision, shares: bool
) -> None:
    folder, text = make_folder(tmp_path / "llama", "llama"), tmp_path / "text.txt"
    text.write_text("So it goes on and on. " * 200)
    asked, usual = list[bool](), functional.scaled_dot_product_attention

    def attention(*given: Any, **named: Any) -> Any:
        asked.append(bool(named.get("enable_gqa")))
        return usual(*given, **named)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", attention)
    settings = TrainSettings(
        preset="hf-causal", model=str(folder), data=str(text), seq=16, precision=precision
    )
    trainer = Trainer(find_task(settings, 0), settings, torch.device("cpu"), 0)
    asked.clear()
    trainer.operations()
    assert asked == [shares, shares]
