"""Processes that wait for a training with torch loaded, on real Ray: taken, killed, in the way, and gone with it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from orchestrator.cluster.local_cluster import rehearsed
from orchestrator.cluster.raylets import RayletPlan
from orchestrator.core.fleet import Fleet, Reservation
from tests.cluster.conftest import PATIENT, SMALL, Head, descendants
from tests.fleet.scenarios import Stage
from tests.in_child import MakeSpec
from tests.scene import COMMAND, ROOT, python, wait_for
from workers.settings import CommandSpec

pytestmark = pytest.mark.ray

NODE = "here"
WHOLE = Reservation(node=NODE, num_cpus=1.0, num_gpus=0.0)

#: Another program on the cluster, until its input ends.
OTHER = """
import ray, sys
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR", configure_logging=False)
print("there", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Fleet]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT / "tests" / "fleet"), prepend=os.pathsep)
        with rehearsed([RayletPlan(name=NODE, cpus=1, gpus=0)]) as fleet:
            yield fleet


@pytest.fixture
def stage(cluster: Fleet, make_spec: MakeSpec) -> Iterator[Stage]:
    made = Stage(cluster, NODE, make_spec())
    yield made
    cluster.keep_spares(())
    made.close()
    wait_for(lambda: not spares(), "end of the processes")


def spares() -> set[int]:
    """Processes with an actor of ours, which has no slot unless one was placed."""
    found = set()
    for process in descendants():
        with contextlib.suppress(psutil.Error):
            if " ".join(process.cmdline()).startswith("ray::WorkerActor"):
                found.add(process.pid)
    return found


def has_torch(pid: int) -> bool:
    return "libtorch_cpu" in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")


def test_a_slot_takes_the_spare_and_outlives_it(stage: Stage) -> None:
    stage.fleet.keep_spares((WHOLE,))
    (spare,) = wait_for(spares, "a spare")
    wait_for(lambda: has_torch(spare), "torch in it")
    slot = stage.place("taken")
    stage.submit(slot, 0)
    (report,) = stage.reports(1)
    assert report.device is not None
    assert report.device.pid == spare
    os.kill(spare, 9)
    again = stage.report_of_new_process(slot, 1, report.resume)
    assert again.device is not None
    assert again.device.pid != spare
    assert (again.slot, again.incarnation) == (slot, 1)


def test_a_spare_gives_way_to_what_cannot_use_it(stage: Stage) -> None:
    stage.fleet.keep_spares((WHOLE,))
    (spare,) = wait_for(spares, "a spare")
    program = CommandSpec(argv=("true",))
    spec = replace(stage.spec, slot=f"{NODE}/program", node=NODE, command=program)
    stage.place_as(spec.slot, spec)  # the only CPU of the node was the spare's
    stage.submit(spec.slot, 0)
    stage.wait(1)
    assert spare not in spares()


def test_no_spare_is_kept_from_others_on_the_cluster(cluster: Fleet) -> None:
    from orchestrator.cluster.ray_fleet import RayFleet

    fleet = RayFleet(cluster.address(), None)  # as if the nodes were the user's

    def kept() -> set[int]:
        fleet.nodes()
        fleet.keep_spares((WHOLE,))
        return spares()

    with contextlib.closing(fleet):
        wait_for(kept, "a spare")
        words = [sys.executable, "-c", OTHER, cluster.address()]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == b"there\n"
            wait_for(lambda: not kept(), "end of the spare")
            other.kill()
        wait_for(kept, "a spare again")
        fleet.keep_spares(())
        wait_for(lambda: not spares(), "end of the spare")


def test_spares_end_with_a_head_that_is_killed(nothing_left: None, short_tmp: Path) -> None:
    runs, folder = short_tmp / "runs", str(short_tmp)
    where = ("--config", str(ROOT / "cluster.yaml"), "--run-dir", str(runs))
    environment = {**os.environ, "TMPDIR": folder, "ORCHESTRATOR_STATE_DIR": folder}
    process = subprocess.Popen(
        [*COMMAND, "jobs", "run", "--stay", "--rehearse", "--plain", *SMALL, *PATIENT, *where],
        env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )  # fmt: skip
    head = Head(process=process, runs=runs)
    try:
        head.wait(lambda: len(spares()) == 2, "a spare on each card")
        before = spares()
        words = ("jobs", "submit", "--train", "preset=gpt-nano", "--train", "steps=100000")
        done = python(*COMMAND[1:], *words, "--run-dir", str(runs), **environment)
        assert done.returncode == 0, done.stderr
        opened = wait_for(
            lambda: [each for each in head.events() if each["event"] == "device_opened"],
            "a training",
        )
        assert opened[0]["pid"] in before
    finally:
        process.kill()
        process.communicate()
    wait_for(lambda: not list(short_tmp.glob("orch-*")), "end of the temporary folders")
