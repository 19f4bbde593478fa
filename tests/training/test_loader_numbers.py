"""Numbers of the loader from cores and RAM, and a data set that is served from RAM."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.training.scene import CNN, CPU, GPT, replay, settings, task, trainer
from tests.training.test_trajectory import in_shared_memory
from workers.training.loader import HostShare, loader_numbers, row_bytes
from workers.training.trainer import Trainer
from workers.units import GIB, MIB

CARD = HostShare(cores=8, ram_bytes=16 * GIB, on_card=True)


@pytest.mark.parametrize(
    ("host", "asked", "expected"),
    [
        (CARD, {}, (7, 4)),
        (replace(CARD, cores=32), {}, (8, 4)),
        (replace(CARD, cores=1), {}, (0, 4)),
        (replace(CARD, on_card=False), {}, (2, 4)),
        (replace(CARD, on_card=False, cores=2), {}, (0, 4)),
        (CARD, {"batch_bytes": 512 * MIB}, (3, 2)),
        (replace(CARD, ram_bytes=GIB), {}, (1, 4)),
        (CARD, {"batch_bytes": 8 * GIB}, (0, 1)),
        (CARD, {"workers": 12, "prefetch": 64}, (12, 64)),
        (CARD, {"workers": 12}, (12, 4)),
        (CARD, {"prefetch": 64, "batch_bytes": 32 * MIB}, (1, 64)),
    ],
)
def test_processes_follow_cores_and_ram(
    host: HostShare, asked: dict[str, Any], expected: tuple[int, int]
) -> None:
    keys: dict[str, Any] = {"workers": "auto", "prefetch": "auto", "batch_bytes": MIB} | asked
    told = loader_numbers(host, ram_cache=False, items_bytes=None, **keys)
    assert (told.workers, told.prefetch) == expected
    assert not told.ram_cache


@pytest.mark.parametrize(
    ("items_bytes", "cached", "words"),
    [
        (8 * GIB, True, "kept in RAM: it takes 8192 MiB"),
        (
            8 * GIB + 1,
            False,
            "not kept in RAM: it takes 8192 MiB, and half of the free RAM is 8192 MiB",
        ),
        (None, False, "change from epoch to epoch"),
    ],
)
def test_a_data_set_is_kept_if_it_fits_into_half_of_the_free_ram(
    items_bytes: int | None, cached: bool, words: str
) -> None:
    told = loader_numbers(
        CARD, workers=3, prefetch=2, ram_cache=True, batch_bytes=1, items_bytes=items_bytes
    )
    assert (told.workers, told.ram_cache) == (3, cached)
    assert words in told.reason


def test_of_a_batch_that_is_not_all_rows_nothing_is_kept() -> None:
    rows = torch.zeros(4, 3)
    assert row_bytes({"x": rows, "y": (rows.double(),)}) == 36
    assert row_bytes([rows, "name"]) is None
    assert row_bytes([rows, rows[:2]]) is None


class Counting:
    """A data set that counts what it was asked for."""

    def __init__(self, items: int, varied: bool) -> None:
        self.inner = task(GPT).dataset
        self.asked = 0
        self._items = items
        self._varied = varied

    def __len__(self) -> int:
        return self._items

    def __getitem__(self, index: int) -> torch.Tensor:
        self.asked += 1
        tokens: torch.Tensor = self.inner[index]
        return tokens[: 9 + index % 2] if self._varied else tokens


def test_from_ram_come_the_same_bits_and_each_item_is_made_once() -> None:
    plain = trainer(steps=14)
    replay(plain, [[12, 0, 14]])
    counting = Counting(100, varied=False)
    run = Trainer(replace(task(GPT), dataset=counting), settings(steps=14, ram_cache=True), CPU, 7)
    replay(run, [[12, 0, 10]])
    going_on = copy.deepcopy(run.state())
    replay(run, [[12, 0, 4]])
    assert run.weights_sha256() == plain.weights_sha256()
    # One to see what it takes; of the ninth batch eight begin the second epoch, before the first is
    # complete.
    assert counting.asked == 1 + 9 * 12
    cache = run._feed.loader._cache
    assert cache is not None
    assert in_shared_memory(cache._rows), "on a CPU, outside of what the cap counts"
    run.load(going_on)
    replay(run, [[12, 0, 4]])
    assert run.weights_sha256() == plain.weights_sha256()
    assert counting.asked == 1 + 9 * 12


def test_what_cannot_be_kept_is_trained_all_the_same() -> None:
    asked = []
    for keys in ({}, {"ram_cache": True, "loader_workers": "auto", "prefetch": "auto"}):
        counting = Counting(24, varied=True)
        one_each = replace(task(GPT), dataset=counting)
        run = Trainer(one_each, settings(steps=30, batch=1, **keys), CPU, 7)
        replay(run, [[1, 0, 30]])
        asked.append(counting.asked)
        if not keys:
            expected = run.weights_sha256()
        assert run.weights_sha256() == expected
    assert asked == [30, 31]
    faces = trainer(CNN, steps=2, ram_cache=True)
    replay(faces, [[12, 0, 2]])
    assert "change from epoch to epoch" in faces.loader_numbers.reason
