"""How far a training of a folder goes another way when its parts change in every step, beside two
runs of transformers' own Trainer with two accumulations.

    python -m scripts.benches.own_parity [FAMILY …]      # a line of JSON for each combination

Each folder is tiny and made here. Gaps are relative: of losses the largest of all steps, of weights
the largest difference divided by the largest weight. Where one is beyond its bound, our two runs are
repeated with weights in fp64: a gap that is gone there was rounding, and no error of the sums.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from tests.hf.folders import FAMILIES, make_folder
from tests.scene import ROOT
from workers.hf import folder as hf_folder
from workers.training.batches import Batch
from workers.training.settings import TrainSettings
from workers.training.tasks import TrainTask, find_task
from workers.training.trainer import Trainer

STEPS, BATCH, LR = 50, 16, 1e-3
ENCODERS = {"bert", "roberta", "t5"}

#: Samples computed at once, changed in every step.
LIMITS = (7, 3, 16, 1, 5, 11, 2)

Adapter = Literal["none", "lora", "dora"]
ADAPTERS: tuple[Adapter, ...] = ("none", "lora", "dora")

Run = tuple[list[float], dict[str, Tensor]]


def settings_of(family: str, folder: Path, adapter: Adapter) -> TrainSettings:
    """Write a folder and its data; return the settings of a training on them."""
    is_encoder = family in ENCODERS
    head = "CausalLM" if not is_encoder else "SequenceClassification" if family == "t5" else ""
    make_folder(folder / "model", family, head=head)
    text = (ROOT / "docs" / "training.md").read_text().split("\n\n")
    lines: list[Mapping[str, object]] = [
        {"text": one[: 20 + 7 * (place % 19)], "label": place % 2}
        for place, one in enumerate(text * 4)
    ]
    path = folder / "lines.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    keys: dict[str, Any] = {"preset": "hf-pairs"}
    if not is_encoder:
        keys = {"preset": "hf-causal", "documents": "lines"}
    return TrainSettings(
        model=str(folder / "model"), data=str(path), adapter=adapter, steps=STEPS, batch=BATCH,
        precision="fp32", seq=48, lr=LR, warmup_steps=5, **keys,
    )  # fmt: skip


def ours(task: TrainTask, settings: TrainSettings, limits: tuple[int, ...]) -> Run:
    """Train with these limits, step after step."""
    trainer = Trainer(task, settings, torch.device("cpu"), 7)
    losses = list[float]()
    while not trainer.finished:
        limit = limits[trainer.step % len(limits)]
        while not trainer.micro_batch(limit).updated:
            pass
        losses.append(trainer.course.losses[-1])
    return losses, trainer.model.state_dict()


def theirs(task: TrainTask, settings: TrainSettings, accumulation: int) -> Run:
    """Train the same with transformers' Trainer, and peft for adapters."""
    library = hf_folder.transformers()
    torch.manual_seed(7)
    model: Any = task.model()
    if settings.adapter != "none":
        import peft

        heads = [
            name
            for name, module in model.named_modules()
            if module in task.whole(model) and next(module.parameters(), None) is not None
        ]
        config = peft.LoraConfig(
            r=8, lora_alpha=16, use_dora=settings.adapter == "dora", target_modules="all-linear",
            modules_to_save=heads if settings.preset == "hf-pairs" else None,
            exclude_modules=heads if settings.preset == "hf-causal" else None,
        )  # fmt: skip
        model = peft.get_peft_model(model, config)

    def collate(samples: list[Any]) -> dict[str, Any]:
        batch: Batch = (task.collate or list)(samples)
        tokens = batch[0][:, 0] if settings.preset == "hf-pairs" else batch[:, 0]
        there = tokens >= 0
        inputs = {"input_ids": tokens.where(there, 0), "attention_mask": there.long()}
        if settings.preset == "hf-pairs":
            return inputs | {"labels": batch[1]}
        # Theirs shifts the labels itself; a first one is never predicted.
        labels = torch.cat([tokens[:, :1], batch[:, 1]], dim=1)
        more = torch.zeros_like(tokens[:, :1])
        return {
            "input_ids": torch.cat([inputs["input_ids"], more], dim=1),
            "attention_mask": torch.cat([inputs["attention_mask"], more], dim=1),
            "labels": labels.where(labels >= 0, -100),
        }

    losses = list[float]()

    class Told(library.TrainerCallback):  # type: ignore[misc, name-defined]  # imported late
        def on_log(self, *_: Any, logs: Mapping[str, float], **__: Any) -> None:  # noqa: ANN401
            losses.extend([logs["loss"]] if "loss" in logs else [])

    with tempfile.TemporaryDirectory() as folder:
        arguments = library.TrainingArguments(
            output_dir=folder, per_device_train_batch_size=BATCH // accumulation,
            gradient_accumulation_steps=accumulation, max_steps=STEPS, learning_rate=LR,
            logging_steps=1, save_strategy="no", report_to=[], seed=7, use_cpu=True,
            disable_tqdm=True, adam_beta2=0.95, weight_decay=0.1,
        )  # fmt: skip

        def summed(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:  # noqa: ANN401
            # These models ignore the count, so with accumulation the Trainer would add up means.
            return functional.cross_entropy(outputs.logits, labels, reduction="sum") / (
                num_items_in_batch or len(labels)
            )

        library.Trainer(
            compute_loss_func=summed if settings.preset == "hf-pairs" else None, model=model,
            args=arguments, train_dataset=task.dataset, data_collator=collate, callbacks=[Told()],
        ).train()  # fmt: skip
    return losses, model.state_dict()


def in_fp64(task: TrainTask, settings: TrainSettings) -> tuple[Run, Run]:
    """Return both of our runs with weights, activations and gradients in fp64."""
    fine = replace(task, model=lambda: task.model().double())
    return ours(fine, settings, (BATCH,)), ours(fine, settings, LIMITS)


def gaps(one: Run, other: Run) -> tuple[float, float]:
    """Return the largest relative difference of losses, and of weights."""
    loss = max(abs(a - b) / abs(a) for a, b in zip(one[0], other[0], strict=True))
    weights = [(one[1][name].double(), other[1][name].double()) for name in one[1]]
    largest = max(float(a.abs().max()) for a, _ in weights if a.numel())
    return loss, max(float((a - b).abs().max()) for a, b in weights if a.numel()) / largest


def main() -> None:
    """Print a line for each combination."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for family in sys.argv[1:] or FAMILIES:
        for adapter in ADAPTERS:
            with tempfile.TemporaryDirectory() as folder:
                settings = settings_of(family, Path(folder), adapter)
                task = find_task(settings, 7)
                own = gaps(ours(task, settings, (BATCH,)), ours(task, settings, LIMITS))
                other = gaps(theirs(task, settings, 1), theirs(task, settings, 4))
                held = all(
                    gap <= max(1e-6, 3 * bound) for gap, bound in zip(own, other, strict=True)
                )
                fp64 = None if held else gaps(*in_fp64(task, settings))[1]
            told = {
                "family": family, "adapter": adapter,
                "loss_gap": own[0], "weights_gap": own[1],
                "hf_loss_gap": other[0], "hf_weights_gap": other[1],
                "held": held, "fp64_weights_gap": fp64,
            }  # fmt: skip
            print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
