"""Progressive allocation: which part of what is allowed a block takes, stage by stage. Takes no memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.scene import GUIDES, MIB
from workers.settings import MemorySettings
from workers.workloads.matmul import Claim


def climbed(claim: Claim, allowed_bytes: int, steps: int, beside_bytes: int = 0) -> list[int]:
    """Return the blocks of so many good steps, which take so much beside them."""
    blocks: list[int] = []
    for _ in range(steps):
        held_bytes = blocks[-1] if blocks else None
        blocks.append(claim.wanted_bytes(allowed_bytes, held_bytes))
        claim.succeeded(allowed_bytes, blocks[-1], blocks[-1] + beside_bytes)
    return blocks


def test_after_each_failure_it_takes_10_percent_less_down_to_its_floor() -> None:
    claim = Claim(GUIDES)
    climbed(claim, 1000 * MIB, 5)
    blocks = []
    for _ in range(40):
        claim.failed()
        blocks.append(claim.wanted_bytes(1000 * MIB, None))
    assert blocks[:3] == pytest.approx([900 * MIB, 810 * MIB, 729 * MIB], rel=1e-6)
    assert blocks[-1] == GUIDES.floor_bytes
    assert claim.wanted_bytes(60 * MIB, None) == 60 * MIB, "the floor is never more than is allowed"


def test_after_many_good_steps_it_takes_all_again() -> None:
    claim = Claim(GUIDES)
    climbed(claim, 1000 * MIB, 5)
    claim.failed()
    blocks = climbed(claim, 1000 * MIB, 700)
    assert blocks[0] == blocks[500] == pytest.approx(900 * MIB, rel=1e-6)
    assert blocks[-1] == 1000 * MIB


def test_what_a_step_takes_beside_it_is_left_free() -> None:
    assert climbed(Claim(GUIDES), 1000 * MIB, 7, beside_bytes=20 * MIB)[-1] == 980 * MIB
    assert climbed(Claim(GUIDES), 1000 * MIB, 7, beside_bytes=500 * MIB)[-1] >= 890 * MIB


settings = st.builds(
    lambda fraction, reduction, floor: replace(
        GUIDES, first_fraction=fraction, retry_reduction=reduction, floor_bytes=floor
    ),
    st.floats(0.01, 1.0),
    st.floats(0.01, 0.9),
    st.integers(1, 300 * MIB),
)


@given(
    allowed=st.lists(st.integers(0, 200 * 2**30), min_size=1, max_size=30),
    fails=st.lists(st.booleans(), min_size=30, max_size=30),
    settings=settings,
)
def test_it_never_takes_more_than_is_allowed(
    allowed: list[int], fails: list[bool], settings: MemorySettings
) -> None:
    claim, held_bytes = Claim(settings), None
    for allowed_bytes, is_failure in zip(allowed, fails, strict=False):
        block_bytes = claim.wanted_bytes(allowed_bytes, held_bytes)
        assert 0 <= block_bytes <= allowed_bytes
        if is_failure:
            claim.failed()
            held_bytes = None
        else:
            claim.succeeded(allowed_bytes, block_bytes, None)
            held_bytes = block_bytes
    blocks = climbed(claim, 2**33, 120)
    assert all(before <= after for before, after in pairwise(blocks)), (
        "nothing is given up for none"
    )
