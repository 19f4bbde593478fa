"""Matrix multiplication as a burn-in: C = A B over a ring of results that fills the allowed memory.

A burn-in must really hold each worker's memory, to show that the card can serve all workers. So
each result goes to the next place of a ring, which takes all of one block besides the operands. The
size of the block follows what the worker may hold, by progressive allocation (`Claim`). Checks of
results need no more memory: older places of the ring are their scratch. Decides neither the size of
the matrices nor when to verify.
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

#: Rows and columns are a multiple of this, whole tiles of every tensor core so far; odd widths are
#: slower (pytorch #181718: n % 16 == 8 slows bf16 on a 4090).
TILE = 64

#: Target time of the products that a step queues: waiting for the device then costs little, and a
#: stop is still prompt.
_STEP_S = 0.1


#: A block changes only by this share or more, because filling it again takes time.
_WORTH_A_CHANGE: Final = 0.01

#: Good steps for which the block stays smaller after a failure, about a minute.
_STEPS_SMALLER: Final = 600

#: Largest share of the allowed bytes that is reserved for what a step takes outside the block.
_MOST_BESIDE: Final = 0.1

#: torch's caching allocator maps large blocks in multiples of this (kRoundLarge,
#: c10/cuda/CUDACachingAllocator); a block of whole multiples is never rounded up beyond the cap.
_SEGMENT_BYTES: Final = 2 * 2**20


class Claim:
    """Progressive allocation, the 3070 guide's third technique: which share of the allowed bytes a
    block takes.

    20, 40, 60, 80, 100 %, one stage more after each good step. After a failure the block is 10 %
    smaller, with a floor of 100 MB; these numbers are settings. What a step takes outside it is
    measured, and stays free. Pure.
    """

    def __init__(self, settings: MemorySettings) -> None:
        self._settings = settings
        self._share = min(1.0, settings.first_fraction)
        self._smaller = 0
        """Good steps still to go before the block grows again after a failure."""
        self.beside_bytes = 0
        """Bytes held outside the block, or taken there by a step."""

    def wanted_bytes(self, allowed_bytes: int, held_bytes: int | None) -> int:
        """Return the next size of the block; `held_bytes` is its present one, `None`: no block."""
        usable_bytes = max(0, allowed_bytes - self.beside_bytes)
        share = self._share
        if held_bytes is not None and held_bytes > usable_bytes:
            share = min(share, 1.0 - _WORTH_A_CHANGE)  # less may soon be allowed again
        floor_bytes = min(self._settings.floor_bytes, usable_bytes)
        wanted_bytes = max(floor_bytes, int(share * usable_bytes))
        if held_bytes is None or held_bytes > usable_bytes:
            return wanted_bytes
        is_worth = wanted_bytes > (1.0 + _WORTH_A_CHANGE) * held_bytes
        return max(held_bytes, wanted_bytes if is_worth else 0)

    def succeeded(self, allowed_bytes: int, held_bytes: int, peak_bytes: int | None) -> None:
        """Record a good step with a block of `held_bytes`, and go to the next stage."""
        if peak_bytes is not None:
            beside_bytes = min(peak_bytes - held_bytes, int(_MOST_BESIDE * allowed_bytes))
            self.beside_bytes = max(self.beside_bytes, beside_bytes)
        self._smaller = max(0, self._smaller - 1)
        if not self._smaller:
            self._share = min(1.0, self._share + self._settings.first_fraction)

    def failed(self) -> None:
        """Record that a step ran out of memory."""
        self._share *= 1.0 - self._settings.retry_reduction
        self._smaller = _STEPS_SMALLER


class Matmul(Workload):
    """Square products.

    `size` is n; `batch` is the most products that are queued between two waits for the device.
    """

    size_power = 2.0
    batch_power = 0.0
    needs_are_exact = True

    def __init__(self, context: WorkloadContext) -> None:
        super().__init__(context)
        self._claim = None if context.memory is None else Claim(context.memory)
        if self._claim is not None and context.device.type == "cuda":
            # Workspaces of libraries, allocated when the device was opened.
            self._claim.beside_bytes = torch.cuda.memory_allocated(context.device)
        self._wanted_bytes = 0
        """Bytes of the block from the next step on, unless the step needs more."""
        self._is_filling = False
        """Whether a step is under way with a block larger than it needs."""
        self._tensors: _Tensors | None = None
        self._products_per_step = 1
        # Run a small product and each kind of check, so that their kernels are loaded before the
        # block takes all memory.
        warm_up = _Tensors(TILE, 8 * matrix_bytes(TILE, context.dtype), context)
        for seed in (0, 1):
            warm_up.multiply()
            warm_up.check(seed)

    @property
    def claim_bytes(self) -> int | None:  # type: ignore[override]
        """Bytes of the block; `None`: there is none."""
        return None if self._tensors is None else self._tensors.form[1]

    def run(self, loop: Loop[Run]) -> StepResult | None:
        """Do a step in a block of the size that the loop allows."""
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
            # If the block has shrunk, the peak may be that of the larger one.
            peak_bytes = loop.peak_bytes if held_bytes >= before_bytes else None
            claim.succeeded(loop.allowed_bytes, held_bytes, peak_bytes)
        return done

    def hold(self, claim_bytes: int) -> None:
        """Set the bytes of the block from the next step on; a step that needs more gets more."""
        if self.context.device.type == "cuda":
            claim_bytes -= claim_bytes % _SEGMENT_BYTES
        self._wanted_bytes = claim_bytes

    def needed_bytes(self, size: int, batch: int) -> int:
        """Return the bytes of two operands and one result; the ring takes what is left."""
        del batch  # products are queued one behind the other and share the ring
        return 3 * matrix_bytes(size, self.context.dtype)

    def release(self) -> None:
        self._tensors = None

    def step(self, size: int, batch: int) -> StepResult:
        """Queue up to `batch` products, and wait for them."""
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
        # At most doubled: one fast step proves little.
        fitting = int(products * _STEP_S / took_s) if took_s > 0 else 2 * products
        self._products_per_step = max(1, min(fitting, 2 * products))
        self._is_filling = False
        return StepResult(flop=2.0 * rounded(size) ** 3 * products)

    def prepared(self, size: int) -> _Tensors:
        """Return the block, allocated in its wanted size and cut into matrices of this size."""
        block_bytes = max(self._wanted_bytes, self.needed_bytes(size, 1))
        if self._tensors is None or self._tensors.form != (size, block_bytes):
            self.release()  # free the old block before the new one is allocated
            if self.context.device.type == "cuda":
                torch.cuda.empty_cache()  # the next block has another size
            self._tensors = _Tensors(size, block_bytes, self.context)
            self._products_per_step = 1
        return self._tensors

    def check(self, seed: int) -> Check | None:
        """Verify the latest product by Freivalds' test (even seeds) or by repeating it (odd ones).

        A ring of one place has no room for a repeat: it always gets Freivalds' test, or no check if
        the block leaves no scratch. (With n = 64 in half precision that takes a ring of four
        places; from 128 on, two suffice.)
        """
        return None if self._tensors is None else self._tensors.check(seed)


class _Tensors:
    """The operands and the ring for one size, cut out of one block: many tensors would leave gaps
    in the allocator's pool.
    """

    def __init__(self, size: int, block_bytes: int, context: WorkloadContext) -> None:
        """Allocate `block_bytes`: at least two operands and one result."""
        self.form = size, block_bytes
        """Size and bytes as they were requested."""
        n = rounded(size)
        each_bytes = matrix_bytes(size, context.dtype)
        block = torch.empty(block_bytes, dtype=torch.uint8, device=context.device)
        if context.device.type == "cpu":
            # The kernel gives pages at the first write. Resident memory that grew with the ring
            # would look like a leak.
            block.zero_()
        matrices = block[: len(block) // each_bytes * each_bytes].view(context.dtype).view(-1, n, n)
        generator = torch.Generator(device=context.device).manual_seed(context.seed)
        # Drawn in the final type: a copy from fp32 would take more memory for a moment.
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
        """The result of the last product; `None`: there is none, or a check has overwritten it."""
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
                self._multiplied = False  # the comparison may overwrite both
                return same_bits(latest, again, scratch)
        scratch = self._scratch((self._next - 1) % len(self._ring))
        return (
            freivalds(self._left, self._right, latest, scratch, seed)
            if len(scratch) >= least_scratch(n)
            else None
        )

    def _scratch(self, kept: int) -> torch.Tensor:
        """Return the longer part of the block before or after place `kept` of the ring, as
        doubles.
        """
        begin, each_bytes = (2 + kept) * self._each_bytes, self._each_bytes
        before, after = self._block[2 * each_bytes : begin], self._block[begin + each_bytes :]
        stretch = max(before, after, key=len)
        return stretch[: len(stretch) // 8 * 8].view(torch.float64)


def rounded(size: int) -> int:
    """Return the n really used: `size` rounded down to whole tiles, one tile at least."""
    return max(TILE, size - size % TILE)


def matrix_bytes(size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one n x n matrix."""
    return rounded(size) ** 2 * dtype.itemsize
