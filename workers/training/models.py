"""The GPT models of the presets. They avoid operations that amplify rounding errors, so that a
training may change its micro-batch.

- The projection to queries, keys and values has no bias. The gradient of a key's bias is zero
  except for rounding, and Adam scales it up to a full step.
- Dropout is keyed, and attention has none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from workers.training.keyed_random import KeyedDropout
from workers.training.sequences import document_mask


@dataclass(frozen=True, slots=True, kw_only=True)
class GptShape:
    """Hyperparameters of a GPT."""

    layers: int
    heads: int
    width: int
    seq: int
    vocabulary: int = 256


GPTS = {
    "gpt-nano": GptShape(layers=4, heads=4, width=64, seq=64),
    "gpt-mini": GptShape(layers=6, heads=6, width=384, seq=256),
    # 50,257 tokens of GPT-2, rounded up to a multiple of 64.
    "gpt2-small": GptShape(layers=12, heads=12, width=768, seq=1024, vocabulary=50_304),
    "gpt2-medium": GptShape(layers=24, heads=16, width=1024, seq=1024, vocabulary=50_304),
    # GPT-3 XL (Brown et al., 2020, table 2.1) with heads of 128 features, which cards prefer: 1.3
    # billion parameters.
    "gpt-1b": GptShape(layers=24, heads=16, width=2048, seq=1024, vocabulary=50_304),
}


class Gpt(nn.Module):
    """A GPT-2 that uses its input embedding as output layer, too."""

    def __init__(self, shape: GptShape, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.places = nn.Embedding(shape.seq, shape.width)
        self.dropout = KeyedDropout(dropout)
        self.blocks = nn.ModuleList(
            Block(shape.width, shape.heads, dropout) for _ in range(shape.layers)
        )
        self.norm = nn.LayerNorm(shape.width)
        for name, weight in self.named_parameters():
            if weight.dim() > 1:
                last = name.endswith(("merge.weight", "shrink.weight"))
                nn.init.normal_(weight, std=0.02 / (math.sqrt(2 * shape.layers) if last else 1))
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    def forward(self, tokens: Tensor, places: Tensor | None = None) -> Tensor:
        """Return the logits of each next token. `places`: positions if rows are packed."""
        seen = None if places is None else document_mask(places)
        places = torch.arange(tokens.shape[1], device=tokens.device) if places is None else places
        x = self.dropout(self.tokens(tokens) + self.places(places))
        for block in self.blocks:
            x = block(x) if seen is None else block(x, seen)
        return functional.linear(self.norm(x), self.tokens.weight)


class Block(nn.Module):
    """A pre-norm transformer block: attention, then a perceptron."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self._heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.merge = nn.Linear(width, width)
        self.norm_perceptron = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.shrink = nn.Linear(4 * width, width)
        self.dropout_attention = KeyedDropout(dropout)
        self.dropout_perceptron = KeyedDropout(dropout)

    def forward(self, x: Tensor, seen: Tensor | None = None) -> Tensor:
        """Return (rows, tokens, width). `seen`: attention mask; `None`: causal."""
        rows, seq, width = x.shape
        parts = self.query_key_value(self.norm_attention(x)).view(rows, seq, 3, self._heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        read = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=seen, is_causal=seen is None
        )
        x = x + self.dropout_attention(self.merge(read.transpose(1, 2).reshape(rows, seq, width)))
        hidden = functional.gelu(self.widen(self.norm_perceptron(x)), approximate="tanh")
        added: Tensor = self.dropout_perceptron(self.shrink(hidden))
        return x + added
