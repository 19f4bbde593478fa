"""The output of `plan`: every node once, sums that can be checked by hand, and whether a training
fits.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from orchestrator.cli.plan import plan_object, plan_parts
from orchestrator.cli.printing import text_lines
from orchestrator.config.schema import Config
from orchestrator.core.placement import Target, plan_slots
from orchestrator.view.terminal import plain_text
from tests.cli.conftest import Command
from tests.factories import REFERENCE, config_of
from tests.scene import MIB, ROOT
from workers.settings import ASSUMED_CONTEXT_BYTES
from workers.units import GIB

pytestmark = pytest.mark.torch


def one_node(name: str = "pc1", **changes: object) -> Config:
    return config_of({name: {"workers": 3, **changes}})


def text_of(plan: dict[str, Any], width: int | None = None) -> str:
    return plain_text([*text_lines(plan_parts(plan), width)])


def test_the_reference_pair_is_planned_as_the_guides_have_it() -> None:
    plan = plan_object(REFERENCE)
    table, notes = text_of(plan).split("\n\n")
    lines = [" ".join(line.split()) for line in table.splitlines()]
    assert lines[0] == (
        "node workers card type budget cap about sum of a card allowed Ray GPU CPUs duty size batch"
    )
    assert lines[1:] == [
        "pc1 7 1 x rtx-3090 fp16 3.30 GiB 2.64 GiB 23.10 GiB 23.32 GiB 0.1428 56 60% 8192 128",
        "pc2 3 1 x rtx-3070 fp16 1.50 GiB 0.84 GiB 4.50 GiB 5.75 GiB 0.3333 12 70% 4096 128",
    ]
    assert "runs matmul with the policy adaptive" in notes
    slots = [plan.spec.slot for plan in plan_slots(REFERENCE, Target())]
    assert [worker["slot"] for node in plan["nodes"] for worker in node["workers"]] == slots


def test_the_longest_names_are_not_cut() -> None:
    node, card = "n" * 63, "Card " * 12 + "XYZ"
    config = one_node(node, gpu=card, vram_per_worker_gib=1000.5, vram_gib=4096, size=1_048_576)
    line = text_of(plan_object(config)).splitlines()[1]
    assert line.startswith(f"{node}        3  1 x {card}  ")
    assert line.endswith("1048576    128")


def test_workers_of_two_cards_are_on_theirs() -> None:
    plan = plan_object(one_node(gpus=2, workers=3))
    assert [worker["card"] for worker in plan["nodes"][0]["workers"]] == [0, 0, 1]


def test_a_node_without_cards_has_no_context_and_no_total() -> None:
    plan = plan_object(one_node(gpu="cpu", gpus=0))
    line = " ".join(text_of(plan).splitlines()[1].split())
    assert line.startswith("pc1 3 CPU fp16 1.00 GiB 1.00 GiB 3.00 GiB 0.0000"), "no `allowed`"
    (node,) = plan["nodes"]
    worker = node["workers"][0]
    assert (node["card_total_bytes"], node["card_allowed_bytes"], worker["card"]) == (None,) * 3
    assert worker["cap_about_bytes"] == GIB


#: A task that prints, which must not reach the JSON, and three tasks that cannot be planned.
OWN = """
from dataclasses import replace
import torch
from torch import nn
from workers.training.tasks import TrainTask

print("imported", end="")
good = TrainTask(
    name="numbers",
    model=lambda: nn.Linear(1024, 1024, bias=False),
    dataset=torch.zeros(64, 1024),
    loss=lambda model, part: model(part).square().sum(),
)
nothing_to_train = replace(good, model=nn.Identity)
reads_a_value = replace(good, loss=lambda model, part: model(part).sum() * part.sum().item())


def ends(settings):
    raise SystemExit(7)
"""

STATE = ("weights_bytes", "gradients_bytes", "optimizer_bytes", "average_bytes")


def training_config(caps_mib: dict[str, float], **train: object) -> Config:
    """Return nodes, each with a card and a cap in MiB, and a training."""
    nodes = {
        node: {"vram_per_worker_gib": (cap * MIB + ASSUMED_CONTEXT_BYTES) / 2**30}
        for node, cap in caps_mib.items()
    }
    return config_of(nodes, workload={"name": "train"}, train=train)


@pytest.fixture(scope="module")
def small() -> dict[str, Any]:
    """Plan gpt2-small, which needs 16,843 MiB as a whole, for five nodes with four caps."""
    config = training_config(
        {"pc1": 20_000, "pc2": 10_000, "pc3": 2_800, "pc4": 2_600, "pc5": 20_000},
        preset="gpt2-small",
    )
    return plan_object(config)


def test_each_cap_gets_a_verdict_and_steps_whose_parts_add_up(small: dict[str, Any]) -> None:
    training = small["training"]
    verdicts = {tuple(cap["nodes"]): cap["verdict"] for cap in training["caps"]}
    assert verdicts == {
        ("pc1", "pc5"): "fits",
        ("pc2",): "fits_in_parts",
        ("pc3",): "fits_recomputed",
        ("pc4",): "does_not_fit",
    }
    whole, parts, recomputed, too_large = (cap["steps"] for cap in training["caps"])
    splits = [(step["micro_batch"], step["accumulation"], step["memory_level"]) for step in parts]
    assert splits == [(8, 2, 0), (8, 2, 12), (1, 16, 12)]
    assert [step["fits"] for step in recomputed] == [False, True]
    assert [step["fits"] for step in too_large] == [False]
    assert whole[0]["micro_batch"] == 16
    for cap in training["caps"]:
        for step in cap["steps"]:
            highest = max(step["activations_bytes"], step["update_bytes"])
            assert (
                step["total_bytes"]
                == sum(step[key] for key in STATE) + highest + step["workspace_bytes"]
            )
            assert step["fits"] == (step["total_bytes"] <= cap["cap_bytes"])


def test_a_person_reads_the_parts_the_verdict_and_what_to_change(small: dict[str, Any]) -> None:
    _, _, fits = text_of(small).partition(
        "Will it fit? gpt2-small, bf16, batch 16, train.recompute: auto\n\n"
    )
    first, *_, last, _ = fits.split("\n\n")
    table = [line.split() for line in first.splitlines()]
    assert first.startswith("pc1, pc5: cap about 20000 MiB, cuda\n")
    assert " ".join(table[1]) == "micro x accumulation 16 x 1 16 x 1 1 x 16"
    assert [line[0].strip(",") for line in table[3:13]] == [
        "weights", "gradients", "optimizer", "activations", "update", "workspace", "total",
        "checkpoint_copy", "on_host", "fits",
    ]  # fmt: skip
    assert first.endswith(
        "pc1, pc5: fits whole with micro-batch 16 x accumulation 1, which takes 16851 of 20000 MiB"
    )
    sentence = last.splitlines()[-1]
    assert sentence.startswith(
        "pc4: does not fit: the smallest step, with all 12 blocks recomputed, needs 2619 MiB, "
    )
    assert sentence.endswith(
        "set nodes.pc4.vram_per_worker_gib to 3.22 or more, or lower train.seq, or take a smaller model"
    )


def test_a_model_that_is_divided_is_planned_by_its_parts(command: Command) -> None:
    team = ("--set", "workload.name=train", "--set", "train.team=[pc2, pc1]")
    large = ("--set", "train.preset=gpt2-medium", "--set", "nodes.pc1.vram_per_worker_gib=0.7")
    typed = ("plan", "-c", str(ROOT / "cluster.yaml"), *team, *large)
    alone = command(*typed, "--json").stdout
    verdicts = [cap["verdict"] for cap in json.loads(alone)["training"]["caps"]]
    assert verdicts == ["does_not_fit"] * 2
    assert alone.count("or divide it with train.split: layers") == 2
    training = json.loads(command(*typed, "--set", "train.split=layers", "--json").stdout)[
        "training"
    ]
    assert [cap["nodes"] for cap in training["caps"]] == [["pc1/0"], ["pc2/0"]]
    first, end = training["lent"]
    assert "does_not_fit" not in {cap["verdict"] for cap in training["caps"]}
    text = command(*typed, "--set", "train.split=auto").stdout
    assert f"pc1/0 leads with blocks 0 to {first - 1} and block {end}, and what is before" in text
    assert f"pc2/0 has blocks {first} to {end - 1}." in text


def test_the_page_shows_what_a_plan_says(command: Command, nowhere: Path) -> None:
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    (typed, shown) = re.findall(
        r"^\$ python -m orchestrator (plan .*)\n\.\.\.\n(.*?)^```", page, re.DOTALL | re.MULTILINE
    )[0]
    config = yaml.safe_load((ROOT / "cluster.yaml").read_text(encoding="utf-8"))
    del config["nodes"]["pc2"]  # which the page does not show
    (nowhere / "cluster.yaml").write_text(yaml.safe_dump(config))
    assert shown in command(*typed.split()).stdout


@pytest.fixture
def own(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Plan a task of a module in the current folder, as a user does."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_tasks.py").write_text(OWN)

    def plan(preset: str, *more: str) -> Any:
        trains = ("--set", "workload.name=train", "--set", f"train.preset=own_tasks:{preset}")
        return command("plan", "-c", str(ROOT / "cluster.yaml"), *trains, *more)

    return plan


def test_a_task_in_the_current_folder_is_planned(own: Command) -> None:
    training = json.loads(own("good", "--json").stdout)["training"]
    assert [cap["nodes"] for cap in training["caps"]] == [["pc1"], ["pc2"]]
    for cap in training["caps"]:
        assert [step["weights_bytes"] for step in cap["steps"]] == [4 * MIB] * 2
        assert cap["verdict"] == "fits"


def test_what_cannot_be_trained_is_refused_in_one_sentence(own: Command) -> None:
    done = own("nothing_to_train")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("the model of numbers has no parameter that is trained")


@pytest.mark.parametrize(
    ("task", "said"),
    [
        ("reads_a_value", "the model cannot be computed on tensors without data: DataDependentOutput"),
        ("ends", "the process that computes it ended with status 7"),
    ],
)  # fmt: skip
def test_what_the_run_must_find_out_is_said_below_the_plan(
    own: Command, task: str, said: str
) -> None:
    done = own(task)
    assert done.returncode == 0
    last = done.stdout.splitlines()[-1]
    assert last.startswith(f"Not known, so the run finds out by itself: {said}")


def test_a_budget_below_a_context_leaves_no_cap() -> None:
    (node,) = plan_object(one_node(vram_per_worker_gib=0.1))["nodes"]
    assert {worker["cap_about_bytes"] for worker in node["workers"]} == {0}
