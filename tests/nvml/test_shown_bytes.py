"""What CUDA shows of a card is less than what newer drivers call its total: budgets must be made for the former."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from workers.nvml.fake.prepare import prepare

MIB = 2**20

ASK = """
import json, sys
from orchestrator.cluster import local_gpus
from workers.nvml import queries
from workers.nvml.fake.library import load
from workers.settings import FakeSensors

load(FakeSensors(library_path=sys.argv[1], script_path=sys.argv[2]))
print(json.dumps([
    queries.cards()[0].total_bytes, local_gpus.cards()[0].total_bytes,
    queries.card_used_bytes("0"), queries.card_free_bytes("0"),
]))
"""


@pytest.mark.parametrize(
    ("changes", "shown_mib"),
    [
        ({"reserved_bytes": 380 * MIB}, 12288 - 380),
        ({}, 12288),
        # An older driver leaves the reserve out of the total by itself, and has no second version.
        ({"missing": ["nvmlDeviceGetMemoryInfo_v2"]}, 12288),
    ],
)
def test_the_reserve_of_the_driver_is_nobodys_budget(
    tmp_path: Path, changes: dict[str, object], shown_mib: int
) -> None:
    card = {"name": "NVIDIA GeForce RTX 3060", "uuid": "GPU-3060f00d-0000-4000-8000-000000003060"}
    own = {key: value for key, value in changes.items() if key != "missing"}
    script = {
        "cards": [{**card, "total_bytes": 12288 * MIB, "used_bytes": MIB, **own}],
        "missing_functions": changes.get("missing", []),
    }
    path = tmp_path / "card.json"
    path.write_text(json.dumps(script))
    fake = prepare(path, tmp_path)
    command = [sys.executable, "-c", ASK, fake.library_path, fake.script_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [shown_mib * MIB, shown_mib * MIB, MIB, (shown_mib - 1) * MIB]
