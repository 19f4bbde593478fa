"""Nodes started by hand with the commands that `up` prints: `doctor`, and a run with faults."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator.config.load import load_config
from orchestrator.record.archive import read_run
from tests.cluster.conftest import RESTING, SMALL, ByHand, Head, Starter, descendants, ray_process
from tests.scene import COMMAND, ROOT, ran, wait_for

pytestmark = pytest.mark.ray


#: With a team, `doctor` measures the link between the members.
TEAM = ("--set=workload.name=train", "--set=train.team=[pc1, pc2]")


def doctor(by_hand: ByHand, *more: str) -> dict[tuple[str | None, str], dict[str, Any]]:
    """Return the findings of `doctor --json`, which fails: the nodes lack the planned cards."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = ran(
        [*COMMAND, "doctor", "--json", *by_hand.arguments, *more],
        cwd=ROOT,
        env={**environment, **by_hand.environment},
    )
    assert done.returncode == 1, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert (report["is_cluster"], report["exit_code"]) == (True, 1)
    assert token_of(by_hand) not in done.stdout
    return {(row["node"], row["check"]): row for row in report["findings"]}


def token_of(by_hand: ByHand) -> str:
    token = Path(by_hand.environment["HOME"], ".ray", "auth_token")
    assert token.stat().st_mode & 0o077 == 0
    return token.read_text()


def raylet_of(node: str) -> psutil.Process:
    raylet = ray_process(node, "raylet")
    assert raylet is not None
    return raylet


def wait_for_state(head: Head, slot: str, state: str, after: int = 0) -> None:
    told = (slot, state)
    head.wait(
        lambda: told in {(it["slot"], it.get("to_state")) for it in head.events()[after:]},
        f"{slot} {state}",
    )


def refused_without_pc2(start: Starter, by_hand: ByHand) -> None:
    """A run that does not wait for its nodes prints a command, and leaves the cluster unchanged."""
    found = doctor(by_hand)
    (absent,) = (row for (node, _), row in found.items() if node == "pc2")
    assert absent["verdict"] == "fail"
    assert "no live node has the label node=pc2" in absent["found"]
    join = "ORCHESTRATOR_NODE=pc2 RAY_AUTH_MODE=token ray start --address="
    assert absent["fix"].startswith(join)
    arguments = ("--duration", "30s", "--json", *by_hand.arguments)
    code, out, err = start(*arguments, environment=by_hand.environment).finish()
    assert code == 3
    error = json.loads(out)["error"]
    assert "node=pc2" in error
    line = by_hand.orchestrator("up", "pc2").splitlines()[-1]
    assert f"--address={line.split('--address=')[1].split()[0]}" in error
    assert token_of(by_hand) not in out + err + error
    assert "Total Usage" in by_hand.type(by_hand.status_command())


def back_after_its_raylet_was_killed(head: Head, by_hand: ByHand) -> None:
    """The node returns first with too few resources and is refused, and then with all of them."""
    raylet_of("pc2").kill()
    wait_for_state(head, "pc2/0", "LOST")
    script = by_hand.orchestrator("up", "pc2")
    assert "--num-cpus=4" in script
    by_hand.type(script.replace("--num-cpus=4", "--num-cpus=2"))

    def refused() -> bool:
        notices = read_run(head.folder()).notices
        return any("pc2 cannot be used: pc2 offers 2 CPUs" in notice for notice in notices)

    head.wait(refused, "refusal of pc2")
    steps_ok = head.rows()["pc1/0"]["steps_ok"]
    head.wait(lambda: head.rows()["pc1/0"]["steps_ok"] > steps_ok, "work beside the refused node")
    by_hand.stop_node("pc2")
    before = len(head.events())
    by_hand.type_what_up_prints("pc2")
    wait_for_state(head, "pc2/0", "RUNNING", after=before)
    running = [event["slot"] for event in head.events("state", to_state="RUNNING")]
    assert sorted(slot for slot in running if slot != "pc2/0") == ["pc1/0", "pc1/1"]


def gone_on_after_its_head_was_killed(head: Head, start: Starter, by_hand: ByHand) -> Head:
    """The workers end with their head, and the nodes stay."""
    raylets = {raylet_of(node).pid for node in ("pc1", "pc2")}
    workers = {head.opened(slot)[-1] for slot in ("pc1/0", "pc1/1", "pc2/0")}
    assert all(psutil.pid_exists(pid) for pid in workers)
    head.kill()
    wait_for(lambda: not workers & {process.pid for process in descendants()}, "end of the workers")
    stored = read_run(head.folder())
    assert stored.was_killed
    before = len(head.events())
    again = start(
        *("--resume", head.folder().name, "--json"),
        runs=head.runs,
        environment=by_hand.environment,
    )
    again.wait_until_running(3, after=before)
    assert {raylet_of(node).pid for node in ("pc1", "pc2")} == raylets
    rows = again.rows()
    for slot in stored.slots:
        assert rows[slot.slot]["steps_ok"] >= slot.row.counts.steps_ok
        assert rows[slot.slot]["restarts"] >= slot.row.restarts
    return again


def test_nodes_by_hand_are_named_awaited_asked_and_used(
    start: Starter, by_hand: ByHand, tmp_path: Path
) -> None:
    by_hand.arguments = (*by_hand.arguments, *SMALL, *RESTING)
    by_hand.type_what_up_prints("pc1")
    refused_without_pc2(start, by_hand)

    awaiting = ("--duration", "10", "--json", "--wait-for-nodes", *by_hand.arguments)
    head = start(*awaiting, environment=by_hand.environment)
    head.wait_until_running(2)
    by_hand.type_what_up_prints("pc2")
    head.wait_until_running(3)
    assert by_hand.ask_ray() == {"pc1": 2, "pc2": 1}
    back_after_its_raylet_was_killed(head, by_hand)
    again = gone_on_after_its_head_was_killed(head, start, by_hand)
    by_hand.orchestrator("stop", "--set", f"run.dir={head.runs}")
    code, out, err = again.finish()
    assert code == 130, err
    summary = json.loads(out)
    assert (summary["run_id"], summary["outcome"]) == (head.folder().name, "interrupted")
    worked = [row["node"] for row in summary["workers"] if row["steps_ok"] > 0]
    assert worked == ["pc1", "pc1", "pc2"]
    wait_for(lambda: by_hand.ask_ray() == {}, "end of the actors with their head")
    for path in head.folder().iterdir():
        if path.suffix in {".jsonl", ".json", ".log"}:
            assert token_of(by_hand) not in path.read_text(errors="replace")

    found = doctor(by_hand, *TEAM)
    verdicts = {key: row["verdict"] for key, row in found.items()}
    expected = {(node, "network"): "ok" for node in ("pc1", "pc2")}
    expected |= {(node, "plan"): "fail" for node in ("pc1", "pc2")}
    # On a busy machine the import of torch may take too long.
    assert {verdicts[node, "torch"] for node in ("pc1", "pc2")} <= {"ok", "warn"}
    expected |= {(None, check): "ok" for check in ("versions", "token")}
    assert "b/s to pc1" in found["pc2", "link"]["found"]
    # If a node gave no answer, its findings say why.
    assert expected.items() <= verdicts.items(), json.dumps([*found.values()], indent=1)
    for node in ("pc1", "pc2"):
        assert "no NVIDIA card answers there" in found[node, "plan"]["found"]

    written, port = tmp_path / "cluster.yaml", by_hand.port
    by_hand.arguments = ()  # `init` has no configuration: it makes one
    by_hand.orchestrator("init", "--output", str(written))
    config = load_config(str(written))
    assert {name: node.gpus for name, node in config.nodes.items()} == {"pc1": 0, "pc2": 0}
    assert config.cluster.port == port, "and not the usual one, on which nothing listens"
    assert by_hand.ask_ray() == {}, "neither verb leaves an actor behind"
