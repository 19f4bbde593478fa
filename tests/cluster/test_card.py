"""Heat and wrong results in rehearsal: the sensors of a script, real flipped bits, and what the run says of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cluster.conftest import SMALL, Starter

pytestmark = pytest.mark.ray

HOT = {
    "name": "NVIDIA GeForce RTX 3090",
    "uuid": "GPU-3090f00d-0000-4000-8000-000000003090",
    "total_bytes": 2**34,
    "temperature_c": 87,
    "slowdown_c": 95,
    "power_w": 341,
    "power_limit_w": 350,
    "throttle": [[0, ["POWER_CAP", "HARDWARE_THERMAL"]]],
}
COOL = {
    "name": "NVIDIA GeForce RTX 3070",
    "uuid": "GPU-3070c001-0000-4000-8000-000000003070",
    "total_bytes": 2**33,
    "temperature_c": 60,
    "throttle": [[0, ["POWER_CAP"]]],
}


def test_a_hot_card_pauses_workers_and_a_flipped_bit_is_found(
    start: Starter, tmp_path: Path, state_dir: Path
) -> None:
    script = tmp_path / "hot.json"
    script.write_text(json.dumps({"cards": [HOT, COOL]}))
    head = start(
        *("--rehearse", "--duration", "10s", "--json", *SMALL),
        *("--fake-sensors", str(script), "--chaos", "flip:rate=1", "--set", "verify.share=0.2"),
    )
    code, out, err = head.finish()
    assert code == 1, out + err
    summary = json.loads(out)
    assert summary["outcome"] == "degraded"
    rows = {row["slot"]: row for row in summary["workers"]}
    for slot in ("pc1/0", "pc1/1"):
        row = rows[slot]
        assert (row["state"], row["steps_ok"]) == ("PAUSED", 0)
        assert "paused at 87 C, goes on below 75 C" in row["reason"]
        assert row["temperature_c"] == 87
        assert row["margin_c"] == 8
        assert row["power_w"] == 341
        assert row["throttle_pct"] == 100
        assert row["memory_temperature_c"] is None
    cool = rows["pc2/0"]
    assert (cool["state"], cool["temperature_c"], cool["throttle_pct"]) == ("CORRUPT", 60, 0)
    assert cool["steps_ok"] > 0
    assert cool["reason"].startswith("wrong result on pc2/0")
    assert summary["verify_errors"] == cool["verify_errors"] > 0
    events = head.events()
    assert {e["slot"] for e in events if e["event"] == "alarm_raised"} == {"pc1/0", "pc1/1"}
    assert {e["slot"] for e in events if e["event"] == "corrupt"} == {"pc2/0"}
    # One that changes less than rounding does is found by a repeat only, and checks take turns.
    became = {fault["became"] for fault in summary["faults"] if fault["kind"] == "flip"}
    assert "found by the check" in became
    assert became <= {"found by the check", "not all found by the checks"}
    assert not (state_dir / "limits.json").exists(), "a run with injected faults remembers nothing"
