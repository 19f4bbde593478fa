"""Data that needs no download: text of made words, and drawn faces with 68 landmarks.

Each item is a function of seed and index. So every machine and every loader process makes the same
ones, and nothing is stored.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from workers.training.batches import Samples
from workers.training.keyed_random import bits, row_keys, uniform
from workers.training.models import POINTS
from workers.training.order import Sample

#: Items of a made data set, unless told otherwise.
ITEMS = 65_536

_WORDS, _LETTERS = 128, 4
#: The streams of random numbers.
_DICTIONARY, _TEXT, _FACE, _PICTURE, _LENGTH = range(5)


class MadeText(Samples):
    """Sentences of 128 made words of 4 tokens, of which two tell the next: a loss falls far."""

    def __init__(
        self, seq: int, vocabulary: int, seed: int, items: int = ITEMS, least_seq: int | None = None
    ) -> None:
        """Make no text yet. With `least_seq` a text has so many tokens to `seq`, and one more."""
        self._seq = seq
        self._least_seq = seq if least_seq is None else least_seq
        self._seed = seed
        self._items = items
        letters = bits(row_keys(seed, [_DICTIONARY], torch.arange(_WORDS))[0], _LETTERS)
        self._words = letters.to(torch.int64) % vocabulary

    def __getitems__(self, indices: Sequence[int]) -> list[Tensor]:
        """Return seq + 1 tokens of each, or fewer where lengths differ."""
        keys = row_keys(self._seed, [_TEXT], torch.tensor(indices))[0]
        drawn = uniform(keys, self._seq // _LETTERS + 3)
        # The square makes words unequally frequent; the first number says where in a word the text
        # begins.
        words = (drawn[:, 1:].square() * _WORDS).to(torch.int64)
        begins = (drawn[:, :1] * _LETTERS).to(torch.int64)
        tokens = self._words[words].flatten(1)
        texts = tokens.gather(1, begins + torch.arange(self._seq + 1))
        if self._least_seq == self._seq:
            return list(texts)
        return [text[:length] for text, length in zip(texts, self.lengths(indices), strict=True)]

    def lengths(self, indices: Sequence[int]) -> list[int]:
        """Return how many tokens these texts have. Short ones are more frequent."""
        drawn = uniform(row_keys(self._seed, [_LENGTH], torch.tensor(indices))[0], 1)[:, 0]
        more = (drawn.square() * (self._seq - self._least_seq + 1)).to(torch.int64)
        lengths: list[int] = (more + self._least_seq + 1).tolist()
        return lengths


class DrawnFaces(Samples):
    """Grey pictures of line faces, turned, moved and scaled, with the places of their 68 points."""

    def __init__(self, edge: int, seed: int, items: int = ITEMS) -> None:
        self._edge = edge
        self._seed = seed
        self._items = items
        self._mean = _mean_face()

    def __getitems__(self, samples: Sequence[Sample]) -> list[tuple[Tensor, Tensor]]:
        """Return pictures (1, edge, edge) and points (68, 2) from -1 to 1.

        The face depends on the item, the noise also on the epoch.
        """
        index = torch.tensor([sample.index for sample in samples])
        epoch = torch.tensor([sample.epoch for sample in samples])
        points = self._points(uniform(row_keys(self._seed, [_FACE], index)[0], 7))
        pixels = torch.linspace(-1, 1, self._edge)
        across, down = (
            torch.exp(-((points[..., axis, None] - pixels) ** 2) * self._edge**2 / 4)
            for axis in (0, 1)
        )
        pictures = torch.einsum("bph,bpw->bhw", down, across).clamp(max=1.0)
        noise = uniform(
            row_keys(self._seed, [_PICTURE], index + self._items * epoch)[0], self._edge**2
        )
        pictures += 0.2 * (noise.view(pictures.shape) - 0.5)
        return list(zip(pictures[:, None], points, strict=True))

    def _points(self, drawn: Tensor) -> Tensor:
        turn, scale, right, down, wide, smile, gape = (2 * drawn.T[:, :, None] - 1).unbind()
        x, y = self._mean.unbind(-1)
        mouth = (torch.arange(POINTS) >= 48).to(torch.float32)
        x = x * (1 + 0.15 * wide)
        y = y + mouth * (0.25 * smile * x.abs() + 0.15 * gape * (y - 0.45))
        sine, cosine, size = torch.sin(0.4 * turn), torch.cos(0.4 * turn), 0.65 * (1 + 0.15 * scale)
        return torch.stack(
            (
                size * (cosine * x - sine * y) + 0.15 * right,
                size * (sine * x + cosine * y) + 0.15 * down,
            ),
            dim=-1,
        )


def _mean_face() -> Tensor:
    """Return the points of 300-W: jaw 17, brows 2 x 5, nose 9, eyes 2 x 6, mouth 12 + 8."""

    def arc(
        count: int,
        centre: tuple[float, float],
        radii: tuple[float, float],
        ends: tuple[float, float],
    ) -> None:
        for place in range(count):
            angle = math.pi * (ends[0] + (ends[1] - ends[0]) * place / (count - 1))
            points.append(
                (centre[0] + radii[0] * math.cos(angle), centre[1] + radii[1] * math.sin(angle))
            )

    points: list[tuple[float, float]] = []
    arc(17, (0.0, -0.1), (0.9, 1.0), (1.0, 0.0))
    for side in (-0.42, 0.42):
        arc(5, (side, -0.4), (0.26, 0.15), (-1.0, 0.0))
    points.extend((0.0, -0.25 + 0.12 * place) for place in range(4))
    arc(5, (0.0, 0.2), (0.18, 0.07), (1.0, 0.0))
    for side in (-0.4, 0.4):
        arc(6, (side, -0.22), (0.17, 0.08), (-1.0, 2 / 3))
    arc(12, (0.0, 0.45), (0.36, 0.16), (-1.0, 5 / 6))
    arc(8, (0.0, 0.45), (0.27, 0.07), (-1.0, 3 / 4))
    return torch.tensor(points)
