"""The file that `init` writes loads, fits and plans for any machine, and explains every key."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from orchestrator.cli.init import template
from orchestrator.cli.plan import plan_object
from orchestrator.config.load import config_from_text
from orchestrator.config.schema import MAX_WORKERS_PER_CARD, Config, NodeConfig
from orchestrator.config.template import NodeChoice, choose, render
from orchestrator.core.placement import Target, node_budget, plan_slots
from tests.factories import card_facts, laptop, workstation, wsl
from workers.host.facts import CardFacts, Holder, MachineFacts
from workers.units import GIB

NAMES = (
    "NVIDIA GeForce RTX 3060", "NVIDIA GeForce RTX 3070", "NVIDIA GeForce RTX 3070 Laptop GPU",
    "NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 4090", "NVIDIA GeForce GTX 1080", "NVIDIA H100 80GB HBM3",
    "NVIDIA H200", "3070", "null", "1e5", "Ünïcode: {card} #1", "",
)  # fmt: skip

CARDS = st.builds(
    card_facts,
    name=st.sampled_from(NAMES) | st.text(max_size=80),
    total_bytes=st.integers(min_value=2**20, max_value=2**42)
    | st.sampled_from([8, 12, 24, 80, 141]).flatmap(
        lambda gib: st.integers(int(0.88 * gib * GIB), int(1.02 * gib * GIB))
    ),
    compute_capability=st.none()
    | st.sampled_from([(6, 1), (7, 5), (8, 6), (8, 9), (9, 0), (12, 0)]),
    display=st.none() | st.booleans(),
    visible=st.booleans(),
    holders=st.sampled_from([(), (Holder(pid=1, name="Xorg", used_bytes=None),)]),
)
MACHINES = st.builds(
    workstation,
    cards=st.lists(CARDS, max_size=6).map(tuple),
    is_wsl=st.booleans(),
    cores_logical=st.integers(min_value=1, max_value=1024),
    cores_physical=st.none() | st.integers(min_value=1, max_value=1024),
    ram_available_bytes=st.integers(min_value=0, max_value=2**45),
)


def written(*machines: MachineFacts) -> tuple[str, Config, list[NodeChoice]]:
    choices = [choose(facts) for facts in machines]
    text = render(template(), {f"pc{at}": choice for at, choice in enumerate(choices, start=1)})
    return text, config_from_text(text, "mine.yaml"), choices


@given(MACHINES)
@example(workstation(cards=(card_facts(total_bytes=GIB),)))
@example(workstation(cards=(card_facts(name="RTX\nnodes: {}\n\x1b[31m"),)))
@example(workstation(cards=tuple(card_facts(index=at, total_bytes=2**42) for at in range(6))))
@example(laptop(ram_available_bytes=0, cores_logical=1, cores_physical=None))
def test_for_any_machine_the_file_loads_fits_and_plans(facts: MachineFacts) -> None:
    text, config, (choice,) = written(facts)
    (node,) = config.nodes.values()
    assert node == choice.config
    assert "\x1b" not in text
    above, after = (
        template().partition("\nnodes:")[0],
        template()[template().index("\nworkload:") :],
    )
    assert text.startswith(above)
    assert all(f"\n#   {key}: " in above for key in NodeConfig.model_fields)
    assert text.rstrip("\n").endswith(after.rstrip("\n"))
    assert node.overbooked is None
    assert len(plan_slots(config, Target())) == node.workers
    assert plan_object(config)
    large = [found for found in facts.visible_cards if found.total_bytes >= GIB]
    largest = max(large, key=lambda found: found.total_bytes, default=None)
    usable = [found for found in large if largest is not None and found.name == largest.name]
    assert node.gpus == len(usable)
    if usable:
        # It also fits the real memory of the smallest card, whatever the table of known cards
        # says.
        real_gib = min(found.total_bytes for found in usable) / GIB
        assert node.model_copy(update={"vram_gib": real_gib}).overbooked is None
        assert node_budget("pc1", node, config).workers_per_card <= MAX_WORKERS_PER_CARD
    else:
        assert node.gpu == "cpu"


def test_the_reference_pair_is_found_as_the_guides_have_it() -> None:
    pc2 = card_facts(name="NVIDIA GeForce RTX 3070", total_bytes=round(7.67 * GIB), display=True)
    _, config, _ = written(workstation(), workstation(cards=(pc2,)))
    shipped = config_from_text(template(), "shipped").nodes
    for name in ("pc1", "pc2"):
        fields = ("gpu", "gpus", "workers", "gpu_share", "vram_per_worker_gib", "memory_fraction", "size", "dtype",
                  "vram_gib")  # fmt: skip
        assert {key: getattr(config.nodes[name], key) for key in fields} == {
            key: getattr(shipped[name], key) for key in fields
        }
    assert config.nodes["pc1"].cpus_per_worker == 16 // 7


def with_cards(*cards: CardFacts) -> MachineFacts:
    return workstation(cards=cards)


DISPLAY = card_facts(
    index=1, name="NVIDIA GeForce GT 1030", total_bytes=2 * GIB, compute_capability=(6, 1)
)
OLD = card_facts(name="NVIDIA GeForce GTX 1080", total_bytes=8 * GIB, compute_capability=(6, 1))
XORG = card_facts(holders=(Holder(pid=1, name="Xorg", used_bytes=1),))


def processor(ram_gib: int, cores: int) -> MachineFacts:
    return laptop(ram_available_bytes=ram_gib * GIB, cores_physical=cores)


@pytest.mark.parametrize(
    ("facts", "expected", "why"),
    [
        # A desktop on the card keeps a part of the card's memory.
        (workstation(), {"workers": 7, "memory_fraction": 0.99}, None),
        (with_cards(card_facts(display=True)),
         {"workers": 6, "memory_fraction": 0.85}, "a screen is driven by this card"),
        (with_cards(XORG), {"workers": 6, "memory_fraction": 0.85}, "xorg draws on"),
        (wsl(), {"workers": 6, "memory_fraction": 0.85}, "Windows and its desktop"),
        (with_cards(card_facts(total_bytes=20 * GIB)), {"workers": 6, "memory_fraction": 0.90}, None),
        # If cards differ, the largest counts.
        (with_cards(card_facts(), card_facts(index=1)), {"gpus": 2, "gpu": "rtx-3090", "workers": 14}, None),
        (with_cards(card_facts(), DISPLAY), {"gpus": 1, "gpu": "rtx-3090", "workers": 7},
         "left out: NVIDIA GeForce GT 1030; start Ray with CUDA_VISIBLE_DEVICES=0"),
        (with_cards(OLD), {"dtype": "fp32"}, None),
        # Workers on a CPU get half of the free memory.
        (processor(24, 8), {"gpu": "cpu", "gpus": 0, "workers": 8, "vram_per_worker_gib": 1.0},
         "no NVIDIA card: 8 workers x 1.00 GiB on the processor"),
        (processor(2, 8), {"workers": 4, "vram_per_worker_gib": 0.25}, None),
        (processor(8, 2), {"workers": 2, "vram_per_worker_gib": 1.0}, None),
        (processor(0, 8), {"workers": 1, "vram_per_worker_gib": 0.01}, None),
    ],
)  # fmt: skip
def test_what_is_chosen_for_a_machine_and_why(
    facts: MachineFacts, expected: dict[str, Any], why: str | None
) -> None:
    text, config, _ = written(facts)
    assert config.nodes["pc1"].model_dump(include=set(expected)) == expected
    assert (why in text) if why else ("is left to it" not in text)


def test_what_stands_outside_of_the_nodes_stays() -> None:
    """In a checkout the template is cluster.yaml, which the user may have changed, or written with
    `init`.
    """
    first = {"pc1": choose(workstation())}
    changed = template().replace("policy: adaptive", "policy: classic")
    text = render(changed, first)
    assert config_from_text(text, "again").memory.policy == "classic"
    assert render(text, first) == text
    short = "nodes: {old: {gpu: h100, workers: 1, vram_per_worker_gib: 1}}\nrun:\n  report: true\n"
    config = config_from_text(render(short, first), "short")
    assert (list(config.nodes), config.run.report) == (["pc1"], True)
