"""A copy of a state in host memory, outside of what a worker's cap counts. Its buffers are kept and used again."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

from workers.training.host_memory import like
from workers.training.snapshots.tensor_bytes import tensors_in

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
        """Copy; on CUDA this only queues the copies on the current stream, before whatever changes the state next.

        Raises:
            RuntimeError, OSError, OverflowError: There is no memory for the buffers; what was held before stays.
        """
        began_s = time.perf_counter()
        buffers: dict[_Path, torch.Tensor] = {}
        self._lay_out(state, (), buffers)
        self._buffers = buffers
        self.step, self._events = None, None
        self.from_card = any(each.is_cuda for each in tensors_in(state))
        if self.from_card:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
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

    def _lay_out(self, tree: object, path: _Path, buffers: dict[_Path, torch.Tensor]) -> None:
        """Find or make a buffer for each tensor, before anything is overwritten."""
        if isinstance(tree, torch.Tensor):
            kept = self._buffers.get(path)
            alike = kept is not None and kept.dtype == tree.dtype and kept.shape == tree.shape
            buffers[path] = kept if kept is not None and alike else like(tree)
        else:
            for key, each in _children(tree):
                self._lay_out(each, (*path, key), buffers)

    def _copied(self, tree: Any, path: _Path) -> Any:  # noqa: ANN401 - a tree of plain values
        if isinstance(tree, torch.Tensor):
            return self._buffers[path].copy_(tree.detach(), non_blocking=True)
        if isinstance(tree, Mapping):
            return {key: self._copied(each, (*path, key)) for key, each in tree.items()}
        if isinstance(tree, list | tuple):
            return type(tree)(self._copied(each, (*path, key)) for key, each in _children(tree))
        return tree


def _children(tree: object) -> list[tuple[object, Any]]:
    if isinstance(tree, Mapping):
        return list(tree.items())
    return list(enumerate(tree)) if isinstance(tree, list | tuple) else []
