"""Workers killed one after the other under load: how long until each runs again, against a bare Ray
actor with torch.

One rehearsal of the reference pair with all its workers at work, its head in a thread of this
process. In turn, a worker chosen at random and a bare actor on the same raylet meet SIGKILL; the
next one only when this one is back. Ours is back when the report of a new process with one good
step arrives; the bare actor when it answers. The head takes deaths for single ones
(`run.death_window_s`) and makes no pauses. Broken: a slot that does not come back, or counts that
the witness contradicts.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benches.common import Result, percentile
from benches.heads import supervise
from benches.outside import WITNESS, WITNESS_FOLDER, Ledger, Scene, sums
from orchestrator.config.load import load_config
from orchestrator.core.fleet import Fleet, Heard, Told
from orchestrator.record.model import Snapshot
from orchestrator.run import environment as environments
from orchestrator.run.environment import Environment
from orchestrator.run.terminal import own_screen
from workers.messages import Status, Verdict, WorkerState

_TARGET = 1.5
_PATIENCE_S = 120.0  # for one restart; what takes longer hangs
_POLL_S = 0.01
_DAY_S = 86_400.0


def run(kills: int, seed: int, config: str, overrides: Sequence[str]) -> Result:
    calm = ["run.death_window_s=1", "run.min_success_rate=0", f'workload.name="{WITNESS}"']
    environment = environments.in_rehearsal(load_config(config, [*calm, *overrides]), None)
    scene = Scene()
    os.environ[WITNESS_FOLDER] = str(scene.steps)
    tempfile.tempdir = str(scene.folder)  # what the rehearsal leaves lies where it is looked for
    ledger = Ledger(scene.steps)
    rows: list[dict[str, Any]] = []
    broken: list[str] = []
    last: Snapshot | BaseException | None = None
    kept: str | None = None
    try:
        # Ray writes of every death there, whatever it is told.
        with own_screen(scene.folder / "ray.log") as screen, environment.fleet as fleet:
            head = _Head(environment, fleet, scene.folder / "run")
            try:
                for row in _kill_all(kills, seed, environment, head):
                    rows.append(row)
                    took = f"{row['ours_s']:.2f} s, bare {row['bare_s']:.2f} s"
                    print(f"{row['kill']}/{kills}  {row['slot']} {took}", file=screen.err)
                scene.look()
            except TimeoutError as error:
                broken.append(str(error))
            finally:
                last = head.end()
            stored = ledger.look(head.folder)
        lost = [f"the head ended with {last!r}"]
        if isinstance(last, Snapshot):
            lost = [
                f"{row.slot} is lost: {row.state}, {row.reason}"
                for row in last.rows
                if row.state not in {WorkerState.RUNNING, WorkerState.BACKOFF}
            ]
        broken += [*lost, *ledger.broken]
        books = [] if stored is None else ledger.rows(stored)
        broken += scene.leftovers(within_s=10.0)
    finally:
        kept = scene.close(keep=bool(broken))
    figures: dict[str, Any] = {"kills": len(rows), "kept": kept}
    if rows:
        for side in ("ours", "bare"):
            took_s = [row[f"{side}_s"] for row in rows]
            figures[f"{side}_median_s"] = statistics.median(took_s)
            figures[f"{side}_p90_s"] = percentile(took_s, 0.9)
        ratio = figures["ours_median_s"] / figures["bare_median_s"]
        restarts = last.restart_count if isinstance(last, Snapshot) else None
        figures |= {
            "rounds": rows, "slots": books, "slots_lost": len(lost), "restarts": restarts,
            **sums(books), "ratio_of_medians": ratio, "target": _TARGET,
            "target_met": ratio <= _TARGET,
        }  # fmt: skip
    return Result(bench="kills", figures=figures, broken=broken)


class TorchActor:
    """The least an actor with torch can be; its process loads this file."""

    def __init__(self) -> None:
        import torch

        self._version = str(torch.__version__)

    def pid(self) -> int:
        return os.getpid()


class Arrivals:
    """A fleet that tells of each status when it arrives, and passes everything on."""

    def __init__(self, fleet: Fleet, heard: Callable[[float, Status], None]) -> None:
        self._fleet, self._heard = fleet, heard

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the fleet has
        return getattr(self._fleet, name)

    def wait(self, timeout_s: float) -> tuple[Heard, ...]:
        outcomes, now_s = self._fleet.wait(timeout_s), time.monotonic()
        for outcome in outcomes:
            if isinstance(outcome, Told):
                self._heard(now_s, outcome.status)
        return outcomes


class _Head:
    def __init__(self, environment: Environment, fleet: Fleet, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        #: Slot and process id -> when its first RUNNING status arrived, in monotonic seconds.
        self.first: dict[tuple[str, int], float] = {}
        self.pids: dict[str, int] = {}
        self._stop = threading.Event()
        heard: Any = Arrivals(fleet, self._hear)  # passes on what it lacks
        arguments = (environment.config, environment.plans, heard, folder, _DAY_S)
        thread = ThreadPoolExecutor(1)
        self._run = thread.submit(supervise, *arguments, interrupted=self._stop.is_set)
        thread.shutdown(wait=False)

    def _hear(self, at_s: float, status: Status) -> None:
        good = (
            status.verdict is Verdict.OK
            and status.state is WorkerState.RUNNING
            and status.counts.steps_ok > 0
        )
        if good and status.device is not None:
            self.first.setdefault((status.slot, status.device.pid), at_s)
            self.pids[status.slot] = status.device.pid

    def await_first(self, slot: str, pids_before: set[int]) -> float:
        """Wait for the first RUNNING report of another process of the slot; return its moment."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline_s and not self._run.done():
            first = list(self.first.items())
            found = [at for (of, pid), at in first if of == slot and pid not in pids_before]
            if found:
                return min(found)
            time.sleep(_POLL_S)
        raise TimeoutError(
            f"{slot} was not RUNNING within {_PATIENCE_S:.0f} s after its process was killed"
        )

    def end(self) -> Snapshot | BaseException:
        """End the run as Ctrl-C would; return its last snapshot, or the error that ended it."""
        self._stop.set()
        return self._run.exception() or self._run.result()


def _kill_all(
    kills: int, seed: int, environment: Environment, head: _Head
) -> Iterator[dict[str, Any]]:
    """Yield what each pair of kills took. TimeoutError: a process did not come back."""
    import ray  # not earlier: it reads the rehearsal's token settings when it is imported

    from orchestrator.cluster.node_tasks import NODE_LABEL

    slots = {plan.spec.slot: plan.spec.node for plan in environment.plans}
    for slot in slots:
        head.await_first(slot, set())
    # Ray itself repeats the call after a restart.
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
    actors: dict[str, Any] = {
        node: ray.remote(TorchActor).options(label_selector={NODE_LABEL: node}, **options).remote()
        for node in environment.config.nodes
    }
    pids = {node: ray.get(actors[node].pid.remote(), timeout=_PATIENCE_S) for node in actors}
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
