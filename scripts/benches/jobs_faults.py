"""A queue of trainings on two raylets, each with a state folder of its own, under every kind of
loss: each job ends with the weights of its undisturbed run.

    python -m scripts.benches.jobs_faults [JOBS] [STEPS] [KILLS] [SEED]     # a line of JSON

Workers and the head are killed by SIGKILL, a node is ended and started again, out-of-memory is
injected, jobs are held and released (so that they move), and once all is killed at a time, as a
power cut would. The raylets are this program's, as those of `ray start` are not the head's.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from orchestrator.cluster.connect import use_private_token
from orchestrator.cluster.raylets import RayletPlan, Raylets
from orchestrator.jobs import inbox
from orchestrator.jobs.journal import JOURNAL_NAME, QUEUE_NAME, queue_of, records
from orchestrator.jobs.model import ON_CARD, Assigned, JobState, Said, Word

PLANS = (RayletPlan(name="pc1", cpus=56, gpus=1), RayletPlan(name="pc2", cpus=12, gpus=1))
ROOT = Path(__file__).resolve().parents[2]


class Cluster:
    """Two raylets of this program."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self.begin()

    def begin(self) -> None:
        self._count += 1
        place = self._folder / f"c{self._count}"
        place.mkdir()
        use_private_token(place)
        os.environ |= {"MALLOC_ARENA_MAX": "1", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
        os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
        self.raylets = Raylets(PLANS, place)
        for plan in PLANS:
            self.start(plan.name)

    def start(self, node: str) -> None:
        os.environ["ORCHESTRATOR_STATE_DIR"] = str(self._folder / "state" / node)
        self.raylets.start(node)

    def lose(self, node: str) -> None:
        self.raylets.end(node)

    def end(self) -> None:
        """End both at once, the workers with them."""
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                process.kill()
        self.raylets.end_all()
        reap()


def reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


def workers() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "WorkerActor" in " ".join(process.cmdline()):
                found.append(process)
    return found


class Head:
    """The command `jobs run`, begun again by the same words whenever it is killed."""

    def __init__(self, folder: Path, cluster: Cluster, file: Path, more: list[str]) -> None:
        self._folder, self._cluster, self._file, self._more = folder, cluster, file, more
        self.begin()

    def begin(self) -> None:
        command = [
            sys.executable, "-m", "orchestrator", "jobs", "run", str(self._file), "--plain",
            "--config", str(ROOT / "cluster.yaml"), "--run-dir", str(self._folder / "runs"),
            "--set", f"cluster.address={self._cluster.raylets.gcs_address}", *self._more,
        ]  # fmt: skip
        log = (self._folder / "head.log").open("ab")
        self.process = subprocess.Popen(
            command, cwd=self._folder, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )  # fmt: skip

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def job_file(folder: Path, count: int, steps: int) -> Path:
    path = folder / "night.yaml"
    path.write_text(
        "jobs:\n"
        "  - name: seed\n"
        f"    sweep: {{method: grid, over: {{workload.seed: {list(range(count))}}}}}\n"
        f"    train: {{preset: gpt-nano, steps: {steps}, batch: 8, exact: true, micro: 2, "
        "save_every_s: 2}\n"
    )
    return path


def queue_folder(folder: Path) -> Path | None:
    found = sorted((folder / "runs").glob(f"*/{QUEUE_NAME}"))
    return found[-1] if found and (found[-1] / JOURNAL_NAME).exists() else None


def say(folder: Path, word: Word, job: str) -> None:
    said = Said(at_s=time.time(), id=f"{time.time_ns()}", word=word, job=job, by="bench")
    inbox.put(folder, [said])


class Disturber:
    """Does what is planned to a queue at work."""

    def __init__(self, folder: Path, cluster: Cluster, head: Head, draw: random.Random) -> None:
        self._folder, self._cluster, self._head, self._draw = folder, cluster, head, draw
        self._back_at_s: float | None = None
        self._held: dict[str, float] = {}
        self.done: Counter[str] = Counter()

    def look(self) -> None:
        """Undo what is only for a while."""
        now_s, place = time.monotonic(), queue_folder(self._folder)
        if self._back_at_s is not None and now_s > self._back_at_s:
            self._back_at_s = None
            self._cluster.start("pc2")
        for job in [job for job, until_s in self._held.items() if now_s > until_s]:
            if place is not None:
                del self._held[job]
                say(place, Word.RELEASE, job)

    def do(self, what: str) -> bool:
        """Do it, if there is something to do it to."""
        is_done = getattr(self, f"_{what}")()
        self.done[what] += is_done
        return bool(is_done)

    def _worker(self) -> bool:
        there = workers()
        if there:
            self._draw.choice(there).kill()
        return bool(there)

    def _node(self) -> bool:
        if self._back_at_s is not None:
            return False
        self._cluster.lose("pc2")
        self._back_at_s = time.monotonic() + 80.0  # after 30 s its jobs go elsewhere
        return True

    def _head_of_run(self) -> bool:
        self._head.kill()
        return True

    def _move(self) -> bool:
        place = queue_folder(self._folder)
        standings = {} if place is None else queue_of(place).standings
        running = [name for name, each in standings.items() if each.state in ON_CARD]
        if place is None or not running:
            return False
        # All at once: who is released last takes the card that is free then.
        for wait_s, job in enumerate(self._draw.sample(running, len(running))):
            say(place, Word.HOLD, job)
            self._held[job] = time.monotonic() + 5.0 + wait_s
        return True

    def _reboot(self) -> bool:
        if self._back_at_s is not None:
            return False
        self._head.kill()
        self._cluster.end()
        self._cluster.begin()
        return True


def course(
    folder: Path, count: int, steps: int, kills: int, draw: random.Random | None
) -> dict[str, Any]:
    """Work off the jobs, disturbed where there is a `draw`; return the hash of each, and what was
    done.
    """
    cluster = Cluster(folder)
    rate = 5 / (count * steps)
    chaos = [] if draw is None else ["--chaos", f"oom:rate={rate:.6f}", "--yes-really"]
    head = Head(folder, cluster, job_file(folder, count, steps), chaos)
    disturber = Disturber(folder, cluster, head, draw or random.Random())  # noqa: S311
    plan = [] if draw is None else list(schedule(draw, kills))
    began_s = time.monotonic()
    while head.process.poll() is None or head.process.returncode < 0:
        if head.process.poll() is not None:
            head.begin()
        time.sleep(0.2)
        disturber.look()
        is_due = bool(plan) and time.monotonic() - began_s >= plan[0][0]
        if is_due and queue_folder(folder) and disturber.do(plan[0][1]):
            del plan[0]
    took_s = time.monotonic() - began_s
    deadline_s = time.monotonic() + 10
    while workers() and time.monotonic() < deadline_s:
        time.sleep(0.2)
    left = len(workers())
    cluster.end()
    return found_in(folder) | {
        "exit_code": head.process.returncode,
        "took_s": round(took_s, 1),
        "workers_left_after_10_s": left,
        **disturber.done,
    }


def found_in(folder: Path) -> dict[str, Any]:
    """Return how the jobs of a queue ended, with the hash of each under `sha256`."""
    queue = queue_folder(folder)
    assert queue is not None  # noqa: S101 - it has been worked off
    standings = queue_of(queue).standings
    cards: dict[str, list[str]] = {}
    for record in records(queue / JOURNAL_NAME):
        if isinstance(record, Assigned):
            cards.setdefault(record.job, []).append(record.card)
    return {
        "sha256": {name: each.sha256 for name, each in standings.items()},
        "done": sum(each.state is JobState.DONE for each in standings.values()),
        "moved": sum(len(set(each)) > 1 for each in cards.values()),
        "attempts": sum(map(len, cards.values())),
        "out_of_memory": sum(each.out_of_memory for each in standings.values()),
    }


def schedule(draw: random.Random, kills: int) -> Iterator[tuple[float, str]]:
    """Yield when what is done, in seconds since the beginning."""
    events = ["worker"] * kills + ["node"] * 2 + ["head_of_run"] * 2 + ["move"] * 4 + ["reboot"]
    draw.shuffle(events)
    at_s = 20.0
    for event in events:
        at_s += draw.uniform(3.0, 9.0)
        yield at_s, event


def main(count: int = 24, steps: int = 150, kills: int = 20, seed: int = 1) -> int:
    with tempfile.TemporaryDirectory(prefix="jf-", dir="/tmp") as place:
        hashes: dict[str, Mapping[str, str | None]] = {}
        for name, draw in (("undisturbed", None), ("disturbed", random.Random(seed))):  # noqa: S311
            folder = Path(place) / name
            folder.mkdir()
            found = course(folder, count, steps, kills, draw)
            hashes[name] = found.pop("sha256")
            print(json.dumps({name: found}), flush=True)
        wanted, found_hashes = hashes.values()
        equal = sum(found_hashes[name] == sha is not None for name, sha in wanted.items())
        print(json.dumps({"jobs": count, "steps": steps, "seed": seed, "equal": equal}))
    return int(equal < count)


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
