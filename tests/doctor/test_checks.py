"""Each check of one machine, in tables: the problem, the verdict, and the command for the
user.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.schema import NodeConfig
from orchestrator.core.fleet import Link, NodeAnswer
from orchestrator.core.placement import Refusal
from orchestrator.doctor import checks
from orchestrator.doctor.checks import Cluster, Here, Machine, of_cluster, of_here, of_machine
from orchestrator.doctor.report import Finding, Verdict
from tests.factories import CPU_TORCH, CUDA_TORCH, REFERENCE, card_facts, laptop, workstation, wsl
from workers.host.facts import Holder, MachineFacts, TorchFacts
from workers.units import GIB

OK, SKIP, WARN, FAIL = Verdict.OK, Verdict.SKIP, Verdict.WARN, Verdict.FAIL


def examine(facts: MachineFacts, **known: Any) -> list[Finding]:
    return of_machine(Machine(facts=facts, **known))


def only(findings: list[Finding], check: str) -> Finding:
    (found,) = [finding for finding in findings if finding.check == check]
    return found


def test_a_machine_without_a_card_is_told_that_nothing_is_wrong() -> None:
    findings = examine(laptop())
    found = only(findings, "card")
    assert found.verdict is WARN
    assert "no NVIDIA card in this PC. Nothing is wrong" in found.found
    assert found.fix == "python -m orchestrator run --rehearse --duration 1"
    assert found.hint is not None
    assert "a PC with an NVIDIA card, its driver and a torch for CUDA" in found.hint
    assert [finding for finding in findings if finding.verdict in {WARN, FAIL}] == [found]


WORKERS = tuple(Holder(pid=pid, name="orch-engine", used_bytes=3 * GIB) for pid in range(7))
HOLDERS = (
    Holder(pid=900, name="Xorg", used_bytes=GIB // 2),
    Holder(pid=4711, name="game.exe", used_bytes=9 * GIB),
    Holder(pid=5, name=None, used_bytes=None),
)
LATE_TORCH = TorchFacts(is_late=True, error="it took long")
TI = card_facts(name="NVIDIA GeForce RTX 3070 Ti", total_bytes=8 * GIB)


@pytest.mark.parametrize(
    ("facts", "check", "verdict", "words", "fix"),
    [
        (laptop(pci_cards=1), "card", FAIL, "driver does not answer", "sudo ubuntu-drivers install && sudo reboot"),
        (laptop(nvml_error="RM has detected an NVML/RM version mismatch.", pci_cards=1),
         "card", FAIL, "updated while it was in use", "sudo reboot"),
        (workstation(cards=(), card_errors=("card 0 is lost",)), "card", FAIL, "card 0 is lost", "sudo reboot"),
        (workstation(cards=(card_facts(visible=False),), cuda_visible_devices=""),
         "card", FAIL, "hides every one", "unset CUDA_VISIBLE_DEVICES"),
        (workstation(torch=CPU_TORCH), "torch", FAIL, "never use the card", "python -m pip uninstall torch"),
        (workstation(torch=TorchFacts(error="No module 'torch'")), "torch", FAIL, "No module", "make setup"),
        (workstation(torch=LATE_TORCH), "torch", WARN, "not known: it took long", "python -m orchestrator doctor"),
        (workstation(torch=replace(CUDA_TORCH, cuda="13.0"), driver="550.54", driver_cuda=(12, 4)),
         "torch", FAIL, "built for CUDA 13.0, but driver 550.54 runs CUDA up to 12.4",
         "sudo ubuntu-drivers install && sudo reboot"),
        (workstation(torch=replace(CUDA_TORCH, available=False, error="CUDA unknown error")),
         "torch", FAIL, "CUDA unknown error", "sudo rmmod nvidia_uvm && sudo modprobe nvidia_uvm"),
        (wsl(torch=replace(CUDA_TORCH, available=False, error="CUDA unknown error")),
         "torch", FAIL, "CUDA unknown error", "wsl --shutdown"),
        (workstation(cards=(card_facts(compute_capability=(6, 1)),)),
         "torch", FAIL, "6.1", "python -m pip uninstall torch"),
        (workstation(cards=(card_facts(compute_capability=(12, 1)),)), "torch", OK, "sees the card", None),
        (workstation(cards=(card_facts(persistence=False),)), "persistence", WARN, "unloads an idle card",
         "sudo systemctl enable --now nvidia-persistenced || sudo nvidia-smi -pm 1"),
        (workstation(cards=(card_facts(persistence=False, display=True),)), "persistence", OK, "stays loaded", None),
        (laptop(cpu_governors=("powersave",)),
         "cpu_governor", WARN, "lowest clock", "sudo cpupower frequency-set -g schedutil"),
        (laptop(cpu_governors=("powersave",), cpu_scaling_driver="intel_pstate"),
         "cpu_governor", OK, "powersave", None),
        (workstation(), "card", OK, "23.56 GiB, driver 580.65.06, in cluster.yaml: rtx-3090", None),
        (laptop(torch=CUDA_TORCH), "torch", OK, "2.13.0+cu128, built for CUDA 12.8", None),
        (workstation(cards=(card_facts(used_bytes=21 * GIB, holders=WORKERS),)), "vram", OK, "2.56 GiB free", None),
        (workstation(cards=(card_facts(used_bytes=10 * GIB, holders=HOLDERS),)), "vram", WARN,
         "13.56 GiB free of 23.56; held by Xorg (pid 900), game.exe (pid 4711), unknown (pid 5)", "nvidia-smi"),
        (workstation(cards=(TI,)), "card", OK, "8.00 GiB, driver 580.65.06, in cluster.yaml: rtx-3070-ti", None),
    ],
)  # fmt: skip
def test_one_thing_is_wrong(
    facts: MachineFacts, check: str, verdict: Verdict, words: str, fix: str | None
) -> None:
    found = only(examine(facts), check)
    assert (found.verdict, found.fix) == (verdict, fix)
    assert words in found.found


@pytest.mark.parametrize(
    ("architectures", "capability", "verdict"),
    [
        (("sm_80",), (8, 6), OK),
        (("sm_86",), (8, 0), FAIL),
        (("sm_90a",), (9, 0), OK),
        (("sm_90a",), (9, 1), FAIL),
        (("sm_100", "sm_120"), (12, 0), OK),
        (("sm_75", "compute_75"), (8, 6), OK),
        (("compute_90",), (8, 6), FAIL),
        (("nonsense", "sm_", "compute_x"), (8, 6), FAIL),
    ],
)
def test_kernels_run_on_later_minor_and_major_versions(
    architectures: tuple[str, ...], capability: tuple[int, int], verdict: Verdict
) -> None:
    torch = replace(CUDA_TORCH, architectures=architectures)
    facts = workstation(torch=torch, cards=(card_facts(compute_capability=capability),))
    assert only(examine(facts), "torch").verdict is verdict


@pytest.mark.parametrize(
    ("free_bytes", "verdict"), [(10**12, OK), (500 * 2**20, WARN), (2**20, FAIL)]
)
def test_the_disk_of_run_folders(
    monkeypatch: pytest.MonkeyPatch, free_bytes: int, verdict: Verdict
) -> None:
    monkeypatch.setattr(checks, "free_bytes", lambda _: free_bytes)
    assert here()["disk"].verdict is verdict


def test_what_does_not_apply_is_not_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "free_bytes", lambda _: None)
    sleepy = wsl(cards=(card_facts(persistence=False),), cpu_governors=())
    found = {finding.check for finding in examine(sleepy)} | set(here())
    assert found.isdisjoint({"persistence", "cpu_governor", "disk"})


def test_every_failure_says_what_to_do() -> None:
    """A machine with all problems: each FAIL has a command, or a hint if no command helps."""
    config = REFERENCE.model_copy(update={"nodes": {"pc1": PC1}})
    broken = laptop(
        torch=TorchFacts(), pci_cards=2, card_errors=("card 1 is lost", "card 2 is lost")
    )
    found_here = examine(broken, config=config, name="pc1")
    failures = [found for found in found_here if found.verdict is FAIL]
    assert len(failures) >= 4
    assert all(found.fix or found.hint for found in failures)


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
        (PC1, workstation(cards=(SMALL_CARD,)), [FAIL], "7 workers x 3.3 GiB = 23.1 GiB, but 0.99 of"),
        (PC1.model_copy(update={"workers": 1}), workstation(cards=(SMALL_CARD,)), [OK], "which it has"),
        (PC1, workstation(cards=(card_facts(used_bytes=22 * GIB, holders=(WORKER,)),)), [OK], "which it has"),
        (CPU_NODE, laptop(), [OK], "pc1: 4 workers x 1 GiB on the processor, which it has"),
        (CPU_NODE, laptop(ram_available_bytes=2 * GIB), [FAIL], "= 4.00 GiB, and 2.00 GiB of memory are free"),
    ],
)  # fmt: skip
def test_a_plan_against_the_machine(
    plan: NodeConfig, facts: MachineFacts, verdicts: list[Verdict], words: str
) -> None:
    found = plan_of(plan, facts)
    assert [finding.verdict for finding in found] == verdicts
    assert words in found[0].found


def plan_of(plan: NodeConfig, facts: MachineFacts) -> list[Finding]:
    config = REFERENCE.model_copy(update={"nodes": {"pc1": plan}})
    found = examine(facts, config=config, name="pc1")
    return [finding for finding in found if finding.check == "plan"]


def answer(name: str | None = "pc1", **changes: Any) -> NodeAnswer:
    plain = NodeAnswer(
        name=name,
        address="192.168.1.10",
        facts=workstation(),
    )
    return replace(plain, **changes)


def nodes(*answers: NodeAnswer, missing: tuple[Refusal, ...] = ()) -> dict[str, Finding]:
    address = "192.168.1.10:6379"
    cluster = Cluster(config=REFERENCE, address=address, missing=missing, answers=answers)
    found = of_cluster(cluster)
    return {f"{finding.node}/{finding.check}": finding for finding in found}


PAIR = (answer(), answer("pc2", address="192.168.1.11"))


@pytest.mark.parametrize(
    ("told", "verdict", "words"),
    [
        ({"bytes_per_s": 117e6}, OK, "936 Mb/s to pc1: 100 MB of sums, 25 million trained weights, take 0.85 s"),
        ({"bytes_per_s": 11.7e6}, WARN, "94 Mb/s to pc1: a cable, a switch or a port of 100 Mb/s"),
        ({"error": "[Errno 98] Address already in use"}, SKIP, "is not measured: [Errno 98] Address already in use"),
        ({"error": "10.0.0.1:6390 cannot be reached: timed out"}, WARN, "cannot be reached"),
    ],
)  # fmt: skip
def test_the_link_of_a_team(told: dict[str, Any], verdict: Verdict, words: str) -> None:
    links = (Link(node="pc2", to="pc1", **told),)
    cluster = Cluster(config=REFERENCE, address="a:1", missing=(), answers=PAIR, links=links)
    found = only(of_cluster(cluster), "link")
    assert (found.node, found.verdict) == ("pc2", verdict)
    assert words in found.found
    if told.get("bytes_per_s") == 11.7e6:
        assert "take 8.5 s a step; they would take 0.9 s at 1 Gb/s and 0.36 s at 2.5 Gb/s" in str(
            found.hint
        )


def unlike(**facts: Any) -> tuple[NodeAnswer, NodeAnswer]:
    return answer(), answer("pc2", facts=workstation(**facts))


@pytest.mark.parametrize(
    ("answers", "check", "verdict", "words"),
    [
        (PAIR, "None/nodes", OK, "2 planned nodes there, with the CPUs and GPUs planned"),
        (PAIR, "pc2/network", OK, "reaches every other node"),
        ((answer(facts=None, error="No module named 'workers'"),), "pc1/nodes", FAIL, "No module named 'workers'"),
        ((answer(facts=None, is_late=True, error="late"),), "pc1/nodes", FAIL, "not answer: late"),
        ((answer(unreachable=("192.168.1.11:40001",)),), "pc1/network", FAIL, "192.168.1.11:40001"),
        ((answer(None),), "192.168.1.10/nodes", WARN, "has no label"),
        ((answer("pc7"),), "pc7/nodes", WARN, "cluster.yaml does not name it"),
        (unlike(python="3.12.1"), "None/versions", FAIL, "Python differs: pc1 has 3.11, pc2 has 3.12"),
        (unlike(python="3.11.9"), "None/versions", OK, "the same on every node"),
        (unlike(ray="2.59.0"), "None/versions", FAIL, "Ray differs: pc1 has 2.60.0, pc2 has 2.59.0"),
        (unlike(project=None), "None/versions", FAIL, "this project differs: pc1 has 0.1.0, pc2 has none"),
        (unlike(torch=replace(CPU_TORCH, version="2.12.0+cpu")),
         "None/versions", WARN, "torch differs: pc1 has 2.13.0, pc2 has 2.12.0"),
        (unlike(torch=CPU_TORCH), "None/versions", OK, "the same on every node"),
        (unlike(torch=LATE_TORCH), "None/versions", OK, "the same on every node"),
    ],
)  # fmt: skip
def test_what_nodes_answer(
    answers: tuple[NodeAnswer, ...], check: str, verdict: Verdict, words: str
) -> None:
    found = nodes(*answers)[check]
    assert found.verdict is verdict
    assert words in found.found
    assert found.hint or found.fix or verdict in {OK, SKIP}


def test_the_firewall_opens_the_ports_of_ray_to_one_node() -> None:
    """It never opens all ports, or ports to a whole network."""
    shut = answer(unreachable=("192.168.1.11:40001", "192.168.1.11:40002"))
    found = nodes(shut)["pc1/network"]
    ports = f"{REFERENCE.cluster.port},10002:19999,32768:60999"
    assert found.fix == f"sudo ufw allow proto tcp from 192.168.1.10 to any port {ports}"
    assert str(found.hint).startswith("on 192.168.1.11, let pc1 in")


def test_a_missing_node_comes_with_the_exact_command() -> None:
    absent = Refusal(node="pc2", text="no live node has the label node=pc2")
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
    found = here(is_cluster=is_needed, auth=auth)["token"]
    assert (found.verdict, found.fix) == (verdict, None if fix is None else fix.format(path))
    assert "secret" not in str(found)


def here(*, is_cluster: bool = False, **cluster: object) -> dict[str, Finding]:
    config = REFERENCE.model_copy(update={"cluster": REFERENCE.cluster.model_copy(update=cluster)})
    found = of_here(Here(config=config, is_cluster=is_cluster))
    return {finding.check: finding for finding in found}
