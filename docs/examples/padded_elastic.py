"""A small model trained on short texts of unequal lengths."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

from workers import ElasticStep

TEXT = "the worker shrinks before it runs out of memory, and grows again when memory is free."
TEXTS = [TEXT[first : first + 4 + first % 40] for first in range(len(TEXT) - 4)] * 2
BATCH, WIDTH, EPOCHS, RATE, IGNORED = 16, 48, 3, 1e-2, -100


class Reader(nn.Module):
    """Predicts the next byte from those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.reads = nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.reads(self.bytes(tokens))[0])


def padded(texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and labels, padded to the longest text; padding is ignored."""
    rows = [torch.tensor(list(text.encode())) for text in texts]
    tokens = nn.utils.rnn.pad_sequence([row[:-1] for row in rows], batch_first=True)
    labels = [row[1:] for row in rows]
    return tokens, nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=IGNORED)


def loss_of(model: nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = model(tokens).flatten(0, 1)
    return functional.cross_entropy(logits, labels.flatten(), reduction="sum")


def main(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    model = Reader().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    elastic = ElasticStep(model, optimizer, clip=1.0)
    loader = DataLoader(TEXTS, BATCH, shuffle=True, drop_last=True, collate_fn=padded)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, RATE, total_steps=EPOCHS * len(loader)
    )
    for _ in range(EPOCHS):
        for batch in loader:
            tokens, labels = (each.to(device) for each in batch)
            count = int((labels != IGNORED).sum())
            loss = elastic.step((tokens, labels), lambda part: loss_of(model, *part), count)
            scheduler.step()
            print(f"{scheduler.last_epoch:3}  {loss:.6f}")
    return model


if __name__ == "__main__":
    main(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
