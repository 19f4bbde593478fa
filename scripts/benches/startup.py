"""How long ten workers take to run, against ten bare Ray actors that only import torch.

Both start the reference pair as two nodes on this machine and are measured from the start of their
own process. The bare actors run on nodes as Ray starts them, with its agents; those of the
product's rehearsal have none. The product must also read its configuration, write its records, cap
each process, climb and end one step in each worker.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from datetime import datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benches.common import Child, Result, in_turn, progress, spread
from orchestrator.cluster.raylets import Raylets

_ROOT = Path(__file__).resolve().parents[2]
_TARGET = 1.0
_PATIENCE_S = 180.0
_POLL_S = 0.05


class TorchActor:
    """The least an actor with torch can be.

    The body of a Ray actor, whose process loads this file, and so little.
    """

    def __init__(self) -> None:
        import torch

        self._version = str(torch.__version__)

    def pid(self) -> int:
        return os.getpid()


def torch_actor(node: str, **options: Any) -> Any:  # noqa: ANN401 - Ray's options and handle have no types
    import ray  # not earlier: it reads the rehearsal's token settings when it is imported

    from orchestrator.cluster.node_tasks import NODE_LABEL

    return (
        ray.remote(TorchActor)
        .options(label_selector={NODE_LABEL: node}, max_restarts=-1, **options)
        .remote()
    )


def run(rounds: int, config: str, overrides: Sequence[str]) -> Result:
    arguments = ["--config", config, *(word for value in overrides for word in ("--set", value))]
    rows = []
    for number in range(rounds):
        took: dict[str, Any] = in_turn(
            number,
            {"product": lambda: _product_s(arguments), "bare": lambda: _bare_s(config, overrides)},
        )
        (product_s, workers), bare_s = took["product"], took["bare"]
        rows.append(
            {
                "round": number + 1,
                "product_s": product_s,
                "bare_s": bare_s,
                "ratio": product_s / bare_s,
            }
        )
        progress(f"{number + 1}/{rounds}  ratio {rows[-1]['ratio']:.3f}")
    ratios = spread("ratio", [row["ratio"] for row in rows])
    target = {"target": _TARGET, "target_met": ratios["ratio_median"] <= _TARGET}
    return Result(bench="startup", figures={"workers": workers, "rounds": rows, **ratios, **target})


class _RaysOwn(Raylets):
    """Nodes with all that Ray starts for a node, without the dashboard's pages."""

    def start(self, name: str) -> None:
        from ray._private.node import (
            Node,
        )  # not earlier: it reads the rehearsal's settings when it is imported

        from orchestrator.cluster import raylets

        def node(params: Any, **options: Any) -> Node:  # noqa: ANN401 - Ray's parameters
            params.include_dashboard = False
            return Node(params, **options)

        raylets.private_node_class = lambda: node
        super().start(name)


def _start_bare_actors(answer: Connection, config: str, overrides: Sequence[str]) -> None:
    """Start what the product starts, without the product in it.

    Send when all of it is ready, and when it has ended.
    """
    from orchestrator.cluster import local_cluster
    from orchestrator.config.load import load_config
    from orchestrator.run import environment as environments

    local_cluster.Raylets = _RaysOwn  # type: ignore[attr-defined]  # this process does nothing else
    environment = environments.in_rehearsal(load_config(config, list(overrides)), None)
    with environment.fleet:
        import ray  # not earlier: it reads the rehearsal's token settings when it is imported

        places = environment.plans
        actors = [
            torch_actor(place.spec.node, num_cpus=place.num_cpus, num_gpus=place.num_gpus)
            for place in places
        ]
        ray.get([actor.pid.remote() for actor in actors])
        answer.send(time.monotonic())
    answer.send(time.monotonic())


def _bare_s(config: str, overrides: Sequence[str]) -> float:
    started_s = time.monotonic()
    with closing(Child("the bare actors", _start_bare_actors, config, overrides)) as bare:
        ready_s, _ended_s = bare.receive(_PATIENCE_S), bare.receive(_PATIENCE_S)
    return float(ready_s - started_s)


def _product_s(arguments: Sequence[str]) -> tuple[float, int]:
    """Return the seconds until all workers were RUNNING, and how many these are."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        command = [
            sys.executable,
            "-m",
            "orchestrator",
            "run",
            "--rehearse",
            "--json",
            "--duration",
            "10m",
        ]
        started_at_unix_s = time.time()
        process = subprocess.Popen(
            [*command, *arguments, "--run-dir", folder], stdout=subprocess.DEVNULL, cwd=_ROOT
        )
        try:
            deadline_s = time.monotonic() + _PATIENCE_S
            while (ready := _all_running(Path(folder))) is None:
                if (code := process.poll()) is not None or time.monotonic() > deadline_s:
                    raise RuntimeError(
                        f"not all workers were RUNNING within {_PATIENCE_S:.0f} s (exit code "
                        f"{code})"
                    )
                time.sleep(_POLL_S)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    ready_at_unix_s, workers = ready
    return ready_at_unix_s - started_at_unix_s, workers


def _all_running(folder: Path) -> tuple[float, int] | None:
    """Return when the last worker was first RUNNING, and how many there are; `None`: not yet."""
    for path in folder.glob("*/events.jsonl"):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        events = [json.loads(line) for line in lines if line[-1] == "\n"]
        workers = next(
            (event["workers"] for event in events if event["event"] == "run_started"), None
        )
        states = [
            event
            for event in events
            if event["event"] == "state" and event["to_state"] == "RUNNING"
        ]
        running = {event["slot"]: event["at"] for event in reversed(states)}
        if workers and len(running) == workers:
            return max(datetime.fromisoformat(at).timestamp() for at in running.values()), workers
    return None
