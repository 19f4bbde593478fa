"""Code that tests on a card share: the condition for running, and the spec of one worker."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests import scene
from tests.scene import MIB

ON_A_CARD = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA card here"),
]

#: The budget of the 3090 guide, in which seven workers share a card.
BUDGET_BYTES = int(3.3 * 2**30)

spec_of = partial(
    scene.spec_of,
    device="cuda",
    dtype="fp16",
    size=4096,
    budget_bytes=BUDGET_BYTES,
    floor_bytes=100 * MIB,
)
