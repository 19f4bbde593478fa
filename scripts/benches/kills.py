"""Kills workers one after the other under load, and compares the time until each runs again with
that of a bare Ray actor with torch.

Runs one rehearsal of the reference pair with all its workers, and a cluster with one raylet beside
it. In turn, a random worker's process and a bare actor receive SIGKILL, each after the one before
has returned. A worker has returned when the first report of its new process arrives, with one good
step; the bare actor, when it answers. The head treats each death as a single one
(`run.death_window_s`) and makes no pauses. Broken: a slot that does not return, or counts that the
witness contradicts. Does not check what other kills leave behind (`matrix.py`).
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from benches.common import Result, percentile, progress
from benches.outside import WITNESS, Ledger, Scene, within
from orchestrator.cluster.local_cluster import rehearsed
from orchestrator.errors import ArchiveError
from orchestrator.record.events import read_events

_TARGET = 1.5
_PATIENCE_S = 120.0  # limit of one restart
_SETS = {
    "run.death_window_s": 1, "run.min_success_rate": 0, "workload.name": json.dumps(WITNESS),
}  # fmt: skip


def run(kills: int, seed: int) -> Result:
    scene = Scene()
    tempfile.tempdir = str(scene.folder)  # where `Scene.leftovers` finds the rehearsal's files
    rows: list[dict[str, Any]] = []
    broken: list[str] = []
    kept: str | None = None
    try:
        with rehearsed({"bare": {"num_cpus": 1, "num_gpus": 0}}):
            sets = [f"--set={key}={value}" for key, value in _SETS.items()]
            head = scene.start("run", "--json", "--rehearse", "--duration", "24h", *sets)
            try:
                for row in _kill_all(kills, seed, scene):
                    rows.append(row)
                    took = f"{row['ours_s']:.2f} s, bare {row['bare_s']:.2f} s"
                    progress(f"{row['kill']}/{kills}  {row['slot']} {took}")
            except TimeoutError as error:
                broken.append(str(error))
            broken += Ledger(scene, is_witnessed=True).look()
            head.send_signal(signal.SIGINT)
            code, said = scene.ended(head, _PATIENCE_S)
            broken += [] if code == 130 else [f"the head ended with {code}: {said[-500:]}"]
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
        figures |= {
            "rounds": rows, "ratio_of_medians": ratio, "target": _TARGET,
            "target_met": ratio <= _TARGET,
        }  # fmt: skip
    return Result(bench="kills", figures=figures, broken=broken)


class TorchActor:
    """A minimal actor with torch; its process imports this module."""

    def __init__(self) -> None:
        import torch

        self._version = str(torch.__version__)

    def pid(self) -> int:
        return os.getpid()


def _kill_all(kills: int, seed: int, scene: Scene) -> Iterator[dict[str, Any]]:
    """Yield the times of each pair of kills. TimeoutError: a process did not return."""
    import ray  # imported late: the import reads the token settings of the rehearsal

    # With these options Ray repeats a call after a restart.
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": -1}
    actor: Any = ray.remote(TorchActor).options(**options).remote()
    bare = ray.get(actor.pid.remote(), timeout=_PATIENCE_S)
    within(_PATIENCE_S, lambda: [] if _has_begun(scene) else ["no worker has begun"])
    chance = random.Random(seed)  # noqa: S311 - repeatable is what is wanted
    for number in range(kills):
        opened = _opened(scene)
        slot = chance.choice(sorted(opened))
        killed_unix_s = time.time()
        os.kill(opened[slot][0], signal.SIGKILL)
        ours_s = _await_another(scene, slot, opened[slot][0]) - killed_unix_s

        bare_s = -time.monotonic()
        killed = bare
        os.kill(killed, signal.SIGKILL)
        while bare == killed:  # one answer of the old process may still arrive
            # Ray's GetTimeoutError is a TimeoutError.
            bare = ray.get(actor.pid.remote(), timeout=_PATIENCE_S)
        bare_s += time.monotonic()
        yield {"kill": number + 1, "slot": slot, "ours_s": ours_s, "bare_s": bare_s}


def _has_begun(scene: Scene) -> bool:
    """Return whether all workers have done a step."""
    with contextlib.suppress(ArchiveError):
        return bool(read_events(scene.newest_run() or scene.runs, ("counting",)))
    return False


def _opened(scene: Scene) -> dict[str, tuple[int, float]]:
    """Return each slot's newest process and the Unix time of its first report, keyed by slot."""
    return {
        str(event.slot): (int(event.details["pid"]), event.at_unix_s or 0.0)
        for event in read_events(scene.newest_run() or scene.runs, ("device_opened",))
    }


def _await_another(scene: Scene, slot: str, killed: int) -> float:
    """Wait for the first report of the slot's next process; return its Unix time in seconds."""
    late = f"{slot} was not RUNNING within {_PATIENCE_S:.0f} s after its process was killed"
    if within(_PATIENCE_S, lambda: [late] if _opened(scene)[slot][0] == killed else []):
        raise TimeoutError(late)
    return _opened(scene)[slot][1]
