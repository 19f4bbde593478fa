"""What ten workers cost on real Ray: `python -m tests.cluster.weigh [rounds]` and `… head`.

In turns: ten slots up to their first product, and ten bare Ray actors that import torch and do the
same product, each in a cluster of its own; how long it took, and what their processes hold (PSS).
`head` starts a rehearsal of the shipped configuration and prints what its head computes and writes
in 60 s. Judges nothing.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from orchestrator.cluster.local_cluster import rehearsed
from orchestrator.cluster.raylets import RayletPlan
from orchestrator.core.fleet import Fleet, Told
from orchestrator.record.archive import read_run
from tests.scene import COMMAND, MIB, spec_of
from workers.host.processes import ENGINE_NAME
from workers.keeper.keeper import NAME as KEEPER
from workers.keeper.server import SERVER_NAME
from workers.messages import Begin, Orders

COUNT, SIZE, PLAN = 10, 1024, RayletPlan(name="pc1", cpus=64, gpus=0)


class Bare:
    """The least an actor with torch can be."""

    def product(self) -> float:
        import torch

        torch.set_num_threads(1)
        return float((torch.ones(SIZE, SIZE) @ torch.ones(SIZE, SIZE)).sum())


def ours(fleet: Fleet) -> None:
    """Have ten slots do a good step each."""
    waiting = {f"pc1/{number}": Orders(begin=Begin()) for number in range(COUNT)}
    for slot, orders in waiting.items():
        spec = spec_of(budget_bytes=512 * MIB, size=SIZE, batch=1)
        fleet.place(replace(spec, slot=slot, poll_s=1.0), num_cpus=1.0, num_gpus=0.0)
        fleet.order(slot, orders)
    while waiting:
        for heard in fleet.wait(1.0):
            if isinstance(heard, Told) and heard.slot in waiting:
                status = heard.status
                begin = None if status.incarnation == 0 else Begin()
                fleet.order(heard.slot, Orders(begin=begin, actor=status.actor, heard=status.news))
                if status.counts.steps_ok > 0:
                    del waiting[heard.slot]


def bare(_: Fleet) -> list[Any]:
    """Have ten actors do the product; they live as long as what is returned."""
    import ray

    actor: Any = ray.remote(Bare).options(num_cpus=1)
    actors = [actor.remote() for _ in range(COUNT)]
    ray.get([each.product.remote() for each in actors])
    return actors


def side(name: str) -> dict[str, float]:
    """Start a cluster, and weigh one side in it."""
    names = (ENGINE_NAME, KEEPER, SERVER_NAME, "ray::WorkerActor", "ray::Bare")
    with rehearsed([PLAN]) as fleet:
        began_s = time.monotonic()
        kept = {"ours": ours, "bare": bare}[name](fleet)
        took_s = time.monotonic() - began_s
        everything = psutil.Process().children(recursive=True)
        mine = [each for each in everything if each.name().startswith(names)]
        pss = {each.name(): 0 for each in mine}
        for each in mine:
            pss[each.name()] += each.memory_full_info().pss
        del kept
    return {"s": round(took_s, 2), **{key: round(value / MIB) for key, value in pss.items()}}


def in_turns(rounds: int) -> dict[str, Any]:
    """Weigh both sides in processes of their own, in every other round backwards."""
    rows: dict[str, list[dict[str, float]]] = {"ours": [], "bare": []}
    for number in range(rounds):
        for name in sorted(rows, reverse=bool(number % 2)):
            command = [sys.executable, "-m", "tests.cluster.weigh", name]
            said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            rows[name].append(json.loads(said.splitlines()[-1]))
    took_s = {name: statistics.median(row["s"] for row in found) for name, found in rows.items()}
    held = {
        name: statistics.median(sum(row.values()) - row["s"] for row in found)
        for name, found in rows.items()
    }
    ratios = {
        "of_the_time": took_s["ours"] / took_s["bare"],
        "of_the_pss": held["ours"] / held["bare"],
    }
    return {**ratios, "median_s": took_s, "median_pss_mib": held, **rows}


def head(seconds: float = 60.0) -> dict[str, float]:
    """Return what the head of a rehearsal of ten workers computes and writes a second."""
    with tempfile.TemporaryDirectory(dir="/tmp") as runs:
        words = ["run", "--rehearse", "--json", "--duration", "1h", "--run-dir", runs]
        run = psutil.Popen([*COMMAND, *words], stdout=subprocess.PIPE, text=True)
        try:
            while not _all_run(Path(runs)):
                time.sleep(1.0)
            time.sleep(10.0)
            store = next(Path(runs).glob("*/run.sqlite"))
            before, stored = _of_head(run), store.stat().st_size
            time.sleep(seconds)
            after, grown = _of_head(run), store.stat().st_size - stored
        finally:
            run.send_signal(2)
            run.communicate()
    cpu_s, written = (late - early for early, late in zip(before, after, strict=True))
    return {
        "cpu_pct": round(100 * cpu_s / seconds, 2),
        "store_bytes_a_s": round(grown / seconds),
        "written_bytes_a_s": round(written / seconds),
    }


def _of_head(run: psutil.Process) -> Sequence[float]:
    return sum(run.cpu_times()[:2]), run.io_counters().write_bytes


def _all_run(runs: Path) -> bool:
    if not list(runs.glob("*/run.sqlite")):
        return False
    try:
        slots = read_run(next(runs.glob("*/run.sqlite")).parent).slots
    except Exception:  # noqa: BLE001 - nothing is stored yet
        return False
    return len(slots) == COUNT and all(slot.counters["steps_ok"] > 0 for slot in slots)


def main(words: Sequence[str]) -> None:
    """Do what is named."""
    what = words[0] if words else "3"
    if what == "head":
        sys.stdout.write(json.dumps(head()) + "\n")
    elif what in {"ours", "bare"}:
        sys.stdout.write(json.dumps(side(what)) + "\n")
    else:
        sys.stdout.write(json.dumps(in_turns(int(what)), indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
