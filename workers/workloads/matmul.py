"""Matrix multiplication as a burn-in: C = A B over a ring of results that fills the claim.

A burn-in must really hold each worker's memory to show that the card can serve all of them. So
every result goes to the next place of a ring that takes all of the claim besides the operands.
Results are verified without more memory: the places of older ones are scratch. Decides neither
sizes nor when to verify.
"""

from __future__ import annotations

import time

import torch

from workers.verification.check import Check
from workers.verification.products import freivalds, least_scratch, same_bits
from workers.workloads.base import StepResult, Workload, WorkloadContext

#: Rows and columns are a multiple of this: whole tiles of every tensor core so far; odd widths cost
#: speed (pytorch #181718: n % 16 == 8 slows bf16 on a 4090).
TILE = 64

#: What is copied to time the card's memory: several times the largest L2 cache (72 MB, RTX 4090),
#: and so little that a copy fits into one turn on a shared card.
_MOVED_BYTES = 256 * 2**20

#: A step queues as many products as take about this long, so that waiting for the device costs
#: little and a stop is still prompt.
_STEP_S = 0.1


class Matmul(Workload):
    """Square products.

    `size` is n; `batch` is the most products queued between two waits for the device.
    """

    size_power = 2.0
    batch_power = 0.0
    fills_claim = True

    def __init__(self, context: WorkloadContext) -> None:
        super().__init__(context)
        self._claim_bytes = 0
        self._tensors: _Tensors | None = None
        self._products_per_step = 1
        # A small product and each kind of check, so that their kernels are in memory before all of
        # it is taken.
        warm_up = _Tensors(TILE, 8 * matrix_bytes(TILE, context.dtype), context)
        for seed in (0, 1):
            warm_up.multiply()
            warm_up.check(seed)

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
        took_s = time.perf_counter() - started
        # At most doubled: one fast step says little.
        fitting = int(products * _STEP_S / took_s) if took_s > 0 else 2 * products
        self._products_per_step = max(1, min(fitting, 2 * products))
        return StepResult(flop=2.0 * rounded(size) ** 3 * products)

    def check(self, seed: int) -> Check | None:
        """Verify the latest product by Freivalds' test (even seeds) or by repeating it (odd ones).

        A ring of one place has nowhere to put a repeat: it gets Freivalds' test always, or none
        where the claim leaves nothing beside it. (With n = 64 in half precision it takes a ring of
        four; from 128 on, two do.)
        """
        return None if self._tensors is None else self._tensors.check(seed)

    def move(self) -> int | None:
        """Copy one stretch of the ring to another."""
        return None if self._tensors is None else self._tensors.move()


class _Tensors:
    """The operands and the ring for one size, cut out of one block.

    One block, because the claim lies in the allocator's pool in one piece: many tensors would leave
    gaps there.
    """

    def __init__(self, size: int, claim_bytes: int, context: WorkloadContext) -> None:
        self.size = size
        n = rounded(size)
        each_bytes = matrix_bytes(size, context.dtype)
        # Two operands and one result at the least: where even that does not fit, the device says
        # so.
        block = torch.empty(
            max(claim_bytes, 3 * each_bytes), dtype=torch.uint8, device=context.device
        )
        matrices = block[: len(block) // each_bytes * each_bytes].view(context.dtype).view(-1, n, n)
        generator = torch.Generator(device=context.device).manual_seed(context.seed)
        # Drawn in the final type: a detour over fp32 would need more memory for a moment.
        matrices[:2].normal_(generator=generator)
        self._left, self._right, *self._ring = matrices.unbind()
        self._next = 0
        self._multiplied = False
        self._block = block
        self._each_bytes = each_bytes

    def multiply(self) -> None:
        torch.mm(self._left, self._right, out=self._ring[self._next])
        self._next = (self._next + 1) % len(self._ring)
        self._multiplied = True

    @property
    def latest(self) -> torch.Tensor | None:
        """The result of the last product, unless a check has used it up."""
        return self._ring[self._next - 1] if self._multiplied else None

    def check(self, seed: int) -> Check | None:
        """Verify the latest result; see `Matmul.check`."""
        latest = self.latest
        if latest is None:
            return None
        n = latest.shape[0]
        if seed % 2 and len(self._ring) > 1:
            again = self._ring[self._next]
            scratch = self._scratch(self._next)
            if len(scratch) >= least_scratch(n):
                torch.mm(self._left, self._right, out=again)
                self._multiplied = False  # the comparison may use up both of them
                return same_bits(latest, again, scratch)
        scratch = self._scratch((self._next - 1) % len(self._ring))
        return (
            freivalds(self._left, self._right, latest, scratch, seed)
            if len(scratch) >= least_scratch(n)
            else None
        )

    def move(self) -> int | None:
        """See `Matmul.move`."""
        ring = self._block[2 * self._each_bytes :]
        if len(ring) < 2 * _MOVED_BYTES:
            return None
        self._multiplied = False
        ring[_MOVED_BYTES : 2 * _MOVED_BYTES].copy_(ring[:_MOVED_BYTES])
        return 2 * _MOVED_BYTES

    def _scratch(self, kept: int) -> torch.Tensor:
        """Return the longer stretch of the block on either side of one place of the ring, as
        doubles.
        """
        begin = (2 + kept) * self._each_bytes
        before, after = (
            self._block[2 * self._each_bytes : begin],
            self._block[begin + self._each_bytes :],
        )
        stretch = max(before, after, key=len)
        return stretch[: len(stretch) // 8 * 8].view(torch.float64)


def rounded(size: int) -> int:
    """The n really used: `size` down to a whole number of tiles, one tile at least."""
    return max(TILE, size - size % TILE)


def matrix_bytes(size: int, dtype: torch.dtype) -> int:
    """Bytes of one n x n matrix."""
    return rounded(size) ** 2 * dtype.itemsize
