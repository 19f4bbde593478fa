"""Workers killed one after the other under load: how long until each runs again, against a bare Ray actor with torch.

One rehearsal of the reference pair with all its workers at work. In turn, a worker chosen at random and a bare actor
on the same raylet meet SIGKILL; the next one only when this one is back. Ours is back when the report arrives that
proves the new process, with one good step done; the bare actor when it answers. Both restart on a machine that the
other workers keep busy. The head runs in a thread of this process, with its event log and its store.

Deaths are far from each other for the head (`run.death_window_s`): pauses between repeated deaths are meant, and not
what is measured. A target that is missed is told; what makes the result broken is a slot that does not come back, and
books that the witness contradicts.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benches.common import Result, percentile
from benches.heads import supervise
from benches.outside import WITNESS, WITNESS_FOLDER, Ledger, Scene, sums
from benches.startup import torch_actor
from orchestrator.config.load import load_config
from orchestrator.core.fleet import Fleet
from orchestrator.run import environment as environments
from orchestrator.run.environment import Environment
from orchestrator.run.stdio import own_screen
from orchestrator.watch.model import Snapshot
from workers.messages import Report, Verdict, WorkerState

_TARGET = 1.5
_PATIENCE_S = 120.0
"""For one restart; what takes longer hangs."""
_POLL_S = 0.01
_DAY_S = 86_400.0


def run(kills: int, seed: int, config: str, overrides: Sequence[str]) -> Result:
    """Kill so many workers, and a bare actor after each."""
    calm = ["run.death_window_s=1", "run.min_success_rate=0", f'workload.name="{WITNESS}"']
    environment = environments.in_rehearsal(load_config(config, [*calm, *overrides]), None)
    scene = Scene()
    os.environ[WITNESS_FOLDER] = str(scene.steps)
    tempfile.tempdir = str(scene.folder)  # so that what the rehearsal leaves lies where it is looked for
    ledger = Ledger(scene.steps)
    rows: list[dict[str, Any]] = []
    broken: list[str] = []
    snapshot: Snapshot | None = None
    kept: str | None = None
    try:
        # Ray writes of every death there, whatever it is told.
        with own_screen(scene.folder / "ray.log") as screen, environment.fleet as fleet:
            head = _Head(environment, fleet, scene.folder / "run")
            try:
                for row in _kill_all(kills, seed, environment, head):
                    rows.append(row)
                    told = f"{row['kill']}/{kills}  {row['slot']} {row['ours_s']:.2f} s, bare {row['bare_s']:.2f} s"
                    print(told, file=screen.err)
                scene.look()
            except TimeoutError as error:
                broken.append(str(error))
            finally:
                snapshot = head.end()
            stored = ledger.look(head.folder)
        if stored is not None:
            ledger.end(stored)
        lost = _lost(snapshot)
        broken += [*lost, *ledger.broken]
        books = [] if stored is None else ledger.rows(stored)
        broken += scene.leftovers(within_s=10.0)
    finally:
        kept = scene.close(keep=bool(broken))
    figures: dict[str, Any] = {"kills": len(rows), "kept": kept}
    if rows:
        ours_s, bare_s = [row["ours_s"] for row in rows], [row["bare_s"] for row in rows]
        ratio = statistics.median(ours_s) / statistics.median(bare_s)
        figures |= {
            "rounds": rows,
            "slots": books,
            "slots_lost": len(lost),
            "restarts": None if snapshot is None else snapshot.restart_count,
            **sums(books),
            "ours_median_s": statistics.median(ours_s),
            "ours_p90_s": percentile(ours_s, 0.9),
            "bare_median_s": statistics.median(bare_s),
            "bare_p90_s": percentile(bare_s, 0.9),
            "ratio_of_medians": ratio,
            "target": _TARGET,
            "target_met": ratio <= _TARGET,
        }
    return Result(bench="kills", figures=figures, broken=broken)


class _Head:
    """A supervisor at work in a thread of its own."""

    def __init__(self, environment: Environment, fleet: Fleet, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.first: dict[tuple[str, int], float] = {}
        """Slot and process id -> when its first RUNNING report arrived, in monotonic seconds."""
        self.pids: dict[str, int] = {}
        self._stop = threading.Event()
        self._snapshot: Snapshot | None = None

        def work() -> None:
            config, plans = environment.config, environment.plans
            self._snapshot = supervise(config, plans, fleet, self._hear, folder, _DAY_S, self._stop)

        self._thread = threading.Thread(target=work, name="head")
        self._thread.start()

    def _hear(self, at_s: float, report: Report) -> None:
        good = report.verdict is Verdict.OK and report.state is WorkerState.RUNNING and report.counts.steps_ok > 0
        if good and report.device is not None:
            self.first.setdefault((report.slot, report.device.pid), at_s)
            self.pids[report.slot] = report.device.pid

    def await_first(self, slot: str, pids_before: set[int]) -> float:
        """Wait for the first RUNNING report of a process of the slot that is none of these; return when it came.

        Raises:
            TimeoutError: It did not come.
        """
        deadline_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline_s and self._thread.is_alive():
            found = [at for (of, pid), at in list(self.first.items()) if of == slot and pid not in pids_before]
            if found:
                return min(found)
            time.sleep(_POLL_S)
        raise TimeoutError(f"{slot} was not RUNNING within {_PATIENCE_S:.0f} s after its process was killed")

    def end(self) -> Snapshot | None:
        """End the run as Ctrl-C would; return its last picture."""
        self._stop.set()
        self._thread.join()
        return self._snapshot


def _kill_all(kills: int, seed: int, environment: Environment, head: _Head) -> Iterator[dict[str, Any]]:
    """Yield what each pair of kills took.

    Raises:
        TimeoutError: Somebody did not come back.
    """
    import ray  # not earlier: it reads the rehearsal's token settings when it is imported

    slots = {plan.reservation.slot: plan.reservation.node for plan in environment.plans}
    for slot in slots:
        head.await_first(slot, set())
    # Ray itself repeats the call after a restart: nobody has to find out when to ask again.
    actors = {node: torch_actor(node, num_cpus=0, max_task_retries=-1) for node in environment.config.nodes}
    pids = {node: ray.get(actor.pid.remote(), timeout=_PATIENCE_S) for node, actor in actors.items()}
    chance = random.Random(seed)  # noqa: S311 - repeatable is what is wanted
    for number in range(kills):
        slot = chance.choice(sorted(slots))
        node = slots[slot]
        gone = {pid for of, pid in list(head.first) if of == slot}
        ours_s = -time.monotonic()
        os.kill(head.pids[slot], signal.SIGKILL)
        ours_s += head.await_first(slot, gone)

        bare_s = -time.monotonic()
        killed = pids[node]
        os.kill(killed, signal.SIGKILL)
        while pids[node] == killed:  # one answer may still come from the old process
            # GetTimeoutError is a TimeoutError.
            pids[node] = ray.get(actors[node].pid.remote(), timeout=_PATIENCE_S)
        bare_s += time.monotonic()
        yield {"kill": number + 1, "slot": slot, "ours_s": ours_s, "bare_s": bare_s}


def _lost(snapshot: Snapshot | None) -> list[str]:
    if snapshot is None:
        return ["the head ended with an error"]
    works = {WorkerState.RUNNING, WorkerState.BACKOFF}
    return [f"{row.slot} is lost: {row.state}, {row.reason}" for row in snapshot.rows if row.state not in works]
