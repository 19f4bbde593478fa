"""Batches and states, which are tensors in mappings, lists and tuples; and what has samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import Dataset

Batch: TypeAlias = Any
"""A tensor, or tuples, lists and mappings of tensors; the first dimension of each is the samples.
"""


def map_tensors(change: Callable[[Tensor], Any], tree: Any) -> Any:  # noqa: ANN401 - any batch
    """Return a tree of the same form with each tensor changed; what is no tensor stays."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, Mapping):
        return {key: map_tensors(change, value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        values = [map_tensors(change, value) for value in tree]
        return type(tree)(*values) if hasattr(tree, "_fields") else type(tree)(values)
    return tree


def tensors_in(tree: object) -> Iterator[Tensor]:
    """Yield the tensors of a tree, in their order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping | list | tuple):
        for value in tree.values() if isinstance(tree, Mapping) else tree:
            yield from tensors_in(value)


def rows_of(batch: Batch) -> int:
    """Return the number of samples in a batch."""
    return len(next(tensors_in(batch)))


def part_of(batch: Batch, first: int, rows: int) -> Batch:
    """Return some samples of a batch, without a copy."""
    return map_tensors(lambda tensor: tensor[first : first + rows], batch)


def on_device(batch: Batch, device: torch.device, *, non_blocking: bool = True) -> Batch:
    """Copy a batch. From pinned memory the copy does not wait for the card."""
    return map_tensors(
        lambda tensor: tensor.to(device, non_blocking=non_blocking and tensor.is_pinned()), batch
    )


class Samples(Dataset[Any]):
    """A data set that makes several samples at once."""

    _items: int

    def __len__(self) -> int:
        return self._items

    def __getitem__(self, key: Any) -> Any:  # noqa: ANN401 - an index, or an `order.Sample`
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[Any]) -> list[Any]:
        """Return several; torch's loader prefers this."""
        raise NotImplementedError
