"""Kills every kind of process with SIGKILL at random moments, and checks what remains, what is
lost, and whether the same command continues.

Uses real Ray with two raylets: a run of three workers, or with `--jobs` a queue of trainings under
`train.exact`. Two trainings are teams of both cards: one divides the samples, and one the model.
The second team preempts running jobs. All trainings must end with the weights of an undisturbed
queue. A program in the queue counts, and records if it ever runs twice at a time; no card may run
two programs. After each kill nothing of the victim may remain after 10 s, the store must be sound,
and the counters must grow again and never decrease. Killing the GCS, the head, or one process of
each kind at once ends the run: nothing of it may remain, and the same command is started again.

Every kill is a line of `--out`, so that a second call continues with the missing kills. A kill that
breaks a property ends its run; the next kill gets a fresh run. Does not measure times (`kills.py`).
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benches.common import ROOT, Result, amiss, progress
from benches.outside import WITNESS, Ledger, Scene, called, is_dead, shared_files, within
from orchestrator.record.jobs import queue_of
from workers.host.processes import ENGINE_NAME
from workers.keeper.keeper import NAME as KEEPER
from workers.keeper.keeper import SERVER_NAME
from workers.keeper.processes import below, children

#: The names of each victim's process; the head has none.
NAMES: Mapping[str, tuple[str, ...]] = {
    "child": ("",),  # the process of a keeper: an engine, or any program
    "keeper": (KEEPER,), "server": (SERVER_NAME,), "raylet": ("raylet",), "gcs": ("gcs_server",),
    "actor": ("ray::WorkerActor", "ray::CommandActor"),
}  # fmt: skip
VICTIMS = (*NAMES, "head", "all at once")
#: Victims whose death ends the run.
_ENDING = ("gcs", "head", "all at once")
#: Victims that may follow another victim within 1 s.
_SECOND = ("child", "keeper", "server", "actor")

_GRACE_S = 10.0
#: Limit for Ray to end after the death of its GCS.
_GRACE_OF_RAY_S = 75.0
#: Limit for a run to start, to make progress after a kill, and to end after Ctrl-C.
_PATIENCE_S = 240.0
#: Limit for a queue to end.
_NIGHT_S = 3600.0
_POLL_S = 0.5

_SMALL = {
    "nodes.pc1.workers": 2, "nodes.pc2.workers": 1, "compute_share_mode": "none",
    "run.death_window_s": 1, "run.min_success_rate": 0,
}  # fmt: skip
_COUNTER = "counter"
_TRAIN = {
    "preset": "gpt-nano", "seq": 32, "batch": 4, "micro": 2, "exact": True, "precision": "fp32",
    "dropout": 0.1, "save_every_s": 2, "loader_workers": 1,
}  # fmt: skip
#: Counts to a number, and continues at its last count after a restart.
_PROGRAM = """
import fcntl, os, time
from pathlib import Path
folder = Path(os.environ["ORCHESTRATOR_JOB_DIR"])
lock = (folder / "lock").open("w")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    (folder / "twice").touch()
counts = folder / "counts"
while not counts.exists() or counts.stat().st_size < {counts}:
    with counts.open("a") as file:
        file.write("+")
    time.sleep(0.1)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One planned kill."""

    number: int
    victim: str
    wait_s: float
    """Delay after the run has made progress."""
    second: str | None = None
    """A second victim, killed `second_s` later, or during the next start if the run has ended."""
    second_s: float = 0.0


def planned(kills: int, seed: int) -> list[Kill]:
    """Draw the kills of a seed: each victim once in eight kills, a third of them with a second."""
    chance = random.Random(seed)  # noqa: S311 - must be repeatable
    found: list[Kill] = []
    while len(found) < kills:
        for victim in chance.sample(VICTIMS, len(VICTIMS)):
            second = chance.choice(_SECOND) if chance.random() < 1 / 3 else None
            found.append(
                Kill(
                    number=len(found) + 1, victim=victim, wait_s=round(chance.uniform(0, 4), 2),
                    second=victim if second and victim in _ENDING else second,
                    second_s=round(chance.uniform(0.0, 1.0), 2),
                )
            )  # fmt: skip
    return found[:kills]


def run(kills: int, seed: int, jobs: bool, steps: int, out: str) -> Result:
    book = ROOT / out if out else None
    mine = {"seed": seed, "jobs": steps if jobs else 0}
    rows: list[Mapping[str, Any]] = []
    if book is not None:
        book.parent.mkdir(exist_ok=True)
        book.touch()
        known = map(json.loads, book.read_text(encoding="utf-8").splitlines())
        rows += [row for row in known if {key: row[key] for key in mine} == mine]

    def note(row: Mapping[str, Any]) -> None:
        rows.append({**mine, **row})
        if book is not None:
            with book.open("a", encoding="utf-8") as file:
                file.write(json.dumps(rows[-1]) + "\n")
        progress(str(row))

    if jobs and not any("undisturbed" in row for row in rows):
        with contextlib.closing(Course(seed, steps)) as night:
            note({"undisturbed": night.weights(), "broken": night.end()})
    expected = next((row["undisturbed"] for row in rows if "undisturbed" in row), None)
    done = {row["number"] for row in rows if "number" in row}
    waiting = [kill for kill in planned(kills, seed) if kill.number not in done]
    while waiting:
        with contextlib.closing(Course(seed, steps if jobs else None)) as course:
            is_good = True
            while waiting and is_good:
                row = course.kill(waiting[0])
                if row is None:
                    break  # every job has ended
                is_good = not row["broken"]
                note({**asdict(waiting.pop(0)), **row})
            is_played = expected is not None and is_good
            found = {"weights_equal": course.weights() == expected} if is_played else {}
            note({"night": found or None, "broken": [*course.end(), *amiss(found, "not ")]})
    return Result(bench="matrix", figures=_figures(rows), broken=_broken(rows))


def _figures(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    victims = [
        {
            "victim": victim,
            "kills": len(mine := [row for row in rows if row.get("victim") == victim]),
            "with_a_second": sum(row["second"] is not None for row in mine),
            "failed": (failed := sum(bool(row["broken"]) for row in mine)),
            "verdict": "fail" if failed else "pass" if mine else "not met",
        }
        for victim in VICTIMS
    ]
    nights = [row["night"]["weights_equal"] for row in rows if row.get("night")]
    equal = sum(nights) / len(nights) if nights else None
    return {
        "kills": sum(row["kills"] for row in victims), "nights": len(nights),
        "share_of_equal_weights": equal, "victims": victims,
    }  # fmt: skip


def _broken(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"{row.get('number', '-')}, {row.get('victim', 'the end')}: {sentence}"
        for row in rows
        for sentence in row["broken"]
    ]


class Course:
    """One run, or one run of a queue, and the kills during it."""

    def __init__(self, seed: int, steps: int | None) -> None:
        self._scene = Scene()
        self._has_jobs = steps is not None
        self._ledger = Ledger(self._scene, is_witnessed=steps is None)
        self._chance = random.Random(f"{seed} of each kind")  # noqa: S311 - as in `planned`
        sets = _SMALL if self._has_jobs else _SMALL | {"workload.name": json.dumps(WITNESS)}
        words = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
        self._words = ["run", "--json", "--rehearse", "--duration", "24h", *words]
        if steps is not None:
            file = self._scene.folder / "night.json"
            trains = [{**_TRAIN, "steps": steps, "lr": 1e-3 * (1 + n)} for n in range(4)]
            jobs: list[dict[str, Any]] = [
                {"name": f"t{n}", "train": keys} for n, keys in enumerate(trains)
            ]
            program = _PROGRAM.format(counts=steps)
            jobs.insert(2, {"name": _COUNTER, "command": [sys.executable, "-c", program]})
            both = {**_TRAIN, "steps": steps, "team": ["pc1", "pc2"]}
            jobs.insert(1, {"name": "team", "train": both})
            now = {"after": ["t0"], "priority": 1, "preempt": True}
            divided = {**both, "split": "layers", "steps": steps // 4}
            jobs.append({"name": "urgent", "train": divided, **now})
            file.write_text(json.dumps({"jobs": jobs}))
            self._words = ["jobs", "run", str(file), "--rehearse", "--plain", *words]
        self._broken: list[str] = []
        self._was_broken = False
        self._files: set[Path] = set()
        self._head = self._scene.start(*self._words)

    def kill(self, kill: Kill) -> dict[str, Any] | None:
        """Kill, check the consequences, return the row; `None` if all jobs ended before."""
        began_s = time.monotonic()
        victims: list[psutil.Process] = []
        while not victims:
            if not self._gets_on():
                return self._row(began_s) if self._broken else None
            self._pause(kill.wait_s)
            victims = self._choose(kill.victim)
        gone = self._strike(victims)
        if kill.victim in _ENDING:
            self._end_with(kill.victim)
            if kill.second is not None:
                self._pause(10 * kill.second_s)
                while not (victims := self._choose(kill.second)) and self._head.poll() is None:
                    self._pause(_POLL_S)
                self._strike(victims)
                self._end_with(kill.second)
        else:
            if kill.second is not None:
                time.sleep(kill.second_s)
                gone += self._strike(self._choose(kill.second))
            self._demand(within(_GRACE_S, lambda: [*self._left_of(gone), *self._stray()]))
        if kill.victim == "raylet":  # a rehearsal does not restart its raylets
            self._gets_on(are_all=False)
            self._interrupt()
            self._begin()
        self._gets_on()
        return self._row(began_s)

    def weights(self) -> dict[str, str] | None:
        """Wait for the end of all jobs; return the hash of each training's weights, and the names
        of the files that the program has left.
        """
        code, said = self._scene.ended(self._head, _NIGHT_S)
        if code != 0:
            self._broken.append(f"the queue ended with {code}: {said[-500:]}")
            return None
        listed = subprocess.run(
            [sys.executable, "-m", "orchestrator", "jobs", "list", "--json",
             "--run-dir", str(self._scene.runs)],
            cwd=ROOT, env=self._scene.environment(), capture_output=True, text=True, check=True,
        ).stdout  # fmt: skip
        jobs = json.loads(listed)["jobs"]
        self._demand(
            f"{job['job_name']} is {job['job_state']}" for job in jobs if job["job_state"] != "DONE"
        )
        left = next(self._scene.runs.glob(f"*/jobs/files/{_COUNTER}"))
        files = {"left": f"{sorted(each.name for each in left.iterdir())}"}
        return files | {job["job_name"]: job["job_sha256"] for job in jobs}

    def end(self) -> list[str]:
        """End the run as Ctrl-C does; return the broken properties since the last kill."""
        if self._head.poll() is None:
            self._interrupt()
        self._demand(self._scene.leftovers(_GRACE_S))
        return self._broken

    def close(self) -> None:
        """End all processes; keep the folders if a property was broken."""
        if kept := self._scene.close(keep=self._was_broken or bool(self._broken)):
            progress(f"kept: {kept}")

    def _row(self, began_s: float) -> dict[str, Any]:
        row = {"took_s": round(time.monotonic() - began_s, 1), "broken": self._broken}
        self._was_broken = self._was_broken or bool(self._broken)
        self._broken = []
        return {**row, "steps": sum(self._ledger.last.values())}

    def _begin(self) -> None:
        """Start the same command again: a run with `--resume`, a queue as it was."""
        folder = self._scene.newest_run()
        if self._has_jobs or folder is None:
            self._head = self._scene.start(*self._words)
        else:
            self._head = self._scene.start("run", "--json", "--resume", folder.name)

    def _gets_on(self, *, are_all: bool = True) -> bool:
        """Wait until every slot has done a good step; return whether this happened.

        One slot is enough without `are_all`, and in a queue, whose jobs may wait for a card.
        """
        self._demand(self._ledger.look())
        before, grown = dict(self._ledger.last), list[bool]()
        deadline_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline_s:
            if self._head.poll() is not None:
                code, said = self._scene.ended(self._head)
                is_good = self._has_jobs and code == 0
                self._demand([] if is_good else [f"the head ended with {code}: {said[-500:]}"])
                return False
            self._pause(_POLL_S)
            self._demand(self._ledger.look())
            grown = [steps > before.get(slot, 0) for slot, steps in self._ledger.last.items()]
            if any(grown) and (all(grown) or self._has_jobs or not are_all):
                return True
        self._demand([f"{grown.count(True)} of {len(grown)} slots got on in {_PATIENCE_S:.0f} s"])
        return False

    def _pause(self, seconds: float) -> None:
        """Wait, and check meanwhile that no slot and no card runs two programs."""
        deadline_s = time.monotonic() + seconds
        while time.monotonic() < deadline_s:
            programs = [place for place, keeper in self._kept() if below(keeper.pid)]
            twice = [place for place, count in Counter(programs).items() if count > 1]
            self._demand(f"{place} has two programs at a time" for place in twice)
            cards = Counter(map(self._card_of, set(programs)) if self._has_jobs else ())
            twice = [card for card, count in cards.items() if card and count > 1]
            self._demand(f"{card} has two programs at a time: {programs}" for card in twice)
            time.sleep(min(_POLL_S, max(0.0, deadline_s - time.monotonic())))

    def _card_of(self, place: str) -> str | None:
        """Return the PC of the program in a folder; a rehearsed PC has one card."""
        with contextlib.suppress(OSError, ValueError):  # no training, or not yet written
            return str(json.loads(Path(place, "spec.json").read_text("utf-8"))["spec"]["node"])
        folder, name = self._scene.newest_run(), Path(place).name
        standing = queue_of(folder).standings.get(name) if folder else None
        return standing.last_card if standing else None

    def _demand(self, sentences: Iterable[str]) -> None:
        self._broken += [each for each in sentences if each not in self._broken]

    def _choose(self, victim: str) -> list[psutil.Process]:
        """Return a random process of the victim's kind, one of each kind, or an empty list."""
        if victim == "all at once":
            return [process for kind in (*NAMES, "head") for process in self._choose(kind)]
        if victim == "head":
            return [psutil.Process(self._head.pid)] if self._head.poll() is None else []
        found = [each for each in self._scene.look() if _name(each).startswith(NAMES[victim])]
        if victim == "raylet":
            found = [each for each in found if "__internal_head__" not in called(each)]
        if victim == "child":  # without the processes that the child has forked
            programs = {pid for _, keeper in self._kept() for pid in children(keeper.pid)}
            found = [each for each in found if each.pid in programs]
        return [self._chance.choice(sorted(found, key=lambda each: each.pid))] if found else []

    def _strike(self, victims: Sequence[psutil.Process]) -> list[psutil.Process]:
        """Kill the victims; return the processes that must soon be gone."""
        self._scene.note_traces()
        gone = [*victims]
        servers = [each for each in self._scene.look() if _name(each) == SERVER_NAME]
        for each in victims:
            watching = [one for one in servers if f"[{each.pid}, " in called(one)]
            gone += watching
            # Processes that a server has forked outlive the server, but not their node.
            for one in [*watching, *([each] if _name(each) != SERVER_NAME else [])]:
                with contextlib.suppress(psutil.Error):
                    gone += one.children(recursive=True)
        self._files |= {path for each in gone for path in shared_files(each.pid)}
        for each in victims:
            with contextlib.suppress(psutil.Error):
                each.kill()
        return gone

    def _left_of(self, gone: Sequence[psutil.Process]) -> list[str]:
        """Return a sentence for each process of `gone` that still lives, and for each of their
        files in /dev/shm that still exists.
        """
        alive = [each for each in gone if each.is_running() and not is_dead(each)]
        return [
            *(f"process {each.pid} still lives: {called(each)[:200]}" for each in alive),
            *(f"{path} was left" for path in self._files if path.exists()),
        ]

    def _end_with(self, victim: str) -> None:
        """Check that the run ends and leaves nothing, and start the same command again."""
        grace_s = _GRACE_OF_RAY_S if victim == "gcs" else _GRACE_S
        deadline_s = time.monotonic() + grace_s
        code, _ = self._scene.ended(self._head, grace_s)
        self._demand([f"the head did not end within {grace_s:.0f} s"] if code is None else [])
        self._demand(self._scene.leftovers(max(_GRACE_S, deadline_s - time.monotonic())))
        self._demand(self._ledger.look())
        self._begin()

    def _interrupt(self) -> None:
        self._scene.note_traces()
        self._head.send_signal(signal.SIGINT)
        code, said = self._scene.ended(self._head, _PATIENCE_S)
        is_good = code in {0, 130}
        self._demand([] if is_good else [f"Ctrl-C ended it with {code}: {said[-500:]}"])
        self._demand(self._scene.leftovers(_GRACE_S))

    def _kept(self) -> list[tuple[str, psutil.Process]]:
        """Return each keeper and the folder of its program, found by the log that it has open."""
        found = []
        for keeper in (each for each in self._scene.look() if _name(each) == KEEPER):
            with contextlib.suppress(psutil.Error):
                logs = [Path(file.path) for file in keeper.open_files()]
                found += [(str(log.parent), keeper) for log in logs if log.name == "output.log"]
        return found

    def _stray(self) -> list[str]:
        """Return a sentence for each process that a continuing run should not have."""
        kept = self._kept()
        places = Counter(place for place, _ in kept)
        known = {pid for _, keeper in kept for pid in below(keeper.pid)}
        engines = [each for each in self._scene.look() if _name(each) == ENGINE_NAME]
        return [
            *(f"{count} keepers for {place}" for place, count in places.items() if count > 1),
            *(f"keeper {one.pid} keeps nothing" for _, one in kept if not below(one.pid)),
            *(f"engine {one.pid} has no keeper" for one in engines if one.pid not in known),
        ]


def _name(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return str(process.name())
    return ""
