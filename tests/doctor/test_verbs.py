"""`doctor` and `init` from outside, on this machine as it is and without a cluster."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.load import load_config
from tests.scene import ROOT, orchestrator, python
from workers.host.machine import visible_cards

without_card = pytest.mark.skipif(bool(visible_cards()), reason="judges a machine without a card")

#: Torch is asked in a process of its own.
pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nowhere")]


def report_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["exit_code"] == done.returncode
    return report


def found(report: dict[str, Any], check: str) -> list[dict[str, Any]]:
    return [row for row in report["findings"] if row["check"] == check]


@without_card
def test_a_newcomer_without_card_cluster_or_file_is_not_failed() -> None:
    done = orchestrator("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no Ray cluster runs on this machine; only this machine was looked at" in " ".join(
        done.stdout.split()
    )
    assert "python -m orchestrator init" in done.stdout
    assert "\x1b" not in done.stdout


@without_card
def test_the_way_from_nothing_to_a_checked_configuration(nowhere: Path) -> None:
    first = orchestrator("init")
    assert first.returncode == 0, first.stderr
    assert "written to cluster.yaml" in first.stdout
    assert list(load_config("cluster.yaml").nodes) == ["pc1"]
    report = report_of(orchestrator("doctor", "--json"))
    assert report["exit_code"] == 0
    (plan,) = found(report, "plan")
    assert plan["verdict"] == "ok"

    Path("cluster.yaml").write_text("mine")
    again = orchestrator("init")
    assert again.returncode == 2
    assert again.stderr.strip() == (
        "cluster.yaml is there already; --force replaces it, --output FILE writes to another place"
    )
    assert Path("cluster.yaml").read_text() == "mine"
    assert orchestrator("init", "--force").returncode == 0
    assert list(load_config("cluster.yaml").nodes) == ["pc1"]
    assert sorted(path.name for path in nowhere.iterdir()) == ["cluster.yaml"], (
        "no temporary file stays"
    )


def test_a_typing_error_is_a_finding_among_others() -> None:
    text = (ROOT / "cluster.yaml").read_text(encoding="utf-8")
    Path("cluster.yaml").write_text(text.replace("workers: 7", "wrokers: 7"), encoding="utf-8")
    report = report_of(orchestrator("doctor", "--json"))
    assert report["exit_code"] == 1
    wrong = [row for row in found(report, "config") if "wrokers" in row["found"]]
    assert wrong[0]["verdict"] == "fail"
    assert "did you mean workers?" in wrong[0]["found"]
    assert wrong[0]["fix"].startswith("${EDITOR:-nano} +")
    assert found(report, "torch")[0]["verdict"] == "ok"


def test_a_missing_file_can_be_made_without_torch() -> None:
    probe = (
        "import sys; sys.argv[:] = ['orchestrator', *sys.argv[1:]]\n"
        "from orchestrator.cli.main import main\n"
        "try:\n    main()\nfinally:\n    print(sorted({'torch', 'ray'} & set(sys.modules)), file=sys.stderr)"
    )
    done = python("-c", probe, "doctor", "--json", "--config", "mine.yaml")
    assert done.stderr.strip().endswith("[]")
    (config,) = found(report_of(done), "config")
    assert config["verdict"] == "fail"
    assert config["fix"] == "python -m orchestrator init --output mine.yaml"


@without_card
def test_what_to_type_names_the_configuration_read() -> None:
    shutil.copy(ROOT / "cluster.yaml", "my own.yaml")
    done = orchestrator("doctor", "--config", "my own.yaml")
    typed = [
        line.partition("type: ")[2]
        for line in done.stdout.splitlines()
        if "type: python -m" in line
    ]
    assert "python -m orchestrator run --rehearse --duration 1 --config 'my own.yaml'" in typed
    assert all(line.endswith("--config 'my own.yaml'") or " init " in line for line in typed)
    assert " ".join(done.stdout.split()).endswith(
        "`python -m orchestrator run --rehearse --config 'my own.yaml'`."
    )


def test_a_machine_that_is_said_to_be_a_node_is_compared_with_it() -> None:
    shutil.copy(ROOT / "cluster.yaml", "cluster.yaml")
    (said,) = found(report_of(orchestrator("doctor", "--json", "--node", "pc1")), "plan")
    assert said["verdict"] in {"ok", "fail"}
    refused = orchestrator("doctor", "--node", "pc9")
    assert refused.returncode == 2
    assert refused.stderr.strip() == "cluster.yaml has no node 'pc9'; valid: pc1, pc2"


def test_an_unreachable_head_a_taken_port_and_no_name() -> None:
    shutil.copy(ROOT / "cluster.yaml", "cluster.yaml")
    with socket.socket() as taken, socket.socket() as silent:
        taken.bind(("", 0))
        taken.listen()
        silent.bind(("127.0.0.1", 0))
        port, head = taken.getsockname()[1], f"127.0.0.1:{silent.getsockname()[1]}"
        settings = ("--set", f"cluster.port={port}", "--set", f"cluster.address={head}")
        report = report_of(orchestrator("doctor", "--json", *settings))
    rows = {row["check"]: row for row in report["findings"]}
    words = {
        "cluster": f"the Ray head at {head} cannot be reached",
        "port": f"{port} is taken",
        "plan": "--node NAME",
    }
    for check, verdict in (("cluster", "fail"), ("port", "warn"), ("plan", "skip")):
        assert rows[check]["verdict"] == verdict
        assert words[check] in rows[check]["found"]
