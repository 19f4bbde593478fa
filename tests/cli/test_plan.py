"""What `plan` shows: every worker once, and the sums a person would check by hand."""

from __future__ import annotations

import json
from typing import Any

import pytest

from orchestrator.cli.plan import plan_json, plan_text
from orchestrator.config.schema import Config
from orchestrator.core.placement import Target, plan_slots
from orchestrator.view.cells import aligned
from tests.factories import REFERENCE, config_of
from workers.units import GIB

SLOTS = [plan.spec.slot for plan in plan_slots(REFERENCE, Target())]


def one_node(name: str = "pc1", **changes: object) -> Config:
    return config_of({name: {"workers": 3, **changes}})


def numbers(config: Config) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(plan_json(config))
    return loaded


def test_every_reference_worker_is_a_line_of_the_table() -> None:
    table = plan_text(REFERENCE).split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in table] == ["worker", *SLOTS]
    assert (
        " ".join(table[1].split())
        == "pc1/0 rtx-3090 #0 fp16 0.1428 8 3.30 GiB 2.64 GiB 60% 8192 128"
    )
    assert (
        " ".join(table[-1].split())
        == "pc2/2 rtx-3070 #0 fp16 0.3333 4 1.50 GiB 0.84 GiB 70% 4096 128"
    )


def test_the_sums_of_the_reference_pair_are_the_guides() -> None:
    sums = plan_text(REFERENCE).split("\n\n")[1].splitlines()
    assert sums[0].startswith(
        "pc1: 7 workers, 56 CPUs, a card holds 7 x 3.30 GiB = 23.10 GiB, of 23.32 GiB allowed"
    )
    assert sums[1].startswith(
        "pc2: 3 workers, 12 CPUs, a card holds 3 x 1.50 GiB = 4.50 GiB, of 5.75 GiB allowed"
    )
    assert ["420% duty" in sums[0], "210% duty" in sums[1]] == [True, True]
    assert ["0.9996 of its Ray GPU" in sums[0], "0.9999 of its Ray GPU" in sums[1]] == [True, True]


def test_the_reference_pair_fits_80_cells() -> None:
    table, _, notes = plan_text(REFERENCE).split("\n\n")
    assert max(map(len, table.splitlines())) <= 80
    assert "runs matmul with the policy adaptive" in notes
    mine = Config.model_validate(
        {
            **one_node(workers=1, dtype="bf16").model_dump(),
            "workload": {"name": "mlp:Mlp"},
            "memory": {"policy": "classic"},
        }
    )
    table, sums, notes = plan_text(mine).split("\n\n")
    assert table.splitlines()[1].split()[3] == "bf16"
    assert sums.startswith("pc1: 1 worker, 1 CPU, ")
    assert "runs mlp:Mlp with the policy classic" in notes
    assert (numbers(mine)["workload"], numbers(mine)["policy"]) == ("mlp:Mlp", "classic")


def test_the_table_is_the_same_in_a_terminal_of_any_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert plan_text(one_node(workers=2)).split("\n\n")[0].splitlines() == [
        "worker  card     type  Ray GPU  CPUs    budget  cap about  duty  size  batch",
        "pc1/0   card #0  fp16   0.5000     1  1.00 GiB   0.34 GiB  100%  4096    128",
        "pc1/1   card #0  fp16   0.5000     1  1.00 GiB   0.34 GiB  100%  4096    128",
    ]


def test_words_stand_left_and_numbers_right() -> None:
    rows = [("name", "steps", "said"), ("a", "7", "yes"), ("longer", "123456", "")]
    assert list(aligned(rows, {"name", "said"})) == [
        "name     steps  said",
        "a            7  yes",
        "longer  123456",
    ]


def test_the_longest_names_are_not_cut() -> None:
    node, card = "n" * 63, "Card " * 12 + "XYZ"
    config = one_node(node, gpu=card, vram_per_worker_gib=1000.5, vram_gib=4096, size=1_048_576)
    lines = plan_text(config).splitlines()
    assert lines[3].startswith(f"{node}/2  {card} #0")
    assert lines[3].endswith("1048576    128")
    assert "…" not in plan_text(config)


def test_workers_of_two_cards_are_shown_on_theirs() -> None:
    config = one_node(gpus=2, workers=3)
    table = plan_text(config).split("\n\n")[0].splitlines()[1:]
    assert [line.split()[2] for line in table] == ["#0", "#0", "#1"]
    assert [worker["card"] for worker in numbers(config)["nodes"][0]["workers"]] == [0, 0, 1]


def test_a_node_without_cards_has_no_context_and_no_total() -> None:
    config = one_node(gpu="cpu", gpus=0)
    text = plan_text(config)
    assert text.splitlines()[1].split()[:4] == ["pc1/0", "CPU", "fp16", "0.0000"]
    assert "its memory holds 3 x 1.00 GiB = 3.00 GiB" in text
    assert "of its Ray GPU" not in text
    (node,) = numbers(config)["nodes"]
    assert node["card_total_bytes"] is None
    assert node["card_allowed_bytes"] is None
    assert node["workers"][0]["card"] is None
    assert node["workers"][0]["cap_about_bytes"] == GIB


def test_where_duty_is_no_limit_none_is_shown() -> None:
    config = Config.model_validate({**one_node().model_dump(), "compute_share_mode": "none"})
    assert plan_text(config).splitlines()[1].split()[-3] == "–"  # noqa: RUF001 - the sign for an unknown value
    assert numbers(config)["nodes"][0]["workers"][0]["duty"] is None


def test_a_budget_below_a_context_leaves_no_cap() -> None:
    (node,) = numbers(one_node(vram_per_worker_gib=0.1))["nodes"]
    assert {worker["cap_about_bytes"] for worker in node["workers"]} == {0}
