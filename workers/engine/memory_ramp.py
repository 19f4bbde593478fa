"""Progressive allocation: find out in stages how much of the cap can really be obtained.

The 3070 guide's third technique: 20, 40, 60, 80, 100 % of the cap; a failed stage is tried again 10 % smaller, down
to a floor. What was obtained is the claim. Does not keep it (the allocator's pool does, where there is one) and does
not decide what to do with it.
"""

from __future__ import annotations

from dataclasses import dataclass

from workers import oom
from workers.devices.base import Device
from workers.errors import ContextCorruptedError
from workers.settings import FailureKind, MemorySettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Ramp:
    """What progressive allocation obtained."""

    claim_bytes: int
    """The largest block obtained; 0 when not even the floor was there."""
    target_bytes: int
    """What 100 % would have been."""
    failures: int
    """Blocks refused on the way, each a real out-of-memory."""


def ramp_up(device: Device, settings: MemorySettings, lease_bytes: int | None = None) -> Ramp:
    """Obtain growing blocks, one at a time, until one is refused for good or all of the free memory is obtained.

    Each stage is a block of its own, and the last one stays in the allocator's pool in one piece (unless a larger one
    was refused, which empties the pool): the workload then cuts its tensors out of it without gaps. The target is
    what is free now, so that the memory of other processes causes no failures.

    Args:
        device: Empty of workload tensors.
        settings: Stages, reduction and floor.
        lease_bytes: No more than this, if it is known.

    Raises:
        ContextCorruptedError: The device failed in another way than by lack of memory.
    """
    target_bytes = device.free_bytes()
    if lease_bytes is not None:
        target_bytes = min(target_bytes, lease_bytes)
    claim_bytes = failures = 0
    share = settings.first_fraction
    while claim_bytes < target_bytes:
        stage_bytes = int(min(1.0, share) * target_bytes)
        obtained, refused = _obtain_or_reduce(device, stage_bytes, max(settings.floor_bytes, claim_bytes), settings)
        claim_bytes = max(claim_bytes, obtained)
        failures += refused
        if refused or share >= 1.0:
            break  # all of it was obtained, or a refusal has found the limit; the largest block below it is the claim
        share = share + settings.first_fraction
    return Ramp(claim_bytes=claim_bytes, target_bytes=target_bytes, failures=failures)


def _obtain_or_reduce(device: Device, wanted_bytes: int, floor_bytes: int, settings: MemorySettings) -> tuple[int, int]:
    """Obtain a block of `wanted_bytes`, or of less; return its size (0 for none) and how often one was refused."""
    refused = 0
    while True:
        device.release()  # the last stage's block, or the cache that stood in the way
        obtained_bytes = _obtained(device, wanted_bytes)
        if obtained_bytes is not None:
            return obtained_bytes, refused
        refused += 1
        wanted_bytes = int(wanted_bytes * (1.0 - settings.retry_reduction))
        if wanted_bytes <= floor_bytes:
            device.release()
            return 0, refused


def _obtained(device: Device, wanted_bytes: int) -> int | None:
    """Obtain a block and let it go; return the size it really had, or `None` if memory was short."""
    failure = None
    try:
        obtained_bytes = device.obtain(wanted_bytes)
    except Exception as error:  # noqa: BLE001 - every failure is classified; only memory's may pass
        failure = oom.classify(error)
    if failure is None:
        return obtained_bytes
    if failure.kind in {FailureKind.DEFINITE, FailureKind.PROBABLE}:
        return None
    raise ContextCorruptedError(f"allocating {wanted_bytes} bytes failed for another reason: {failure.text}")
