"""The effective batches of a task, on the host, in the order that the seed gives them."""

from __future__ import annotations

from typing import Any, cast

import psutil
import torch
from torch.utils.data import Dataset, default_collate

from workers.training import order
from workers.training.errors import TaskError
from workers.training.length_order import by_length, pool_samples
from workers.training.loader import Loader, LoaderSettings, should_pin
from workers.training.loader_numbers import HostShare, LoaderNumbers, loader_numbers
from workers.training.ram_cache import RamCache, row_bytes
from workers.training.sequences import Documents
from workers.training.settings import TrainSettings
from workers.training.tasks import Batch, TrainTask, refuse_without_data, rows_of


class Feed:
    """One effective batch at a time; it stays until the next one is asked for."""

    def __init__(
        self, task: TrainTask, settings: TrainSettings, device: torch.device, seed: int
    ) -> None:
        """Start nothing yet.

        Raises:
            TaskError: There is no data, or there are no lengths to sort it by.
        """
        refuse_without_data(task)
        self._task = task
        self._batch_rows = settings.batch
        self._seed = seed
        self._bucketing = settings.bucketing
        if self._bucketing and (task.collate is None or not hasattr(task.dataset, "lengths")):
            raise TaskError(
                f"train.bucketing sorts samples by their lengths, and those of {task.name} have "
                "one length, or do not "
                "tell it; set train.documents (your own text) or train.min_seq (made text), or "
                "give your data set a "
                "method `lengths`, and the task a `collate`"
            )
        self._pool: tuple[int, list[order.Sample]] | None = None
        """Its number, and its samples as they are used."""
        pin = (
            should_pin(device) if settings.pin == "auto" else settings.pin and device.type == "cuda"
        )
        numbers = self._numbers(settings, device)
        self._loader = Loader(
            cast("Dataset[Any]", task.dataset),
            self._keys,
            settings.batch,
            LoaderSettings(
                workers=numbers.workers,
                prefetch=numbers.prefetch,
                pin=pin,
                start_method=settings.start_method,
                persistent=settings.persistent,
            ),
            task.collate,
            RamCache(len(task.dataset)) if numbers.ram_cache else None,
        )
        self.numbers = numbers
        """How batches are made ready; its reason is empty where the settings leave nothing open."""
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
            raise TaskError(
                f"the data set of {self._task.name} gave {rows} samples, not {self._batch_rows}"
            )
        count = self._task.count(batch)
        if count < 1:
            raise TaskError(
                f"a batch of {self._task.name} counts {count} items, so there is nothing to learn "
                "from it"
            )
        self.batch, self.count = batch, count

    def seek(self, samples_used: int) -> None:
        """Go on after so many samples."""
        self.batch = None
        self._loader.seek(samples_used)

    def waiting_share(self) -> float:
        """Return the share of time in which the training waited for data."""
        return self._loader.wait_share()

    def news(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the events of the loader since the last call."""
        return self._loader.news()

    def close(self) -> None:
        """End the loader's processes."""
        self._loader.close()

    def _numbers(self, settings: TrainSettings, device: torch.device) -> LoaderNumbers:
        """Decide what the settings leave open. Makes one sample, if they do."""
        workers, prefetch, ram_cache = (
            settings.loader_workers,
            settings.prefetch,
            settings.ram_cache,
        )
        if workers != "auto" and prefetch != "auto" and not ram_cache:
            return LoaderNumbers(workers=workers, prefetch=prefetch, ram_cache=False, reason="")
        task = self._task
        of_row = row_bytes((task.collate or default_collate)([task.dataset[self._keys(0, 1)[0]]]))
        return loader_numbers(
            host_share(on_card=device.type == "cuda"),
            workers=workers,
            prefetch=prefetch,
            ram_cache=ram_cache,
            batch_bytes=settings.batch * (of_row or 0),
            items_bytes=(
                None
                if of_row is None or task.by_sample or task.shorten is not None
                else len(task.dataset) * of_row
            ),
        )

    def _keys(self, samples_used: int, count: int) -> list[Any]:
        used = (
            self._bucketed(samples_used, count)
            if self._bucketing
            else order.samples(self._seed, len(self._task.dataset), samples_used, count)
        )
        return list(used) if self._task.by_sample else [each.index for each in used]

    def _bucketed(self, samples_used: int, count: int) -> list[order.Sample]:
        """Return the samples of a part of the training in which each batch has similar lengths."""
        items, size = (
            len(self._task.dataset),
            pool_samples(len(self._task.dataset), self._batch_rows),
        )
        found: list[order.Sample] = []
        while len(found) < count:
            begin, within = divmod(samples_used + len(found), size)
            if self._pool is None or self._pool[0] != begin:
                pool = order.samples(self._seed, items, begin * size, size)
                lengths = cast("Documents", self._task.dataset).lengths(
                    [each.index for each in pool]
                )
                self._pool = begin, by_length(pool, lengths, self._batch_rows, self._seed)
            found.extend(self._pool[1][within : within + count - len(found)])
        return found


def host_share(*, on_card: bool) -> HostShare:
    """Return what this training has of its host: torch's threads here are its share of the physical
    cores.
    """
    physical = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    cores = min(torch.get_num_threads(), physical)
    return HostShare(
        cores=cores,
        ram_bytes=psutil.virtual_memory().available * cores // physical,
        on_card=on_card,
    )
