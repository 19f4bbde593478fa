"""The cable between two PCs is pulled and plugged in again during a run; the PCs are namespaces."""

from __future__ import annotations

import os
import shutil

import pytest
from benches.cable import run

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and the command `ip`"
    ),
]


def test_a_pc_behind_a_cut_is_lost_and_works_again() -> None:
    try:
        result = run([12.0], program=False)
    except PermissionError as why:
        pytest.skip(str(why))
    (row,) = result.figures["cuts"]
    assert row["lost_after_s"] is not None
    assert row["back_after_s"] is not None
