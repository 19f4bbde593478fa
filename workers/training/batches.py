"""Operations on batches and states: trees of mappings, lists and tuples that hold tensors.

A batch is cut along its samples, the first dimension of each tensor. A list or tuple is read as
columns (such as inputs and labels), or as a list of the samples themselves: texts, numbers, lists
of tokens, tensors of unequal lengths. A batch that has two readings, or cannot be cut, is refused.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.data import Dataset

from workers.training.errors import TaskError

Batch: TypeAlias = Any
"""A tensor, or tuples, lists and mappings of tensors, texts and numbers, by sample."""

#: Types of values that belong to all samples, and so to each part.
_SHARED = (type(None), str, bytes, bool, int, float, complex, torch.dtype, torch.device)


class _SampleList(list[Any]):
    """Some samples of a list. Never read as columns, even if their lengths are equal."""


class _SampleTuple(tuple[Any, ...]):
    """Some samples of a tuple. Never read as columns."""


def map_tensors(change: Callable[[Any], Any], tree: Any) -> Any:  # noqa: ANN401 - any batch
    """Return a tree of the same form with `change` applied to each tensor; other values stay."""

    def changed(value: Any) -> Any:  # noqa: ANN401 - any value
        return change(value) if isinstance(value, Tensor | PackedSequence) else value

    return _map_values(changed, tree)


def copied_values(tree: Any, *, tensors: bool) -> Any:  # noqa: ANN401 - any batch
    """Return a tree of the same form in new containers, with copies of its arrays and, if
    `tensors`, of its tensors. A tensor that occurs twice, such as inputs that are also labels, is
    copied once.
    """
    copies: dict[object, Tensor] = {}

    def own(value: Any) -> Any:  # noqa: ANN401 - any value
        if isinstance(value, Tensor):
            return copies.setdefault(_memory_key(value), value.clone()) if tensors else value
        return value if _shape(value) is None else copy.copy(value)

    return _map_values(own, tree)


def _map_values(change: Callable[[Any], Any], tree: Any) -> Any:  # noqa: ANN401 - any batch
    if isinstance(tree, Tensor | PackedSequence):
        return change(tree)
    if isinstance(tree, Mapping):
        return _mapped(tree, lambda _, value: _map_values(change, value))
    if isinstance(tree, list | tuple):
        values = [_map_values(change, value) for value in tree]
        kind = list if type(tree) is _SampleList else type(tree)
        kind = tuple if kind is _SampleTuple else kind
        return kind(*values) if hasattr(tree, "_fields") else kind(values)
    return change(tree)


def _memory_key(tensor: Tensor) -> object:
    """Return a key that is equal for tensors with the same numbers in memory."""
    if tensor._base is None or not is_plain(tensor):
        return id(tensor), (0, *tensor.shape) if is_plain(tensor) else ()
    form = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
    return id(tensor._base), form


def versions_of(tree: object) -> list[int]:
    """Return torch's count of writes for each tensor of a tree; 0 for tensors of inference mode."""
    return [0 if each.is_inference() else each._version for each in tensors_in(tree)]


def tensors_in(tree: object) -> Iterator[Tensor]:
    """Yield the tensors of a tree, in their order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping | list | tuple):
        for value in tree.values() if isinstance(tree, Mapping) else tree:
            yield from tensors_in(value)


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is neither sparse nor nested. Others lack some operators, and cannot be cut
    by sample.
    """
    return tensor.layout == torch.strided and not tensor.is_nested


def rows_of(batch: Batch) -> int:
    """Return the number of samples in a batch.

    Raises:
        TaskError: The values allow no number, or several.
    """
    columns = isinstance(batch, list | tuple) and _columns(batch)
    rows = columns or _possible_rows(batch)
    if rows is not None and len(rows) == 1:
        return next(iter(rows))
    reason = "no value has one for each sample"
    if rows:
        reason = f"{' or '.join(map(str, sorted(rows)))} are possible"
    elif rows is not None:
        values = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
        read = [(key, _possible_rows(value)) for key, value in values]
        reason = ", ".join(f"batch[{key!r}] has {min(one)}" for key, one in read if one)
    raise TaskError(
        f"the number of samples of a batch cannot be determined: {reason}; make the batch a "
        "tensor, or a mapping of tensors whose first dimension is the samples"
    )


def part_of(batch: Batch, first: int, rows: int) -> Batch:
    """Return `rows` samples of a batch from `first` on; tensors are views, not copies.

    Raises:
        TaskError: A value cannot be cut by sample; the text names it.
    """
    whole = rows_of(batch)
    if first == 0 and rows >= whole:
        return batch
    cut = slice(first, first + rows)
    return _cut(batch, lambda value: value[cut], whole, "batch")


def samples_at(batch: Batch, places: Sequence[int]) -> Batch:
    """Return a copy of the samples at these places of a batch.

    Raises:
        TaskError: As `part_of`.
    """

    def pick(value: Any) -> Any:  # noqa: ANN401 - a tensor, array or list
        if isinstance(value, list | tuple):
            return type(value)([value[place] for place in places])
        taken = value[list(places)]
        if isinstance(taken, Tensor) and taken.requires_grad:  # it is trained itself
            return taken.detach().requires_grad_()
        return taken

    return _cut(batch, pick, rows_of(batch), "batch")


def on_device(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch to a device. From pinned memory the copy does not wait for the card."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=tensor.is_pinned()), batch)


def _mapped(tree: Mapping[Any, Any], change: Callable[[Any, Any], Any]) -> Any:  # noqa: ANN401
    """Return a mapping with changed values, of the same type if that can be written to."""
    values = {key: change(key, value) for key, value in tree.items()}
    if type(tree) is OrderedDict:
        return OrderedDict(values)
    if type(tree) is dict or not isinstance(tree, MutableMapping):
        return values
    made = copy.copy(tree)  # such as the outputs of a tokenizer, which also have attributes
    made.update(values)
    return made


def _shape(tree: object) -> tuple[int, ...] | None:
    """Return the shape of a tensor or array; `None` for other values."""
    if isinstance(tree, Tensor) and tree.is_nested:  # it may have no shape
        return (tree.size(0),)
    shape = getattr(tree, "shape", None)
    return tuple(shape) if isinstance(shape, tuple) else None


def _possible_rows(tree: Any) -> set[int] | None:  # noqa: ANN401 - any batch
    """Return the numbers of samples that a value may have; `None`: any number."""
    if isinstance(tree, PackedSequence):
        return {int(tree.batch_sizes[0])}
    if shape := _shape(tree):
        return {shape[0]}
    if isinstance(tree, Mapping) or hasattr(tree, "_fields"):
        return _columns(tree)
    if not isinstance(tree, list | tuple):
        return None
    kinds = {
        (getattr(value, "dtype", None), len(shape)) for value in tree if (shape := _shape(value))
    }
    samples = {len(tree)} if len(kinds) < 2 else set[int]()  # samples have one type
    return samples | (_columns(tree) or set())


def _columns(tree: Any) -> set[int] | None:  # noqa: ANN401 - a mapping, list or tuple
    """Return the numbers of samples that all columns allow; `None`: these are no columns."""
    if isinstance(tree, _SampleList | _SampleTuple):
        return None
    values = tree.values() if isinstance(tree, Mapping) else tree
    if type(tree) in {list, tuple} and all(
        isinstance(value, Mapping)
        or (isinstance(value, list) and all(type(one) in {int, float} for one in value))
        for value in values
    ):
        return None  # each sample is a mapping, or a list of tokens
    possible = [rows for value in values if (rows := _possible_rows(value)) is not None]
    return set.intersection(*possible) if possible else None


def _cut(value: Any, take: Callable[[Any], Any], whole: int, path: str) -> Any:  # noqa: ANN401
    """Apply `take` to each value with an entry for each of `whole` samples; keep shared ones."""
    shape = _shape(value)
    if isinstance(value, _SHARED) or shape == ():
        return value
    if isinstance(value, PackedSequence):
        padded, lengths = pad_packed_sequence(value, batch_first=True)
        return pack_padded_sequence(
            take(padded), take(lengths), batch_first=True, enforce_sorted=False
        )
    if isinstance(value, Tensor) and not is_plain(value):
        kind = "nested" if value.is_nested else "sparse"
        raise TaskError(f"{path} is a {kind} tensor, which cannot be cut by sample: {_REMEDY}")
    if shape is not None:
        if shape[0] == whole:
            return take(value)
        raise TaskError(f"{path} has {shape[0]} rows in a batch of {whole} samples: {_REMEDY}")
    if isinstance(value, Mapping):
        return _mapped(value, lambda key, one: _cut(one, take, whole, f"{path}[{key!r}]"))
    if isinstance(value, list | tuple):
        named = hasattr(value, "_fields")
        columns = whole in (_columns(value) or ())
        samples = len(value) == whole and not named
        if columns and samples and path != "batch":
            raise TaskError(
                f"{path} may be {whole} samples, or {whole} columns of samples: {_REMEDY}"
            )
        if columns or named:
            parts = [_cut(one, take, whole, f"{path}[{at}]") for at, one in enumerate(value)]
            return type(value)(*parts) if named else type(value)(parts)
        if samples:
            return (_SampleList if isinstance(value, list) else _SampleTuple)(take(value))
        raise TaskError(f"{path} has {len(value)} values in a batch of {whole} samples: {_REMEDY}")
    raise TaskError(f"{path} is a {type(value).__name__}, which cannot be cut by sample: {_REMEDY}")


_REMEDY = (
    "make it a tensor whose first dimension is the samples, a list with a value for each sample, "
    "or leave it out of the batch"
)


def scalar_loss(loss: object) -> Tensor:
    """Return the result of a loss function as one number: a tensor, or the `loss` of a mapping.

    Raises:
        TaskError: The result is neither.
    """
    if isinstance(loss, Mapping):  # such as the outputs of a model of transformers
        loss = loss.get("loss")
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.reshape(())
    found = f"is a {type(loss).__name__}"
    if isinstance(loss, Tensor):
        found = f"has the shape {tuple(loss.shape)}"
    raise TaskError(f"the loss {found}; return one number as a tensor, without item()")


class Samples(Dataset[Any]):
    """A data set that makes several samples in one call."""

    _items: int

    def __len__(self) -> int:
        return self._items

    def __getitem__(self, key: Any) -> Any:  # noqa: ANN401 - an index, or an `order.Sample`
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[Any]) -> list[Any]:
        """Return the samples of several keys; torch's loader prefers this method."""
        raise NotImplementedError
