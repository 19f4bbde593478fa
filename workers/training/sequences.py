"""Documents of unequal lengths for a GPT: padded to the longest one of a part, or packed several to
a row.

In a packed row each document attends only to itself, and its positions begin at 0. So the loss of
each token is the same either way, to rounding, and padding never counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from workers.training.batches import Samples
from workers.training.order import PACKED_TOGETHER, packed_rows
from workers.training.text import TextBytes
from workers.training.token_files import SampleWriter, written_once

#: Marks padding, and labels that are not predicted.
NO_TOKEN: Final = -1


class PackedRows(Samples):
    """Packed rows (3, seq) of several documents: inputs, labels and positions."""

    def __init__(self, documents: TextBytes, seq: int) -> None:
        """Assign documents to rows, once per PC. A document of n tokens takes n - 1 places."""
        self._documents = documents
        self._seq = seq
        key = ("packed", documents.key, len(documents), seq)
        self._rows = written_once(key, {"rows": "int32"}, self._write)["rows"]
        self._items = len(self._rows)

    def _write(self, rows: SampleWriter) -> None:
        documents = range(len(self._documents))
        for first in documents[::PACKED_TOGETHER]:
            together = documents[first : first + PACKED_TOGETHER]
            lengths = [length - 1 for length in self._documents.lengths(together)]
            for row in packed_rows(lengths, self._seq):
                rows.add([together[place] for place in row])
                rows.end()

    def __getitems__(self, indices: Sequence[int]) -> list[Tensor]:
        """Return several rows."""
        wanted = [self._rows[index].tolist() for index in indices]
        texts = iter(self._documents.__getitems__([document for row in wanted for document in row]))
        return [packed_row([next(texts) for _ in row], self._seq) for row in wanted]


def packed_row(documents: Sequence[Tensor], seq: int) -> Tensor:
    """Return a row (3, seq); the rest of the row becomes a document without labels."""
    left = seq - sum(len(document) - 1 for document in documents)
    inputs = torch.cat(
        [*(document[:-1] for document in documents), torch.zeros(left, dtype=torch.int64)]
    )
    labels = torch.cat([*(document[1:] for document in documents), torch.full((left,), NO_TOKEN)])
    places = torch.cat(
        [torch.arange(length) for length in (*(len(document) - 1 for document in documents), left)]
    )
    return torch.stack((inputs, labels, places))


def padded(documents: Sequence[Tensor]) -> Tensor:
    """Pad documents (tokens) or (2, tokens) to the longest one, and stack them."""
    tokens_first = [document.movedim(-1, 0) for document in documents]
    rows = nn.utils.rnn.pad_sequence(tokens_first, batch_first=True, padding_value=NO_TOKEN)
    return rows.movedim(1, -1).contiguous()


def shortened(part: Tensor) -> Tensor:
    """Remove the padding that all rows (tokens) or (2, tokens) of a part on the host share."""
    tokens = part if part.dim() == 2 else part[:, 0]
    return part[..., : int((tokens != NO_TOKEN).sum(dim=1).max())]


def packed_loss(model: nn.Module, rows: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Sum the cross-entropy of all labels of packed rows."""
    inputs, labels, places = rows.unbind(dim=1)
    return cross_entropy(model(inputs, places), labels, label_smoothing)


def packed_tokens(rows: Tensor) -> int:
    """Count the predicted tokens in rows of inputs and labels."""
    return int((rows[:, 1] != NO_TOKEN).sum())


def document_mask(places: Tensor) -> Tensor:
    """Return a mask (rows, 1, tokens, tokens): each token attends to its document, up to itself."""
    document = (places == 0).cumsum(dim=1)
    seen = document[:, :, None] == document[:, None, :]
    return seen.tril()[:, None]


def cross_entropy(logits: Tensor, labels: Tensor, label_smoothing: float) -> Tensor:
    """Sum the cross-entropy of all labels except NO_TOKEN, in fp32."""
    return functional.cross_entropy(
        logits.flatten(0, 1).float(),
        labels.flatten(),
        reduction="sum",
        ignore_index=NO_TOKEN,
        label_smoothing=label_smoothing,
    )
