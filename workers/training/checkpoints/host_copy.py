"""A copy of a state in host memory, outside of what a worker's cap counts.

Its buffers are kept and used again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch

from workers.training.checkpoints.tensor_bytes import tensors_in
from workers.training.host_memory import give_back, like_all

_Path: TypeAlias = tuple[object, ...]


class HostCopy:
    """One copy at a time. Does not know what the state means."""

    def __init__(self) -> None:
        """Allocate nothing yet."""
        self.step: int | None = None
        """The step of the state that is held; `None`: none is complete."""
        self.state: dict[str, Any] = {}
        self.from_card = False
        """Whether the state was on a card."""
        self._buffers: dict[_Path, torch.Tensor] = {}
        self._events: tuple[torch.cuda.Event, torch.cuda.Event] | None = None
        self._host_s = 0.0

    def take(self, state: Mapping[str, Any], step: int) -> None:
        """Copy; on CUDA this only queues the copies on the current stream, before whatever changes
        the state next.

        Raises:
            RuntimeError, OSError, OverflowError: There is no memory for the buffers; what was held
            before stays.
        """
        began_s = time.perf_counter()
        self._lay_out(state)
        self.step, self._events = None, None
        self.from_card = any(each.is_cuda for each in tensors_in(state))
        if self.from_card:
            # Blocking: the thread that waits for the copy sleeps.
            before, after = (
                torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]  # no types here
                for _ in range(2)
            )
            before.record()
        self.state = self._copied(state, ())
        if self.from_card:
            after.record()
            self._events = before, after
        self._host_s = time.perf_counter() - began_s
        self.step = step

    def complete(self) -> float:
        """Wait until the copy is done; return the seconds in which the training could not go on."""
        if self._events is None:
            return self._host_s
        before, after = self._events
        after.synchronize()
        return float(before.elapsed_time(after)) / 1000

    def _lay_out(self, state: object) -> None:
        """Make buffers, all of them anew if one does not fit, before anything is overwritten."""
        tensors = dict(_tensors(state, ()))
        kept = {path: (each.dtype, each.shape) for path, each in self._buffers.items()}
        if kept == {path: (each.dtype, each.shape) for path, each in tensors.items()}:
            return
        before = self._buffers
        self._buffers = dict(zip(tensors, like_all(list(tensors.values())), strict=True))
        if before:
            del before
            self.state = {}
            give_back(
                torch.device("cuda" if any(each.is_cuda for each in tensors.values()) else "cpu")
            )

    def _copied(self, tree: Any, path: _Path) -> Any:  # noqa: ANN401 - a tree of plain values
        if isinstance(tree, torch.Tensor):
            return self._buffers[path].copy_(tree.detach(), non_blocking=True)
        if isinstance(tree, Mapping):
            return {key: self._copied(each, (*path, key)) for key, each in tree.items()}
        if isinstance(tree, list | tuple):
            return type(tree)(self._copied(each, (*path, key)) for key, each in _children(tree))
        return tree


def _tensors(tree: object, path: _Path) -> Iterator[tuple[_Path, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        yield path, tree
    for key, each in _children(tree):
        yield from _tensors(each, (*path, key))


def _children(tree: object) -> list[tuple[object, Any]]:
    if isinstance(tree, Mapping):
        return list(tree.items())
    return list(enumerate(tree)) if isinstance(tree, list | tuple) else []
