"""A queue of trainings on two raylets, each with a state folder of its own, under every kind of
loss: each job ends with the weights of its undisturbed run.

    python -m scripts.benches.jobs_faults [JOBS] [STEPS] [KILLS] [SEED]     # a line of JSON

Workers and the head are killed by SIGKILL, a node is ended and started again, out-of-memory is
injected, jobs are moved to the other card, and once all is killed at a time, as a power cut would.
The raylets are this program's, as those of `ray start` are not the head's.

Jobs are moved as a user would do it: all are held, and once both cards are free, the two that ran
are released one after the other, so that the first takes the card that the second had.
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
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import psutil

from orchestrator.cluster.connect import use_private_token
from orchestrator.cluster.raylets import RayletPlan, Raylets
from orchestrator.jobs import inbox
from orchestrator.jobs.journal import JOURNAL_NAME, QUEUE_NAME, queue_of
from orchestrator.jobs.model import ENDED, ON_CARD, JobState, Said, Word
from orchestrator.record.archive import read_run

PLANS = (RayletPlan(name="pc1", cpus=56, gpus=1), RayletPlan(name="pc2", cpus=12, gpus=1))
ROOT = Path(__file__).resolve().parents[2]

#: So many moves are wanted.
MOVES = 4
#: How long a swap waits for both jobs to rest, and for one to be placed: a head or a node may be lost
#: meanwhile, and a job may wait for the faster card.
REST_S, PLACE_S = 60.0, 15.0
#: What is late is done one after the other, so long apart.
GAP_S = 3.0


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


def say(folder: Path, word: Word, jobs: list[str]) -> None:
    now = time.time_ns()
    inbox.put(
        folder,
        [Said(at_s=now / 1e9, id=f"{now}-{job}", word=word, job=job, by="bench") for job in jobs],
    )


def at_work(folder: Path) -> set[str]:
    """Return the jobs that train."""
    return {record.slot for record in read_run(folder.parent).slots if record.state == "RUNNING"}


def pids_of(folder: Path) -> dict[str, int]:
    """Return the last process of each job."""
    lines = (folder.parent / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines if '"device_opened"' in line]
    return {event["slot"]: event["pid"] for event in events}


class Disturber:
    """Does what is planned to a queue at work."""

    def __init__(self, folder: Path, cluster: Cluster, head: Head, draw: random.Random) -> None:
        self._folder, self._cluster, self._head, self._draw = folder, cluster, head, draw
        self._back_at_s: float | None = None
        self._swap: Iterator[None] | None = None
        self.done: Counter[str] = Counter()

    def look(self) -> None:
        """Go on with what takes a while."""
        if self._back_at_s is not None and time.monotonic() > self._back_at_s:
            self._back_at_s = None
            self._cluster.start("pc2")
        if self._swap is not None and next(self._swap, "over") == "over":
            self._swap = None

    def moves(self) -> int:
        """Return how often a job has come to another card so far."""
        place = queue_folder(self._folder)
        standings = {} if place is None else queue_of(place).standings
        return sum(each.moves for each in standings.values())

    def do(self, what: str) -> bool:
        """Do it, if there is something to do it to."""
        is_done = getattr(self, f"_{what}")()
        self.done[what] += is_done
        return bool(is_done)

    def _worker(self) -> bool:
        """Kill a process that trains: one that never comes to it is given up after ten deaths."""
        place = queue_folder(self._folder)
        pids = set() if place is None else {pids_of(place).get(name) for name in at_work(place)}
        there = [process for process in workers() if process.pid in pids]
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

    def _swap_cards(self) -> bool:
        place = queue_folder(self._folder)
        if place is None or self._swap is not None or self._back_at_s is not None:
            return False
        standings = queue_of(place).standings
        by_card = {each.card: name for name, each in standings.items() if each.state in ON_CARD}
        if len(by_card) < len(PLANS) or not at_work(place).issuperset(by_card.values()):
            return False  # a job whose process only starts has nothing new to take along
        pair = [by_card["pc2"], by_card["pc1"]]  # the first goes to the faster card
        if self.done["swap_cards"] % 2:  # what is faster is measured, on the same processor
            pair.reverse()
        left = [name for name, each in standings.items() if each.state not in ENDED]
        self._swap = _swap(place, pair, left)
        return True

    def _reboot(self) -> bool:
        if self._back_at_s is not None:
            return False
        self._head.kill()
        self._cluster.end()
        self._cluster.begin()
        return True


def _swap(place: Path, pair: list[str], left: list[str]) -> Iterator[None]:
    """Have two jobs change their cards, while all that are `left` are held; a part at each `next`."""
    say(place, Word.HOLD, left)
    yield from _until(place, pair, {JobState.HELD}, REST_S)
    for job in pair:
        say(place, Word.RELEASE, [job])
        yield from _until(place, [job], ON_CARD, PLACE_S)
    say(place, Word.RELEASE, left)


def _until(
    place: Path, jobs: list[str], states: Collection[JobState], most_s: float
) -> Iterator[None]:
    """Wait until each job is in one of these states or has ended, but no longer than `most_s`."""
    end_s = time.monotonic() + most_s
    while time.monotonic() < end_s:
        standings = queue_of(place).standings
        if all(standings[job].state in {*states, *ENDED} for job in jobs):
            break
        yield


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
    began_s = last_s = time.monotonic()
    while head.process.poll() is None or head.process.returncode < 0:
        if head.process.poll() is not None:
            head.begin()
        time.sleep(0.2)
        disturber.look()
        if queue_folder(folder) is None:
            continue
        if draw is not None and not plan and disturber.moves() < MOVES:
            plan.append((0.0, "swap_cards"))
        for number, (at_s, what) in enumerate(plan):
            now_s = time.monotonic()
            if now_s - began_s < at_s or now_s - last_s < GAP_S:
                break
            if disturber.do(what):
                del plan[number]
                last_s = now_s
                break
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
        "planned_but_not_done": len(plan),
        **disturber.done,
    }


def found_in(folder: Path) -> dict[str, Any]:
    """Return how the jobs of a queue ended, with the hash of each under `sha256`."""
    queue = queue_folder(folder)
    assert queue is not None  # noqa: S101 - it has been worked off
    standings = queue_of(queue).standings
    return {
        "sha256": {name: each.sha256 for name, each in standings.items()},
        "done": sum(each.state is JobState.DONE for each in standings.values()),
        "moves": sum(each.moves for each in standings.values()),
        "jobs_that_moved": sum(each.moves > 0 for each in standings.values()),
        "attempts": sum(each.attempt for each in standings.values()),
        "out_of_memory": sum(each.out_of_memory for each in standings.values()),
    }


def schedule(draw: random.Random, kills: int) -> Iterator[tuple[float, str]]:
    """Yield when what is done, in seconds since the beginning."""
    events = ["worker"] * kills + ["node"] * 2 + ["head_of_run"] * 2 + ["reboot"]
    events += ["swap_cards"] * MOVES
    draw.shuffle(events)
    at_s = 20.0
    for event in events:
        at_s += draw.uniform(3.0, 9.0)
        yield at_s, event


def main(count: int = 24, steps: int = 150, kills: int = 20, seed: int = 1) -> int:
    with tempfile.TemporaryDirectory(prefix="jf-", dir="/tmp") as place:
        courses: list[dict[str, Any]] = []
        for name, draw in (("undisturbed", None), ("disturbed", random.Random(seed))):  # noqa: S311
            folder = Path(place) / name
            folder.mkdir()
            courses.append(course(folder, count, steps, kills, draw))
            told = {key: value for key, value in courses[-1].items() if key != "sha256"}
            print(json.dumps({name: told}), flush=True)
    wanted, found = (each["sha256"] for each in courses)
    equal = sum(found[name] == sha is not None for name, sha in wanted.items())
    print(json.dumps({"jobs": count, "steps": steps, "seed": seed, "equal": equal}))
    is_wanted = equal == count and courses[1]["moves"] >= MOVES
    lacks = ("exit_code", "workers_left_after_10_s", "planned_but_not_done")
    return int(not is_wanted or any(each[lack] for each in courses for lack in lacks))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
