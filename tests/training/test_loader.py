"""The order of samples comes from outside, whatever happens to the loader and its processes."""

from __future__ import annotations

import copy
import os
import resource
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import Dataset

from tests.scene import vm_data_bytes, wait_for
from tests.training.scene import CNN, CPU, GPT, in_shared_memory, replay, settings, task, trainer
from workers.training.errors import TaskError
from workers.training.loader import (
    HostShare,
    Loader,
    LoaderNumbers,
    Order,
    loader_numbers,
    row_bytes,
)
from workers.training.settings import TrainSettings
from workers.training.trainer import Trainer
from workers.units import GIB, MIB

BATCH = 6


class Items(Dataset[torch.Tensor]):
    """Says which item was asked for, and in which process it was made.

    Fails once where a file tells it to.
    """

    def __init__(self, trouble: Path | None = None) -> None:
        self.trouble = trouble

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 20 and self.trouble is not None and self.trouble.exists():
            self.trouble.unlink()
            raise ValueError("this item is broken")
        return torch.tensor([index, os.getpid()])


class Large(Dataset[torch.Tensor]):
    """Takes 256 MiB for each item."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(2**26)[:1] + index


class NotPicklable(Dataset[torch.Tensor]):
    """Holds what no other process can have."""

    def __init__(self) -> None:
        self.held = (each for each in ())


def order(used: int, count: int) -> Sequence[int]:
    """Some order that differs from counting."""
    return [(number * 7) % 101 for number in range(used, used + count)]


def loader_of(
    dataset: Dataset[Any], workers: int = 0, order: Order = order, pin: bool = False, **keys: Any
) -> Loader:
    settings = TrainSettings(**{"batch": BATCH, **keys})
    numbers = LoaderNumbers(workers=workers, prefetch=1)
    return Loader(dataset, order, settings, numbers, pin=pin)


def keys(batch: torch.Tensor) -> list[int]:
    """Return which items a batch holds."""
    return [int(row[0]) for row in batch]


def test_a_loader_goes_on_anywhere_in_the_given_order() -> None:
    _goes_on_anywhere(0)


def test_a_batch_that_failed_is_made_again(tmp_path: Path) -> None:
    _makes_a_failed_batch_again(0, tmp_path)


def test_with_processes_of_its_own_it_does_the_same(in_child: Any, tmp_path: Path) -> None:
    in_child(_with_processes, tmp_path)


def _with_processes(folder: Path) -> None:
    _lifts_the_cap()  # first: the process that starts the others inherits the cap, too
    _goes_on_anywhere(2)
    _makes_a_failed_batch_again(2, folder)
    _replaces_a_killed_process()
    _says_what_cannot_be_sent()
    wait_for(lambda: not _loader_processes(), "end of the loader's processes")


def _loader_processes() -> list[psutil.Process]:
    """The children of the fork server, which ends with this process."""
    own = psutil.Process()
    return [each for each in own.children(recursive=True) if each.ppid() != own.pid]


def _goes_on_anywhere(workers: int) -> None:
    state = torch.get_rng_state()
    loader = loader_of(Items(), workers)
    batches = [loader.next_batch() for _ in range(4)]
    assert [keys(each) for each in batches] == [list(order(used, BATCH)) for used in (0, 6, 12, 18)]
    assert loader.samples_used == 24
    assert ({int(each[0, 1]) for each in batches} == {os.getpid()}) == (workers == 0)
    loader.seek(6)
    assert keys(loader.next_batch()) == list(order(6, BATCH))
    assert loader.samples_used == 12
    loader.close()
    assert torch.equal(state, torch.get_rng_state())
    assert 0 < loader.wait_share() <= 1


def _makes_a_failed_batch_again(workers: int, folder: Path) -> None:
    (folder / "trouble").touch()
    loader = loader_of(
        Items(folder / "trouble"), workers, lambda used, count: range(used, used + count), batch=10
    )
    assert [keys(loader.next_batch())[0] for _ in range(2)] == [0, 10]
    with pytest.raises(ValueError, match="this item is broken"):
        loader.next_batch()
    assert loader.samples_used == 20
    assert keys(loader.next_batch()) == list(range(20, 30))
    loader.close()


def _replaces_a_killed_process() -> None:
    loader = loader_of(Items(), 1)
    makers = []
    for turn in range(8):
        batch = loader.next_batch()
        assert keys(batch) == list(order(turn * BATCH, BATCH))
        makers.append(int(batch[0, 1]))
        if turn == 2:
            os.kill(makers[-1], signal.SIGKILL)
    assert len(set(makers)) == 2
    loader.close()


def _says_what_cannot_be_sent() -> None:
    loader = loader_of(NotPicklable(), 1)
    with pytest.raises(
        TaskError, match=r"cannot be sent to loader processes .*set train\.loader_workers to 0"
    ):
        loader.next_batch()
    loader.close()


def _lifts_the_cap() -> None:
    """The memory of loader processes is not under the cap of the training."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (vm_data_bytes() + 128 * 2**20, hard))
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        loader_of(Large(), batch=2).next_batch()
    loader = loader_of(Large(), 1, batch=2)
    assert loader.next_batch()[:, 0].int().tolist() == list(order(0, 2))
    loader.close()
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def test_a_shortage_of_pinned_memory_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not taken for one of the card's memory, which a smaller part of the batch would cure."""

    def pin_memory(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    # torch pins only where there is an accelerator, and does so in this process.
    monkeypatch.setattr(torch.accelerator, "is_available", lambda *_, **__: True)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cpu")
    )
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    loader = loader_of(Items(), pin=True)
    batches = [loader.next_batch() for _ in range(3)]
    loader.close()
    assert [key for batch in batches for key in keys(batch)] == order(0, 3 * BATCH)
    ((name, detail),) = loader.news()
    assert name == "unpinned"
    assert "CUDA error: out of memory" in detail["reason"]
    assert loader.news() == []


CARD = HostShare(cores=8, ram_bytes=16 * GIB, on_card=True)


@pytest.mark.parametrize(
    ("host", "asked", "expected"),
    [
        (CARD, {}, (7, 4)),
        (replace(CARD, cores=32), {}, (8, 4)),
        (replace(CARD, on_card=False), {}, (2, 4)),
        (CARD, {"batch_bytes": 512 * MIB}, (3, 2)),
        (replace(CARD, ram_bytes=GIB), {}, (1, 4)),
        (CARD, {"batch_bytes": 8 * GIB}, (0, 1)),
        (CARD, {"workers": 12, "prefetch": 64}, (12, 64)),
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
