"""Injected failures for tests of workloads: torch's real exception types, at an allocation boundary, on command.

For tests of your own workload: it can survive failures without a full card. In the style of spark-rapids'
`injectRetryOOM`: so many failures, after so many good allocations. Does not allocate, and does not stand in for the
real thing: the engine's own tests run into a real cap.

    class MyWorkload(Workload):
        injector = OomInjector(num=2, skip=10)

        def step(self, size, batch):
            self.injector.check()  # before anything that allocates
            ...
"""

from __future__ import annotations

import random

import torch

from workers.settings import FailureKind

#: cudaErrorIllegalAddress.
_ILLEGAL_ADDRESS = 700


class OomInjector:
    """Lets `skip` checks pass, then fails `num` of those that follow, then lets all pass."""

    def __init__(
        self, num: int, skip: int = 0, kind: FailureKind = FailureKind.DEFINITE, seed: int | None = None
    ) -> None:
        """Prepare; nothing fails before `check` is called.

        Args:
            num: Failures in all.
            skip: Checks before the first that may fail.
            kind: What `workers.oom.classify` will make of the failure.
            seed: `None` fails `num` checks in a row; with a seed each check fails with even chance until `num` have,
                the same ones in every run.

        Raises:
            ValueError: `num` or `skip` is negative.
        """
        if num < 0 or skip < 0:
            raise ValueError(f"num and skip must not be negative, not {num} and {skip}")
        self.checks = 0
        """Steps or allocations that asked."""
        self.injected = 0
        """Times one failed."""
        self._num = num
        self._skip = skip
        self._kind = kind
        self._chance = None if seed is None else random.Random(seed)  # noqa: S311 - repeatable is what is wanted

    def check(self) -> None:
        """Fail if it is time to.

        Raises:
            RuntimeError: What `injected_error` makes of the kind.
        """
        if self.due():
            raise injected_error(self._kind)

    def due(self) -> bool:
        """Count a check, and return whether it is to fail, for callers that do more than raise."""
        self.checks += 1
        if self.checks <= self._skip or self.injected >= self._num:
            return False
        if self._chance is not None and self._chance.random() < 0.5:
            return False
        self.injected += 1
        return True


def injected_error(kind: FailureKind) -> RuntimeError:
    """Make the exception that `workers.oom.classify` takes for `kind`.

    DEFINITE is a `torch.OutOfMemoryError`, as the CUDA allocator raises it; CONTEXT_CORRUPTED a
    `torch.AcceleratorError` with its error code; PROBABLE and OTHER are in the words of cuBLAS and of a wrong shape.
    """
    match kind:
        case FailureKind.DEFINITE:
            return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. (injected)")
        case FailureKind.PROBABLE:
            return RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)` (injected)")
        case FailureKind.CONTEXT_CORRUPTED:
            error = torch.AcceleratorError("CUDA error: an illegal memory access was encountered (injected)")
            error.error_code = _ILLEGAL_ADDRESS  # type: ignore[attr-defined]  # torch sets it in C++
            return error
        case FailureKind.OTHER:
            return RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3) (injected)")
