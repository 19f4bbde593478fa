"""The effective batches of a task, on the host, made ahead of time, in the order that the seed
gives them.

The order is a function of how many samples were used, so a loader can be closed and opened again
anywhere, and nothing is left out or repeated. A batch that could not be made is made again by the
next call. Does not split batches.

How many processes make them, and whether the data set is kept in RAM, follows from the cores and
the RAM that the training has for itself. How dear a sample is to make is not guessed: whether
processes help is measured (`data_wait_pct`).
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import platform
import re
import resource
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.util import get_temp_dir
from typing import Any, Final, Literal, TypeAlias, cast

import psutil
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset, default_collate

from workers import oom
from workers.settings import FailureKind
from workers.training import order
from workers.training.batches import Batch, rows_of
from workers.training.errors import TaskError
from workers.training.host_memory import like
from workers.training.sequences import Documents
from workers.training.settings import TrainSettings
from workers.training.tasks import TrainTask, refuse_without_data
from workers.units import MIB

Order: TypeAlias = Callable[[int, int], Sequence[Any]]
"""From (samples used, how many) to what the data set is asked for, one key for each sample."""

#: Of an error's text.
_LONGEST: Final = 200

#: Loaded first by the process that loader processes are forked from.
_SERVER: Final = "workers.training.loader_server"

#: A loader process without its batches. 59 MiB were measured (torch 2.13, forkserver); user
#: libraries come on top.
_PROCESS_BYTES: Final = 128 * MIB

#: More processes than this rarely help one card, and each takes RAM.
_MOST_WORKERS: Final = 8

#: Shares of the RAM that is free for this training, for processes with their batches and for the
#: data set.
_SHARE_OF_PROCESSES: Final = 0.25
_SHARE_OF_CACHE: Final = 0.5

#: On a CPU the training itself uses the cores: one in so many goes to the loader.
_CPU_CORES_PER_PROCESS: Final = 4

#: Batches ahead for each process, where RAM allows it. torch's default is the smaller number.
_LEAST_PREFETCH, _MOST_PREFETCH = 2, 4


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
                "one length, or do not tell it; set train.documents (your own text), "
                "or give your data set a method `lengths`, and the task a `collate`"
            )
        self._pool: tuple[int, list[order.Sample]] | None = None
        """Its number, and its samples as they are used."""
        self.numbers = self._numbers(settings, device)
        """How batches are made ready; its reason is empty where the settings leave nothing open."""
        pin = settings.pin is not False and device.type == "cuda"
        if settings.pin == "auto" and "microsoft" in platform.release().lower():
            pin = False  # under WSL2 little memory can be pinned
        self.loader = Loader(
            cast("Dataset[Any]", task.dataset),
            self._keys,
            settings,
            self.numbers,
            pin=pin,
            collate=task.collate,
            cache=RamCache(len(task.dataset)) if self.numbers.ram_cache else None,
        )
        self.batch: Batch | None = None
        """`None`: none was taken since `seek`."""
        self.count = 0
        """Its items."""
        self._taken: Batch | None = None
        """A batch whose items could not be counted yet."""

    def take(self) -> None:
        """Take the next batch.

        Raises:
            TaskError: It has another number of samples, or nothing to learn from.
            Exception: Whatever the data set raised. The next call tries the same batch again.
        """
        # To count may fail as well, and the batch must not be lost by that.
        batch = self._taken = self.loader.next_batch() if self._taken is None else self._taken
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
        self.batch, self.count, self._taken = batch, count, None

    def seek(self, samples_used: int) -> None:
        """Go on after so many samples."""
        self.batch = self._taken = None
        self.loader.seek(samples_used)

    def _numbers(self, settings: TrainSettings, device: torch.device) -> LoaderNumbers:
        """Decide what the settings leave open. Makes one sample, if they do."""
        workers, prefetch = settings.loader_workers, settings.prefetch
        if workers != "auto" and prefetch != "auto" and not settings.ram_cache:
            return LoaderNumbers(workers=workers, prefetch=prefetch)
        task = self._task
        of_row = row_bytes((task.collate or default_collate)([task.dataset[self._keys(0, 1)[0]]]))
        changes = of_row is None or task.by_sample or task.shorten is not None
        return loader_numbers(
            host_share(on_card=device.type == "cuda"),
            workers=workers,
            prefetch=prefetch,
            ram_cache=settings.ram_cache,
            batch_bytes=settings.batch * (of_row or 0),
            items_bytes=None if changes else len(task.dataset) * (of_row or 0),
        )

    def _keys(self, samples_used: int, count: int) -> list[Any]:
        items = len(self._task.dataset)
        used = (
            self._bucketed(items, samples_used, count)
            if self._bucketing
            else order.samples(self._seed, items, samples_used, count)
        )
        return list(used) if self._task.by_sample else [sample.index for sample in used]

    def _bucketed(self, items: int, samples_used: int, count: int) -> list[order.Sample]:
        """Return the samples of a part of the training in which each batch has similar lengths."""
        size = order.pool_samples(items, self._batch_rows)
        used: list[order.Sample] = []
        while len(used) < count:
            number, within = divmod(samples_used + len(used), size)
            if self._pool is None or self._pool[0] != number:
                pool = order.samples(self._seed, items, number * size, size)
                documents = cast("Documents", self._task.dataset)
                lengths = documents.lengths([sample.index for sample in pool])
                self._pool = number, order.by_length(pool, lengths, self._batch_rows, self._seed)
            used.extend(self._pool[1][within : within + count - len(used)])
        return used


@dataclass(frozen=True, slots=True, kw_only=True)
class HostShare:
    """What one training has for itself of its host."""

    cores: int
    """Physical cores."""
    ram_bytes: int
    """That is free now."""
    on_card: bool
    """Whether the training computes on a card and leaves the cores to the loader."""


def host_share(*, on_card: bool) -> HostShare:
    """Return this training's share of its host: torch's threads of the physical cores."""
    physical = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    cores = min(torch.get_num_threads(), physical)
    free_bytes = psutil.virtual_memory().available
    return HostShare(cores=cores, ram_bytes=free_bytes * cores // physical, on_card=on_card)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderNumbers:
    """What was decided, and why."""

    workers: int = 0
    """Processes that make batches; 0: this one does, when they are asked for."""
    prefetch: int = 2
    """Batches that each process keeps ready."""
    ram_cache: bool = False
    reason: str = ""


def loader_numbers(
    host: HostShare,
    *,
    workers: int | Literal["auto"],
    prefetch: int | Literal["auto"],
    ram_cache: bool,
    batch_bytes: int,
    items_bytes: int | None,
) -> LoaderNumbers:
    """Return the numbers; what is given as a number stays. Pure.

    Args:
        host: What the training has for itself.
        workers: Loader processes.
        prefetch: Batches that each keeps ready.
        ram_cache: Whether to keep the data set in RAM if it fits.
        batch_bytes: Of an effective batch.
        items_bytes: Of the whole data set; `None`: it cannot be kept, because its items change from
            epoch to epoch.
    """
    reasons = []
    room_bytes = _SHARE_OF_CACHE * host.ram_bytes
    cached = ram_cache and items_bytes is not None and items_bytes <= room_bytes
    if ram_cache and items_bytes is None:
        reasons.append(
            "the data set is not kept in RAM: its items change from epoch to epoch, or are not "
            "tensors of one shape"
        )
    elif ram_cache and items_bytes is not None:
        reasons.append(
            f"the data set is {'' if cached else 'not '}kept in RAM: it takes "
            f"{items_bytes / MIB:.0f} MiB, and half of the free RAM is {room_bytes / MIB:.0f} MiB"
        )

    allowed_bytes = _SHARE_OF_PROCESSES * host.ram_bytes
    if workers == "auto":
        by_cores = host.cores - 1 if host.on_card else host.cores // _CPU_CORES_PER_PROCESS
        ahead_bytes = (_LEAST_PREFETCH if prefetch == "auto" else prefetch) * batch_bytes
        by_ram = int(allowed_bytes // (_PROCESS_BYTES + ahead_bytes))
        processes = max(0, min(by_cores, by_ram, _MOST_WORKERS))
        reasons.append(
            f"{processes} loader processes: {host.cores} cores allow {by_cores}, RAM allows "
            f"{by_ram}"
        )
    else:
        processes = workers
    if prefetch == "auto":
        left_bytes = allowed_bytes / max(1, processes) - _PROCESS_BYTES
        ahead = max(1, min(_MOST_PREFETCH, int(left_bytes // max(1, batch_bytes))))
        if processes:
            reasons.append(f"each keeps {ahead} batches of {batch_bytes / MIB:.1f} MiB ready")
    else:
        ahead = prefetch
    return LoaderNumbers(
        workers=processes, prefetch=ahead, ram_cache=cached, reason="; ".join(reasons)
    )


class Loader:
    """Hands out one effective batch after the other."""

    def __init__(
        self,
        dataset: Dataset[Any],
        order: Order,
        settings: TrainSettings,
        numbers: LoaderNumbers,
        *,
        pin: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
        cache: RamCache | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            dataset: What is asked for.
            order: In which order; with a cache it must give indices.
            settings: Those of the training.
            numbers: How many processes, and batches that each keeps ready.
            pin: Put batches into page-locked memory, from which a card copies while it computes.
            collate: As in `TrainTask`.
            cache: Where rows are kept.
        """
        self._dataset = dataset
        self._order = order
        self._batch = settings.batch
        self._numbers = numbers
        self._pin = pin
        self._collate = collate
        self._cache = cache
        self._batches: Iterator[Any] | None = None
        self._opened_s = 0.0
        self.samples_used = 0
        """Of the batches that were handed out; set by `seek`."""
        self.waited_s = 0.0
        """The time that the training spent in `next_batch`."""
        self._news: list[tuple[str, dict[str, Any]]] = []

    def news(self) -> list[tuple[str, dict[str, Any]]]:
        """Return the events since the last call: `unpinned`, once, with the reason."""
        news, self._news = self._news, []
        return news

    def seek(self, samples_used: int) -> None:
        """Go on after so many samples."""
        self.close()
        self.samples_used = samples_used

    def next_batch(self) -> Batch:
        """Return the next batch, on the host.

        Raises:
            TaskError: The data set cannot be sent to loader processes.
            RuntimeError: They have ended twice.
            Exception: Whatever the data set raised. The next call tries the same batch again.
        """
        began_s = time.perf_counter()
        self._opened_s = self._opened_s or began_s
        try:
            try:
                batch = self._next()
            except (RuntimeError, OSError, EOFError) as failure:
                if self._pin and _was_pinning(failure):
                    self._pin = False
                    self._news.append(("unpinned", {"reason": _reason(failure)}))
                elif not self._may_be_a_lost_process(failure):
                    raise
                self.close()
                batch = self._next()
        except BaseException:
            self.close()
            raise
        finally:
            self.waited_s += time.perf_counter() - began_s
        self.samples_used += self._batch
        return batch

    def wait_share(self) -> float:
        """Return the share of time since the first batch that the training waited for data."""
        return self.waited_s / (time.perf_counter() - self._opened_s) if self._opened_s else 0.0

    def close(self) -> None:
        """End the loader's processes and forget what they made."""
        batches, self._batches = self._batches, None
        # Not left to its end: an exception's traceback may hold it, and its processes would stay.
        getattr(batches, "_shutdown_workers", lambda: None)()

    def _next(self) -> Batch:
        cache = self._cache
        if cache is not None and cache.complete:
            self.close()  # nothing is left to make
            return cache.batch(self._order(self.samples_used, self._batch), pin=self._pin)
        if self._batches is None:
            self._batches = self._open()
        batch = next(self._batches)
        if cache is not None:
            cache.keep(self._order(self.samples_used, self._batch), batch)
        return batch

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

    def _keys(self) -> Iterator[list[Any]]:
        """Yield the keys of one batch after the other, without an end."""
        used = self.samples_used
        while True:
            yield list(self._order(used, self._batch))
            used += self._batch

    def _open(self) -> Iterator[Any]:
        parallel = self._numbers.workers > 0
        loader = DataLoader(
            self._dataset,
            batch_sampler=cast("Any", self._keys()),
            num_workers=self._numbers.workers,
            collate_fn=self._collate,
            pin_memory=self._pin,
            prefetch_factor=self._numbers.prefetch if parallel else None,
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


def _was_pinning(failure: BaseException) -> bool:
    """Say whether a batch was being copied into page-locked memory: the host is short of that, and
    not the card.

    The thread of a loader says so in words (torch/utils/data/_utils/pin_memory.py); without one the
    frame tells.
    """
    if oom.classify(failure).kind is FailureKind.CONTEXT_CORRUPTED:
        return False  # it only surfaced there
    if "pin memory thread" in str(failure):
        return True
    frames = [frame for frame, _ in traceback.walk_tb(failure.__traceback__)]
    return any(
        "pin_memory" in {frame.f_code.co_name, *frame.f_code.co_names} for frame in frames[-1:]
    )


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


class RamCache:
    """The rows of a data set, kept as its batches are made for the first time; later epochs are
    served from it.

    Rows are kept as they are in a batch, so a batch from RAM has the same bits. Rows whose shape
    changes from batch to batch cannot be kept.
    """

    def __init__(self, items: int) -> None:
        self._items = items
        self._seen = torch.zeros(items, dtype=torch.bool)
        self._rows: Any = None
        self._failed = False
        """Whether rows of other shapes came, or there was no memory: then nothing is kept."""
        self.complete = False
        """Whether all items are here."""

    def keep(self, indices: Sequence[int], batch: Batch) -> None:
        """Keep the rows of a batch."""
        if self._failed:
            return
        try:
            rooms = tree_map(self._room_for, batch) if self._rows is None else self._rows
        except (RuntimeError, OSError, OverflowError):
            self._failed = True
            return
        pairs = list(zip(tree_leaves(rooms), tree_leaves(batch), strict=False))
        if any(
            room.shape[1:] != rows.shape[1:] or room.dtype != rows.dtype for room, rows in pairs
        ):
            self._rows, self._failed = None, True
            return
        places = torch.tensor(indices)
        for room, rows in pairs:
            room[places] = rows
        self._rows = rooms
        self._seen[places] = True
        self.complete = bool(self._seen.all())

    def batch(self, indices: Sequence[int], *, pin: bool) -> Batch:
        """Return a batch of rows that are all here."""
        places = torch.tensor(indices)
        batch = tree_map(lambda room: room[places], self._rows)
        return tree_map(Tensor.pin_memory, batch) if pin else batch

    def _room_for(self, rows: Tensor) -> Tensor:
        # Memory that the cap of a worker on a CPU does not count, and that is taken page by page as
        # rows come.
        return like(torch.empty((self._items, *rows.shape[1:]), dtype=rows.dtype, device="meta"))


def row_bytes(batch: Batch) -> int | None:
    """Return the bytes of a row of a batch; `None`: not all of it is tensors of so many rows."""
    leaves = tree_leaves(batch)
    if not all(isinstance(leaf, Tensor) and leaf.dim() and len(leaf) for leaf in leaves):
        return None
    if len({len(leaf) for leaf in leaves}) != 1:
        return None
    return sum(int(leaf.nbytes) // len(leaf) for leaf in leaves)
