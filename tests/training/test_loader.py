"""The order of samples is given from outside, whatever happens to the loader and its processes."""

from __future__ import annotations

import os
import random
import resource
import signal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import Dataset

from tests.scene import vm_data_bytes, wait_for
from tests.training.scene import CPU, Told, settings
from workers.training.errors import TaskError
from workers.training.loader import Feed
from workers.training.order import samples
from workers.training.tasks import TrainTask

BATCH, SEED = 6, 3


def order(used: int, count: int) -> list[int]:
    """Return the items in the order of the seed."""
    return [each.index for each in samples(SEED, 101, used, count)]


class Hundred(Dataset[torch.Tensor]):
    """A data set of 101 items."""

    def __len__(self) -> int:
        return 101


class Items(Hundred):
    """Returns the index of an item and the process that made it.

    Fails once if the file `trouble` exists.
    """

    def __init__(self, trouble: Path | None = None) -> None:
        self.trouble = trouble

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == order(20, 1)[0] and self.trouble is not None and self.trouble.exists():
            self.trouble.unlink()
            raise ValueError("this item is broken")
        return torch.tensor([index, os.getpid()])


class Large(Hundred):
    """Allocates 256 MiB for each item."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.zeros(2**26)[:1] + index


class Augmented(Hundred):
    """Draws from all random number generators of a process."""

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [torch.rand(()).item(), random.random(), float(np.random.rand())]  # noqa: S311
        return torch.tensor([index, *drawn])


def _noisy(samples: list[torch.Tensor]) -> torch.Tensor:
    made = torch.stack(samples)
    return made + torch.rand(made.shape) * (torch.arange(4) > 0)


class NotPicklable(Hundred):
    """Holds an object that cannot be sent to another process."""

    def __init__(self) -> None:
        self.held = (each for each in ())


def feed_of(
    dataset: Dataset[Any],
    workers: int = 0,
    batch: int = BATCH,
    told: Told | None = None,
    **fields: Any,
) -> Feed:
    made = TrainTask(
        name="items",
        model=torch.nn.Module,
        dataset=dataset,  # type: ignore[arg-type]
        loss=lambda *_: None,  # type: ignore[arg-type, return-value]
        **fields,
    )
    keys = settings(batch=batch, loader_workers=workers, prefetch=1)
    return Feed(made, keys, CPU, SEED, Told() if told is None else told)


def taken(feed: Feed) -> torch.Tensor:
    feed.take()
    return feed.batch


def keys(batch: torch.Tensor) -> list[int]:
    """Return the indices of the items in a batch."""
    return [int(row[0]) for row in batch]


def test_a_loader_goes_on_anywhere_in_the_given_order() -> None:
    _goes_on_anywhere(0)


def test_a_batch_that_failed_is_made_again(tmp_path: Path) -> None:
    _makes_a_failed_batch_again(0, tmp_path)


def test_with_processes_of_its_own_it_does_the_same(in_child: Any, tmp_path: Path) -> None:
    in_child(_with_processes, tmp_path)


def _with_processes(folder: Path) -> None:
    _lifts_the_cap()  # first, because the fork server inherits the cap too
    _goes_on_anywhere(2)
    _makes_a_failed_batch_again(2, folder)
    _replaces_a_killed_process()
    _says_what_cannot_be_sent()
    assert torch.equal(_draws_by_batch(0), _draws_by_batch(2))
    wait_for(lambda: not _loader_processes(), "end of the loader's processes")


def _loader_processes() -> list[psutil.Process]:
    """Return the children of the fork server, which ends with this process."""
    own = psutil.Process()
    return [each for each in own.children(recursive=True) if each.ppid() != own.pid]


def test_what_a_data_set_draws_is_a_function_of_seed_and_batch() -> None:
    """The draws do not change the random numbers of the training."""
    before = torch.get_rng_state(), random.getstate()
    assert len(_draws_by_batch(0)[:, 1:].unique()) == 3 * 4 * BATCH
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()


def _draws_by_batch(workers: int) -> torch.Tensor:
    feed = feed_of(Augmented(), workers, collate=_noisy)
    made = [taken(feed) for _ in range(4)]
    feed.seek(2 * BATCH)  # as after a kill
    assert torch.equal(taken(feed), made[2])
    feed.close()
    return torch.cat(made)


def _goes_on_anywhere(workers: int) -> None:
    state = torch.get_rng_state()
    feed = feed_of(Items(), workers)
    batches = [taken(feed) for _ in range(4)]
    assert [keys(each) for each in batches] == [order(used, BATCH) for used in (0, 6, 12, 18)]
    assert ({int(each[0, 1]) for each in batches} == {os.getpid()}) == (workers == 0)
    feed.seek(6)
    assert keys(taken(feed)) == order(6, BATCH)
    assert keys(taken(feed)) == order(12, BATCH)
    feed.close()
    assert torch.equal(state, torch.get_rng_state())
    assert 0 < feed.wait_share() <= 1


def _makes_a_failed_batch_again(workers: int, folder: Path) -> None:
    (folder / "trouble").touch()
    feed = feed_of(Items(folder / "trouble"), workers, batch=10)
    for used in (0, 10):
        assert keys(taken(feed)) == order(used, 10)
    with pytest.raises(ValueError, match="this item is broken"):
        feed.take()
    assert keys(taken(feed)) == order(20, 10)
    feed.close()


def _replaces_a_killed_process() -> None:
    feed = feed_of(Items(), 1)
    makers = []
    for turn in range(8):
        batch = taken(feed)
        assert keys(batch) == order(turn * BATCH, BATCH)
        makers.append(int(batch[0, 1]))
        if turn == 2:
            os.kill(makers[-1], signal.SIGKILL)
    assert len(set(makers)) == 2
    feed.close()


def _says_what_cannot_be_sent() -> None:
    feed = feed_of(NotPicklable(), 1)
    with pytest.raises(
        TaskError, match=r"cannot be sent to loader processes .*set train\.loader_workers to 0"
    ):
        taken(feed)
    feed.close()


def _lifts_the_cap() -> None:
    """The cap of the training does not limit the memory of loader processes."""
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (vm_data_bytes() + 128 * 2**20, hard))
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        feed_of(Large(), batch=2).take()
    feed = feed_of(Large(), 1, batch=2)
    assert taken(feed)[:, 0].int().tolist() == order(0, 2)
    feed.close()
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def test_a_shortage_of_pinned_memory_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not count as a shortage of card memory, which smaller parts would solve."""

    def pin_memory(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory")

    # torch pins memory only with an accelerator, and in this process.
    monkeypatch.setattr(torch.accelerator, "is_available", lambda *_, **__: True)
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cpu")
    )
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin_memory)
    told = Told()
    feed = feed_of(Items(), told=told)
    feed._pin = True
    batches = [taken(feed) for _ in range(3)]
    feed.close()
    assert [key for batch in batches for key in keys(batch)] == order(0, 3 * BATCH)
    ((name, detail),) = told
    assert name == "unpinned"
    assert "CUDA error: out of memory" in detail["reason"]
