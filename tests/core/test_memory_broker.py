"""What the head's leases are made of: statuses and orders of real slots, on cards that they share or do not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from orchestrator.core.memory_broker import MemoryBroker
from orchestrator.core.placement import SlotPlan, Target, plan_slots
from orchestrator.core.slot import NodeJoined, NodeLeft
from tests.core.scene import Scene
from tests.factories import CPU, MEMORY, REFERENCE
from tests.scene import MIB
from workers.messages import DeviceInfo

TOTAL_BYTES = 24 * 2**30
CONTEXT_BYTES = 400 * MIB


def card(plan: SlotPlan, uuid: str = "GPU-1") -> DeviceInfo:
    cap_bytes = plan.spec.budget_bytes - CONTEXT_BYTES
    return replace(CPU, kind="cuda", uuid=uuid, context_bytes=CONTEXT_BYTES, cap_bytes=cap_bytes)


class House:
    """The slots of some plans, their broker, and a card on which nothing but they and one tenant take memory."""

    def __init__(self, plans: tuple[SlotPlan, ...], *, outside_bytes: int = 0) -> None:
        self.plans = {plan.spec.slot: plan for plan in plans}
        self.scenes = {name: Scene(slot=name) for name in self.plans}
        self.broker = MemoryBroker(self.plans)
        self.outside_bytes = outside_bytes
        self.held_bytes: dict[str, int] = {}
        self.sent: dict[str, list[int | None]] = {name: [] for name in self.plans}
        """Of each slot the leases that it was told, turn by turn."""
        self.news: list[dict[str, int | None]] = []
        """Every answer of the broker that told of something new."""
        self.now_s = 1000.0

    def join(self, *names: str) -> None:
        for name in names or tuple(self.plans):
            self.scenes[name].feed(NodeJoined())
            self.after(name)

    def report(self, name: str, held_bytes: int, **changes: object) -> None:
        """Let a worker tell what it sees of the card, and that it obeys what it was told last."""
        self.now_s += 0.1
        self.held_bytes[name] = held_bytes
        used_bytes = (
            self.outside_bytes
            + sum(self.held_bytes.values())
            + len(self.held_bytes) * CONTEXT_BYTES
        )
        memory = replace(
            MEMORY,
            device_total_bytes=TOTAL_BYTES,
            device_used_bytes=used_bytes,
            reserved_bytes=held_bytes,
            peak_bytes=held_bytes,
        )
        for scene in self.scenes.values():
            scene.now_s = self.now_s
        usual = {"memory": memory, "lease_bytes": self.sent[name][-1]}
        scene = self.scenes[name]
        scene.feed(scene.status(device=card(self.plans[name]), **{**usual, **changes}))
        self.after(name)

    def after(self, *names: str) -> None:
        """Do as the supervisor does at the end of a turn."""
        for scene in self.scenes.values():
            scene.now_s = self.now_s
        new = self.broker.look(
            {other: scene.slot for other, scene in self.scenes.items()}, self.now_s
        )
        if new:
            self.news.append(new)
        for name in names:
            self.sent[name].append(self.broker.grant(self.scenes[name].slot))

    def settle(self, *names: str, rounds: int = 10, share: float = 1.0) -> None:
        """Let workers hold this share of what they were told last."""
        for _ in range(rounds):
            for name in names or tuple(self.plans):
                told = self.sent[name][-1]
                cap_bytes = card(self.plans[name]).cap_bytes
                self.report(
                    name, int(share * (cap_bytes if told is None else min(told, cap_bytes)))
                )
            self.now_s += 1.0

    def caps(self) -> Mapping[str, int]:
        return {name: card(plan).cap_bytes for name, plan in self.plans.items()}


PC1 = tuple(plan for plan in plan_slots(REFERENCE, Target()) if plan.spec.node == "pc1")


def seven(**begin: int) -> House:
    """Let all seven workers of the reference PC come up."""
    house = House(PC1, **begin)
    house.join()
    return house


def test_a_worker_not_yet_open_is_expected_on_its_neighbours() -> None:
    house = seven(outside_bytes=TOTAL_BYTES // 2)
    house.report("pc1/0", 0)
    share_bytes = (TOTAL_BYTES // 2 - 7 * CONTEXT_BYTES - 128 * MIB) / 7
    assert house.sent["pc1/0"][-1] == pytest.approx(share_bytes, rel=0.05)


def test_what_is_under_way_is_not_promised_to_others() -> None:
    house = seven(outside_bytes=int(0.7 * TOTAL_BYTES))
    house.settle("pc1/0", "pc1/1", rounds=40)
    before = house.sent["pc1/0"][-1]
    assert before is not None
    # The third comes up at last. The others may still hold all that they were told.
    house.report("pc1/2", 0)
    assert house.sent["pc1/2"][-1] == 0
    for _ in range(2):
        for name in ("pc1/0", "pc1/1"):
            house.report(name, house.held_bytes[name])
            assert house.sent[name][-1] < 0.8 * before
        house.report("pc1/2", 0)
        assert house.sent["pc1/2"][-1] < 0.1 * before, (
            "they have been told, and have not done it yet"
        )
    house.settle("pc1/0", "pc1/1", "pc1/2", rounds=8)
    assert house.sent["pc1/2"][-1] == pytest.approx(house.sent["pc1/0"][-1], rel=0.05)


def test_who_has_gone_leaves_its_share_to_the_others() -> None:
    house = seven(outside_bytes=TOTAL_BYTES // 2)
    house.settle()
    before = house.sent["pc1/0"][-1]
    del house.held_bytes["pc1/6"]
    house.scenes["pc1/6"].feed(NodeLeft())
    house.after("pc1/6")
    house.settle(*[name for name in house.plans if name != "pc1/6"])
    assert house.sent["pc1/0"][-1] == pytest.approx(before * 7 / 6, rel=0.1)


def test_a_process_that_comes_back_begins_with_nothing_again() -> None:
    house = seven()
    house.settle()
    scene = house.scenes["pc1/3"]
    scene.feed(NodeLeft())
    house.after("pc1/3")
    del house.held_bytes["pc1/3"]
    scene.feed(NodeJoined())
    house.after("pc1/3")
    assert house.sent["pc1/3"][-1] == 0
    house.report("pc1/3", 0)
    assert house.sent["pc1/3"][-1] == house.caps()["pc1/3"]


@pytest.mark.parametrize("ground", [Target(device="cpu"), Target(device="cpu", one_machine=True)])
def test_workers_of_a_cpu_have_no_leases(ground: Target) -> None:
    house = House(plan_slots(REFERENCE, ground))
    house.join()
    assert all(sent == [None] for sent in house.sent.values())


def test_a_worker_alone_on_its_card_has_no_lease() -> None:
    pc1 = REFERENCE.nodes["pc1"].model_copy(update={"workers": 2, "gpus": 2})
    house = House(plan_slots(REFERENCE.model_copy(update={"nodes": {"pc1": pc1}}), Target()))
    house.join()
    house.report("pc1/0", 0)
    assert house.sent == {"pc1/0": [None] * 2, "pc1/1": [None]}


def test_a_slot_that_begins_costs_the_others_no_lease() -> None:
    house, same = (seven(outside_bytes=TOTAL_BYTES // 2) for _ in range(2))
    for each in (house, same):
        each.settle()
    house.broker = MemoryBroker(house.plans, house.broker)
    for each in (house, same):
        each.settle("pc1/0", "pc1/1", rounds=3, share=0.9)
    assert house.sent == same.sent
