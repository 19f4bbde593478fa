"""Heat and wrong results in rehearsal: scripted sensors, real flipped bits, and what the run says of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cards import script_cards, scripted_card
from tests.cluster.conftest import SMALL, Starter
from workers.readings import Throttle

pytestmark = pytest.mark.ray

HOT = scripted_card(1, temperature_c=87, throttle=Throttle.POWER_CAP | Throttle.HARDWARE_THERMAL)
COOL = scripted_card(2, temperature_c=60)


def test_a_hot_card_pauses_workers_and_a_flipped_bit_is_found(
    start: Starter, tmp_path: Path
) -> None:
    cards = script_cards(tmp_path / "cards.json", COOL, nodes={"pc1": [HOT]})
    head = start(
        *("--rehearse", "--duration", "4s", "--json", *SMALL),
        *("--workload", "tests.flips:Flipping", "--set", "verify.share=0.2"),
        environment=cards,
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
