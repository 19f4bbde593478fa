"""On real Ray a program of the user ends with its worker, its raylet and its head."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command.scenes import is_gone, kill, parent_of, told, wait_for
from tests.scene import ROOT
from workers.learned_limits import STATE_DIR_VARIABLE

pytestmark = pytest.mark.ray

#: A head: places a command on each of two nodes, and goes on sending slices.
HEAD = """
import dataclasses, json, os, sys, time
from pathlib import Path
from orchestrator.cluster.local_cluster import rehearsed
from orchestrator.cluster.raylets import RayletPlan
from orchestrator.core.fleet import SliceReported
from tests.command.scenes import command_spec
from workers.messages import Directive

FORKS = '''
import json, os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = os.fork()
if child == 0:
    os.setsid()
else:
    name = os.environ["ORCHESTRATOR_JOB"]
    with open(name + ".new", "w") as file:
        json.dump([os.getpid(), child, os.getppid(), os.environ["ORCHESTRATOR_JOB_DIR"]], file)
    os.rename(name + ".new", name)
time.sleep(600)
'''
with rehearsed([RayletPlan(name="pc1", cpus=4, gpus=0), RayletPlan(name="pc2", cpus=4, gpus=0)]) as fleet:
    fleet.nodes()
    for name, node in (("first", "pc1"), ("second", "pc2"), ("third", "pc1")):
        spec = command_spec("-c", FORKS, slot=name, cwd=os.getcwd(), grace_s=1.0)
        fleet.place(dataclasses.replace(spec, node=node), 1, 0)
        assert fleet._folder(dataclasses.replace(spec, node=node)) is None, "it is on this PC"
        fleet.submit(name, Directive(incarnation=0, sequence=0, duration_s=0.0, resume=None))
    from orchestrator.cluster import command_folder
    fleet._own_address = lambda: "another PC"
    command_folder.look = lambda cwd: None  # and it has no copy of the folder
    Path("project").mkdir()
    Path("project", "train.py").write_text("print(1)")
    spec = command_spec("-c", FORKS, slot="sent", cwd=str(Path("project").absolute()), grace_s=1.0)
    fleet.place(dataclasses.replace(spec, node="pc1"), 1, 0)
    fleet.submit("sent", Directive(incarnation=0, sequence=0, duration_s=0.0, resume=None))
    workers = {}
    while True:
        for ended in fleet.wait(0.5):
            if isinstance(ended, SliceReported):
                report = ended.report
                workers[report.slot] = report.device.pid
                sequence = report.sequence + 1
                fleet.submit(
                    report.slot,
                    Directive(incarnation=0, sequence=sequence, duration_s=0.5, resume=None),
                )
        Path("workers.new").write_text(json.dumps(workers))
        os.rename("workers.new", "workers")
"""


class Scene:
    """A head in a process of its own, and the processes of its slots."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = Path(os.environ[STATE_DIR_VARIABLE])
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.head = subprocess.Popen([sys.executable, "-c", HEAD], cwd=folder, env=environment)

    def of(self, slot: str) -> list[int]:
        """Program, its child, and its keeper."""
        program, child, keeper, _ = told(self.folder / slot)
        return [program, child, keeper]

    def worker(self, slot: str) -> int:
        return int(wait_for(lambda: told(self.folder / "workers").get(slot), f"a report of {slot}"))


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    made = Scene(tmp_path_factory.mktemp("commands"))
    yield made
    made.head.kill()
    made.head.wait()


def await_end(pids: list[int]) -> None:
    wait_for(lambda: all(map(is_gone, pids)), f"end of {pids}", patience_s=10.0)


def test_folder_travels_where_there_is_none(scene: Scene) -> None:
    folder = scene.state / "state" / "run" / ".code"
    found = wait_for(lambda: list(folder.glob("sent-*/sent")), "the program in its folder")
    assert (found[0].parent / "train.py").read_text() == "print(1)"


def test_nothing_outlives_the_worker(scene: Scene) -> None:
    pids, worker = scene.of("first"), scene.worker("first")
    kill(worker)
    await_end(pids)


def test_nothing_outlives_the_raylet(scene: Scene) -> None:
    pids, worker = scene.of("second"), scene.worker("second")
    server = parent_of(pids[-1])
    kill(parent_of(worker))
    await_end([*pids, server])  # Ray's worker stays longer, until it misses its raylet


def test_nothing_outlives_the_head(scene: Scene) -> None:
    pids, worker = scene.of("third"), scene.worker("third")
    kill(scene.head.pid)
    await_end([*pids, worker])
