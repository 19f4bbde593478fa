"""Trainings of tiny models of transformers, with their checkpoints on disk."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftModel
from torch import Tensor, nn
from torch.nn import functional

from tests.scene import ROOT
from workers.hf.export import Request
from workers.training.checkpoints import Checkpoints
from workers.training.settings import TrainSettings
from workers.training.tasks import TrainTask, find_task
from workers.training.trainer import Trainer

CPU = torch.device("cpu")
#: Of the labels in what `trained` writes.
CLASSES = 3


def labelled(folder: Path) -> Path:
    """Write lines of words, and a label for each."""
    words = (ROOT / "LICENSE").read_text(encoding="utf-8").split()
    lines = [
        {"text": " ".join(words[at : at + 12]), "label": f"class {at % CLASSES}"}
        for at in range(0, 1200, 4)
    ]
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def trained(
    folder: Path, state: Path, *, steps: int = 2, pairs: bool = False, **keys: Any
) -> tuple[Trainer, Callable[..., Request]]:
    """Train a folder, save each step in `state`, and return the trainer and a maker of requests."""
    own: dict[str, Any] = {"preset": "hf-causal", "documents": "lines"}
    own = {"preset": "hf-pairs"} if pairs else own
    usual = {"batch": 4, "seq": 32, "lr": 0.005, "warmup_steps": 0, "precision": "fp32"}
    settings = TrainSettings.model_validate(
        {**usual, "model": str(folder), "data": str(labelled(folder.parent)), "steps": steps}
        | own
        | keys
    )
    run = Trainer(find_task(settings, 7), settings, CPU, 7)
    checkpoints = Checkpoints(state, run.identity)
    checkpoints.load()
    while not run.finished:
        run.micro_batch(settings.batch)
        assert checkpoints.save(run.state(), run.step)
        assert checkpoints.wait(60)
    files = sorted(map(str, state.glob("generation-?.pt")))

    def request(to: Path, form: str | None = None, *, average: bool = False) -> Request:
        return Request(
            checkpoints=files, settings=settings.model_dump(), seed=7, slot="pc1/0", to=str(to),
            form=form, average=average,
        )  # fmt: skip

    return run, request


def course(settings: TrainSettings, *, cut: bool, task: TrainTask | None = None) -> Trainer:
    """Train to the end, in parts and recomputed blocks that change if the batch is to be `cut`."""
    draw = random.Random(5)  # noqa: S311 - sizes of parts
    run = Trainer(task or find_task(settings, 3), settings, CPU, 3)
    while not run.finished:
        most = len(run.task.blocks(run.model))
        run.micro_batch(draw.randint(1, 6) if cut else 6, draw.randint(0, most) if cut else 0)
    return run


class _Numbers:
    """Samples of 12 numbers of words."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        return torch.randint(4, 96, (12,), generator=torch.Generator().manual_seed(index))


def _loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(input_ids=tokens).logits[:, :-1].flatten(0, 1)
    return functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum")


def with_embeddings(settings: TrainSettings) -> TrainTask:
    """Train the folder `data` as a user's own task, its embeddings in full beside adapters."""
    auto = transformers.AutoModelForCausalLM
    return TrainTask(
        name="own",
        model=lambda: auto.from_pretrained(settings.data, use_cache=False),
        dataset=_Numbers(),
        loss=_loss,
        fingerprint="numbers",
        uses=frozenset({"data"}),
        whole=lambda model: {model.get_input_embeddings(): True},
    )


@torch.no_grad()
def logits_of(model: nn.Module) -> Tensor:
    """Return the logits of inputs that were not trained on."""
    draw = torch.Generator().manual_seed(99)
    tokens = torch.randint(5, 384, (8, 24), generator=draw)
    return model.eval()(input_ids=tokens).logits


def gap(one: Tensor, other: Tensor) -> float:
    """Return the largest difference, as a share of the largest logit."""
    return float((one - other).abs().max() / one.abs().max())


def loaded(folder: Path) -> nn.Module:
    """Load a folder as its user does; nothing may be missing or left over."""
    kind = transformers.AutoConfig.from_pretrained(folder).architectures[0]
    model, told = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True)
    assert not any(told.values()), told
    return model  # type: ignore[no-any-return]


def adapted(base: str, folder: Path, *, pairs: bool) -> nn.Module:
    """Load an adapter on its base as its user does; nothing may be said of its keys."""
    kind = "SequenceClassification" if pairs else "CausalLM"
    more = {"num_labels": CLASSES} if pairs else {}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(base, **more)
        found: nn.Module = PeftModel.from_pretrained(model, folder)
    assert not [each for each in told if "key" in str(each.message)]
    return found
