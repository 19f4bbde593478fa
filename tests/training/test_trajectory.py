"""A training whose micro-batch changes at any time goes the way of one that is left alone."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fork_server import Child, ForkServer
from tests.scene import PATIENCE_S, ROOT, wait_for
from tests.training.scene import CNN, GPT, gap, in_shared_memory, train, trainer
from workers.training.batches import tensors_in
from workers.training.trainer import Trainer


def held_by(run: Trainer) -> list[torch.Tensor]:
    """Return all that a training holds between two calls."""
    optimizer = list(run._update.optimizer.state.values())
    sums = [*run._accumulator.gradients, *run._accumulator.loss]
    return list(tensors_in([run.model.state_dict(), optimizer, run._average.tensors, sums]))


@pytest.mark.parametrize("kind", [GPT, CNN])
def test_any_micro_batches_change_the_loss_by_rounding_only(kind: str) -> None:
    alone = train(trainer(kind, steps=100), 12)
    control = train(trainer(kind, steps=100))
    drawn = random.Random(3)  # noqa: S311 - repeatable
    changing = trainer(kind, steps=100)
    limits: list[int] = []

    def limit() -> int:
        limits.append(drawn.randint(1, 12))
        return limits[-1]

    losses = train(changing, limit)
    assert alone[-1] < 0.8 * alone[0], "it learns, so a difference would show"
    assert gap(losses, alone) <= max(1e-6, 3 * gap(control, alone))
    again = trainer(kind, steps=100)
    train(again, iter(limits).__next__)
    assert again.step == 100
    assert again.weights_sha256() == changing.weights_sha256()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", [GPT, CNN])
def test_any_recomputation_levels_change_no_bit(kind: str, precision: str) -> None:
    keys: dict[str, Any] = {"precision": precision, "steps": 40}
    alone = trainer(kind, **keys)
    changing = trainer(kind, **keys)
    drawn = random.Random(4)  # noqa: S311 - repeatable
    levels: list[int] = []

    def level() -> int:
        levels.append(drawn.randint(0, 2))
        return levels[-1]

    assert train(alone, 6) == train(changing, 6, level)
    assert alone.weights_sha256() == changing.weights_sha256()
    assert set(levels) == {0, 1, 2}


def test_parking_in_the_middle_of_a_batch_changes_no_bit() -> None:
    alone, run = trainer(steps=4), trainer(steps=4)
    train(alone)
    for _ in range(4):
        run.micro_batch(5)
    needed_bytes = sum(each.nbytes for each in held_by(run))
    assert run.park() == needed_bytes
    assert all(in_shared_memory(each) for each in held_by(run)), (
        "on a CPU, outside of what the cap counts"
    )

    class Full(TorchDispatchMode):
        left = 30

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.left -= 1
            if self.left < 0:
                raise torch.OutOfMemoryError("CUDA out of memory. (injected)")
            return func(*args, **kwargs or {})

    with Full(), pytest.raises(torch.OutOfMemoryError):
        run.unpark()
    assert all(in_shared_memory(each) for each in held_by(run)), "all of it stays in host memory"
    run.unpark()
    assert not any(in_shared_memory(each) for each in held_by(run))
    train(run)
    assert run.weights_sha256() == alone.weights_sha256()


#: Trains with dropout, averaged weights and parts that change with the step; tells where it began,
#: and each step.
TRAINS = """
import sys, torch
from pathlib import Path
sys.path.insert(0, sys.argv[1])
torch.set_num_threads(1)
from tests.training.scene import trainer
from workers.training.checkpoints import Checkpoints
training = trainer(steps=80)
checkpoints = Checkpoints(Path(sys.argv[2]), training.identity, save_every_s=float(sys.argv[3]))
loaded = checkpoints.load()
assert not loaded.refused, loaded.refused
if loaded.state is not None:
    training.load(loaded.state)
print("from", training.step, flush=True)
while not training.finished:
    training.micro_batch((12, 5, 3, 7)[training.step % 4], level=training.step % 3)
    if training.at_boundary:
        print(training.step, checkpoints.saved_step or 0, flush=True)
        if checkpoints.due():
            checkpoints.save(training.state(), training.step)
assert checkpoints.wait(60)
assert checkpoints.failure is None, checkpoints.failure
print("weights", training.weights_sha256(), flush=True)
"""


def lines(child: Child) -> list[list[str]]:
    """Return what it has said in whole lines, as words."""
    return [line.split() for line in child.out[: child.out.rfind("\n") + 1].splitlines()]


def saved_step(child: Child) -> int:
    """Return the newest step that it has told to be safe."""
    return max((int(words[1]) for words in lines(child) if words[0].isdigit()), default=0)


def test_killed_trainings_end_with_the_same_bits(fork_server: ForkServer, tmp_path: Path) -> None:
    """Each is killed at any moment after it has saved once more."""
    undisturbed = fork_server.run(TRAINS, str(ROOT), str(tmp_path / "alone"), "1000")
    assert undisturbed.returncode == 0, undisturbed.stderr
    drawn, begins, safe = random.Random(3), [], 0  # noqa: S311 - moments of a test
    for kills_left in range(5, -1, -1):
        child = fork_server.start(TRAINS, str(ROOT), str(tmp_path / "killed"), "0")
        began = wait_for(lambda child=child: lines(child) or child.err, "beginning of a training")
        assert began[0][0] == "from", child.err
        begins.append(int(began[0][1]))
        assert begins[-1] >= safe, "a checkpoint that was told to be safe is not lost"
        if kills_left:
            wait_for(
                lambda child=child: saved_step(child) > begins[-1] or "weights" in child.out,
                "checkpoint",
            )
            time.sleep(drawn.uniform(0, 0.1))
            child.kill()
        ends = {0, -signal.SIGKILL} if kills_left else {0}
        assert child.wait(PATIENCE_S) in ends, child.err
        told, safe = lines(child), max(safe, saved_step(child))
        child.close()
    assert ["weights", *undisturbed.stdout.split()[-1:]] == told[-1]
    assert len(set(begins)) > 2, "so few kills came after a checkpoint"
    assert sorted(each.name for each in (tmp_path / "killed").iterdir()) == [
        "generation-0.pt",
        "generation-1.pt",
    ]
