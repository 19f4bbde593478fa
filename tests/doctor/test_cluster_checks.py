"""cluster.yaml against what nodes really have, and what concerns several nodes at once."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.schema import NodeConfig
from orchestrator.core.fleet import NodeAnswer
from orchestrator.core.placement import Missing, Refusal
from orchestrator.doctor.checks_cluster import check_nodes, check_plan
from orchestrator.doctor.finding import Finding, Verdict
from orchestrator.doctor.verb import check_port, check_token
from tests.factories import CPU_TORCH, REFERENCE, card_facts, laptop, workstation
from workers.host.facts import Holder, MachineFacts
from workers.units import GIB

OK, SKIP, WARN, FAIL = Verdict.OK, Verdict.SKIP, Verdict.WARN, Verdict.FAIL

PC1 = REFERENCE.nodes["pc1"]

SMALL_CARD = card_facts(name="NVIDIA GeForce RTX 3070", total_bytes=round(7.67 * GIB))
WORKER = Holder(pid=1, name="ray::Wo", used_bytes=None)
CPU_NODE = NodeConfig(gpu="cpu", gpus=0, workers=4, vram_per_worker_gib=1.0)


@pytest.mark.parametrize(
    ("plan", "facts", "verdicts", "words"),
    [
        (PC1, workstation(), [OK], "pc1: 7 workers x 3.3 GiB on 1 x rtx-3090, which it has"),
        (PC1, workstation(cards=(card_facts(), replace(SMALL_CARD, used_bytes=5 * GIB))), [OK], "which it has"),
        (PC1, laptop(), [FAIL], "cluster.yaml gives pc1 1 x rtx-3090, but no NVIDIA card answers there"),
        (PC1.model_copy(update={"gpus": 2}), workstation(), [FAIL], "but 1 answer there"),
        (PC1, workstation(cards=(SMALL_CARD,)), [FAIL, WARN], "7 workers x 3.3 GiB = 23.10 GiB, but 0.99 of"),
        (
            PC1.model_copy(update={"workers": 2}), workstation(cards=(SMALL_CARD,)), [WARN],
            "has a NVIDIA GeForce RTX 3070 with 7.67 GiB, for which cluster.yaml says 23.56",
        ),
        (
            PC1, workstation(cards=(card_facts(used_bytes=5 * GIB, holders=(WORKER, replace(WORKER, name="game"))),)),
            [WARN],
            "its workers want 23.10 GiB of card #0, and 18.56 GiB are free",
        ),
        (PC1, workstation(cards=(card_facts(used_bytes=22 * GIB, holders=(WORKER,)),)), [OK], "which it has"),
        (CPU_NODE, laptop(), [OK], "pc1: 4 workers x 1 GiB on the processor, which it has"),
        (CPU_NODE, laptop(ram_available_bytes=2 * GIB), [FAIL], "= 4.00 GiB, and 2.00 GiB of memory are free"),
        (CPU_NODE, workstation(), [WARN], "lets pc1 work on its processor, and it has a NVIDIA GeForce RTX 3090"),
    ],
)  # fmt: skip
def test_a_plan_against_the_machine(
    plan: NodeConfig, facts: MachineFacts, verdicts: list[Verdict], words: str
) -> None:
    found = list(check_plan("pc1", plan, facts, is_sure=True))
    assert [finding.verdict for finding in found] == verdicts
    assert words in found[0].found


def test_a_machine_that_may_be_another_one_is_only_warned() -> None:
    (found,) = check_plan("pc1", PC1, laptop(), is_sure=False)
    assert found.verdict is WARN
    assert found.found.endswith("(if this PC is meant)")


def test_a_plan_that_does_not_fit_says_what_would() -> None:
    found = next(iter(check_plan("pc1", PC1, workstation(cards=(SMALL_CARD,)), is_sure=True)))
    assert found.hint == "in cluster.yaml: at most 2 workers, or vram_per_worker_gib <= 1.08"


def answer(name: str | None = "pc1", **changes: Any) -> NodeAnswer:
    plain = NodeAnswer(
        name=name,
        address="192.168.1.10",
        facts=workstation(),
        clock_offset_s=0.004,
        clock_error_s=0.001,
    )
    return replace(plain, **changes)


def nodes(*answers: NodeAnswer, missing: tuple[Refusal, ...] = ()) -> dict[str, Finding]:
    found = check_nodes(REFERENCE, "192.168.1.10:6379", missing, answers)
    return {f"{finding.node}/{finding.check}": finding for finding in found}


PAIR = (answer(), answer("pc2", address="192.168.1.11"))


def clock(offset_s: float | None, error_s: float | None) -> tuple[NodeAnswer]:
    return (answer(clock_offset_s=offset_s, clock_error_s=error_s),)


def unlike(**facts: Any) -> tuple[NodeAnswer, NodeAnswer]:
    return answer(), answer("pc2", facts=workstation(**facts))


@pytest.mark.parametrize(
    ("answers", "check", "verdict", "words"),
    [
        (PAIR, "None/nodes", OK, "2 planned nodes there, with the CPUs and GPUs planned"),
        (PAIR, "pc2/clock", OK, "0.004 s ahead of this PC's, give or take 0.001 s"),
        (PAIR, "pc2/network", OK, "reaches every other node"),
        ((answer(facts=None, error="No module named 'workers'"),), "pc1/answer", FAIL, "No module named 'workers'"),
        (clock(0.5, 0.01), "pc1/clock", OK, "0.500 s ahead"),
        (clock(-3.0, 0.01), "pc1/clock", WARN, "3.000 s behind"),
        (clock(1.2, 0.5), "pc1/clock", OK, "give or take 0.500 s"),
        (clock(None, None), "pc1/clock", SKIP, "could not be compared"),
        ((answer(unreachable=("192.168.1.11:40001",)),), "pc1/network", FAIL, "192.168.1.11:40001"),
        ((answer(None),), "192.168.1.10/nodes", WARN, "has no label"),
        ((answer("pc7"),), "pc7/nodes", WARN, "cluster.yaml has no node pc7"),
        (unlike(python="3.12.1"), "None/versions", FAIL, "Python differs: pc1 has 3.11, pc2 has 3.12"),
        (unlike(python="3.11.9"), "None/versions", OK, "the same on every node"),
        (unlike(ray="2.59.0"), "None/versions", FAIL, "Ray differs: pc1 has 2.60.0, pc2 has 2.59.0"),
        (unlike(project=None), "None/versions", FAIL, "this project differs: pc1 has 0.1.0, pc2 has none"),
        (
            unlike(torch=replace(CPU_TORCH, version="2.12.0+cpu")),
            "None/versions", WARN, "torch differs: pc1 has 2.13.0, pc2 has 2.12.0",
        ),
        (unlike(torch=CPU_TORCH), "None/versions", OK, "the same on every node"),
    ],
)  # fmt: skip
def test_what_nodes_answer(
    answers: tuple[NodeAnswer, ...], check: str, verdict: Verdict, words: str
) -> None:
    found = nodes(*answers)[check]
    assert found.verdict is verdict
    assert words in found.found
    assert found.hint or found.fix or verdict in {OK, SKIP} or check == "pc7/nodes"


def test_a_missing_node_comes_with_the_exact_command() -> None:
    absent = Refusal(node="pc2", missing=Missing.NODE, text="no live node has the label node=pc2")
    found = nodes(answer(), missing=(absent,))["pc2/nodes"]
    assert found.verdict is FAIL
    assert (
        "ray start --address=192.168.1.10:6379 --labels=node=pc2 --num-cpus=12 --num-gpus=1"
        in str(found.fix)
    )


@pytest.mark.parametrize(
    ("auth", "mode", "in_environment", "is_needed", "verdict", "fix"),
    [
        ("token", 0o600, False, True, OK, None),
        ("token", 0o644, False, True, WARN, "chmod 600 {}"),
        ("token", None, False, True, FAIL, None),
        ("token", None, False, False, SKIP, None),
        ("token", None, True, True, OK, None),
        ("none", 0o600, False, True, WARN, None),
    ],
)
def test_the_token(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    auth: str,
    mode: int | None,
    in_environment: bool,
    is_needed: bool,
    verdict: Verdict,
    fix: str | None,
) -> None:
    path = tmp_path / "auth_token"
    if mode is not None:
        path.touch()
        path.chmod(mode)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(path))
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret" if in_environment else "")
    found = check_token(auth, is_needed=is_needed)
    assert (found.verdict, found.fix) == (verdict, None if fix is None else fix.format(path))
    assert "secret" not in str(found)


def test_a_port_that_is_taken_says_by_whom() -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        port = taken.getsockname()[1]
        taken.listen()
        found = check_port(port)
    assert found.verdict is WARN
    assert re.fullmatch(rf"{port} is taken by .+ \(pid {os.getpid()}\); a head .+", found.found)
    assert check_port(port).verdict is OK
