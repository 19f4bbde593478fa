"""Matrix multiplication as a burn-in: C = A B over a ring of results that fills the claim.

A worker that shares a card must really hold its memory, or nothing proves that the card can carry it. So every
result goes to the next place of a ring that takes all of the claim the operands leave. Does not time itself for the
report (the engine does) and does not decide sizes.
"""

from __future__ import annotations

import time

import torch

from workers.workloads.base import StepResult, Workload, WorkloadContext

#: Rows and columns are a multiple of this: whole tiles of every tensor core so far; odd widths cost speed
#: (pytorch #181718: n % 16 == 8 slows bf16 on a 4090).
TILE = 64

#: A step queues as many products as take about this long, so that waiting for the device costs little and a stop is
#: still prompt.
_STEP_S = 0.1


class Matmul(Workload):
    """Square products. `size` is n; `batch` is the most products queued between two waits for the device."""

    size_power = 2.0
    batch_power = 0.0
    fills_claim = True

    def __init__(self, context: WorkloadContext) -> None:
        """See `Workload`."""
        super().__init__(context)
        self._claim_bytes = 0
        self._tensors: _Tensors | None = None
        self._products_per_step = 1

    def resize(self, claim_bytes: int) -> None:
        """Fill this much from the next step on."""
        if claim_bytes != self._claim_bytes:
            self._claim_bytes = claim_bytes
            self.release()

    def needed_bytes(self, size: int, batch: int) -> int:
        """Two operands and one result; the ring takes what is left over."""
        del batch  # products are queued one behind the other and share the ring
        return 3 * matrix_bytes(size, self.context.dtype)

    def release(self) -> None:
        """See `Workload.release`."""
        self._tensors = None

    def step(self, size: int, batch: int) -> StepResult:
        """Queue up to `batch` products and wait for them."""
        if self._tensors is None or self._tensors.size != size:
            self.release()  # the old ring must go before the new one comes
            self._tensors = _Tensors(size, self._claim_bytes, self.context)
            self._products_per_step = 1
        products = min(self._products_per_step, batch)
        started = time.perf_counter()
        for _ in range(products):
            self._tensors.multiply()
        if self.context.device.type == "cuda":
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # sleeps; a synchronize would spin
            done.record()
            done.synchronize()
        self._pace(time.perf_counter() - started, products)
        n = rounded(size)
        return StepResult(flop=2.0 * n * n * n * products)

    def _pace(self, took_s: float, products: int) -> None:
        """Aim at `_STEP_S` a step, at most doubling: one fast step says little."""
        fitting = int(products * _STEP_S / took_s) if took_s > 0 else 2 * products
        self._products_per_step = max(1, min(fitting, 2 * products))


class _Tensors:
    """The operands and the ring for one size, cut out of one block.

    One block, because the claim lies in the allocator's pool in one piece: many tensors would leave gaps there, and
    small ones would need memory beside it.
    """

    def __init__(self, size: int, claim_bytes: int, context: WorkloadContext) -> None:
        self.size = size
        n = rounded(size)
        each_bytes = matrix_bytes(size, context.dtype)
        # Two operands and one result at the least: where even that does not fit, the device says so.
        block = torch.empty(max(claim_bytes, 3 * each_bytes), dtype=torch.uint8, device=context.device)
        matrices = block[: len(block) // each_bytes * each_bytes].view(context.dtype).view(-1, n, n)
        generator = torch.Generator(device=context.device).manual_seed(context.seed)
        # Drawn in the final type: a detour over fp32 would need more memory for a moment.
        matrices[:2].normal_(generator=generator)
        self._left, self._right, *self._ring = matrices.unbind()
        self._next = 0

    def multiply(self) -> None:
        torch.mm(self._left, self._right, out=self._ring[self._next])
        self._next = (self._next + 1) % len(self._ring)


def rounded(size: int) -> int:
    """The n really used: `size` down to a whole number of tiles, one tile at least."""
    return max(TILE, size - size % TILE)


def matrix_bytes(size: int, dtype: torch.dtype) -> int:
    """Bytes of one n x n matrix."""
    n = rounded(size)
    return n * n * dtype.itemsize
