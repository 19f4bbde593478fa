"""Checkpoints that lie on another PC come through real Ray, whole, while their files are replaced."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from orchestrator.cluster.local_cluster import rehearsed
from orchestrator.cluster.raylets import RayletPlan
from orchestrator.errors import NoClusterError

pytestmark = pytest.mark.ray

RUN, SLOT, NAMES = "20260101-000000-abcd", "pc1/0", "generation-?.pt"


def test_checkpoints_come_in_pieces_from_their_node(state_dir: Path, tmp_path: Path) -> None:
    place = state_dir / "state" / RUN / SLOT
    place.mkdir(parents=True)
    content = {"generation-0.pt": secrets.token_bytes(20 * 2**20), "generation-1.pt": b"short"}
    for name, data in content.items():
        (place / name).write_bytes(data)
    (place / "generation-0.pt.77.new").write_bytes(b"being written")
    with rehearsed([RayletPlan(name="pc1", cpus=1, gpus=0)]):
        from orchestrator.cluster.checkpoint_copy import copied

        paths = copied("pc1", RUN, SLOT, NAMES, tmp_path)
        assert {path.name: path.read_bytes() for path in paths} == content
        assert copied("pc1", RUN, "pc1/1", NAMES, tmp_path) == []
        with pytest.raises(NoClusterError, match="no node pc2 is in the cluster"):
            copied("pc2", RUN, "pc2/0", NAMES, tmp_path)
