"""Which node is told to keep what, and what its workers are told of it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.load import load_config
from orchestrator.core.fleet import Fleet
from orchestrator.core.placement import Target
from orchestrator.errors import UsageError
from orchestrator.run import node_setup
from orchestrator.run.environment import Environment, Mode
from workers.node_agent.protocol import AgentOrders, AgentOutcome
from workers.settings import FakeSensors

SHIPPED = str(Path(__file__).parents[2] / "cluster.yaml")
FAKE = FakeSensors(library_path="/l", script_path="/s")


@contextlib.contextmanager
def no_fleet() -> Iterator[Fleet]:
    raise AssertionError("nothing is connected to here")
    yield


def environment(*overrides: str, mode: Mode = Mode.CLUSTER, device: str | None = None) -> Environment:
    config = load_config(SHIPPED, overrides)
    return Environment(mode=mode, config=config, target=Target(device=device), fleet=no_fleet(), lines=())


def orders(made: Environment, *, apply: bool = False, fake: bool = False) -> dict[str, AgentOrders]:
    plans = made.plans
    if fake:
        plans = tuple(
            replace(plan, spec=replace(plan.spec, fake_sensors=FAKE, fake_card=int(plan.spec.node == "pc2")))
            for plan in plans
        )
    return node_setup.orders_for(made, plans, run_id="r", apply_power_limit=apply)


LIMIT = "nodes.pc1.power_limit_w=280"
MPS = "compute_share_mode=mps"


def test_without_mps_and_the_option_nobody_is_told_anything() -> None:
    assert orders(environment(LIMIT)) == {}


def test_the_limit_is_set_only_when_asked_for_and_only_where_there_is_one() -> None:
    expected = AgentOrders(node="pc1", run_id="r", card_count=1, power_limit_w=280.0)
    assert orders(environment(LIMIT), apply=True) == {"pc1": expected}


def test_mps_is_for_every_node_with_cards() -> None:
    found = orders(environment(MPS, "nodes.pc2.gpus=2", "nodes.pc2.workers=4"))
    assert found == {
        "pc1": AgentOrders(node="pc1", run_id="r", card_count=1, mps=True),
        "pc2": AgentOrders(node="pc2", run_id="r", card_count=2, mps=True),
    }
    assert list(orders(environment(MPS, "nodes.pc2.gpus=0"))) == ["pc1"]
    assert orders(environment(MPS, mode=Mode.LOCAL, device="cuda")) == found | {
        "pc2": replace(found["pc2"], card_count=1)
    }


@pytest.mark.parametrize(("mode", "device"), [(Mode.REHEARSE, None), (Mode.REHEARSE, "cpu"), (Mode.CLUSTER, "cpu")])
def test_a_rehearsal_touches_no_card(mode: Mode, device: str | None) -> None:
    assert orders(environment(LIMIT, MPS, mode=mode, device=device), apply=True) == {}


def test_a_rehearsal_with_fake_cards_sets_theirs() -> None:
    made = environment(LIMIT, "nodes.pc2.power_limit_w=150", mode=Mode.REHEARSE, device="cpu")
    assert orders(made, apply=True, fake=True) == {
        "pc1": AgentOrders(node="pc1", run_id="r", card_count=1, cards=("0",), power_limit_w=280.0, fake=FAKE),
        "pc2": AgentOrders(node="pc2", run_id="r", card_count=1, cards=("1",), power_limit_w=150.0, fake=FAKE),
    }


def test_an_option_without_a_limit_is_a_mistake() -> None:
    with pytest.raises(UsageError, match=r"no node has one; set it, such as --set nodes\.pc1\.power_limit_w=250"):
        orders(environment(), apply=True)


def test_workers_are_told_where_their_daemon_is_and_what_they_may_hold() -> None:
    made = environment(MPS)
    plans = node_setup.with_outcomes(made.config, made.plans, {"pc1": AgentOutcome(pipe_directory="/tmp/p")})
    assert {(p.spec.node, p.spec.mps_pipe_directory, p.spec.thread_share, p.spec.duty) for p in plans} == {
        ("pc1", "/tmp/p", 0.6, None),
        ("pc2", None, None, 0.7),  # its ceiling holds by duty
    }
    assert {plan.spec.mps_memory_limit_bytes for plan in plans} == {plans[0].spec.budget_bytes, None}


@pytest.mark.parametrize("mode", ["duty", "none"])
def test_other_modes_change_nothing(mode: str) -> None:
    made = environment(f"compute_share_mode={mode}")
    assert node_setup.with_outcomes(made.config, made.plans, {}) == made.plans


class Told:
    """What a run said and wrote down."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.events: list[tuple[str, dict[str, Any]]] = []

    def write(self, event: str, /, **fields: Any) -> None:  # noqa: ANN401 - as an event log takes them
        self.events.append((event, fields))


class Bare:
    """A fleet whose nodes have not joined."""

    def nodes(self) -> tuple[()]:
        return ()


def test_a_node_that_is_not_there_yet_is_told_and_works_by_duty() -> None:
    made, told = environment(LIMIT, MPS), Told()
    with node_setup.kept(
        made,
        Bare(),  # type: ignore[arg-type]  # nothing else is asked
        made.plans,
        run_id="r",
        apply_power_limit=True,
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
    assert lines == ["pc1: power_limit_w 280 is not set; to set it for the length of a run: --apply-power-limit"]
    (line,) = node_setup.left_out(made, {}, {}, apply_power_limit=True)
    assert line == "pc1: power_limit_w 280 is not set: this run uses no card of that PC"


#: Loads the engine as a worker's process does, and tells what CUDA would have found in the environment by then.
_WORKER = """
import json, os, sys
from dataclasses import replace
from orchestrator.cluster import actor
from orchestrator.config.load import load_config
from orchestrator.core.placement import Target, plan_slots
from workers.node_agent import mps

actor._DAEMON_S = 0.2
pipes, share, limit = json.loads(sys.argv[2])
spec = plan_slots(load_config(sys.argv[1], ["compute_share_mode=mps"]), Target())[0].spec
spec = replace(spec, mps_pipe_directory=pipes, thread_share=share, mps_memory_limit_bytes=limit)
try:
    actor.load_engine(spec)
except mps.MpsError as error:
    print(error)
else:
    print(json.dumps({name: value for name, value in os.environ.items() if name.startswith("CUDA_MPS_")}))
"""


def worker(*told: object) -> str:
    command = [sys.executable, "-W", "ignore", "-c", _WORKER, SHIPPED, json.dumps(told)]
    own = {name: value for name, value in os.environ.items() if not name.startswith("CUDA_MPS_")}
    done = subprocess.run(command, env=own, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.torch
def test_the_process_of_a_worker_has_its_environment_before_the_engine_is_there(tmp_path: Path) -> None:
    (tmp_path / "nvidia-cuda-mps-control.pid").write_text("1")
    assert json.loads(worker(str(tmp_path), 0.6, 3_575_000_000)) == {
        "CUDA_MPS_PIPE_DIRECTORY": str(tmp_path),
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "60",
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=3410M",
    }
    assert json.loads(worker(None, None, None)) == {}


def test_a_worker_whose_daemon_is_gone_does_not_start_without_its_limits(tmp_path: Path) -> None:
    assert worker(str(tmp_path), 0.6, 1) == f"the MPS control daemon in {tmp_path} is gone"
