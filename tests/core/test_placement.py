"""Slots from a configuration, whether their budgets fit, and problems of live nodes."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.config.schema import MAX_WORKERS_PER_CARD, Config, NodeConfig
from orchestrator.core.fleet import NodeFact
from orchestrator.core.placement import (
    Refusal,
    SlotPlan,
    Target,
    idle_line,
    node_budget,
    plan_slots,
    refusals,
)
from tests.factories import REFERENCE, config_of, node_fact

PC1, PC2 = node_fact(cpus=56.0), node_fact("pc2", "b", cpus=12.0)


def test_one_slot_trains_a_folder_unless_more_are_asked_for() -> None:
    folder = {"preset": "hf-causal", "model": "m", "data": "d"}
    training, pcs = {"name": "train"}, {"pc1": {"workers": 7}, "pc2": {"workers": 3}}

    def slots(**train: object) -> list[str]:
        config = config_of(pcs, workload=training, train={**folder, **train})
        return [plan.spec.slot for plan in plan_slots(config, Target())]

    assert slots() == ["pc1/0"]
    assert slots(slots=8) == [*(f"pc1/{index}" for index in range(7)), "pc2/0"]
    nano = config_of(pcs, workload=training)
    assert len(plan_slots(nano, Target())) == 10
    assert idle_line(nano, plan_slots(nano, Target())) is None


@pytest.mark.parametrize(
    ("target", "gpus", "device"),
    [
        (Target(), 1, "cuda"),
        (Target(), 0, "cpu"),
        (Target(device="cpu"), 1, "cpu"),
        (Target(device="cuda"), 0, "cuda"),
    ],
)
def test_the_device_is_the_grounds_or_follows_from_the_cards(
    target: Target, gpus: int, device: str
) -> None:
    (plan,) = plan_slots(config_of({"pc1": {"gpus": gpus}}), target)
    assert plan.spec.device == device


PC1_ABSENT, PC2_ABSENT = (
    Refusal(node=name, text=f"no live node has the label node={name}", is_absent=True)
    for name in ("pc1", "pc2")
)


@pytest.mark.parametrize(
    ("live", "expected"),
    [
        pytest.param([PC2], [PC1_ABSENT], id="missing"),
        pytest.param([PC2, node_fact(None)], [PC1_ABSENT], id="unnamed"),
        pytest.param([PC1, node_fact("pc2", cpus=12.0, gpus=0.0)],
         [Refusal(node="pc2", text="pc2 offers 0 GPUs, the plan needs 1")], id="no GPU"),
        pytest.param(
            [node_fact(cpus=55.5, gpus=0.5), PC2],
            [
                Refusal(node="pc1", text="pc1 offers 55.5 CPUs, the plan needs 7 workers x 8 = 56"),
                Refusal(node="pc1", text="pc1 offers 0.5 GPUs, the plan needs 1"),
            ],
            id="too little of everything",
        ),
        pytest.param([PC1, node_fact(node_id="0", cpus=0.0), PC2],
         [Refusal(node="pc1", text="2 live nodes have the label node=pc1: 10.0.0.0, 10.0.0.a")],
         id="twice"),
        pytest.param([], [PC1_ABSENT, PC2_ABSENT], id="nothing"),
    ],
)  # fmt: skip
def test_what_is_missing_is_refused_with_the_sum(
    live: list[NodeFact], expected: list[Refusal]
) -> None:
    assert list(refusals(REFERENCE, live)) == expected


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Draw a configuration of a few nodes with and without cards, of unknown sizes."""
    names = draw(
        st.lists(
            st.from_regex(r"[a-z0-9]([a-z0-9_.-]{0,6}[a-z0-9])?", fullmatch=True),
            min_size=1,
            max_size=4,
        )
    )
    nodes: dict[str, dict[str, object]] = {}
    for name in names:
        gpus = draw(st.integers(0, 4))
        nodes[name] = {
            "gpus": gpus,
            "workers": draw(st.integers(max(1, gpus), max(1, gpus) * 12)),
            "cpus_per_worker": draw(st.integers(1, 16)),
            "vram_per_worker_gib": draw(st.floats(0.01, 100)),
        }
    return config_of(nodes, workload={"seed": draw(st.integers(0, 2**32 - 1))})


grounds = st.builds(
    Target, device=st.sampled_from([None, "cpu", "cuda"]), one_machine=st.booleans()
)


def by_node(plans: Iterable[SlotPlan]) -> dict[str, list[SlotPlan]]:
    found: dict[str, list[SlotPlan]] = {}
    for plan in plans:
        found.setdefault(plan.spec.node, []).append(plan)
    return found


@settings(deadline=None)
@given(drawn=configs(), target=grounds)
def test_the_sums_of_a_node_agree_with_its_workers(drawn: Config, target: Target) -> None:
    plans = plan_slots(drawn, target)
    everything = sum(plan.spec.budget_bytes for plan in plans)
    for name, node_plans in by_node(plans).items():
        budget = node_budget(name, drawn.nodes[name], drawn)
        assert sum(plan.num_cpus for plan in node_plans) == budget.cpus_total
        assert len(node_plans) <= max(1, budget.gpus) * MAX_WORKERS_PER_CARD
        # As in Ray's arithmetic: whole steps of 1/10000, rounded down.
        free = [10_000] * budget.gpus
        for plan in node_plans:
            steps = int(Fraction(repr(plan.num_gpus)) * 10_000)
            if budget.gpus:
                free[next(card for card, left in enumerate(free) if left >= steps)] -= steps
                assert 10_000 // steps == budget.workers_per_card
            shared = [other.spec.budget_bytes for other in node_plans][: budget.workers_per_card]
            assert plan.spec.card_budget_bytes == (
                everything if target.one_machine else sum(shared)
            )
            assert plan.spec.workers_on_host == (
                len(plans) if target.one_machine else len(node_plans)
            )
    assert len({plan.spec.workload.seed for plan in plans}) == len(plans)


def node(**changes: object) -> NodeConfig:
    """Return the reference node pc1 with `changes`, checked by its model but not for its sums."""
    return NodeConfig.model_validate({**REFERENCE.nodes["pc1"].model_dump(), **changes})


@pytest.mark.parametrize(
    ("changes", "sections", "expected"),
    [
        ({}, {"compute_share_mode": "duty"}, {"duty": 0.6}),
        ({}, {"workers": {"mps": True}}, {"duty": None}),
        ({}, {"compute_share_mode": "none"}, {"duty": None}),
        ({"size": 8192}, {}, {"size": 8192}),
        ({"size": None}, {}, {"size": 4096}),
        ({"size": 8192}, {"workload": {"size": 512}}, {"size": 512}),
        ({"size": None}, {"workload": {"size": 512}}, {"size": 512}),
        ({"dtype": "bf16"}, {}, {"dtype": "bf16"}),
        (
            {"vram_gib": 2.0, "memory_fraction": 0.5},
            {},
            {"card_total_bytes": 2 << 30, "card_allowed_bytes": 1 << 30},
        ),
    ],
)
def test_what_a_worker_gets_follows_from_node_and_workload(
    changes: dict[str, object], sections: dict[str, object], expected: dict[str, object]
) -> None:
    one = node(**changes)
    budget = node_budget("pc1", one, config_of({"pc1": one.model_dump()}, **sections))
    assert {name: getattr(budget, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("changes", "text", "valid"),
    [
        (
            {"workers": 15, "gpus": 2},
            (
                "8 workers on the fullest of 2 cards x 3.3 GiB = 26.4 GiB, "
                "but 0.99 of the 23.56 GiB of a rtx-3090 is 23.3244 GiB"
            ),
            "at most 14 workers, or vram_per_worker_gib <= 2.91",
        ),
        ({"workers": 1, "vram_per_worker_gib": 24},
         "1 worker x 24 GiB = 24 GiB, but 0.99 of the 23.56 GiB of a rtx-3090 is 23.3244 GiB",
         "vram_per_worker_gib <= 23.32"),
        ({"gpu": "mine", "vram_gib": 8, "memory_fraction": 0.5, "workers": 2},
         "2 workers x 3.3 GiB = 6.6 GiB, but 0.5 of the 8 GiB of a mine is 4 GiB",
         "at most 1 worker, or vram_per_worker_gib <= 2"),
        # The memory that workers of a node without cards share.
        ({"gpu": "cpu", "gpus": 0, "vram_gib": 16},
         "7 workers x 3.3 GiB = 23.1 GiB, but 0.99 of the 16 GiB of its memory is 15.84 GiB",
         "at most 4 workers, or vram_per_worker_gib <= 2.26"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_with_sum_and_ways_out(
    changes: dict[str, object], text: str, valid: str
) -> None:
    assert node(**changes).overbooked == (text, valid)


@settings(max_examples=200, deadline=None)
@given(
    workers=st.integers(1, 100),
    gpus=st.integers(0, 8),
    each_gib=st.floats(0.001, 200),
    total_gib=st.floats(0.01, 200),
    fraction=st.floats(0.01, 1),
)
def test_following_either_advice_makes_it_fit(
    workers: int, gpus: int, each_gib: float, total_gib: float, fraction: float
) -> None:
    one = node(
        workers=workers,
        gpus=gpus,
        vram_per_worker_gib=each_gib,
        vram_gib=total_gib,
        memory_fraction=fraction,
    )
    excess = one.overbooked
    if excess is None:
        found = node_budget("pc1", one, config_of({"pc1": one.model_dump()}))
        assert found.card_allowed_bytes is not None
        assert found.card_budget_bytes <= found.card_allowed_bytes
        return
    fewer, _, smaller = excess[1].rpartition("vram_per_worker_gib <= ")
    assert one.model_copy(update={"vram_per_worker_gib": float(smaller)}).overbooked is None
    if fewer:
        assert one.model_copy(update={"workers": int(fewer.split()[2])}).overbooked is None
