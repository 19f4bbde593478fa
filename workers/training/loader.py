"""The effective batches of a task, on the host, made ahead of time, in the order that the seed
gives them.

The order is a function of how many samples were used, so a loader can be closed and opened again
anywhere, and nothing is left out or repeated. A batch that could not be made is made again by the
next call. Does not split batches.

How dear a sample is to make is not guessed: whether processes help is measured (`data_wait_pct`).
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

#: Of the random numbers that a data set draws.
_DRAWS_STREAM: Final = 3

#: Of an error's text.
_LONGEST: Final = 200

#: Loaded first by the process that loader processes are forked from.
_SERVER: Final = "workers.training.loader_server"


class Feed:
    """One effective batch at a time, on the host; it stays until the next one is asked for."""

    def __init__(
        self,
        task: TrainTask,
        settings: TrainSettings,
        device: torch.device,
        seed: int,
        tell: Callable[..., None],
    ) -> None:
        """Start nothing yet. `tell` gets the event `unpinned`, once, with the reason.

        Raises:
            TaskError: There is no data, or there are no lengths to sort it by.
        """
        refuse_without_data(task)
        self._task, self._tell = task, tell
        self._batch_rows = settings.batch
        self._seed = seed
        self._bucketing = settings.bucketing
        if self._bucketing and (task.collate is None or not hasattr(task.dataset, "lengths")):
            raise TaskError(
                f"train.bucketing sorts samples by their lengths, and those of {task.name} have "
                "one length, or do not tell it; set train.documents (your own text), "
                "or give your data set a method `lengths`, and the task a `collate`"
            )
        self._pool: tuple[int, list[order.Sample]] | None = None
        """Its number, and its samples as they are used."""
        self._workers, self._prefetch = settings.loader_workers, settings.prefetch
        self._pin = settings.pin is not False and device.type == "cuda"
        if settings.pin == "auto" and "microsoft" in platform.release().lower():
            self._pin = False  # under WSL2 little memory can be pinned
        self._batches: Iterator[Any] | None = None
        """What torch's loader makes ahead of time; `None`: it is closed."""
        self._samples_used = 0
        """Of the batches that were taken; set by `seek`."""
        self._opened_s = self._waited_s = 0.0
        self.batch: Batch | None = None
        """`None`: none was taken since `seek`."""
        self.count = 0
        """Its items."""
        self._taken: Batch | None = None
        """A batch whose items could not be counted yet."""

    def take(self) -> None:
        """Take the next batch.

        Raises:
            TaskError: It has another number of samples, or nothing to learn from, or the data set
                cannot be sent to loader processes.
            RuntimeError: Those have ended twice.
            Exception: Whatever the data set raised. The next call tries the same batch again.
        """
        # To count may fail as well, and the batch must not be lost by that.
        batch = self._taken = self._next_batch() if self._taken is None else self._taken
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
        self.batch, self.count, self._taken = batch, items, None

    def seek(self, samples_used: int) -> None:
        """Go on after so many samples."""
        self.close()
        self.batch = self._taken = None
        self._samples_used = samples_used

    def close(self) -> None:
        """End the loader's processes and forget what they made."""
        batches, self._batches = self._batches, None
        # Not left to its end: an exception's traceback may hold it, and its processes would stay.
        getattr(batches, "_shutdown_workers", lambda: None)()

    def wait_share(self) -> float:
        """Return the share of time since the first batch that the training waited for data."""
        return self._waited_s / (time.perf_counter() - self._opened_s) if self._opened_s else 0.0

    def _asked(self, samples_used: int) -> list[Any]:
        """Return the seed of the batch after so many samples, and what the data set is asked."""
        return [order.mixed(self._seed, _DRAWS_STREAM, samples_used), *self._keys(samples_used)]

    def _keys(self, samples_used: int) -> list[Any]:
        """Return what the data set is asked for by the batch after so many samples."""
        items = len(self._task.dataset)
        used = (
            self._bucketed(items, samples_used)
            if self._bucketing
            else order.samples(self._seed, items, samples_used, self._batch_rows)
        )
        return list(used) if self._task.by_sample else [sample.index for sample in used]

    def _bucketed(self, items: int, samples_used: int) -> list[order.Sample]:
        """Return the samples of a batch in a part of the training in which each batch has similar
        lengths.
        """
        size = order.pool_samples(items, self._batch_rows)
        used: list[order.Sample] = []
        while (missing := self._batch_rows - len(used)) > 0:
            number, within = divmod(samples_used + len(used), size)
            if self._pool is None or self._pool[0] != number:
                pool = order.samples(self._seed, items, number * size, size)
                dataset: Any = self._task.dataset  # that has them, as was checked
                lengths = dataset.lengths([sample.index for sample in pool])
                self._pool = number, order.by_length(pool, lengths, self._batch_rows, self._seed)
            used.extend(self._pool[1][within : within + missing])
        return used

    def _next_batch(self) -> Batch:
        """Return the next batch; after a loss of its process, or of pinned memory, made anew."""
        began_s = time.perf_counter()
        self._opened_s = self._opened_s or began_s
        was_pinned = self._pin
        try:
            try:
                batch = self._made()
            except (RuntimeError, OSError, EOFError) as failure:
                is_lost = self._may_be_a_lost_process(failure)
                if not is_lost and not was_pinned:
                    raise
                self.close()
                # The host may be short of page-locked memory, which is no shortage of the card's.
                self._pin = was_pinned and is_lost
                batch = self._made()
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

    def _made(self) -> Batch:
        if self._batches is None:
            self._batches = self._open()
        if self._workers:
            return next(self._batches)
        drawn = RandomState(torch.device("cpu"))
        try:
            return next(self._batches)
        finally:
            drawn.restore()

    def _may_be_a_lost_process(self, failure: Exception) -> bool:
        """Whether one may have been ended from outside; torch tells that by several exceptions, and
        restarts none.

        A broken connection to it is told before its end is. One more attempt does no harm if it was
        something else.
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
                "Any", map(self._asked, count(self._samples_used, self._batch_rows))
            ),
            num_workers=self._workers,
            collate_fn=self._task.collate,
            pin_memory=self._pin,
            prefetch_factor=self._prefetch if parallel else None,
            multiprocessing_context="forkserver" if parallel else None,
            worker_init_fn=_in_loader_process if parallel else None,
            # Else it would draw from torch's global generator.
            generator=torch.Generator().manual_seed(0),
        )
        if parallel:
            # Else each process imports torch anew.
            multiprocessing.set_forkserver_preload([_SERVER, "torch.utils.data"])
            get_temp_dir()  # made before them, it is theirs too, and goes with the server
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Got pickle error")  # told below, with what to do
                return iter(loader)
        except (pickle.PicklingError, TypeError, AttributeError) as failure:
            raise TaskError(
                f"the data set cannot be sent to loader processes ({failure}); set "
                "train.loader_workers to 0, or make what it holds picklable"
            ) from failure


class _Seeded(Dataset[Any]):
    """A data set that draws the same random numbers for a batch, whichever process makes it, and
    when: those of torch, Python and NumPy begin with the seed that comes before its keys. What
    collates the batch goes on with them.
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
    """Return what an error says. That of a thread of torch's has a traceback in its text."""
    lines = str(failure).splitlines() or [type(failure).__name__]
    return next((line for line in lines if re.match(r"[\w.]*Error: ", line)), lines[0])[:_LONGEST]


def _in_loader_process(_: int) -> None:
    """Lift the cap of the training process, which its children inherit: their memory is the host's.
    End with the training.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    threading.Thread(target=_end_with_training, daemon=True).start()


def _end_with_training() -> None:
    """Wait for the end of the training: torch's own watch sees only that of the process between."""
    training = multiprocessing.parent_process()
    if training is not None:
        training.join()
        os._exit(os.EX_UNAVAILABLE)
