"""Trainings of tiny models of transformers, with their checkpoints on disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn import functional

from workers.hf.export import Request
from workers.training.checkpoints import Checkpoints
from workers.training.settings import TrainSettings
from workers.training.tasks import TrainTask, find_task
from workers.training.trainer import Trainer

CPU = torch.device("cpu")
WORDS, SEQ, SAMPLES = 96, 12, 40
_DECODER = {"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 32}
_USUAL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}

#: Class of the configuration, class of the model, and its shape.
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2Config",
        "AutoModelForCausalLM",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32},
    ),
    "llama": ("LlamaConfig", "AutoModelForCausalLM", _USUAL | _DECODER),
    "llama-tied": (
        "LlamaConfig",
        "AutoModelForCausalLM",
        _USUAL | _DECODER | {"tie_word_embeddings": True},
    ),
    "bert": (
        "BertConfig",
        "AutoModelForSequenceClassification",
        _USUAL | {"intermediate_size": 48, "num_labels": 3, "max_position_embeddings": 32},
    ),
}


def make_folder(path: Path, family: str) -> Path:
    """Write what an owner brings: random weights by a seed, and a tokenizer of numbered words."""
    config, auto, shape = FAMILIES[family]
    torch.manual_seed(3)
    made = getattr(transformers, config)(
        vocab_size=WORDS, bos_token_id=1, eos_token_id=2, pad_token_id=0, **shape
    )
    getattr(transformers, auto).from_config(made).save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"w{word}": word for word in range(WORDS)}, "w3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    chat = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    own = {"pad_token": "w0", "eos_token": "w2", "chat_template": chat}
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, **own).save_pretrained(path)
    return path


class _Numbers:
    """Samples (SEQ,) of numbers of words, and a class for each."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(index)
        return torch.randint(4, WORDS, (SEQ,), generator=draw), torch.tensor(index % 3)


def _loss(model: nn.Module, part: Any) -> Tensor:
    tokens, classes = part
    logits = model(input_ids=tokens).logits
    if logits.dim() == 3:
        logits, classes = logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    return functional.cross_entropy(logits, classes, reduction="sum")


def own_task(settings: TrainSettings) -> TrainTask:
    """Train the model of the folder `data`; its configuration says which kind it is."""
    kind = str(transformers.AutoConfig.from_pretrained(settings.data).architectures[0])
    # As a training does, which computes no sample by the samples before it.
    model = partial(getattr(transformers, kind).from_pretrained, settings.data, use_cache=False)
    return TrainTask(
        name="own",
        model=model,
        dataset=_Numbers(),
        loss=_loss,
        fingerprint="numbers",
        uses=frozenset({"data"}),
    )


def with_embeddings(settings: TrainSettings) -> TrainTask:
    """Train the embeddings in full beside adapters."""
    return replace(own_task(settings), whole=lambda model: {model.get_input_embeddings(): True})


def trained(
    folder: Path, state: Path, steps: int = 2, **keys: Any
) -> tuple[Trainer, Callable[..., Request]]:
    """Train, save each step in `state`, and return the trainer and a maker of requests."""
    usual = {"preset": "tests.export.scene:own_task", "batch": 4, "lr": 0.05, "warmup_steps": 0}
    settings = TrainSettings.model_validate(
        {**usual, "data": str(folder), "steps": steps, "precision": "fp32", **keys}
    )
    run = Trainer(find_task(settings, 7), settings, CPU, 7)
    checkpoints = Checkpoints(state, run.identity)
    checkpoints.load()
    while not run.finished:
        run.micro_batch(4)
        assert checkpoints.save(run.state(), run.step)
        assert checkpoints.wait(60)
    assert checkpoints.wait(60)
    files = sorted(map(str, state.glob("generation-?.pt")))

    def request(to: Path, form: str | None = None, *, average: bool = False) -> Request:
        return Request(
            checkpoints=files, settings=settings.model_dump(), seed=7, run_id="r", slot="pc1/0",
            to=str(to), form=form, average=average,
        )  # fmt: skip

    return run, request


@torch.no_grad()
def logits_of(model: nn.Module, inputs: int = 8) -> Tensor:
    """Return the logits of inputs that were not trained on."""
    draw = torch.Generator().manual_seed(99)
    logits: Tensor = model.eval()(
        input_ids=torch.randint(4, WORDS, (inputs, SEQ), generator=draw)
    ).logits
    return logits


def gap(one: Tensor, other: Tensor) -> float:
    """Return the largest difference, as a share of the largest logit."""
    return float((one - other).abs().max() / one.abs().max())


def loaded(folder: Path) -> nn.Module:
    """Load a folder as its user does; nothing may be missing or left over."""
    kind = transformers.AutoConfig.from_pretrained(folder).architectures[0]
    model, told = getattr(transformers, kind).from_pretrained(folder, output_loading_info=True)
    assert not any(told.values()), told
    return model  # type: ignore[no-any-return]
