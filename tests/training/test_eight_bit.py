"""AdamW with 8-bit states needs less memory, and its losses differ less than those of two seeds."""

from __future__ import annotations

import copy
import sys

import pytest

from tests.training.scene import CPU, gap, private_bytes, settings, task, train, trainer
from workers.training.errors import TaskError
from workers.training.memory_plan import MemoryPlanner
from workers.training.settings import TrainSettings
from workers.training.tasks import find_task
from workers.training.trainer import Trainer

EIGHT = "adamw-8bit"


@pytest.fixture
def _installed() -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed (extra train8bit)")


@pytest.mark.usefixtures("_installed")
def test_the_loss_goes_its_way_and_states_take_a_quarter() -> None:
    wide = {"width": 96}
    runs = []
    for seed, optimizer in ((7, "adamw-fused"), (7, EIGHT), (8, "adamw-fused")):
        chosen = settings(steps=60, optimizer=optimizer)
        runs.append(Trainer(task("gpt", **wide), chosen, CPU, seed))
    plain, eight, other_seed = (train(each, 12) for each in runs)
    noise, half = gap(other_seed, plain), 30
    mean_gap = abs(sum(eight[half:]) - sum(plain[half:])) / sum(plain[half:])
    assert 0 < mean_gap < 0.1 * noise
    assert private_bytes(runs[1]) < 0.3 * private_bytes(runs[0])


@pytest.mark.usefixtures("_installed")
def test_8_bit_states_survive_checkpoints_and_parking() -> None:
    alone, run, later = (
        trainer(steps=8, optimizer=EIGHT, states_on_host=share) for share in (0, 50, 100)
    )
    train(alone)
    begin = copy.deepcopy(run.state())
    run.micro_batch(12)
    run.load(begin)
    held = private_bytes(run)
    for _ in range(6):
        run.micro_batch(5)
    run.park()
    run.unpark()
    assert private_bytes(run) == held
    later.load(run.state())
    assert private_bytes(later) == 0
    train(later)
    assert later.weights_sha256() == alone.weights_sha256()


@pytest.mark.usefixtures("_installed")
def test_a_plan_knows_the_bytes_of_its_states() -> None:
    chosen = TrainSettings(preset="gpt-nano", optimizer=EIGHT, precision="fp32")
    found = find_task(chosen, 0)
    plan = MemoryPlanner(found, chosen, on_card=False).plan(2, 0)
    made = Trainer(found, chosen, CPU, 0).optimizer
    storages = {
        each.untyped_storage().data_ptr(): each.nbytes
        for states in made.state.values()
        for each in states.values()
        if not isinstance(each, int)
    }
    assert plan.optimizer_bytes == pytest.approx(sum(storages.values()), rel=0.02)


def test_without_a_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(
        TaskError, match=r"pip install 'bitsandbytes>=0\.50' there, or set train.optimizer"
    ):
        trainer(optimizer=EIGHT)
