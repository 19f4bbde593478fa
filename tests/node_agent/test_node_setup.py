"""Which node is told to keep what, and what its workers are told of it."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.load import load_config
from orchestrator.core.placement import Target
from orchestrator.errors import UsageError
from orchestrator.run import node_setup
from orchestrator.run.environment import Environment, Mode
from tests.scene import python
from workers.node_agent.protocol import AgentOrders, AgentOutcome
from workers.settings import FakeSensors

SHIPPED = str(Path(__file__).parents[2] / "cluster.yaml")
FAKE = FakeSensors(library_path="/l", script_path="/s")


def environment(
    *overrides: str, mode: Mode = Mode.CLUSTER, device: str | None = None
) -> Environment:
    config = load_config(SHIPPED, overrides)
    return Environment(mode=mode, config=config, target=Target(device=device), lines=())


def orders(made: Environment, *, apply: bool = False, fake: bool = False) -> dict[str, AgentOrders]:
    plans = made.plans
    if fake:
        plans = tuple(
            replace(
                plan,
                spec=replace(plan.spec, fake_sensors=FAKE, fake_card=int(plan.spec.node == "pc2")),
            )
            for plan in plans
        )
    return node_setup.orders_for(
        made, plans, run_id="r", cards=node_setup.CardSettings(apply_power_limit=apply)
    )


LIMIT = "nodes.pc1.power_limit_w=280"
MPS = "compute_share_mode=mps"


PC1 = AgentOrders(node="pc1", run_id="r", card_count=1)
PC2 = AgentOrders(node="pc2", run_id="r", card_count=1)


@pytest.mark.parametrize(
    ("made", "asked", "expected"),
    [
        (environment(LIMIT), {}, []),
        (environment(LIMIT), {"apply": True}, [replace(PC1, power_limit_w=280.0)]),
        (environment(MPS, "nodes.pc2.gpus=2", "nodes.pc2.workers=4"), {},
         [replace(PC1, mps=True), replace(PC2, mps=True, card_count=2)]),
        (environment(MPS, "nodes.pc2.gpus=0"), {}, [replace(PC1, mps=True)]),
        (environment(MPS, mode=Mode.LOCAL, device="cuda"), {},
         [replace(PC1, mps=True), replace(PC2, mps=True)]),
        # A folder is trained by one slot, and the other node has none.
        (environment(MPS, "workload.name=train", "train.slots=1"), {}, [replace(PC1, mps=True)]),
        # A rehearsal touches no card but fake ones.
        (environment(LIMIT, MPS, mode=Mode.REHEARSE), {"apply": True}, []),
        (environment(LIMIT, MPS, mode=Mode.REHEARSE, device="cpu"), {"apply": True}, []),
        (environment(LIMIT, MPS, mode=Mode.CLUSTER, device="cpu"), {"apply": True}, []),
        (
            environment(LIMIT, "nodes.pc2.power_limit_w=150", mode=Mode.REHEARSE, device="cpu"),
            {"apply": True, "fake": True},
            [
                replace(PC1, cards=("0",), power_limit_w=280.0, fake=FAKE),
                replace(PC2, cards=("1",), power_limit_w=150.0, fake=FAKE),
            ],
        ),
    ],
)  # fmt: skip
def test_each_node_is_told_what_it_is_to_keep(
    made: Environment, asked: dict[str, bool], expected: list[AgentOrders]
) -> None:
    assert orders(made, **asked) == {each.node: each for each in expected}


def test_an_option_without_a_limit_is_a_mistake() -> None:
    with pytest.raises(
        UsageError, match=r"no node has one; set it, such as --set nodes\.pc1\.power_limit_w=250"
    ):
        orders(environment(), apply=True)


def test_workers_are_told_their_daemon_and_what_they_may_hold() -> None:
    made = environment(MPS)
    plans = node_setup.with_outcomes(
        made.config, made.plans, {"pc1": AgentOutcome(pipe_directory="/tmp/p")}
    )
    assert {
        (p.spec.node, p.spec.mps_pipe_directory, p.spec.thread_share, p.spec.duty) for p in plans
    } == {
        ("pc1", "/tmp/p", 0.6, None),
        ("pc2", None, None, 0.7),  # its ceiling holds by duty
    }
    assert {plan.spec.mps_memory_limit_bytes for plan in plans} == {
        plans[0].spec.budget_bytes,
        None,
    }


@pytest.mark.parametrize("mode", ["duty", "none"])
def test_other_modes_change_nothing(mode: str) -> None:
    made = environment(f"compute_share_mode={mode}")
    assert node_setup.with_outcomes(made.config, made.plans, {}) == made.plans


class Told:
    """What a run said and wrote down."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.events: list[tuple[str, dict[str, Any]]] = []

    def write(self, event: str, /, **fields: Any) -> None:
        self.events.append((event, fields))


class Bare:
    """A fleet whose nodes have not joined."""

    def nodes(self) -> tuple[()]:
        return ()


def test_a_node_that_is_not_there_yet_is_told_and_works_by_duty() -> None:
    made, told = environment(LIMIT, MPS), Told()
    with node_setup.hold_settings(
        made,
        Bare(),  # type: ignore[arg-type]  # nothing else is asked
        made.plans,
        run_id="r",
        cards=node_setup.CardSettings(apply_power_limit=True),
        interrupted=lambda: False,
        tell=told.lines.append,
        events=told,  # type: ignore[arg-type]
    ) as plans:
        assert {(plan.spec.node, plan.spec.duty) for plan in plans} == {("pc1", 0.6), ("pc2", 0.7)}
    assert told.lines == [
        "pc1: power_limit_w 280 is not set: pc1 has not joined yet",
        "pc1: no MPS, 60% of the time instead (duty): pc1 has not joined yet",
        "pc2: no MPS, 70% of the time instead (duty): pc2 has not joined yet",
    ]
    assert [event for event, _ in told.events] == ["mps_unavailable", "mps_unavailable"]


def test_a_limit_that_is_not_asked_for_is_shown() -> None:
    made = environment(LIMIT, "nodes.pc2.gpus=0", "nodes.pc2.power_limit_w=100")
    lines = list(node_setup.left_out(made, {}, {}, apply_power_limit=False))
    assert lines == [
        "pc1: power_limit_w 280 is not set; to set it for the length of a run: --apply-power-limit"
    ]
    (line,) = node_setup.left_out(made, {}, {}, apply_power_limit=True)
    assert line == "pc1: power_limit_w 280 is not set: this run uses no card of that PC"


#: Loads the engine as worker processes do, and tells what CUDA would have found in the environment
#: by then.
_WORKERS = """
import json, os, sys
from dataclasses import replace
from orchestrator.cluster import actor
from orchestrator.config.load import load_config
from orchestrator.core.placement import Target, plan_slots
from workers.node_agent import mps

actor._DAEMON_S = 0.2
plain = plan_slots(load_config(sys.argv[1], ["compute_share_mode=mps"]), Target())[0].spec
told = []
for pipes, share, limit in json.loads(sys.argv[2]):
    try:
        actor.load_engine(replace(plain, mps_pipe_directory=pipes, thread_share=share, mps_memory_limit_bytes=limit))
    except mps.MpsError as error:
        told.append(str(error))
    else:
        told.append({name: value for name, value in os.environ.items() if name.startswith("CUDA_MPS_")})
print(json.dumps(told))
"""


@pytest.mark.torch
def test_a_worker_does_not_start_without_its_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("CUDA_MPS_")]:
        monkeypatch.delenv(name)
    (tmp_path / "nvidia-cuda-mps-control.pid").write_text("1")
    pipes = str(tmp_path)
    specs = [
        (None, None, None),
        (f"{pipes}/gone", 0.5, 1),
        (pipes, 0.6, 3_575_000_000),
        (pipes, 0.125, 2**20 + 1),
    ]
    done = python("-W", "ignore", "-c", _WORKERS, SHIPPED, json.dumps(specs))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        {},
        f"the MPS control daemon in {pipes}/gone is gone",
        *(
            {
                "CUDA_MPS_PIPE_DIRECTORY": pipes,
                "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": percentage,
                "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": limit,
            }
            for percentage, limit in (("60", "0=3410M"), ("12.5", "0=2M"))
        ),
    ]
