"""Data that waits or stays in host memory for a card; tests/gpu has the tests that need a card."""

from __future__ import annotations

import copy
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.in_child import InChild
from tests.training.scene import (
    CPU,
    Full,
    in_shared_memory,
    private_bytes,
    settings,
    task,
    train,
    trainer,
)
from tests.training.test_memory_plan import planned_and_measured
from workers.training import host_memory
from workers.training.errors import TaskError, UpdateInterruptedError
from workers.training.trainer import Trainer


def test_no_place_in_training_waits_in_a_loop() -> None:
    # CUDA waits in a busy loop for a card, a stream, or an event that is not blocking.
    root = Path(host_memory.__file__).parent
    for file in (*root.rglob("*.py"), root.parent / "workloads" / "train.py"):
        assert not re.search(r"(cuda|current_stream\(.*\))\.synchronize\(", file.read_text()), file


SHARES_PCT = (0, 25, 50, 100)


def test_the_share_on_the_host_may_change_at_any_time_and_changes_no_bit() -> None:
    alone, run = trainer(steps=12), trainer(steps=12, states_on_host=25)
    train(alone)
    for share in (25, 100, 50, 0):
        run.host_states.hold(share)
        run.micro_batch(5)
        held = private_bytes(run)
        run.park()
        run.unpark()
        assert private_bytes(run) == held, "parking leaves on the host what belongs there"
        run.micro_batch(5)
        run.micro_batch(5)
    other = trainer(steps=12, states_on_host=100)
    other.load(run.state())
    assert private_bytes(other) == 0
    other.load(run.state())
    assert private_bytes(other) == 0
    train(other)
    assert other.weights_sha256() == alone.weights_sha256()


def test_an_update_out_of_memory_is_rolled_back() -> None:
    alone, run = trainer(steps=4), trainer(steps=4, states_on_host=100)
    train(alone, 12)
    begin = copy.deepcopy(run.state())
    run.micro_batch(12)
    full = Full(lambda func, args: "_to_copy" in str(func) and in_shared_memory(args[0]))
    with full, pytest.raises(UpdateInterruptedError):
        run.micro_batch(12)
    assert private_bytes(run) == 0
    run.load(begin)
    assert run.step == 0
    train(run, 12)
    assert run.weights_sha256() == alone.weights_sha256()


def test_memory_falls_as_the_plan_predicts(in_child: InChild, record_property: Any) -> None:
    keys = {"preset": "gpt-mini", "batch": 4, "seq": 64, "precision": "fp32"}
    pairs = [
        in_child(planned_and_measured, keys | {"states_on_host": share}, 0) for share in SHARES_PCT
    ]
    record_property("planned_and_measured_mib", [(a / 2**20, b / 2**20) for a, b in pairs])
    (planned, measured), *others = pairs
    assert planned - others[-1][0] > 80 * 2**20
    for planned_less, measured_less in others:
        assert measured - measured_less == pytest.approx(planned - planned_less, rel=0.05)


def test_states_that_are_not_known_are_refused_on_the_host() -> None:
    def own(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

    other = dataclasses.replace(task("gpt"), optimizer=own)
    with pytest.raises(TaskError, match="the states of SGD are not known"):
        Trainer(other, settings(states_on_host=1), CPU, 0)
