"""Matrix multiplication as a burn-in: C = A B over a ring of results that fills what is allowed.

A burn-in must really hold each worker's memory to show that the card can serve all of them. So
every result goes to the next place of a ring that takes all of a block besides the operands. The
block follows what the worker may hold, by progressive allocation (`Claim`). Results are verified
without more memory: the places of older ones are scratch. Decides neither the size of the matrices
nor when to verify.
"""

from __future__ import annotations

import time
from typing import Final

import torch

from workers.elastic.loop import Loop
from workers.policy.base import Run
from workers.settings import MemorySettings
from workers.verification.check import Check
from workers.verification.products import freivalds, least_scratch, same_bits
from workers.workloads.base import StepResult, Workload, WorkloadContext

#: Rows and columns are a multiple of this: whole tiles of every tensor core so far; odd widths cost
#: speed (pytorch #181718: n % 16 == 8 slows bf16 on a 4090).
TILE = 64

#: A step queues as many products as take about this long, so that waiting for the device costs
#: little and a stop is still prompt.
_STEP_S = 0.1


#: A block changes by this share or more: to fill it anew takes time.
_WORTH_A_CHANGE: Final = 0.01

#: After a failure the block stays smaller for so many good steps, about a minute.
_STEPS_SMALLER: Final = 600

#: Of what is allowed, the most that is left to what a step takes beside the block.
_MOST_BESIDE: Final = 0.1

#: torch's caching allocator maps large blocks in multiples of this (kRoundLarge,
#: c10/cuda/CUDACachingAllocator); a block of whole ones is never rounded past what is allowed.
_SEGMENT_BYTES: Final = 2 * 2**20


class Claim:
    """Progressive allocation, the 3070 guide's third technique: how much of what is allowed a block
    takes.

    20, 40, 60, 80, 100 % of it, a stage after each good step. After a failure it is 10 % smaller,
    down to a floor of 100 MB; the numbers are settings. What a step takes beside the block is
    measured, and left free. Pure.
    """

    def __init__(self, settings: MemorySettings) -> None:
        self._settings = settings
        self._share = min(1.0, settings.first_fraction)
        self._smaller = 0
        """Good steps to go until more is tried after a failure."""
        self.beside_bytes = 0
        """What is held, or taken by a step, beside the block."""

    def wanted_bytes(self, allowed_bytes: int, held_bytes: int | None) -> int:
        """Return how large the block should be; `held_bytes` is what it is, `None` without one."""
        usable_bytes = max(0, allowed_bytes - self.beside_bytes)
        share = self._share
        if held_bytes is not None and held_bytes > usable_bytes:
            share = min(share, 1.0 - _WORTH_A_CHANGE)  # less may be allowed again soon
        floor_bytes = min(self._settings.floor_bytes, usable_bytes)
        wanted_bytes = max(floor_bytes, int(share * usable_bytes))
        if held_bytes is None or held_bytes > usable_bytes:
            return wanted_bytes
        is_worth = wanted_bytes > (1.0 + _WORTH_A_CHANGE) * held_bytes
        return max(held_bytes, wanted_bytes if is_worth else 0)

    def succeeded(self, allowed_bytes: int, held_bytes: int, peak_bytes: int | None) -> None:
        """Take note of a good step with a block of so many bytes: the next stage comes."""
        if peak_bytes is not None:
            beside_bytes = min(peak_bytes - held_bytes, int(_MOST_BESIDE * allowed_bytes))
            self.beside_bytes = max(self.beside_bytes, beside_bytes)
        self._smaller = max(0, self._smaller - 1)
        if not self._smaller:
            self._share = min(1.0, self._share + self._settings.first_fraction)

    def failed(self) -> None:
        """Take note that a step ran out of memory."""
        self._share *= 1.0 - self._settings.retry_reduction
        self._smaller = _STEPS_SMALLER


class Matmul(Workload):
    """Square products.

    `size` is n; `batch` is the most products queued between two waits for the device.
    """

    size_power = 2.0
    batch_power = 0.0
    needs_are_exact = True

    def __init__(self, context: WorkloadContext) -> None:
        super().__init__(context)
        self._claim = None if context.memory is None else Claim(context.memory)
        if self._claim is not None and context.device.type == "cuda":
            # Workspaces of libraries, made when the device was opened.
            self._claim.beside_bytes = torch.cuda.memory_allocated(context.device)
        self._wanted_bytes = 0
        """Of the block from the next step on, unless that needs more."""
        self._is_filling = False
        """Whether a step is under way whose block is larger than it needs."""
        self._tensors: _Tensors | None = None
        self._products_per_step = 1
        # A small product and each kind of check, so that their kernels are in memory before all of
        # it is taken.
        warm_up = _Tensors(TILE, 8 * matrix_bytes(TILE, context.dtype), context)
        for seed in (0, 1):
            warm_up.multiply()
            warm_up.check(seed)

    @property
    def claim_bytes(self) -> int | None:  # type: ignore[override]
        """Bytes of the block; `None` without one."""
        return None if self._tensors is None else self._tensors.form[1]

    def run(self, loop: Loop[Run]) -> StepResult | None:
        """Do a step in a block of what the loop allows."""
        claim = self._claim

        def part(run: Run) -> StepResult:
            if claim is not None and self._is_filling:
                claim.failed()
            if claim is not None and loop.allowed_bytes is not None:
                self.hold(claim.wanted_bytes(loop.allowed_bytes, self.claim_bytes))
            return self.step(run.size, run.batch)

        before_bytes = self.claim_bytes or 0
        done = loop.run(part)
        held_bytes = self.claim_bytes
        if claim is not None and loop.allowed_bytes is not None and held_bytes is not None:
            # Where the block has shrunk, the peak may be that of the larger one.
            peak_bytes = loop.peak_bytes if held_bytes >= before_bytes else None
            claim.succeeded(loop.allowed_bytes, held_bytes, peak_bytes)
        return done

    def hold(self, claim_bytes: int) -> None:
        """Fill this much from the next step on, or what a step needs if that is more."""
        if self.context.device.type == "cuda":
            claim_bytes -= claim_bytes % _SEGMENT_BYTES
        self._wanted_bytes = claim_bytes

    def needed_bytes(self, size: int, batch: int) -> int:
        """Two operands and one result; the ring takes what is left over."""
        del batch  # products are queued one behind the other and share the ring
        return 3 * matrix_bytes(size, self.context.dtype)

    def release(self) -> None:
        self._tensors = None

    def step(self, size: int, batch: int) -> StepResult:
        """Queue up to `batch` products and wait for them."""
        self._is_filling = self.needed_bytes(size, batch) < self._wanted_bytes
        tensors = self.prepared(size)
        products = min(self._products_per_step, batch)
        started = time.perf_counter()
        for _ in range(products):
            tensors.multiply()
        if self.context.device.type == "cuda":
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # sleeps; a synchronize would spin
            done.record()
            done.synchronize()
        took_s = time.perf_counter() - started
        # At most doubled: one fast step says little.
        fitting = int(products * _STEP_S / took_s) if took_s > 0 else 2 * products
        self._products_per_step = max(1, min(fitting, 2 * products))
        self._is_filling = False
        return StepResult(flop=2.0 * rounded(size) ** 3 * products)

    def prepared(self, size: int) -> _Tensors:
        """Return the block that is to be filled, cut into matrices of this size."""
        block_bytes = max(self._wanted_bytes, self.needed_bytes(size, 1))
        if self._tensors is None or self._tensors.form != (size, block_bytes):
            self.release()  # the old ring must go before the new one comes
            if self.context.device.type == "cuda":
                torch.cuda.empty_cache()  # the next block has another size
            self._tensors = _Tensors(size, block_bytes, self.context)
            self._products_per_step = 1
        return self._tensors

    def check(self, seed: int) -> Check | None:
        """Verify the latest product by Freivalds' test (even seeds) or by repeating it (odd ones).

        A ring of one place has nowhere to put a repeat: it gets Freivalds' test always, or none
        where the block leaves nothing beside it. (With n = 64 in half precision it takes a ring of
        four; from 128 on, two do.)
        """
        return None if self._tensors is None else self._tensors.check(seed)


class _Tensors:
    """The operands and the ring for one size, cut out of one block: many tensors would leave gaps
    in the allocator's pool.
    """

    def __init__(self, size: int, block_bytes: int, context: WorkloadContext) -> None:
        """Allocate so much: two operands and one result at the least."""
        self.form = size, block_bytes
        """As it was asked for."""
        n = rounded(size)
        each_bytes = matrix_bytes(size, context.dtype)
        block = torch.empty(block_bytes, dtype=torch.uint8, device=context.device)
        if context.device.type == "cpu":
            # The kernel gives pages at the first write. Resident memory that grew with the ring
            # would look like a leak.
            block.zero_()
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

    def _scratch(self, kept: int) -> torch.Tensor:
        """Return the longer stretch of the block on either side of one place of the ring, as
        doubles.
        """
        begin, each_bytes = (2 + kept) * self._each_bytes, self._each_bytes
        before, after = self._block[2 * each_bytes : begin], self._block[begin + each_bytes :]
        stretch = max(before, after, key=len)
        return stretch[: len(stretch) // 8 * 8].view(torch.float64)


def rounded(size: int) -> int:
    """The n really used: `size` down to a whole number of tiles, one tile at least."""
    return max(TILE, size - size % TILE)


def matrix_bytes(size: int, dtype: torch.dtype) -> int:
    """Bytes of one n x n matrix."""
    return rounded(size) ** 2 * dtype.itemsize
