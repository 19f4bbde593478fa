"""Batches of any form are divided by sample, or the error names the part that cannot be divided."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from workers.training.batches import copied_values, on_device, part_of, rows_of, samples_at
from workers.training.errors import TaskError


class Encoding(UserDict[str, Any]):
    """A mapping with attributes, like the result of tokenizers of transformers."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


class Pair(NamedTuple):
    left: Any
    right: Any


def sample(number: int) -> dict[str, Any]:
    """Return one sample in all possible forms; lengths differ."""
    return {
        "tensor": torch.full((3,), number),
        "text": f"text {number}",
        "number": float(number),
        "tokens": [number] * (1 + number % 3),
        "ragged": torch.full((2 + number,), number),
        "nested": {"boxes": torch.full((number % 2, 4), number)},
        "nothing": None,
    }


#: Make a batch in each form from the columns of its samples, and a tensor of the first column.
FORMS: dict[str, Callable[[dict[str, Any], Tensor], Any]] = {
    "tensor": lambda _, stacked: stacked,
    "pair": lambda _, stacked: (stacked, stacked[:, 0]),
    "named": lambda of, stacked: Pair(stacked, {"text": of["text"], "shared": None}),
    "texts": lambda of, _: of["text"],
    "texts and labels": lambda of, stacked: [tuple(of["text"]), stacked[:, 0]],
    "tokens": lambda of, _: {"ids": of["tokens"], "labels": of["number"]},
    "ragged": lambda of, stacked: {"waves": of["ragged"], "labels": stacked[:, 0]},
    "detection": lambda of, _: (tuple(of["ragged"]), tuple(of["nested"])),
    "labels in a list": lambda of, stacked: [stacked, of["number"], of["tokens"]],
    "samples": lambda of, _: [dict(zip(of, each, strict=True)) for each in zip(*of.values(), strict=True)],
    "encoding": lambda _, stacked: Encoding(ids=stacked, inner=Encoding(mask=stacked, scale=2.0)),
    "ordered": lambda of, stacked: OrderedDict(x=stacked, names=of["text"], mode="train"),
    "packed": lambda of, _: {"packed": pack_sequence(of["ragged"], enforce_sorted=False)},
    "array": lambda _, stacked: {"x": stacked.numpy(), "y": stacked},
    "scalar": lambda _, stacked: {"x": stacked, "items": torch.tensor(7), "none": None, "keep": True},
}  # fmt: skip


def joined(form: str, numbers: list[int]) -> Any:
    """Return a batch of these samples."""
    column = {key: [sample(number)[key] for number in numbers] for key in sample(0)}
    return FORMS[form](column, torch.stack(column["tensor"]))


def plain(tree: Any) -> Any:
    """Return a batch as values that `==` can compare."""
    if isinstance(tree, PackedSequence):
        padded, lengths = pad_packed_sequence(tree, batch_first=True)
        return [each[:size].tolist() for each, size in zip(padded, lengths.tolist(), strict=True)]
    if isinstance(tree, Tensor) or hasattr(tree, "dtype"):
        return tree.tolist()
    if hasattr(tree, "items"):
        return {key: plain(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [plain(value) for value in tree]
    return tree


@given(
    st.sampled_from(list(FORMS)),
    st.lists(st.integers(0, 9), min_size=4, max_size=9, unique=True),
    st.data(),
)
@settings(deadline=None)
def test_each_part_is_the_batch_of_its_samples(
    form: str, numbers: list[int], data: st.DataObject
) -> None:
    """Parts that are joined again equal the batch."""
    whole = joined(form, numbers)
    assert rows_of(whole) == len(numbers)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(numbers) - 1), max_size=4)))
    for first, last in zip([0, *cuts], [*cuts, len(numbers)], strict=True):
        part = part_of(whole, first, last - first)
        assert type(copied_values(part, tensors=False)) is type(whole), "as a loss gets it"
        assert plain(part) == plain(joined(form, numbers[first:last]))
    places = data.draw(st.permutations(range(len(numbers))))
    assert plain(samples_at(whole, places)) == plain(joined(form, [numbers[at] for at in places]))


def test_attributes_of_an_encoding_stay_on_any_device() -> None:
    whole = on_device(joined("encoding", [1, 2, 3, 4]), torch.device("cpu"))
    part = part_of(whole, 1, 2)
    assert part.ids.data_ptr() == whole.ids[1:].data_ptr(), "it is no copy"
    assert part.ids.tolist() == [[2, 2, 2], [3, 3, 3]]
    assert part.inner.scale == 2.0
    assert on_device(joined("packed", [1, 2]), torch.device("meta"))["packed"].data.is_meta


@pytest.mark.parametrize(
    ("batch", "named"),
    [
        ({"a": torch.zeros(4, 2), "b": object()}, r"batch\['b'\] is a object"),
        ((torch.zeros(4), {"graph": {1, 2}}), r"batch\[1\]\['graph'\] is a set"),
        ({"a": torch.zeros(4), "b": torch.zeros(1, 4)}, r"batch\['a'\] has 4, batch\['b'\] has 1"),
        ((torch.zeros(4, 2), torch.zeros(4), torch.zeros(5)), r"batch\[2\] has 5"),
        ({"a": torch.zeros(4), "b": ["x", "y"]}, r"batch\['a'\] has 4, batch\['b'\] has 2"),
        ({"x": [torch.zeros(3)] * 3, "y": torch.zeros(3)}, r"batch\['x'\] may be 3 samples, or 3"),
        ({"x": [torch.zeros(3)] * 5}, "3 or 5 are possible"),
        ({"a": None, "b": 1.0}, "no value has one for each sample"),
        (None, "no value has one for each sample"),
    ],
)
def test_what_cannot_be_cut_is_named_in_one_sentence(batch: object, named: str) -> None:
    with pytest.raises(TaskError, match=named) as refused:
        part_of(batch, 0, 1)
    assert "\n" not in str(refused.value)
