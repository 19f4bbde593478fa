"""The effective batches of a task, made in host memory ahead of time, in the order of the seed.

The order is a function of the number of samples used. So a loader can be closed and opened again at
any batch, and no sample is left out or repeated. After a failure the next call makes the same batch
again. Does not split batches. Whether loader processes help is measured (`data_wait_pct`), not
guessed.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import platform
import random
import re
import resource
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import count
from multiprocessing.util import get_temp_dir
from typing import Any, Final, cast

import torch
from torch.utils.data import DataLoader, Dataset

from workers.training import order
from workers.training.batches import Batch, rows_of
from workers.training.errors import TaskError
from workers.training.random_state import RandomState
from workers.training.settings import TrainSettings
from workers.training.tasks import TrainTask, refuse_without_data

#: Stream of the random numbers that a data set draws.
_DRAWS_STREAM: Final = 3

#: Longest reason in an event, in characters.
_LONGEST: Final = 200

#: Module that the fork server of the loader processes imports first.
_SERVER: Final = "workers.training.loader_server"


class Feed:
    """Makes one effective batch at a time in host memory; `batch` holds until the next `take`."""

    def __init__(
        self,
        task: TrainTask,
        settings: TrainSettings,
        device: torch.device,
        seed: int,
        tell: Callable[..., None],
    ) -> None:
        """Start no process yet. `tell` gets the event `unpinned` with its reason, once.

        Raises:
            TaskError: There is no data, or bucketing is set and the samples have no lengths.
        """
        refuse_without_data(task)
        self._task, self._tell = task, tell
        self._batch_rows = settings.batch
        self._seed = seed
        self._bucketing = settings.bucketing
        if self._bucketing and (task.collate is None or not hasattr(task.dataset, "lengths")):
            raise TaskError(
                f"train.bucketing sorts samples by their lengths, and those of {task.name} have "
                "one length, or do not report it; set train.documents (your own text), "
                "or give your data set a method `lengths`, and the task a `collate`"
            )
        self._pool: tuple[int, list[order.Sample]] | None = None
        """The number of the current pool, and its samples in order of use."""
        self._workers, self._prefetch = settings.loader_workers, settings.prefetch
        self._pin = settings.pin is not False and device.type == "cuda"
        if settings.pin == "auto" and "microsoft" in platform.release().lower():
            self._pin = False  # under WSL2 little memory can be pinned
        self._batches: Iterator[Any] | None = None
        """Batches of torch's loader; `None`: the loader is closed."""
        self._samples_used = 0
        """Samples of all batches taken so far; set by `seek`."""
        self._opened_s = self._waited_s = 0.0
        self.batch: Batch | None = None
        """The current batch; `None`: none was taken since `seek`."""
        self.count = 0
        """Items of the current batch."""
        self._uncounted: Batch | None = None
        """A batch whose items could not be counted yet."""

    def take(self) -> None:
        """Make the next batch the current one.

        Raises:
            TaskError: The batch has a wrong number of samples or no items, or the data set cannot
                be sent to loader processes.
            RuntimeError: Loader processes died twice.
            Exception: Whatever the data set raised. The next call tries the same batch again.
        """
        # Counting may fail, too, and must not lose the batch.
        batch = self._uncounted = self._next_batch() if self._uncounted is None else self._uncounted
        if (rows := rows_of(batch)) != self._batch_rows:
            raise TaskError(
                f"the data set of {self._task.name} gave {rows} samples, not {self._batch_rows}"
            )
        items = self._task.count(batch)
        if items < 1:
            raise TaskError(
                f"a batch of {self._task.name} counts {items} items, so there is nothing to learn "
                "from it"
            )
        self.batch, self.count, self._uncounted = batch, items, None

    def seek(self, samples_used: int) -> None:
        """Continue after this number of samples."""
        self.close()
        self.batch = self._uncounted = None
        self._samples_used = samples_used

    def close(self) -> None:
        """End the loader's processes and discard the batches they made."""
        batches, self._batches = self._batches, None
        # Without this call, an exception's traceback may hold the iterator, and its processes stay.
        getattr(batches, "_shutdown_workers", lambda: None)()

    def wait_share(self) -> float:
        """Return the share (0 to 1) of the time since the first batch spent waiting for data."""
        return self._waited_s / (time.perf_counter() - self._opened_s) if self._opened_s else 0.0

    def _seed_and_keys(self, samples_used: int) -> list[Any]:
        """Return the seed and the sample keys of the batch after `samples_used` samples."""
        return [order.mixed(self._seed, _DRAWS_STREAM, samples_used), *self._keys(samples_used)]

    def _keys(self, samples_used: int) -> list[Any]:
        """Return the sample keys of the batch after `samples_used` samples."""
        items = len(self._task.dataset)
        samples = (
            self._bucketed(items, samples_used)
            if self._bucketing
            else order.samples(self._seed, items, samples_used, self._batch_rows)
        )
        return list(samples) if self._task.by_sample else [sample.index for sample in samples]

    def _bucketed(self, items: int, samples_used: int) -> list[order.Sample]:
        """Return the samples of a batch from a pool that is sorted into batches of like length."""
        size = order.pool_samples(items, self._batch_rows)
        samples: list[order.Sample] = []
        while (missing := self._batch_rows - len(samples)) > 0:
            number, within = divmod(samples_used + len(samples), size)
            if self._pool is None or self._pool[0] != number:
                pool = order.samples(self._seed, items, number * size, size)
                dataset: Any = self._task.dataset  # has `lengths`, as `__init__` checked
                lengths = dataset.lengths([sample.index for sample in pool])
                self._pool = number, order.by_length(pool, lengths, self._batch_rows, self._seed)
            samples.extend(self._pool[1][within : within + missing])
        return samples

    def _next_batch(self) -> Batch:
        """Return the next batch; made again once after a dead process or lack of pinned memory."""
        began_s = time.perf_counter()
        self._opened_s = self._opened_s or began_s
        was_pinned = self._pin
        try:
            try:
                batch = self._make()
            except (RuntimeError, OSError, EOFError) as failure:
                is_lost = self._may_have_lost_process(failure)
                if not is_lost and not was_pinned:
                    raise
                self.close()
                # A lack of page-locked host memory is no shortage of the card's memory.
                self._pin = was_pinned and is_lost
                batch = self._make()
                if was_pinned and not self._pin:
                    self._tell("unpinned", reason=_reason(failure))
        except BaseException:
            self._pin = was_pinned
            self.close()
            raise
        finally:
            self._waited_s += time.perf_counter() - began_s
        self._samples_used += self._batch_rows
        return batch

    def _make(self) -> Batch:
        if self._batches is None:
            self._batches = self._open()
        if self._workers:
            return next(self._batches)
        drawn = RandomState(torch.device("cpu"))
        try:
            return next(self._batches)
        finally:
            drawn.restore()

    def _may_have_lost_process(self, failure: Exception) -> bool:
        """Return whether a loader process may have died. torch reports that by several exceptions,
        a broken connection before the end of the process, and restarts no process. A second attempt
        does no harm if the cause was another one.
        """
        processes = getattr(self._batches, "_workers", ())
        return any(
            isinstance(failure, OSError | EOFError) or not process.is_alive()
            for process in processes
        )

    def _open(self) -> Iterator[Any]:
        parallel = self._workers > 0
        loader = DataLoader(
            _Seeded(cast("Dataset[Any]", self._task.dataset)),
            batch_sampler=cast(
                "Any", map(self._seed_and_keys, count(self._samples_used, self._batch_rows))
            ),
            num_workers=self._workers,
            collate_fn=self._task.collate,
            pin_memory=self._pin,
            prefetch_factor=self._prefetch if parallel else None,
            multiprocessing_context="forkserver" if parallel else None,
            worker_init_fn=_in_loader_process if parallel else None,
            # Without it the loader would draw from torch's global generator.
            generator=torch.Generator().manual_seed(0),
        )
        if parallel:
            # Without this each loader process would import torch itself.
            multiprocessing.set_forkserver_preload([_SERVER, "torch.utils.data"])
            get_temp_dir()  # created here, it is shared, and the server removes it
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Got pickle error")  # see below
                return iter(loader)
        except (pickle.PicklingError, TypeError, AttributeError) as failure:
            raise TaskError(
                f"the data set cannot be sent to loader processes ({failure}); set "
                "train.loader_workers to 0, or make what it holds picklable"
            ) from failure


class _Seeded(Dataset[Any]):
    """A data set that draws the same random numbers for a batch, whichever process makes it and
    when. The generators of torch, Python and NumPy are set to the seed that comes before the keys,
    and the batch's `collate` continues with them.
    """

    def __init__(self, items: Any) -> None:  # noqa: ANN401 - any data set
        self._items = items

    def __getitems__(self, asked: list[Any]) -> list[Any]:
        seed, *keys = asked
        torch.default_generator.manual_seed(seed >> 1)
        random.seed(seed)
        if "numpy" in sys.modules:
            importlib.import_module("numpy.random").seed(seed % 2**32)
        several = getattr(self._items, "__getitems__", None)
        return list(several(keys)) if several else [self._items[key] for key in keys]


def _reason(failure: BaseException) -> str:
    """Return the message of an error. In a thread of torch its text includes a traceback."""
    lines = str(failure).splitlines() or [type(failure).__name__]
    return next((line for line in lines if re.match(r"[\w.]*Error: ", line)), lines[0])[:_LONGEST]


def _in_loader_process(_: int) -> None:
    """Lift the inherited cap, which must not count host memory, and end with the training."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    threading.Thread(target=_end_with_training, daemon=True).start()


def _end_with_training() -> None:
    """Wait for the training process to end, then exit. torch watches the fork server instead."""
    training = multiprocessing.parent_process()
    if training is not None:
        training.join()
        os._exit(os.EX_UNAVAILABLE)
