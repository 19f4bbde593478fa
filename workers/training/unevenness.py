"""Finds how the samples of a batch differ: which samples show that parts do not add up, and which
batches to check.

A mean over items adds up if all samples have equally many, so a check needs samples with different
numbers of items. Only the loss knows what an item is. So for every tensor of the batch this module
counts the ignored labels of each sample, its zeros, and the length of a run of one number at its
ends. Computes no loss (`parts.py` does).
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from workers.training.batches import Batch, is_plain, rows_of, tensors_in

#: Most numbers of a sample in possible labels, tokens or masks: the longest is 1,048,576 tokens.
_ITEMS_MOST: Final = 2**20

#: Most real numbers of a sample in what may be a mask. More are features: to examine 3 million of
#: them takes 15 ms of a core in each batch (256 samples of 12,288 numbers, measured).
_REAL_MOST: Final = 2**13

#: Absolute values of possible weights are distinguished in steps of the eighth root of two.
_STEPS_OF_SIZE: Final = 8

_UNSIGNED: Final = (torch.uint16, torch.uint32, torch.uint64)


@dataclass(frozen=True, slots=True)
class _Measure:
    """A property that samples may have in different amounts."""

    by_sample: Tensor
    """One whole number for each sample."""
    by_chance: bool
    """Whether a difference of 1 is no evidence of different numbers of items, as for tokens that
    begin with two equal ones.
    """


def differing(batch: Batch, rows: int) -> list[list[int]]:
    """Return places of `rows` samples for each way in which samples differ, at least once.

    The second half has fewer items than the first: its last sample has the fewest, and the one
    before it has some. Among equal samples, those with rare labels come first, which may have
    larger weights.
    """
    all_rows = rows_of(batch)
    measures = list(_measures(batch, all_rows))
    common = torch.zeros(all_rows, dtype=torch.int64)
    for tensor in _countable(batch, all_rows):
        if tensor.dim() == 1 and not tensor.is_floating_point() and not tensor.is_complex():
            # Untyped in torch.
            _, kind, times = tensor.unique(return_inverse=True, return_counts=True)  # type: ignore[no-untyped-call]
            common += times[kind].cpu()
    total = sum((each.by_sample.cpu() for each in measures), torch.zeros_like(common))
    keys = [each.by_sample.cpu() for each in measures if _spread(each)] or [total]
    keys += [
        each.by_sample.cpu() for each in _guesses(batch, all_rows, _ITEMS_MOST) if _spread(each)
    ]
    chosen = []
    for key in keys:
        by = list(zip(key.tolist(), total.tolist(), common.tolist(), strict=True))
        order = sorted(range(all_rows), key=by.__getitem__)
        places = [*order[: rows - 1], order[-1]]
        if places not in chosen:
            chosen.append(places)
    for lengths in _lengths(batch, all_rows):  # long ones, and short ones padded to them
        order = lengths.argsort(descending=True).tolist()
        ends = [*order[: rows - rows // 2], *order[-(rows // 2) :]]
        if ends not in chosen and int(lengths.max()) > int(lengths.min()):
            chosen.append(ends)
    chosen += [places for places in _pairs(batch, all_rows, rows) if places not in chosen]
    return chosen


def shuffled(batch: Batch, rows: int) -> list[int]:
    """Return places of `rows` samples in a shuffled order, which is a function of the batch's size,
    so that samples which belong together are separated.
    """
    all_rows = rows_of(batch)
    return random.Random(all_rows).sample(range(all_rows), rows)  # noqa: S311 - no secret


def _pairs(batch: Batch, all_rows: int, rows: int) -> Iterator[list[int]]:
    """Yield, for each column of labels, two samples of each of two labels, one in each half: only
    the whole then has the pairs of one label that a loss may use.
    """
    if rows < 4:
        return
    for tensor in _countable(batch, all_rows):
        if tensor.dim() != 1 or tensor.is_floating_point() or tensor.is_complex():
            continue
        by_label: dict[int, list[int]] = {}
        for place, label in enumerate(tensor.tolist()):
            by_label.setdefault(label, []).append(place)
        groups = sorted(by_label.values(), key=len, reverse=True)
        if len(groups) < 2:
            continue
        first, second = groups[:2]
        if len(second) > 1:
            yield [first[0], second[0], first[1], second[1]]
        elif len(first) > 1:
            rest = [place for place in range(all_rows) if place not in first] + first[2:]
            yield [first[0], rest[0], first[1], rest[-1]]


class PartsCheckSchedule:
    """Decides which batches to check, and remembers the findings."""

    def __init__(self) -> None:
        self._checked: set[object] = set()
        self._spreads: list[int] = []
        self._batches = 0
        self._reported: set[str] = set()
        """Causes that were found."""

    def due(self, batch: Batch, rows: int, *others: object) -> bool:
        """Whether to check a batch: no batch of its form was checked. A form is types, sizes and
        differences of samples, both to a factor of two, and whatever else a result may depend on.

        Also the 2nd, 4th, 8th ... batch of all is due: the tensors may not show what its samples
        have in common.
        """
        self._batches += 1
        measures = *_measures(batch, rows), *_guesses(batch, rows, _REAL_MOST)
        spreads = [_spread(each) for each in measures]
        if len(spreads) == len(self._spreads):
            spreads = list(map(max, spreads, self._spreads))
        self._spreads = spreads
        forms = (
            (each.dtype, *map(int.bit_length, each.shape[1:]))
            for each in tensors_in(batch)
            if is_plain(each)
        )
        self._form = (*spreads, *others, *forms)
        return self._form not in self._checked or self._batches.bit_count() == 1

    def forget(self) -> None:
        """Make the next batch due, whatever its form."""
        self._checked.clear()

    def done(self, found: Mapping[str, str]) -> list[str]:
        """Record a check and its findings, a sentence for each cause; return the sentences of new
        causes.
        """
        self._checked.add(self._form)
        new = [sentence for kind, sentence in found.items() if kind not in self._reported]
        self._reported.update(found)
        return new


def _spread(measure: _Measure) -> int:
    """Return the bit length of the largest difference between samples; 0: they are equal."""
    least, most = measure.by_sample.aminmax()
    spread = int(most - least).bit_length()
    return 0 if measure.by_chance and spread == 1 else spread


def _countable(batch: Batch, rows: int) -> Iterator[Tensor]:
    for tensor in tensors_in(batch):
        most = _REAL_MOST if tensor.is_floating_point() else _ITEMS_MOST
        if (
            is_plain(tensor)
            and tensor.dim()
            and tensor.shape[0] == rows
            and 0 < tensor[0].numel() <= most
        ):
            # torch cannot compare unsigned numbers of more than 8 bits.
            yield tensor.detach().long() if tensor.dtype in _UNSIGNED else tensor.detach()


def _lengths(tree: object, rows: int) -> Iterator[Tensor]:
    """Yield the lengths of samples that are texts, lists of tokens or separate tensors."""
    if isinstance(tree, Mapping | list | tuple):
        values = list(tree.values() if isinstance(tree, Mapping) else tree)
        if len(values) == rows and all(
            isinstance(value, str | list) or (isinstance(value, Tensor) and value.dim() > 0)
            for value in values
        ):
            sizes = [
                value.numel() if isinstance(value, Tensor) and is_plain(value) else len(value)
                for value in values
            ]
            yield torch.tensor(sizes)
        else:
            for value in values:
                yield from _lengths(value, rows)


def _measures(batch: Batch, rows: int) -> Iterator[_Measure]:
    for lengths in _lengths(batch, rows):
        yield _Measure(-lengths, by_chance=False)  # like zeros: more of it, fewer items
    for tensor in _countable(batch, rows):
        flat = tensor.reshape(rows, -1)
        if tensor.is_complex():
            continue
        if tensor.is_floating_point() or tensor.dtype == torch.bool:
            yield _Measure((flat == 0).sum(1), by_chance=False)
            continue
        yield _Measure((flat < 0).sum(1), by_chance=False)
        if tensor.dim() == 2:
            begin, end = flat == flat[:, :1], flat.flip(1) == flat[:, -1:]
            runs = begin.int().cumprod(1).sum(1) + end.int().cumprod(1).sum(1)
            yield _Measure(runs, by_chance=True)


def _guesses(batch: Batch, rows: int, most: int) -> Iterator[_Measure]:
    """Yield further possible measures of items, of tensors with at most `most` numbers in a sample:
    the absolute value of a single real number, which may be a weight; and the count of whole
    numbers equal to the highest or lowest of all, which may mark ignored items, such as 255.
    """
    for tensor in _countable(batch, rows):
        flat = tensor.reshape(rows, -1)
        if tensor.is_complex() or tensor.dtype == torch.bool or flat.shape[1] > most:
            continue
        if not tensor.is_floating_point():
            for value in flat.aminmax() if flat.shape[1] > 1 else ():
                yield _Measure((flat == value).sum(1), by_chance=True)
        elif flat.shape[1] == 1:
            sizes = flat[:, 0].double().abs().nan_to_num(0.0).clamp(1e-30, 1e30)
            yield _Measure((_STEPS_OF_SIZE * sizes.log2()).round().long(), by_chance=False)
