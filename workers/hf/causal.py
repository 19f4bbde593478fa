"""The preset `hf-causal`: the next token of your own text, by the model of a folder.

A sample is two rows of token numbers: what goes in, and what is to be predicted in each place. So
an answer alone can be trained on, and what fills up never counts.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from workers.hf.folder import ModelFolder, blocks_of, heads_of
from workers.hf.token_data import CausalSamples
from workers.training.sequences import cross_entropy, filled_up, packed_tokens, shortened
from workers.training.settings import TrainSettings
from workers.training.tasks import TrainTask, Validation


def causal_task(settings: TrainSettings) -> TrainTask:
    """Return the task of `train.preset: hf-causal`.

    Raises:
        TaskError: The folder or a key cannot be used.
    """
    folder = ModelFolder(settings, "AutoModelForCausalLM")
    text = CausalSamples(
        str(settings.data), settings, folder, holds_out=settings.validation is None
    )
    unseen = text.unseen
    if settings.validation is not None:
        unseen = CausalSamples(settings.validation, settings, folder, holds_out=False).all
    return TrainTask(
        name=f"hf-causal {folder.config.model_type}",
        model=folder.model,
        dataset=text,
        fingerprint=text.fingerprint,
        loss=partial(token_loss, label_smoothing=settings.label_smoothing),
        count=packed_tokens,
        blocks=blocks_of,
        evaluate=Validation(
            samples=unseen, loss=token_loss, count=packed_tokens, collate=filled_up
        ),
        collate=filled_up,
        shorten=shortened,
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
