"""Tensors in host memory that a worker's cap does not count.

On a card every tensor on the host is one. On a CPU the cap counts what is private to the process,
so these share their memory with processes that do not exist.

For a card they are pinned. torch rounds a pinned block up to a power of two and keeps it when it is
free (aten/src/ATen/core/CachingHostAllocator.h), so `like_all` puts several tensors into few
blocks, and `give_back` returns the free ones to the system.
"""

from __future__ import annotations

import mmap
import resource
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

#: Where a tensor begins in a block that it shares: what the caching allocator of a card aligns to.
_ALIGNED_BYTES: Final = 512


def like(tensor: Tensor) -> Tensor:
    """Return an empty tensor of the same type, shape and strides; pinned if this one is on a card
    and that is possible.

    Raises:
        RuntimeError, OSError, OverflowError: There is no memory.
    """
    return like_all([tensor])[0]


def like_all(tensors: Sequence[Tensor], *, pinned: bool = False) -> list[Tensor]:
    """Return an empty tensor for each, as `like` does; those for a card, or all if `pinned`, share
    few pinned blocks.

    A block is pinned as long as one of its tensors lives. torch does not know which copies of a
    shared block are under way: wait for them before the last of its tensors goes (`wait_asleep`).

    Raises:
        RuntimeError, OSError, OverflowError: There is no memory.
    """
    on_card = [number for number, tensor in enumerate(tensors) if pinned or tensor.is_cuda]
    sizes, places = blocks_for([tensors[number].nbytes for number in on_card])
    blocks = [_pinned(size) for size in sizes]
    parts = {
        number: blocks[block].untyped_storage()[offset : offset + tensors[number].nbytes]
        for number, (block, offset) in zip(on_card, places, strict=True)
    }
    return [_over(parts.get(number), tensor) for number, tensor in enumerate(tensors)]


def blocks_for(sizes: Sequence[int]) -> tuple[list[int], list[tuple[int, int]]]:
    """Return blocks whose sizes are powers of two, and for each of `sizes` (bytes) its block and
    offset. Pure.

    The largest come first. A new block is at most as large as all that is left, unless one size
    needs more.
    """
    whole = [-(-size // _ALIGNED_BYTES) * _ALIGNED_BYTES for size in sizes]
    blocks: list[int] = []
    free: list[int] = []
    places = [(0, 0)] * len(sizes)
    left = sum(whole)
    for number in sorted(range(len(whole)), key=lambda number: -whole[number]):
        size = whole[number]
        block = next((place for place, room in enumerate(free) if room >= size), len(blocks))
        if block == len(blocks):
            blocks.append(max(power_of_two(size), 1 << max(0, left.bit_length() - 1)))
            free.append(blocks[block])
        places[number] = block, blocks[block] - free[block]
        free[block] -= size
        left -= size
    return blocks, places


def power_of_two(size: int) -> int:
    """Return what torch pins for a block of so many bytes."""
    return 1 << max(0, size - 1).bit_length()


def host_bytes(sizes: Sequence[int], *, on_card: bool) -> int:
    """Return what `like_all` takes for tensors of so many bytes."""
    return sum(blocks_for(sizes)[0]) if on_card else sum(sizes)


@contextmanager
def uncapped() -> Iterator[None]:
    """Have the kernel refuse no memory meanwhile, as no cap of a card counts what a model is made in
    before it goes there.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def give_back(device: torch.device) -> None:
    """Return pinned blocks of a card that no tensor uses to the system."""
    if device.type == "cuda":
        # `torch.accelerator` has it since 2.12; before, only the binding that it calls.
        empty = getattr(torch.accelerator, "empty_host_cache", None) or torch._C._host_emptyCache
        empty()


def wait_asleep(device: torch.device) -> None:
    """Wait for what the current stream of a card has to do, without keeping a processor busy.

    Reading a value of the card, or `synchronize` of a stream, waits in a loop that takes a whole
    processor.
    """
    if device.type == "cuda":
        done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # no types here
        done.record(torch.cuda.current_stream(device))
        done.synchronize()


def _pinned(size: int) -> Tensor:
    try:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError:
        return torch.empty(size, dtype=torch.uint8, device="cpu")  # under WSL2 little can be pinned


def _over(part: torch.UntypedStorage | None, tensor: Tensor) -> Tensor:
    """Return a tensor like another one over its part of a block, or in memory no cap counts."""
    # Without the gaps that a slice of another tensor has.
    layout = torch.empty_like(tensor, device="meta")
    if part is not None:
        # A storage of its own: `torch.save` refuses one that has two types.
        return torch.empty(0, dtype=tensor.dtype).set_(part, 0, layout.shape, layout.stride())
    if not tensor.numel():
        return torch.empty_like(tensor, device="cpu")
    # Anonymous, and gone with the last tensor that uses it: no descriptor, no name in /dev/shm.
    block = torch.frombuffer(mmap.mmap(-1, layout.nbytes), dtype=tensor.dtype)
    return block.as_strided(layout.shape, layout.stride())


def to_host(tensors: Sequence[Tensor], device: torch.device) -> None:
    """Move tensors of a device, one by one, to host memory: each goes before the next one is copied.

    Raises:
        RuntimeError, OSError, OverflowError: There is no memory.
    """
    wait_asleep(device)
    hosts = like_all([tensor.detach() for tensor in tensors], pinned=device.type == "cuda")
    for tensor, host in zip(tensors, hosts, strict=True):
        tensor.data = host.copy_(tensor.data)


def to_device(tensors: Sequence[Tensor], device: torch.device) -> None:
    """Move tensors to a device: all of them, or, if it has no memory for them, none."""
    moved = [torch.empty_like(tensor.data, device=device) for tensor in tensors]
    for tensor, there in zip(tensors, moved, strict=True):
        there.copy_(tensor.data, non_blocking=True)
    wait_asleep(device)
    for tensor, there in zip(tensors, moved, strict=True):
        tensor.data = there
    give_back(device)


class Parking:
    """Moves tensors of a device to the host for a while."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parked: list[Tensor] = []

    def park(self, tensors: Iterable[Tensor], on_host: Iterable[Tensor] = ()) -> int:
        """Move those of the device (whose number may be missing) to host memory; return the bytes
        that they take there, rounding included.

        What is `on_host` anyway stays there, also after `unpark`.
        """
        stay = {id(tensor) for tensor in (*on_host, *self._parked)}
        moving = {
            id(tensor): tensor
            for tensor in tensors
            if tensor.device.type == self._device.type and id(tensor) not in stay
        }
        to_host([*moving.values()], self._device)
        self._parked += moving.values()
        sizes = [tensor.nbytes for tensor in self._parked]
        return host_bytes(sizes, on_card=self._device.type == "cuda")

    def unpark(self) -> None:
        """Move back what was parked: all of it, or, if the device has no memory for it, nothing."""
        to_device(self._parked, self._device)
        self._parked = []
