"""Effective batches on the host, made ahead of time, in an order that is given from outside.

The order is a function of how many samples were used, so a loader can be closed and opened again
anywhere, and nothing is left out or repeated. A batch that could not be made is made again by the
next call. Does not split batches.
"""

from __future__ import annotations

import multiprocessing
import pickle
import platform
import re
import resource
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import torch
from torch.utils.data import DataLoader, Dataset

from workers import oom
from workers.settings import FailureKind
from workers.training.errors import TaskError
from workers.training.ram_cache import RamCache

Order: TypeAlias = Callable[[int, int], Sequence[Any]]
"""From (samples used, how many) to what the data set is asked for, one key for each sample."""


_LONGEST = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSettings:
    """How batches are made ready; nothing here changes what is in them."""

    workers: int = 0
    """Processes that make batches; 0: this one does, when they are asked for."""
    prefetch: int = 2
    """Batches that each process keeps ready."""
    pin: bool = False
    """Put them into page-locked memory, from which a card copies while it computes."""
    start_method: str = "forkserver"
    persistent: bool = True
    """Keep the processes from epoch to epoch; otherwise they are ended and started anew."""


class Loader:
    """Hands out one effective batch after the other."""

    def __init__(
        self,
        dataset: Dataset[Any],
        order: Order,
        batch: int,
        settings: LoaderSettings,
        collate: Callable[[list[Any]], Any] | None = None,
        cache: RamCache | None = None,
    ) -> None:
        """Start nothing yet. `collate` makes a batch of samples; by default tensors are stacked.

        With a cache, `order` must give indices.
        """
        self._dataset = dataset
        self._order = order
        self._batch = batch
        self._settings = settings
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

    def next_batch(self) -> Any:  # noqa: ANN401 - whatever `collate` makes
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
                if self._settings.pin and _was_pinning(failure):
                    self._settings = replace(self._settings, pin=False)
                    self._news.append(("unpinned", {"reason": _what(failure)}))
                elif not self._may_be_a_lost_process(failure):
                    raise
                self.close()
                batch = self._next()
        except BaseException:
            self.close()
            raise
        finally:
            self.waited_s += time.perf_counter() - began_s
        before, self.samples_used = self.samples_used, self.samples_used + self._batch
        if not self._settings.persistent:
            items = len(cast("Sized", self._dataset))
            if before // items < self.samples_used // items:
                self.close()
        return batch

    def wait_share(self) -> float:
        """Return the share of time since the first batch was asked for in which the training waited
        for data.
        """
        return self.waited_s / (time.perf_counter() - self._opened_s) if self._opened_s else 0.0

    def close(self) -> None:
        """End the loader's processes and forget what they made."""
        batches, self._batches = self._batches, None
        # Not left to its end: an exception's traceback may hold it, and its processes would stay.
        getattr(batches, "_shutdown_workers", lambda: None)()

    def _next(self) -> Any:  # noqa: ANN401 - whatever `collate` makes
        cache = self._cache
        if cache is not None and cache.complete:
            self.close()  # nothing is left to make
            return cache.batch(self._order(self.samples_used, self._batch), pin=self._settings.pin)
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
            isinstance(failure, OSError | EOFError) or not each.is_alive() for each in processes
        )

    def _open(self) -> Iterator[Any]:
        parallel = self._settings.workers > 0
        loader = DataLoader(
            self._dataset,
            batch_sampler=_Keys(self._order, self.samples_used, self._batch),
            num_workers=self._settings.workers,
            collate_fn=self._collate,
            pin_memory=self._settings.pin,
            prefetch_factor=self._settings.prefetch if parallel else None,
            multiprocessing_context=self._settings.start_method if parallel else None,
            worker_init_fn=_in_loader_process if parallel else None,
            generator=torch.Generator().manual_seed(
                0
            ),  # else it would draw from torch's global generator
        )
        if parallel and self._settings.start_method == "forkserver":
            multiprocessing.set_forkserver_preload(
                ["torch.utils.data"]
            )  # else each process imports torch anew
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Got pickle error")  # told below, with what to do
                return iter(loader)
        except (pickle.PicklingError, TypeError, AttributeError) as failure:
            raise TaskError(
                f"the data set cannot be sent to loader processes ({failure}); set "
                "train.loader_workers to 0, or make "
                "what it holds picklable"
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
    frames = traceback.walk_tb(failure.__traceback__)
    return any(
        "pin_memory" in {frame.f_code.co_name, *frame.f_code.co_names}
        for frame, _ in list(frames)[-1:]
    )


def _what(failure: BaseException) -> str:
    """Return what an error says.

    One of another thread of torch's comes with its traceback, as text.
    """
    lines = str(failure).splitlines() or [type(failure).__name__]
    return next((line for line in lines if re.match(r"[\w.]*Error: ", line)), lines[0])[:_LONGEST]


def on_device(batch: Any, device: torch.device, *, non_blocking: bool = True) -> Any:  # noqa: ANN401 - any batch
    """Copy the tensors of a batch, or of a part of it.

    From pinned memory the copy does not wait for the card.
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=non_blocking and batch.is_pinned())
    if isinstance(batch, Mapping):
        return {
            key: on_device(each, device, non_blocking=non_blocking) for key, each in batch.items()
        }
    if isinstance(batch, list | tuple):
        return type(batch)(on_device(each, device, non_blocking=non_blocking) for each in batch)
    return batch


def should_pin(device: torch.device) -> bool:
    """Whether pinned batches help: on a card, but not under WSL2, where little memory can be
    pinned.
    """
    return device.type == "cuda" and "microsoft" not in platform.release().lower()


class _Keys:
    """The keys of one batch after the other, without an end."""

    def __init__(self, order: Order, samples_used: int, batch: int) -> None:
        self._order = order
        self._samples_used = samples_used
        self._batch = batch

    def __iter__(self) -> Iterator[list[Any]]:
        used = self._samples_used
        while True:
            yield list(self._order(used, self._batch))
            used += self._batch


def _in_loader_process(_: int) -> None:
    """Lift the cap of the training process, which its children inherit: their memory is the host's."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
