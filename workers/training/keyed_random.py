"""Random numbers that are a function of what they are for: seed, layer, sample and position.

There is no state. So a number does not depend on how a batch was split, on what was computed
before, or on where a training was interrupted. Only integer arithmetic that wraps is used: a CPU
and a card compute the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn

from workers.training.errors import TaskError
from workers.training.order import mixed


def _signed(number: int, bits: int) -> int:
    """Return these bits in two's complement: torch has no unsigned arithmetic."""
    return number - (1 << bits) if number >= 1 << (bits - 1) else number


_GOLDEN: Final = _signed(0x9E3779B97F4A7C15, 64)
_SPLITMIX: Final = ((30, _signed(0xBF58476D1CE4E5B9, 64)), (27, _signed(0x94D049BB133111EB, 64)))
#: `lowbias32` by Chris Wellons: with 32 bits in and out, the least biased of its length.
_LOWBIAS: Final = ((16, 0x7FEB352D), (15, _signed(0x846CA68B, 32)))


def row_keys(seed: int, streams: Sequence[int], numbers: Tensor) -> Tensor:
    """Return 64 bits for each stream and each number, shaped (streams, numbers)."""
    stream_keys = torch.tensor([_signed(mixed(seed, stream), 64) for stream in streams])
    state = numbers * _GOLDEN + stream_keys.to(numbers.device, non_blocking=True)[:, None]
    for shift, factor in _SPLITMIX:
        state = (state ^ _shifted(state, shift, 64)) * factor
    return state ^ _shifted(state, 31, 64)


def bits(keys: Tensor, count: int) -> Tensor:
    """Return `count` times 32 random bits for each of `keys`, shaped (keys, count)."""
    halves = keys.contiguous().view(torch.int32).view(-1, 2)
    state = torch.arange(count, dtype=torch.int32, device=keys.device) * (halves[:, :1] | 1)
    state += halves[:, 1:]
    for shift, factor in _LOWBIAS:
        state ^= _shifted(state, shift, 32)
        state *= factor
    state ^= _shifted(state, 16, 32)
    return state


def uniform(keys: Tensor, count: int) -> Tensor:
    """Return `count` numbers in [0, 1) for each of `keys`, multiples of 2^-24."""
    return _shifted(bits(keys, count), 8, 32).to(torch.float32) * 2.0**-24


def _shifted(state: Tensor, by: int, width: int) -> Tensor:
    """Shift right and fill with zeros; torch's own shift repeats the sign."""
    return (state >> by) & ((1 << (width - by)) - 1)


class KeyedDropout(nn.Module):
    """Dropout by seed, sample, layer and position only. Samples are the first dimension."""

    def __init__(self, p: float, layer: int = 0) -> None:
        super().__init__()
        self.p = p
        self.layer = layer
        """Its place among the dropouts of a model; `Dropouts` sets it."""
        self.keys: Tensor | None = None
        """One for each sample of the micro-batch under way."""

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements and scale the others up."""
        if not self.training or self.p == 0:
            return x
        if self.keys is None or x.shape[0] % len(self.keys):
            keys = "no sample" if self.keys is None else f"{len(self.keys)} samples"
            raise TaskError(
                f"dropout {self.layer} got a tensor of shape {tuple(x.shape)} in a micro-batch of "
                f"{keys}; the first dimension must be the samples, or samples times something"
            )
        drawn = bits(self.keys, x.numel() // len(self.keys)).view(x.shape)
        return torch.where(drawn >= int(self.p * 2**32) - 2**31, x * (1 / (1 - self.p)), 0.0)


class Dropouts:
    """All dropouts of one model. Those of torch are replaced by keyed ones."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Dropout:
                    setattr(parent, name, KeyedDropout(child.p).train(child.training))
        self._layers = [module for module in model.modules() if isinstance(module, KeyedDropout)]
        for layer, dropout in enumerate(self._layers):
            dropout.layer = layer
        self._seed = seed

    def key(self, first: int, rows: int, device: torch.device) -> None:
        """Prepare for the samples `first` and following, by their numbers in the whole training."""
        if self._layers:
            numbers = torch.arange(first, first + rows, device=device)
            keys = row_keys(self._seed, range(len(self._layers)), numbers)
            for dropout in self._layers:
                dropout.keys = keys[dropout.layer]

    def forget(self) -> None:
        """Drop the keys; the next `key` makes new ones."""
        for dropout in self._layers:
            dropout.keys = None
