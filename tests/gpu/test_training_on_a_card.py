"""The use of a real card by a training: pinned memory, workspaces, kernels, a CPU core, messages.

    python -m pytest tests/gpu/test_training_on_a_card.py -rP       # prints the figures, too

Each scenario runs in a separate process and returns figures.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import psutil
import pytest
import torch

from tests.engine.scene import begun, events, turn
from tests.gpu.scene import ON_A_CARD
from tests.scene import MIB, spec_of
from workers import oom
from workers.devices import open_device
from workers.messages import Status
from workers.nvml import queries
from workers.settings import FailureKind
from workers.training.host_memory import wait_asleep
from workers.training.memory_plan import MemoryPlanner
from workers.training.settings import TrainSettings
from workers.training.tasks import find_task
from workers.training.trainer import Trainer

pytestmark = ON_A_CARD

Found: TypeAlias = dict[str, Any]

DEVICE, PRESET, BUDGET_BYTES, SECONDS = "cuda", "gpt2-small", 8 * 2**30, 8.0

#: Factor for the overhead of the caching allocator and of small tensors.
SLACK = 1.05


def told_of(in_child: Callable[..., Any], scenario: Callable[[], Found]) -> Found:
    found: Found = in_child(scenario)
    print(scenario.__name__, found)  # noqa: T201 - for `pytest -rP`
    return found


lone_spec = partial(spec_of, device=DEVICE, budget_bytes=BUDGET_BYTES, floor_bytes=4 * MIB)


def trainer_of(**levers: Any) -> Trainer:
    settings = TrainSettings(preset=PRESET, **{"batch": 4, "steps": 1000, **levers})
    return Trainer(find_task(settings, 0), settings, torch.device(DEVICE), 0)


def trained() -> list[Status]:
    """Run turns of a training in an engine in this process."""
    keys = {"preset": PRESET, "batch": 8, "steps": 100_000, "precision": "bf16"}
    spec = lone_spec(name="train", policy="adaptive", dtype="bf16", size=1, batch=8)
    workload = replace(spec.workload, settings=TrainSettings(**keys).model_dump())
    engine = begun(replace(spec, workload=workload))
    statuses = [turn(engine, duration_s=SECONDS / 4) for _ in range(4)]
    assert sum(status.counts.steps_ok for status in statuses), statuses[-1].error
    return statuses


def shortages() -> dict[str, str]:
    """Allocate all memory, then call libraries that need memory; return the result of each call."""
    device = open_device(lone_spec())
    place = device.torch_device
    kernel, square = torch.ones(8, 8, 3, 3, device=place), torch.eye(512, device=place)
    calls: dict[str, Callable[[], Any]] = {
        "block": lambda: torch.empty(2 * device.most_bytes, dtype=torch.uint8, device=place),
        "conv": lambda: torch.conv2d(torch.ones(8, 8, 64, 64).to(place), kernel),
        "solve": lambda: torch.linalg.solve(square, square),
        "fft": lambda: torch.fft.fft2(square),
        "compiled": lambda: torch.compile(lambda x: (x.sin() * x).sum())(square),
    }
    blocks = []
    for size_bytes in (64 * MIB, MIB):
        try:
            while True:
                blocks.append(torch.empty(size_bytes, dtype=torch.uint8, device=place))
        except torch.OutOfMemoryError:
            continue
    found = {}
    for name, call in calls.items():
        try:
            with device.enforced():
                call()
        except Exception as error:  # noqa: BLE001 - the error is the result
            failure = oom.classify(error)
            found[name] = f"{failure.kind.value}: {failure.text[:80]}"
    return found


def test_a_shortage_in_a_library_is_one_of_memory(in_child: Callable[..., Any]) -> None:
    found = told_of(in_child, shortages)
    kinds = {told.partition(":")[0] for told in found.values()}
    assert "block" in found
    assert kinds <= {FailureKind.DEFINITE.value, FailureKind.PROBABLE.value}, found


def states_on_the_card() -> Found:
    trainer = trainer_of(optimizer="adamw-8bit", states_on_host=100)
    begin = copy.deepcopy(trainer.state())
    while trainer.step < 2:
        trainer.micro_batch(4)
    trainer.load(begin)
    while trainer.step < 1:
        trainer.micro_batch(4)
    states = trainer.host_states.tensors
    on_card = [
        each.nbytes
        for each in states
        if isinstance(each, torch.Tensor) and each.device.type == "cuda"
    ]
    return {"states": len({id(each) for each in states}), "on_card_bytes": sum(on_card)}


def test_8_bit_states_on_the_host_stay_there(in_child: Callable[..., Any]) -> None:
    found = told_of(in_child, states_on_the_card)
    assert found["states"] > 0
    assert found["on_card_bytes"] == 0


def pinned() -> Found:
    trainer = trainer_of()
    while trainer.step < 1:
        trainer.micro_batch(4)
    parked_bytes = trainer.park()
    pinned_bytes = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    trainer.unpark()
    gc.collect()
    after_bytes = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    return {"parked": parked_bytes, "pinned": pinned_bytes, "pinned_after": after_bytes}


def test_a_parked_state_pins_its_bytes_and_gives_them_back(in_child: Callable[..., Any]) -> None:
    found = told_of(in_child, pinned)
    assert found["parked"] > 2**30, "weights, sums and two moments of 124 million parameters"
    assert found["pinned"] <= SLACK * found["parked"] + 64 * MIB
    assert found["pinned_after"] <= 64 * MIB


def pinned_by_activations(name: str) -> int:
    trainer_of(activations_on_host=True, precision=name).micro_batch(4)
    return torch.cuda.host_memory_stats()["active_bytes.peak"]


def test_half_precision_copies_of_weights_stay_on_the_card(in_child: Callable[..., Any]) -> None:
    found = {name: in_child(pinned_by_activations, name) for name in ("fp32", "bf16")}
    print(found)  # noqa: T201 - for `pytest -rP`
    assert 0 < found["bf16"] <= SLACK * found["fp32"]


def memory() -> Found:
    statuses = trained()
    process_bytes = queries.process_used_bytes(queries.visible_card())
    grown = events(statuses, "context_grew")
    return {
        "failures": sum(status.counts.steps_oom for status in statuses),
        "peak_bytes": max(status.memory.peak_bytes for status in statuses if status.memory),
        "cap_bytes": statuses[-1].device.cap_bytes if statuses[-1].device else None,
        "context_grown_bytes": sum(int(event.detail["grown_bytes"] or 0) for event in grown),
        "process_bytes": process_bytes,
    }


@pytest.fixture(scope="module")
def training(in_child: Callable[..., Any]) -> Found:
    return told_of(in_child, memory)


class TestTraining:
    def test_it_finds_its_size_with_two_failures_at_most(self, training: Found) -> None:
        assert training["failures"] <= 2

    def test_the_process_stays_within_its_budget(self, training: Found) -> None:
        if training["process_bytes"] is None:
            pytest.skip("this driver does not tell what a process holds")
        assert training["process_bytes"] <= BUDGET_BYTES


def cores_of_a_wait() -> Found:
    square = torch.ones(8192, 8192, device=DEVICE)
    product = torch.mm(square, square)
    wait_asleep(product.device)
    process, began_s = psutil.Process(), time.perf_counter()
    before = process.cpu_times()
    for _ in range(200):  # fewer than the driver's queue holds: a full one is waited for in a loop
        torch.mm(square, square, out=product)
    wait_asleep(product.device)
    took_s, after = time.perf_counter() - began_s, process.cpu_times()
    return {"cores": (after.user + after.system - before.user - before.system) / took_s}


def test_a_wait_does_not_spin(in_child: Callable[..., Any]) -> None:
    found = told_of(in_child, cores_of_a_wait)
    assert found["cores"] <= 0.3  # a wait that spins takes a whole core


#: A small training in parts of four samples.
SMALL: Found = {"preset": "gpt2-small", "batch": 8, "seq": 256, "steps": 4, "dropout": 0.1}


def with_levers(levers: Found) -> Found:
    """Train to the end; return what came out, and what it took."""
    usual = {"recompute": "none", "deterministic": True, "ema_decay": 0.9}
    settings = TrainSettings(**(SMALL | usual | levers))
    task, losses = find_task(settings, 0), list[float]()
    plan = MemoryPlanner(task, settings, on_card=True).plan(4, 0)
    run = Trainer(task, settings, torch.device(DEVICE), 0)
    torch.cuda.reset_peak_memory_stats()
    while not run.finished:
        if run.micro_batch(4).updated:
            losses.append(run.course.losses[-1])
    peak_bytes = torch.cuda.max_memory_allocated()
    came_out = losses, run.weights_sha256()
    return {"came_out": came_out, "peak_bytes": peak_bytes, "planned_bytes": plan.total_bytes}


def test_what_waits_on_the_host_changes_no_bit(in_child: Callable[..., Any]) -> None:
    plain = in_child(with_levers, {})
    levered = in_child(with_levers, {"activations_on_host": True, "ema_on": "host"})
    assert levered["came_out"] == plain["came_out"]
    for found in (plain, levered):
        assert found["planned_bytes"] == pytest.approx(found["peak_bytes"], rel=0.1)
    assert levered["peak_bytes"] < 0.8 * plain["peak_bytes"]
