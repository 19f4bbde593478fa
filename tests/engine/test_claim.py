"""Progressive allocation against a device whose bytes are counted, not taken.

Only the device is a stand-in.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.scene import GUIDES, MIB
from workers.devices.base import Device
from workers.engine.oom_recovery import ramp_up
from workers.messages import ContextCorruptedError
from workers.settings import MemorySettings

RuntimeErrorMaker = Callable[[str], RuntimeError]


class Counted:
    """A device that promises `free` bytes and has `there`.

    Refuses in torch's own type, or in the one given.
    """

    def __init__(
        self, free: int, there: int, refusal: RuntimeErrorMaker = torch.OutOfMemoryError
    ) -> None:
        self.asked: list[int] = []
        self.refused: list[bool] = []
        self.released = True
        self._free, self._there, self._refusal = free, there, refusal

    def free_bytes(self) -> int:
        return self._free

    def held_bytes(self) -> int:
        return 0

    def allowed_bytes(self, leave_bytes: int) -> int:
        return max(0, self._free - leave_bytes)

    def release(self) -> None:
        self.released = True

    def obtain(self, size_bytes: int) -> int:
        assert self.released, (
            "the block before still lies in the pool: two stages would be held at once"
        )
        self.released = False
        self.asked.append(size_bytes)
        self.refused.append(size_bytes > self._there)
        if self.refused[-1]:
            raise self._refusal("CUDA out of memory. Tried to allocate more than there is.")
        return size_bytes

    def as_device(self) -> Device:
        return cast("Device", self)


def stages(target_bytes: int, fraction: float) -> list[int]:
    return [
        int(min(1.0, fraction * n) * target_bytes) for n in range(1, math.ceil(1 / fraction) + 1)
    ]


def words(text: str) -> RuntimeErrorMaker:
    return lambda _: RuntimeError(text)


def test_another_failure_is_not_taken_for_a_full_card() -> None:
    said = "CUDA error: an illegal memory access was encountered"
    device = Counted(free=1000 * MIB, there=500 * MIB, refusal=words(said))
    with pytest.raises(ContextCorruptedError, match=said):
        ramp_up(device.as_device(), GUIDES)


class Shared(Counted):
    """A device whose neighbour takes a part of what is free with each stage, down to a rest."""

    def __init__(self, free: int, taken: int, held: int) -> None:
        super().__init__(free, free)
        self.left: list[int] = []
        """What the neighbour saw free, with each block."""
        self._taken, self._held = taken, held

    def held_bytes(self) -> int:
        return self._held

    def allowed_bytes(self, leave_bytes: int) -> int:
        return max(0, self._held + self._free - leave_bytes)

    def obtain(self, size_bytes: int) -> int:
        self.left.append(self._free - size_bytes)
        self._free = max(LEAVE, self._free - self._taken)
        return super().obtain(size_bytes)


LEAVE = 128 * MIB


@pytest.mark.parametrize("taken", [0, 60 * MIB, 900 * MIB])
@pytest.mark.parametrize("held", [0, 500 * MIB])
def test_a_neighbour_always_finds_what_is_left_free(taken: int, held: int) -> None:
    device = Shared(free=1000 * MIB, taken=taken, held=held)
    went = ramp_up(device.as_device(), replace(GUIDES, leave_free_bytes=LEAVE))
    assert min(device.left) >= LEAVE
    assert went.claim_bytes <= device.free_bytes() - LEAVE + taken
    if not taken:
        assert went.claim_bytes == 1000 * MIB - LEAVE
        assert not device.released, "on CUDA the workload cuts its tensors out of the last block"


def test_what_is_held_counts_against_the_lease() -> None:
    device = Shared(free=1000 * MIB, taken=0, held=500 * MIB)
    assert ramp_up(device.as_device(), GUIDES, lease_bytes=700 * MIB).claim_bytes == 200 * MIB


settings = st.builds(
    lambda fraction, reduction, floor: replace(
        GUIDES, first_fraction=fraction, retry_reduction=reduction, floor_bytes=floor
    ),
    st.floats(0.01, 1.0),
    st.floats(0.01, 0.9),
    st.integers(1, 300 * MIB),
)


@given(free=st.integers(0, 200 * 2**30), share=st.floats(0.0, 1.5), settings=settings)
def test_whatever_is_there(free: int, share: float, settings: MemorySettings) -> None:
    there = int(share * free)
    device = Counted(free=free, there=there)
    went = ramp_up(device.as_device(), settings)

    # The claim was really obtained, and is never more than was asked for.
    granted = [
        size for size, refused in zip(device.asked, device.refused, strict=True) if not refused
    ]
    assert went.claim_bytes == max(granted, default=0)
    assert went.claim_bytes <= min(went.target_bytes, there)
    assert went.target_bytes == free
    assert went.failures == sum(device.refused)
    assert device.released or granted, "a refused block leaves nothing in the pool"

    wanted = stages(free, settings.first_fraction) if free else []
    granted_first = list(itertools.takewhile(lambda size: size <= there, device.asked))
    assert granted_first == pytest.approx(wanted[: len(granted_first)], abs=1, rel=1e-9), (
        "in stages"
    )
    if there >= free:
        assert (went.claim_bytes, went.failures) == (free, 0)
    if not went.failures:
        assert went.claim_bytes == free
        return

    # Failures come in one series, each smaller than the one before by the reduction, none at or
    # under the floor.
    first = device.refused.index(True)
    reached = max(device.asked[:first], default=0)
    assert not any(device.refused[:first])
    retries = device.asked[first + 1 :]
    assert all(size > max(settings.floor_bytes, reached) for size in retries)
    assert all(
        after == int(before * (1 - settings.retry_reduction))
        for before, after in pairwise(device.asked[first:])
    )
    assert went.claim_bytes >= reached, "a refusal at one stage keeps what the stage before had"
    shrinking = max(1, settings.floor_bytes) / max(1, device.asked[first])
    bound = math.log(shrinking) / math.log(1 - settings.retry_reduction)
    assert went.failures <= max(0, bound) + 2
    assert all(device.refused[first:-1]), "it ends with the first block that is granted"
