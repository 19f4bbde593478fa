"""A small GPT trained on text."""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional

from workers import ElasticStep

TEXT = (
    "the worker shrinks before it runs out of memory, and grows again when memory is free. " * 200
)
BATCH, MICRO, LENGTH, STEPS, RATE = 16, 4, 32, 20, 3e-3


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm, self.norm_after = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        split = (
            self.qkv(self.norm(x))
            .view(rows, length, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        seen = functional.scaled_dot_product_attention(*split, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.norm_after(x))


class Gpt(nn.Module):
    def __init__(self, width: int = 48, heads: int = 3, layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        return self.head(self.norm(self.blocks(x)))


def batches(device: torch.device):
    """Yield tokens and targets, the same ones in every run."""
    data = torch.tensor(list(TEXT.encode()), device=device)
    chance = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(data) - LENGTH - 1, (BATCH,), generator=chance).tolist()
        rows = torch.stack([data[start : start + LENGTH + 1] for start in starts])
        yield rows[:, :-1], rows[:, 1:]


def main(device: torch.device) -> list[float]:
    torch.manual_seed(0)
    model = Gpt().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    elastic = ElasticStep(model, optimizer, clip=1.0)
    losses = []

    def loss_of(part: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return functional.cross_entropy(model(part[0]).flatten(0, 1), part[1].flatten())

    for step, batch in zip(range(STEPS), batches(device), strict=False):
        for group in optimizer.param_groups:
            group["lr"] = RATE * (0.55 + 0.45 * math.cos(math.pi * step / STEPS))
        losses.append(elastic.step(batch, loss_of))
    return losses


if __name__ == "__main__":
    print(main(torch.device("cuda" if torch.cuda.is_available() else "cpu")))
