"""Text that needs no download: sentences of made words.

Each item is a function of seed and index. So every machine and every loader process makes the same
ones, and nothing is stored.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from workers.training.batches import Samples
from workers.training.keyed_random import bits, row_keys, uniform

#: Items of a made data set, unless told otherwise.
ITEMS = 65_536

_WORDS, _LETTERS = 128, 4
#: The streams of random numbers.
_DICTIONARY, _TEXT = range(2)


class MadeText(Samples):
    """Sentences of 128 made words of 4 tokens, of which two tell the next: a loss falls far."""

    def __init__(self, seq: int, vocabulary: int, seed: int, items: int = ITEMS) -> None:
        """Make no text yet."""
        self._seq = seq
        self._seed = seed
        self._items = items
        letters = bits(row_keys(seed, [_DICTIONARY], torch.arange(_WORDS))[0], _LETTERS)
        self._words = letters.to(torch.int64) % vocabulary

    def __getitems__(self, indices: Sequence[int]) -> list[Tensor]:
        """Return seq + 1 tokens of each."""
        keys = row_keys(self._seed, [_TEXT], torch.tensor(indices))[0]
        drawn = uniform(keys, self._seq // _LETTERS + 3)
        # The square makes words unequally frequent; the first number says where in a word the text
        # begins.
        words = (drawn[:, 1:].square() * _WORDS).to(torch.int64)
        begins = (drawn[:, :1] * _LETTERS).to(torch.int64)
        tokens = self._words[words].flatten(1)
        return list(tokens.gather(1, begins + torch.arange(self._seq + 1)))
