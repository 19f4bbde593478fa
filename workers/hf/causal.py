"""The preset `hf-causal`: the next token of your own text, by the model of a folder.

A sample is two rows of token numbers: what goes in, and what is to be predicted in each place. So
an answer alone can be trained on, and what fills up never counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from workers.hf.folder import ModelFolder, blocks_of, heads_of
from workers.hf.token_data import TokenSamples
from workers.training.sequences import NO_TOKEN, cross_entropy
from workers.training.settings import TrainSettings
from workers.training.tasks import TrainTask, validation


def causal_task(settings: TrainSettings) -> TrainTask:
    """Return the task of `train.preset: hf-causal`.

    Raises:
        TaskError: The folder or a key cannot be used.
    """
    folder = ModelFolder(settings, "AutoModelForCausalLM")
    text = TokenSamples(settings, folder)
    return TrainTask(
        name=f"hf-causal {folder.config.model_type}",
        model=folder.model,
        dataset=text,
        fingerprint=text.fingerprint,
        loss=partial(token_loss, label_smoothing=settings.label_smoothing),
        count=count_labels,
        blocks=blocks_of,
        evaluate=validation(text.unseen, token_loss, count_labels),
        collate=fill_up,
        shorten=shorten,
        largest=lambda: torch.zeros((1, 2, folder.seq), dtype=torch.int64),
        whole=lambda model: dict.fromkeys(heads_of(model), settings.head == "train"),
        notes=folder.notes,
        uses=frozenset({"data", "documents", "seq", "dropout", "label_smoothing"}),
        lr=2e-4 if settings.adapter != "none" else 5e-5,
        items="tokens",
    )


def token_loss(model: nn.Module, part: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Sum the cross-entropy of all labels."""
    tokens, labels = part.unbind(dim=1)
    # What fills up comes last, so no other token sees it.
    logits = model(input_ids=tokens.clamp(min=0), use_cache=False).logits
    return cross_entropy(logits, labels, label_smoothing)


def count_labels(part: Tensor) -> int:
    """Count the tokens that are predicted."""
    return int((part[:, 1] != NO_TOKEN).sum())


def fill_up(samples: Sequence[Tensor]) -> Tensor:
    """Return the samples as (rows, 2, tokens), with the longest one's length."""
    longest = max(sample.shape[1] for sample in samples)
    filled = torch.full((len(samples), 2, longest), NO_TOKEN)
    for row, sample in zip(filled, samples, strict=True):
        row[:, : sample.shape[1]] = sample
    return filled


def shorten(part: Tensor) -> Tensor:
    """Take off what fills up all rows of a part on the host."""
    return part[:, :, : int((part[:, 0] != NO_TOKEN).sum(dim=1).max())]
