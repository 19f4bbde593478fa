"""Random numbers that are a function of their use: seed, layer, sample, call and position.

There is no state. So a number does not depend on how a batch was split, on what was computed
before, or on where a training was interrupted. Only integer arithmetic that wraps is used: a CPU
and a card compute the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo  # `torch.compiler.disable` would load the compiler
from torch._subclasses.fake_tensor import FakeTensor

from workers.training.errors import TaskError
from workers.training.order import mixed


def _signed(number: int, bits: int) -> int:
    """Return the signed value of these bits: torch has no unsigned arithmetic."""
    return number - (1 << bits) if number >= 1 << (bits - 1) else number


_GOLDEN: Final = _signed(0x9E3779B97F4A7C15, 64)
_SPLITMIX: Final = ((30, _signed(0xBF58476D1CE4E5B9, 64)), (27, _signed(0x94D049BB133111EB, 64)))
#: `lowbias32` by Chris Wellons: the least biased 32-bit hash of its length.
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
    """Shift right and fill with zeros; torch's operator repeats the sign."""
    return (state >> by) & ((1 << (width - by)) - 1)


class KeyedDropout(nn.Dropout):
    """Dropout by seed, layer, sample and position only. Samples are the first dimension.

    A forward pass calls it once. Without keys, it is torch's dropout.
    """

    name = ""
    """The module's name in the model, for messages; `Dropouts` sets it."""
    keys: Tensor | None = None
    """One key for each sample of the micro-batch that is being computed; `None`: there is none."""

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements and scale the others up.

        Raises:
            TaskError: The first dimension of `x` is not the samples.
        """
        if self.keys is None or not self.training or self.p in {0, 1}:
            return super().forward(x)
        if not x.dim() or x.shape[0] % len(self.keys):
            raise TaskError(
                f"the dropout {self.name} got a tensor of shape {tuple(x.shape)} in a part of "
                f"{len(self.keys)} samples; make the samples its first dimension, or if it "
                "drops parts of something else, such as a table of positions, set its p to 0"
            )
        drawn = bits(self._keys_of_call(self.keys), x.numel() // len(self.keys)).view(x.shape)
        kept = torch.where(drawn >= int(self.p * 2**32) - 2**31, x * (1 / (1 - self.p)), 0.0)
        return x.copy_(kept) if self.inplace else kept

    def _keys_of_call(self, keys: Tensor) -> Tensor:
        return keys


class CountedDropout(KeyedDropout):
    """A `KeyedDropout` that a pass may call several times: each call has another mask.

    A number from torch's generator identifies the call. Recomputation of activations
    (`torch.utils.checkpoint`) repeats such numbers, so recomputed values get the same mask.
    """

    calls: dict[int, int]
    """Number of each call of this pass, keyed by the number drawn for it."""

    @_disable_dynamo
    def _keys_of_call(self, keys: Tensor) -> Tensor:
        if isinstance(keys, FakeTensor):  # a plan can draw nothing
            return keys
        mark = int(torch.empty((), dtype=torch.int64).random_())
        call = self.calls.setdefault(mark, len(self.calls))
        return keys ^ _signed(mixed(0, call), 64) if call else keys


class Dropouts:
    """All dropouts of one model. Those of torch become keyed ones but stay the same objects."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._layers: list[KeyedDropout] = []
        for name, module in model.named_modules():
            if type(module) is nn.Dropout:
                module.__class__ = CountedDropout
            if isinstance(module, KeyedDropout):
                module.name = name
                self._layers.append(module)
        self._seed = seed
        self.passes = 0
        """Number of calls of `key`; each begins a forward pass."""
        self.samples = 0, 0
        """First sample and number of samples of the last pass."""

    def key(self, first: int, rows: int, device: torch.device) -> None:
        """Prepare a pass over `rows` samples from number `first` of the training on."""
        self.passes, self.samples = self.passes + 1, (first, rows)
        if self._layers:
            numbers = torch.arange(first, first + rows, device=device)
            keys = row_keys(self._seed, range(len(self._layers)), numbers)
            for dropout, own in zip(self._layers, keys, strict=True):
                dropout.keys = own
                if isinstance(dropout, CountedDropout):
                    dropout.calls = {}

    def forget(self) -> None:
        """Remove the keys: until the next `key` the dropouts draw torch's random numbers."""
        for dropout in self._layers:
            dropout.keys = None
