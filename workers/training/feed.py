"""The effective batches of a task, on the host, in the order that the seed gives them."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.utils.data import Dataset

from workers.training import order
from workers.training.errors import TaskError
from workers.training.loader import Loader, LoaderSettings, should_pin
from workers.training.settings import TrainSettings
from workers.training.tasks import Batch, TrainTask, refuse_without_data, rows_of


class Feed:
    """One effective batch at a time; it stays until the next one is asked for."""

    def __init__(self, task: TrainTask, settings: TrainSettings, device: torch.device, seed: int) -> None:
        """Start nothing yet.

        Raises:
            TaskError: There is no data.
        """
        refuse_without_data(task)
        self._task = task
        self._batch_rows = settings.batch
        self._seed = seed
        pin = should_pin(device) if settings.pin == "auto" else settings.pin and device.type == "cuda"
        self._loader = Loader(
            cast("Dataset[Any]", task.dataset),
            self._keys,
            settings.batch,
            LoaderSettings(
                workers=settings.loader_workers,
                prefetch=settings.prefetch,
                pin=pin,
                start_method=settings.start_method,
            ),
            task.collate,
        )
        self.batch: Batch | None = None
        """`None`: none was taken since `seek`."""
        self.count = 0
        """Its items."""

    def take(self) -> None:
        """Take the next batch.

        Raises:
            TaskError: It has another number of samples, or nothing to learn from.
            Exception: Whatever the data set raised. The next call tries the same batch again.
        """
        batch = self._loader.next_batch()
        if (rows := rows_of(batch)) != self._batch_rows:
            raise TaskError(f"the data set of {self._task.name} gave {rows} samples, not {self._batch_rows}")
        count = self._task.count(batch)
        if count < 1:
            raise TaskError(f"a batch of {self._task.name} counts {count} items, so there is nothing to learn from it")
        self.batch, self.count = batch, count

    def seek(self, samples_used: int) -> None:
        """Go on after so many samples."""
        self.batch = None
        self._loader.seek(samples_used)

    def waiting_share(self) -> float:
        """Return the share of time in which the training waited for data."""
        return self._loader.wait_share()

    def close(self) -> None:
        """End the loader's processes."""
        self._loader.close()

    def _keys(self, samples_used: int, count: int) -> list[Any]:
        used = order.samples(self._seed, len(self._task.dataset), samples_used, count)
        return list(used) if self._task.by_sample else [each.index for each in used]
