"""`doctor` and `init` on a cluster started by hand: every node is asked, a missing one is named, nothing is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.load import load_config
from tests.cluster.conftest import ByHand
from tests.scene import PATIENCE_S, ROOT

pytestmark = pytest.mark.ray


def test_every_node_of_a_running_cluster_is_asked_and_a_missing_one_is_named(
    by_hand: ByHand, tmp_path: Path
) -> None:
    by_hand.type_what_up_prints("pc1")
    code, report = doctor(by_hand)
    assert code == 1
    assert report["is_cluster"]
    (absent,) = [row for row in report["findings"] if row["node"] == "pc2"]
    assert absent["verdict"] == "fail"
    assert "no live node has the label node=pc2" in absent["found"]
    assert absent["fix"].startswith(
        "ORCHESTRATOR_NODE=pc2 RAY_AUTH_MODE=token ray start --address="
    )

    by_hand.type_what_up_prints("pc2")
    code, report = doctor(by_hand)
    rows = {(row["node"], row["check"]): row for row in report["findings"]}
    for node in ("pc1", "pc2"):
        assert rows[node, "torch"]["verdict"] == "ok"
        assert rows[node, "network"]["verdict"] == "ok"
        assert rows[node, "clock"]["verdict"] == "ok"
        assert rows[node, "plan"]["verdict"] == "fail", (
            "cluster.yaml gives both a card, and this machine has none"
        )
        assert "no NVIDIA card answers there" in rows[node, "plan"]["found"]
    assert rows[None, "versions"]["verdict"] == "ok"
    assert rows[None, "token"]["verdict"] == "ok"
    assert code == report["exit_code"] == 1
    token = Path(by_hand.environment["HOME"], ".ray", "auth_token").read_text()
    assert token not in json.dumps(report)

    written = tmp_path / "cluster.yaml"
    by_hand.arguments = ()  # `init` takes no configuration: it makes one
    by_hand.orchestrator("init", "--output", str(written))
    config = load_config(str(written))
    assert list(config.nodes) == ["pc1", "pc2"]
    assert [node.gpus for node in config.nodes.values()] == [0, 0]
    assert config.cluster.port == by_hand.port, "and not the usual one, on which nothing listens"
    assert by_hand.ask_ray() == {}, "neither verb leaves an actor behind"


def doctor(by_hand: ByHand) -> tuple[int, dict[str, Any]]:
    """Run `doctor --json`, whose exit code may be 1."""
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator", "doctor", "--json", *by_hand.arguments],
        cwd=ROOT,
        env={**environment(), **by_hand.environment},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def environment() -> dict[str, str]:

    return {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
