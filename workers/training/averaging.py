"""An exponential moving average of the weights, which often evaluates better than the weights
themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from workers.training.host_memory import like, like_all, wait_asleep


class Average:
    """Holds one more copy of the weights, on their device or in host memory.

    In host memory it takes nothing of the device, and each update copies all weights there. The
    weights are the same to the bit; the average may differ in the last bit on a card, where the
    host then computes it.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], decay: float, *, on_host: bool = False
    ) -> None:
        """Begin at the weights."""
        self._parameters = parameters
        self._decay = decay
        self.on_host = on_host
        weights = [each.detach() for each in parameters]
        new = like_all(weights) if on_host else [torch.empty_like(each) for each in weights]
        self.tensors: list[Tensor] = [
            own.copy_(each) for own, each in zip(new, weights, strict=True)
        ]
        self._staging: Tensor | None = None
        if on_host and parameters[0].is_cuda:
            self._staging = like(max(parameters, key=lambda each: each.nbytes).detach().flatten())

    @torch.no_grad()
    def update(self) -> None:
        """Move towards the weights. Allocates nothing on the device."""
        if self._staging is None:
            torch._foreach_lerp_(self.tensors, list(self._parameters), 1 - self._decay)
            return
        wait_asleep(
            self._parameters[0].device
        )  # the first copy would wait for the whole update, in a loop
        for own, weight in zip(self.tensors, self._parameters, strict=True):
            own.lerp_(self._on_host(weight, own), 1 - self._decay)

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

    @torch.no_grad()
    def _swap(self) -> None:
        for place, parameter in enumerate(self._parameters):
            if self.on_host:
                own = self.tensors[place]  # which stays, with the block that it shares
                weight = self._on_host(parameter, own)
                parameter.copy_(own)
                own.copy_(weight)
            else:
                self.tensors[place], parameter.data = parameter.data, self.tensors[place]

    def _on_host(self, weight: Tensor, own: Tensor) -> Tensor:
        """Return a copy of a weight on the host, until the next call."""
        if self._staging is None or weight.dtype != self._staging.dtype:
            return like(weight.detach()).copy_(weight)
        return self._staging[: weight.numel()].as_strided(own.shape, own.stride()).copy_(weight)
