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
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benches.common import Result, percentile
from benches.outside import WITNESS, WITNESS_FOLDER, Ledger, Scene
from orchestrator.cluster.orphan_reaper import start_time
from orchestrator.config.load import dump_config, load_config
from orchestrator.core.fleet import Fleet, SliceEnded, SliceReported
from orchestrator.run import environment as environments
from orchestrator.run.environment import Environment
from orchestrator.run.learned_limits import LearnedLimits
from orchestrator.run.run_info import RunInfo
from orchestrator.run.stdio import own_screen
from orchestrator.run.supervisor import Supervisor
from orchestrator.watch.events import EventLog
from orchestrator.watch.model import Snapshot
from orchestrator.watch.records import STORE_NAME, RunFacts
from orchestrator.watch.sinks import Outlets
from orchestrator.watch.store import RunStore
from workers.messages import Report, Verdict, WorkerState

_TARGET = 1.5
_PATIENCE_S = 120.0
"""For one restart; what takes longer hangs."""

_POLL_S = 0.01
_DAY_S = 86_400.0


class TorchActor:
    """The least an actor with torch can be. The body of a Ray actor."""

    def __init__(self) -> None:
        import torch

        self._version = str(torch.__version__)

    def pid(self) -> int:
        """Answer."""
        return os.getpid()


class Listening:
    """A fleet that notes the last good report of each slot and when it came, and passes everything on."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.first: dict[tuple[str, int], float] = {}
        """Slot and process id -> when its first RUNNING report arrived, in monotonic seconds."""
        self.pids: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever the fleet has
        return getattr(self._fleet, name)

    def wait(self, timeout_s: float) -> tuple[SliceEnded, ...]:
        """See `Fleet.wait`."""
        outcomes = self._fleet.wait(timeout_s)
        now_s = time.monotonic()
        for outcome in outcomes:
            report = outcome.report if isinstance(outcome, SliceReported) else None
            if report is not None and _runs(report) and report.device is not None:
                self.first.setdefault((report.slot, report.device.pid), now_s)
                self.pids[report.slot] = report.device.pid
        return outcomes


def run(kills: int, seed: int, config_path: str, overrides: Sequence[str]) -> Result:
    """Kill so many workers, and a bare actor after each."""
    calm = ["run.death_window_s=1", "run.min_success_rate=0", f'workload.name="{WITNESS}"']
    environment = environments.in_rehearsal(load_config(config_path, [*calm, *overrides]), None)
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
        broken += [*_lost(snapshot), *ledger.broken]
        books = [] if stored is None else ledger.rows(stored)
        broken += scene.leftovers(within_s=10.0)
    finally:
        kept = scene.close(keep=bool(broken))
    return Result(bench="kills", figures={**_figures(rows, snapshot, books), "kept": kept}, broken=broken)


class _Head:
    """A supervisor at work in a thread of its own."""

    def __init__(self, environment: Environment, fleet: Fleet, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.fleet = Listening(fleet)
        self._events = EventLog(folder / "events.jsonl")
        self._store = RunStore(folder / STORE_NAME)
        self._store.begin(_facts(environment))
        self._stop = threading.Event()
        self._snapshot: Snapshot | None = None
        self._supervisor = Supervisor(
            info=RunInfo(run_id="bench", started_at_unix_s=time.time(), duration_s=_DAY_S),
            config=environment.config,
            plans=environment.plans,
            fleet=self.fleet,
            outlets=Outlets(watchers=(), events=self._events, store=self._store),
            interrupted=self._stop.is_set,
            learned_limits=LearnedLimits(None, self._events),
        )
        self._thread = threading.Thread(target=self._run, name="head")
        self._thread.start()

    def _run(self) -> None:
        self._snapshot = self._supervisor.run()

    def await_first(self, slot: str, pids_before: set[int]) -> float:
        """Wait for the first RUNNING report of a process of the slot that is none of these; return when it came.

        Raises:
            TimeoutError: It did not come.
        """
        deadline_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline_s and self._thread.is_alive():
            found = [at for (of, pid), at in list(self.fleet.first.items()) if of == slot and pid not in pids_before]
            if found:
                return min(found)
            time.sleep(_POLL_S)
        raise TimeoutError(f"{slot} was not RUNNING within {_PATIENCE_S:.0f} s after its process was killed")

    def end(self) -> Snapshot | None:
        """End the run as Ctrl-C would; return its last picture."""
        self._stop.set()
        self._thread.join()
        self._store.end("interrupted", 130, None, ())
        self._events.close()
        return self._snapshot


def _kill_all(kills: int, seed: int, environment: Environment, head: _Head) -> Iterator[dict[str, Any]]:
    """Yield what each pair of kills took.

    Raises:
        TimeoutError: Somebody did not come back.
    """
    import ray  # not earlier: it reads the rehearsal's token settings when it is imported

    from orchestrator.cluster.ray_fleet import NODE_LABEL

    slots = {plan.reservation.slot: plan.reservation.node for plan in environment.plans}
    for slot in slots:
        head.await_first(slot, set())
    # Restarts for ever, and Ray itself repeats the call: nobody has to find out when to ask again.
    actors: dict[str, Any] = {
        node: ray.remote(TorchActor)
        .options(num_cpus=0, label_selector={NODE_LABEL: node}, max_restarts=-1, max_task_retries=-1)
        .remote()
        for node in environment.config.nodes
    }
    pids = {node: ray.get(actor.pid.remote(), timeout=_PATIENCE_S) for node, actor in actors.items()}
    chance = random.Random(seed)  # noqa: S311 - repeatable is what is wanted
    for number in range(kills):
        slot = chance.choice(sorted(slots))
        node = slots[slot]
        gone = {pid for of, pid in list(head.fleet.first) if of == slot}
        ours_s = -time.monotonic()
        os.kill(head.fleet.pids[slot], signal.SIGKILL)
        ours_s += head.await_first(slot, gone)

        bare_s = -time.monotonic()
        os.kill(pids[node], signal.SIGKILL)
        pids[node] = _answer(ray, actors[node], pids[node])
        bare_s += time.monotonic()
        yield {"kill": number + 1, "slot": slot, "ours_s": ours_s, "bare_s": bare_s}


def _answer(ray: Any, actor: Any, pid_before: int) -> int:  # noqa: ANN401 - Ray's module and handle have no types
    """Wait for the answer of another process than before; one may still come from the old one.

    Raises:
        TimeoutError: It did not come.
    """
    deadline_s = time.monotonic() + _PATIENCE_S
    while (left_s := deadline_s - time.monotonic()) > 0:
        pid = int(ray.get(actor.pid.remote(), timeout=left_s))  # GetTimeoutError is a TimeoutError
        if pid != pid_before:
            return pid
    raise TimeoutError(f"the bare actor did not come back within {_PATIENCE_S:.0f} s")


def _runs(report: Report) -> bool:
    return report.verdict is Verdict.OK and report.state is WorkerState.RUNNING and report.counts.steps_ok > 0


def _facts(environment: Environment) -> RunFacts:
    return RunFacts(
        run_id="bench",
        started_at_unix_s=time.time(),
        duration_s=_DAY_S,
        min_success_rate=0.0,
        mode=environment.mode.value,
        device=environment.target.device,
        one_machine=environment.target.one_machine,
        config_yaml=dump_config(environment.config),
        chaos=None,
        nodes_planned=tuple(environment.config.nodes),
        head_pid=os.getpid(),
        head_started=start_time(os.getpid()),
        host=socket.gethostname(),
    )


def _lost(snapshot: Snapshot | None) -> list[str]:
    if snapshot is None:
        return ["the head ended with an error"]
    works = {WorkerState.RUNNING, WorkerState.BACKOFF}
    return [f"{row.slot} is lost: {row.state}, {row.reason}" for row in snapshot.rows if row.state not in works]


def _figures(
    rows: Sequence[dict[str, Any]], snapshot: Snapshot | None, books: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    if not rows:
        return {"kills": 0}
    ours_s, bare_s = [row["ours_s"] for row in rows], [row["bare_s"] for row in rows]
    ratio = statistics.median(ours_s) / statistics.median(bare_s)
    return {
        "kills": len(rows),
        "rounds": list(rows),
        "slots": list(books),
        "slots_lost": len(_lost(snapshot)),
        "restarts": None if snapshot is None else snapshot.restart_count,
        "steps_ok": sum(row["steps_ok"] for row in books),
        "steps_lost_at_most": sum(row["lost_at_most"] for row in books),
        "steps_really_lost": sum(row["really_lost"] for row in books),
        "ours_median_s": statistics.median(ours_s),
        "ours_p90_s": percentile(ours_s, 0.9),
        "bare_median_s": statistics.median(bare_s),
        "bare_p90_s": percentile(bare_s, 0.9),
        "ratio_of_medians": ratio,
        "target": _TARGET,
        "target_met": ratio <= _TARGET,
    }
