"""Adapters of peft compute the same in any parts of a batch, on 4-bit weights, and after export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel

from tests.export.scene import CPU, course, gap, labelled, loaded, logits_of, trained
from tests.hf.folders import make_folder
from workers.hf.export import export
from workers.training.memory_plan import MemoryPlanner
from workers.training.settings import TrainSettings
from workers.training.tasks import find_task
from workers.training.trainer import Trainer

#: Warnings between peft and transformers when a user loads an adapter.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
]


def causal(folder: Path, **keys: Any) -> TrainSettings:
    """Return settings that train a folder with adapters."""
    usual = {"batch": 6, "seq": 24, "lr": 0.01, "precision": "fp32", "steps": 6, "adapter": "lora"}
    own = {"model": str(folder), "data": str(labelled(folder.parent)), "documents": "lines"}
    return TrainSettings.model_validate({"preset": "hf-causal", **own, **usual, **keys})


@pytest.mark.parametrize("weights", ["fp32", "nf4"])
@pytest.mark.parametrize(("family", "adapter"), [("gpt2", "lora"), ("llama", "dora")])
def test_an_adapter_is_the_same_however_batches_are_cut(
    family: str, adapter: str, weights: str, tmp_path: Path
) -> None:
    keys = {"adapter": adapter, "weights": weights, "dropout": 0.1}
    settings = causal(make_folder(tmp_path / "base", family), **keys)
    whole, cut = (course(settings, cut=each) for each in (False, True))
    assert cut.course.losses == pytest.approx(whole.course.losses, rel=1e-6)
    assert not [*whole.hazards, *cut.hazards]
    assert {name.partition(".lora_")[1] for name, each in whole.model.named_parameters()
            if each.requires_grad} == {".lora_"}  # fmt: skip


@pytest.mark.parametrize(("family", "adapter"), [("llama", "lora"), ("gpt2", "dora")])
def test_weights_of_4_bits_are_merged_as_they_computed(
    family: str, adapter: str, tmp_path: Path
) -> None:
    folder = make_folder(tmp_path / "base", family)
    keys = {"weights": "nf4", "adapter": adapter}
    run, request = trained(folder, tmp_path / "state", **keys)
    export(request(tmp_path / "merged"))
    expected = logits_of(run.model)
    assert gap(expected, logits_of(loaded(tmp_path / "merged"))) <= 1e-6
    export(request(tmp_path / "adapter", "adapter"))
    bits = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32
    )
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, quantization_config=bits)
    found = PeftModel.from_pretrained(base, tmp_path / "adapter")
    for layer in found.modules():
        layer.support_avx512bf16_for_cpu = False
    assert gap(expected, logits_of(found)) <= 1e-6


@pytest.mark.parametrize("weights", ["fp32", "nf4"])
@pytest.mark.parametrize(
    ("family", "adapter"), [("gpt2", "lora"), ("gpt2", "dora"), ("llama", "lora")]
)
def test_adapters_of_peft_are_planned_without_data(
    family: str, adapter: str, weights: str, tmp_path: Path
) -> None:
    keys = {"adapter": adapter, "weights": weights}
    settings = causal(make_folder(tmp_path / "base", family), **keys)
    planned = MemoryPlanner(find_task(settings, 3), settings, on_card=False).plan(6, 0)
    run = Trainer(find_task(settings, 3), settings, CPU, 3)
    there = [*run.model.parameters(), *run.model.buffers()]
    for each in run.model.parameters():
        if (state := getattr(each, "quant_state", None)) is not None:
            there += [state.absmax, state.code]
    assert planned.weights_bytes == sum({id(each): each.nbytes for each in there}.values())
