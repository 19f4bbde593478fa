"""The members of a team, the configuration of a run that trains only the team, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.load import config_from_text, dump_config
from orchestrator.config.schema import Config
from orchestrator.config.team import members, with_team_alone, without_team
from orchestrator.core.node_commands import firewall_lines
from orchestrator.core.placement import Target, idle_line, listening_at, plan_slots
from orchestrator.errors import ConfigError
from orchestrator.jobs.spec import parse
from orchestrator.jobs.sweep import job_config
from orchestrator.run.environment import in_rehearsal
from orchestrator.run.scaling import REHEARSAL_SCALE, scale_config
from tests.config.test_config_errors import problems_of
from tests.factories import REFERENCE, config_of
from workers.training.settings import TrainSettings

NODES: dict[str, dict[str, Any]] = {
    "pc1": {"workers": 7, "gpu_share": 0.6, "vram_per_worker_gib": 3.3, "cpus_per_worker": 8},
    "pc2": {"workers": 3, "gpu_share": 0.2, "vram_per_worker_gib": 1.5, "cpus_per_worker": 4},
    "pc3": {"workers": 4, "gpus": 2, "gpu_share": 0.25, "vram_per_worker_gib": 2.0},
    "pc4": {"gpu": "cpu", "gpus": 0, "workers": 2, "vram_per_worker_gib": 1.0},
}

YAML = """\
nodes:
  pc1: {gpu: rtx-3090, workers: 7, vram_per_worker_gib: 3}
  pc2:
    gpu: rtx-3070
    workers: 3
    vram_per_worker_gib: 1.5
    team_listen: 192.168.1.11:6390
workload:
  name: train
train:
  team: [pc1, pc2]
"""


def team_of(team: object, nodes: dict[str, dict[str, Any]] = NODES) -> Config:
    return config_of(nodes, workload={"name": "train"}, train={"team": team})


@pytest.mark.parametrize(
    ("team", "expected"),
    [
        (["pc2", "pc1"], ["pc2/0", "pc1/0"]),
        (["pc1/3", "pc2/0"], ["pc1/3", "pc2/0"]),
        (["pc3", "pc4"], ["pc3/0", "pc3/1", "pc4/0"]),
        ("all", ["pc1/0", "pc2/0", "pc3/0", "pc3/1", "pc4/0"]),
        (None, []),
    ],
)
def test_a_pc_is_a_member_for_each_card(team: object, expected: list[str]) -> None:
    assert list(members(team_of(team))) == expected


def test_a_member_has_what_all_workers_of_its_card_had() -> None:
    config = with_team_alone(team_of(["pc2", "pc3"]))
    # The head's node stays, whichever nodes train.
    assert list(config.nodes) == ["pc1", "pc2", "pc3"]
    assert config.nodes["pc1"] == team_of(None).nodes["pc1"]
    pc2, pc3 = config.nodes["pc2"], config.nodes["pc3"]
    assert (pc2.workers, pc2.cpus_per_worker, pc2.vram_per_worker_gib) == (1, 12, 4.5)
    assert pc2.gpu_share == pytest.approx(0.6)
    assert (pc3.workers, pc3.gpus, pc3.gpu_share, pc3.vram_per_worker_gib) == (2, 2, 0.5, 4.0)
    assert with_team_alone(team_of(["pc1", "pc2"])).nodes["pc1"].gpu_share == 1.0


@pytest.mark.parametrize("team", [["pc2", "pc3"], ["pc1/3", "pc2/0"], "all", None])
def test_it_is_the_same_when_the_run_is_resumed(team: object) -> None:
    nodes = {name: {**node, "vram_gib": 30.0} for name, node in NODES.items()}
    config = with_team_alone(team_of(team, nodes))
    again = config_from_text(dump_config(config), "run")
    assert with_team_alone(again) == again == config


def test_all_members_get_one_seed_and_no_other_slot_is_planned() -> None:
    config = team_of(["pc1/3", "pc2/0"])
    plans = plan_slots(config, Target(device="cpu"))
    assert [plan.spec.slot for plan in plans] == ["pc1/3", "pc2/0"]
    assert {plan.spec.workload.seed for plan in plans} == {0}
    assert idle_line(config, plans) == (
        "Trained by pc1/3, pc2/0, which share each step; 14 more stay without a process "
        "(train.team names those that train)"
    )
    whole = with_team_alone(team_of(["pc1", "pc2"]))
    plans = plan_slots(whole, Target(device="cpu"))
    assert idle_line(whole, plans) == "Trained by pc1/0, pc2/0, which share each step"


def test_each_member_listens_at_one_address_of_its_pc() -> None:
    nodes = {**NODES, "pc2": {**NODES["pc2"], "team_listen": "10.0.0.2:7000"}}

    def listen(*team: str, one_machine: bool = False) -> list[str]:
        target = Target(device="cpu", one_machine=one_machine)
        plans = plan_slots(with_team_alone(team_of(list(team), nodes)), target)
        specs = [listening_at(plan.spec, f"10.0.0.{plan.spec.node[-1]}") for plan in plans]
        return [spec.team.listen for spec in specs if spec.team is not None]

    assert listen("pc1", "pc2") == ["10.0.0.1:6390", "10.0.0.2:7000"]
    assert listen("pc1/0", "pc2/1", "pc2/0") == ["10.0.0.1:6390", "10.0.0.2:7001", "10.0.0.2:7000"]
    # Members without a firewall between them use any free port.
    assert listen("pc2/1", "pc2/0") == ["127.0.0.1:0"] * 2
    assert listen("pc1", "pc2", one_machine=True) == ["127.0.0.1:0"] * 2
    (spec, _) = (plan.spec for plan in plan_slots(team_of(["pc1", "pc3/0"]), Target(device="cpu")))
    assert listening_at(spec, "fe80::1").team.listen == "[fe80::1]:6390"  # type: ignore[union-attr]


def test_the_lines_for_a_firewall() -> None:
    plans = plan_slots(team_of(["pc1/0", "pc1/1", "pc2/0"]), Target(device="cpu"))
    assert [line.partition(": ") for line in firewall_lines(plans, {"pc1": "10.0.0.1"})] == [
        (f"on {node}, where it has a firewall", ": ", f"sudo ufw allow proto tcp from {told}")
        for node, told in (
            ("pc1", "ADDRESS_OF_pc2 to 10.0.0.1 port 6390:6391"),
            ("pc2", "10.0.0.1 to ADDRESS_OF_pc2 port 6390"),
        )
    ]
    assert firewall_lines(plan_slots(team_of(["pc1/0", "pc1/1"]), Target(device="cpu")), {}) == ()


def test_a_rehearsal_keeps_the_shares_of_the_members() -> None:
    config = in_rehearsal(team_of(["pc1", "pc2"])).config
    scaled, _ = scale_config(with_team_alone(team_of(["pc1", "pc2"])), REHEARSAL_SCALE, None)
    sizes = [
        [node.vram_per_worker_gib for node in each.nodes.values()] for each in (config, scaled)
    ]
    assert sizes[0][0] / sizes[0][1] == pytest.approx(sizes[1][0] / sizes[1][1])
    assert members(config) == ("pc1/0", "pc2/0")


@pytest.mark.parametrize(
    ("old", "new", "line", "key", "said"),
    [
        ("[pc1, pc2]", "[pc1, pc3]", 11, "train.team.1",
         "there is no PC 'pc3'; did you mean pc2?; valid: pc1, pc2, a slot such as pc2/2, or all"),
        ("[pc1, pc2]", "\n  - pc1/0\n  - pc2/3", 13, "train.team.1",
         "there is no slot 'pc2/3'; did you mean pc2/2?"),
        ("[pc1, pc2]", "[pc1]", 11, "train.team",
         "a team needs two members or more, and this one has pc1/0; valid: two PCs or slots"),
        ("[pc1, pc2]", "[]", 11, "train.team", "two members or more, and this one has none"),
        ("[pc1, pc2]", "[pc1, pc2, pc1/0]", 11, "train.team.2",
         "pc1/0 has pc1/0, which pc1 has named already; valid: each member once"),
        ("[pc1, pc2]", "pc1", 11, "train.team", "'pc1' should be 'all', or be a valid list"),
        ("[pc1, pc2]", "[pc1, pc2]\n  slots: 2", 10, "train",
         "slots: 2 are trainings by themselves, and team makes one training of its members"),
        ("[pc1, pc2]", "[pc1, pc2]\n  dropout: 0.1\n  r_drop: 1.0", 10, "train",
         "r_drop: 1.0 compares two passes over whole batches"),
        ("[pc1, pc2]", "[pc1/0, pc1/1, pc2/0]\n  split: layers", 11, "train.team",
         "split: layers divides a model over two members, and this team has 3; valid: two PCs or"),
        ("[pc1, pc2]", "[pc1, pc2]\n  split: layers\n  ema_decay: 0.9", 10, "train",
         "split: layers divides the model over two members, which train.ema_decay: 0.9 cannot be"),
        ("[pc1, pc2]", "[pc1, pc2]\n  split: date", 12, "train.split", "'date' should be 'data', 'auto' or"),
        ("name: train", "name: matmul", 11, "train.team",
         "a team trains, and workload.name is matmul; valid: workload.name: train (run --workload"),
        ("192.168.1.11:6390", "0.0.0.0:6390", 7, "nodes.pc2.team_listen",
         "0.0.0.0 would listen on every network of this PC; valid: an address of this PC and a"),
        ("192.168.1.11:6390", '"[::]:6390"', 7, "nodes.pc2.team_listen",
         "[::] would listen on every network of this PC"),
        ("192.168.1.11:6390", '"0:6390"', 7, "nodes.pc2.team_listen", "is not ADDRESS:PORT"),
        ("192.168.1.11:6390", "6390", 7, "nodes.pc2.team_listen",
         "6390 should be a valid string; valid: an address of this PC and a port"),
        ("192.168.1.11:6390", "192.168.1.11:0", 7, "nodes.pc2.team_listen",
         "'192.168.1.11:0' has no port from 1 to 65000"),
    ],
)  # fmt: skip
def test_each_mistake_is_one_sentence_at_its_line(
    tmp_path: Path, old: str, new: str, line: int, key: str, said: str
) -> None:
    (problem,) = problems_of(tmp_path, YAML.replace(old, new))
    assert (problem.line, problem.key) == (line, key)
    assert said in f"{problem.text}; valid: {problem.valid}"


def test_jobs_work_without_the_team_of_a_run() -> None:
    base = without_team(team_of(["pc1", "pc2"]))
    assert not members(base)
    assert with_team_alone(base) == base


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("train: {team: [pc1, pc2/0]}", "a job takes whole cards, and 'pc2/0' is one worker of"),
        ("train: {team: [pc1, pc3]}", "there is no PC 'pc3'; did you mean pc2?"),
        ("train: {team: 5}", "train.team: 5 should be 'all', or be a valid list"),
        ("train: {team: all}, nodes: [pc1]", "names the cards of a job, and so does nodes"),
        ("train: {team: all}, pack: true", "names the cards of a job, and so does pack"),
        (
            "train: {team: all, split: auto}",
            "a job must say what its members divide; valid: split: data, or layers, below train",
        ),
        ("train: {team: all, split: layer}", "'layer' should be 'data', 'auto' or 'layers'"),
        ("train: {lr: 1e-3}, sweep: {over: {team: [all]}}",
         "is the same for all members of a sweep; valid: team below train"),
    ],
)  # fmt: skip
def test_a_job_refuses_a_team_that_cannot_be(entry: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(f"jobs:\n  - {{name: a, {entry}}}\n", "night.yaml", REFERENCE)
    (problem,) = caught.value.problems
    assert problem.line == 2
    assert said in str(problem)


def test_a_job_of_a_team_may_be_swept_whatever_the_run_trains() -> None:
    base = REFERENCE.model_copy(update={"train": TrainSettings(slots=3)})
    sweep = "train: {team: [pc2, pc1]}, sweep: {over: {lr: [1e-3, 1e-4]}}"
    jobs = parse(f"jobs:\n  - {{name: a, {sweep}}}\n", "night.yaml", base).jobs
    assert [(job.is_team, job.nodes) for job in jobs] == [(True, ("pc2", "pc1"))] * 2
    slots = [plan.spec.slot for plan in plan_slots(job_config(base, jobs[0]), Target())]
    assert slots == ["pc1/0", "pc2/0"]


def test_a_team_changes_nothing_of_what_is_trained() -> None:
    alone, shared = TrainSettings(), TrainSettings(team=["pc1", "pc2"])
    assert alone.fingerprint() == shared.fingerprint()
