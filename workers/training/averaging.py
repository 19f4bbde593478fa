"""An exponential moving average of the weights, which often evaluates better than the weights themselves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Average:
    """Holds one more copy of the weights."""

    def __init__(self, parameters: Sequence[nn.Parameter], decay: float) -> None:
        self._parameters = parameters
        self._decay = decay
        self.tensors: list[Tensor] = [each.detach().clone() for each in parameters]

    @torch.no_grad()
    def update(self) -> None:
        """Move towards the weights. Allocates nothing."""
        torch._foreach_lerp_(self.tensors, list(self._parameters), 1 - self._decay)

    @torch.no_grad()
    def reset(self) -> None:
        """Begin at the weights as they are."""
        torch._foreach_copy_(self.tensors, list(self._parameters))

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Let the model compute with the average for a while."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        for place, parameter in enumerate(self._parameters):
            self.tensors[place], parameter.data = parameter.data, self.tensors[place]
