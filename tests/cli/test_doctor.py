"""The commands `doctor` and `init` without a cluster, on this machine, and on one without a
card.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.load import load_config
from orchestrator.doctor import verb
from tests.cli.conftest import Command
from tests.factories import laptop
from tests.scene import ROOT, orchestrator
from workers.host.machine import visible_cards

pytestmark = pytest.mark.usefixtures("nowhere")


@pytest.fixture
def typed(command: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run a command as on a machine without a card, with scripted facts."""
    monkeypatch.setattr(verb, "look_around", laptop)
    return command


def report_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["exit_code"] == done.returncode
    return report


def found(report: dict[str, Any], check: str) -> list[dict[str, Any]]:
    return [row for row in report["findings"] if row["check"] == check]


@pytest.mark.torch
@pytest.mark.skipif(bool(visible_cards()), reason="judges a machine without a card")
def test_the_way_from_nothing_to_a_checked_configuration(nowhere: Path) -> None:
    first = orchestrator("init")
    assert first.returncode == 0, first.stderr
    assert "written to cluster.yaml" in first.stdout
    assert list(load_config("cluster.yaml").nodes) == ["pc1"]
    report = report_of(orchestrator("doctor", "--json"))
    assert report["exit_code"] == 0
    (plan,) = found(report, "plan")
    assert plan["verdict"] == "ok"


def test_a_file_that_is_there_is_replaced_only_on_request(command: Command, nowhere: Path) -> None:
    Path("cluster.yaml").write_text("mine")
    refused = command("init")
    assert (refused.returncode, refused.stderr.strip()) == (
        2,
        "cluster.yaml exists already; --force replaces it, --output FILE writes to another place",
    )
    assert Path("cluster.yaml").read_text() == "mine"
    assert command("init", "--force").returncode == 0
    assert list(load_config("cluster.yaml").nodes) == ["pc1"]
    assert [path.name for path in nowhere.iterdir()] == ["cluster.yaml"], "no temporary file stays"


def test_a_newcomer_without_card_cluster_or_file_is_not_failed(typed: Command) -> None:
    done = typed("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    assert "no Ray cluster runs on this machine; only this machine was checked" in said
    assert "python -m orchestrator init" in said
    assert "\x1b" not in done.stdout


def test_a_typing_error_is_a_finding_among_others(typed: Command) -> None:
    text = (ROOT / "cluster.yaml").read_text(encoding="utf-8")
    Path("cluster.yaml").write_text(text.replace("workers: 7", "wrokers: 7"), encoding="utf-8")
    report = report_of(typed("doctor", "--json"))
    assert report["exit_code"] == 1
    wrong = [row for row in found(report, "config") if "wrokers" in row["found"]]
    assert wrong[0]["verdict"] == "fail"
    assert "did you mean workers?" in wrong[0]["found"]
    assert wrong[0]["fix"].startswith("${EDITOR:-nano} +")
    assert found(report, "torch")[0]["verdict"] == "ok"


def test_a_missing_file_can_be_made(typed: Command) -> None:
    (config,) = found(report_of(typed("doctor", "--json", "--config", "mine.yaml")), "config")
    assert config["verdict"] == "fail"
    assert config["fix"] == "python -m orchestrator init --output mine.yaml"


def test_what_to_type_names_the_configuration_read(typed: Command) -> None:
    shutil.copy(ROOT / "cluster.yaml", "my own.yaml")
    said = typed("doctor", "--config", "my own.yaml").stdout
    fixes = [line.partition("type: ")[2] for line in said.splitlines() if "type: python -m" in line]
    assert "python -m orchestrator run --rehearse --duration 1 --config 'my own.yaml'" in fixes
    assert all(fix.endswith("--config 'my own.yaml'") or " init " in fix for fix in fixes)
    assert said.endswith("`python -m orchestrator run --rehearse --config 'my own.yaml'`.\n")


def test_a_machine_that_is_said_to_be_a_node_is_compared_with_it(typed: Command) -> None:
    shutil.copy(ROOT / "cluster.yaml", "cluster.yaml")
    assert found(report_of(typed("doctor", "--json", "--node", "pc1")), "plan") != []
    refused = typed("doctor", "--node", "pc9")
    assert refused.returncode == 2
    assert refused.stderr.strip() == "cluster.yaml has no node 'pc9'; valid: pc1, pc2"


def test_an_unreachable_head_and_no_name(typed: Command) -> None:
    shutil.copy(ROOT / "cluster.yaml", "cluster.yaml")
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        head = f"127.0.0.1:{silent.getsockname()[1]}"
        report = report_of(typed("doctor", "--json", "--set", f"cluster.address={head}"))
    rows = {row["check"]: row for row in report["findings"]}
    for check, verdict, words in (
        ("cluster", "fail", f"the Ray head at {head} cannot be reached"),
        ("plan", "skip", "--node NAME"),
    ):
        assert rows[check]["verdict"] == verdict
        assert words in rows[check]["found"]
