"""A training that is killed again and again ends with the weights of one that never was."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

from tests.fork_server import Child, ForkServer
from tests.scene import PATIENCE_S, ROOT, wait_for

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


def test_killed_trainings_end_with_the_same_bits(fork_server: ForkServer, tmp_path: Path) -> None:
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
            time.sleep(drawn.uniform(0.1, 0.4))
            child.kill()
        assert child.wait(PATIENCE_S) == (-signal.SIGKILL if kills_left else 0), child.err
        told = lines(child)
        child.close()
        safe = max([safe, *(int(words[1]) for words in told if words[0].isdigit())])
    assert ["weights", *undisturbed.stdout.split()[-1:]] == told[-1]
    assert len(set(begins)) > 2, "so few kills came after a checkpoint"
    assert sorted(each.name for each in (tmp_path / "killed").iterdir()) == [
        "generation-0.pt",
        "generation-1.pt",
    ]
