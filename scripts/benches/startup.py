"""How long ten workers take to run, against ten bare Ray actors that only import torch.

Both start the same rehearsal of the reference pair and are measured from the start of their own process. The product
must also read its configuration, write its records, cap each process, climb and end one step in each worker.
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
from datetime import datetime
from pathlib import Path
from typing import Any

from benches.common import Result, progress, spread

_ROOT = Path(__file__).resolve().parents[2]
_TARGET = 1.2
_PATIENCE_S = 180.0
_POLL_S = 0.05


class TorchActor:
    """The least an actor with torch can be. The body of a Ray actor, whose process loads this file, and so little."""

    def __init__(self) -> None:
        import torch

        self._version = str(torch.__version__)

    def pid(self) -> int:
        """Answer."""
        return os.getpid()


def torch_actor(node: str, **options: Any) -> Any:  # noqa: ANN401 - Ray's options and handle have no types
    """Start the least actor on a node."""
    import ray  # not earlier: it reads the rehearsal's token settings when it is imported

    from orchestrator.cluster.ray_fleet import NODE_LABEL

    return ray.remote(TorchActor).options(label_selector={NODE_LABEL: node}, max_restarts=-1, **options).remote()


def run(rounds: int, config: str, overrides: Sequence[str]) -> Result:
    """Let product and bare actors take turns."""
    arguments = ["--config", config, *(word for value in overrides for word in ("--set", value))]
    rows = []
    for number in range(rounds):
        if number % 2:
            bare_s = _bare_s(arguments)
            product_s, workers = _product_s(arguments)
        else:
            product_s, workers = _product_s(arguments)
            bare_s = _bare_s(arguments)
        rows.append({"round": number + 1, "product_s": product_s, "bare_s": bare_s, "ratio": product_s / bare_s})
        progress(f"{number + 1}/{rounds}  ratio {rows[-1]['ratio']:.3f}")
    ratios = spread([row["ratio"] for row in rows])
    figures = {
        "workers": workers,
        "rounds": rows,
        **{f"ratio_{key}": value for key, value in ratios.items()},
        "target": _TARGET,
        "target_met": ratios["median"] <= _TARGET,
    }
    return Result(bench="startup", figures=figures)


def bare_actors(config: str, overrides: Sequence[str]) -> None:
    """Start what the product starts, without the product in it, and print when all of it is ready."""
    from orchestrator.config.load import load_config
    from orchestrator.run import environment as environments

    environment = environments.in_rehearsal(load_config(config, list(overrides)), None)
    with environment.fleet:
        import ray  # not earlier: it reads the rehearsal's token settings when it is imported

        places = [plan.reservation for plan in environment.plans]
        actors = [torch_actor(place.node, num_cpus=place.num_cpus, num_gpus=place.num_gpus) for place in places]
        ray.get([actor.pid.remote() for actor in actors])
        print(json.dumps({"ready_at_unix_s": time.time()}), flush=True)


def _bare_s(arguments: Sequence[str]) -> float:
    started_at_unix_s = time.time()
    command = [sys.executable, str(_ROOT / "scripts" / "bench.py"), "startup-bare", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=_PATIENCE_S, check=True, cwd=_ROOT)
    # Ray may print beside it.
    (line,) = [line for line in done.stdout.splitlines() if line.startswith('{"ready_at_unix_s"')]
    ready_at_unix_s: float = json.loads(line)["ready_at_unix_s"]
    return ready_at_unix_s - started_at_unix_s


def _product_s(arguments: Sequence[str]) -> tuple[float, int]:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        command = [sys.executable, "-m", "orchestrator", "run", "--rehearse", "--json", "--duration", "10m"]
        started_at_unix_s = time.time()
        process = subprocess.Popen([*command, *arguments, "--run-dir", folder], stdout=subprocess.DEVNULL, cwd=_ROOT)
        try:
            ready_at_unix_s, workers = _all_running(process, Path(folder))
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    return ready_at_unix_s - started_at_unix_s, workers


def _all_running(process: subprocess.Popen[bytes], folder: Path) -> tuple[float, int]:
    """Wait for the event that put the last worker in RUNNING.

    Raises:
        RuntimeError: It did not come.
    """
    deadline_s = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline_s and process.poll() is None:
        for path in folder.glob("*/events.jsonl"):
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
            events = [json.loads(line) for line in lines if line[-1] == "\n"]
            workers = next((event["workers"] for event in events if event["event"] == "run_started"), None)
            running: dict[str, str] = {}
            for event in events:
                if event["event"] == "state" and event["to_state"] == "RUNNING":
                    running.setdefault(event["slot"], event["at"])
            if workers and len(running) == workers:
                return max(datetime.fromisoformat(at).timestamp() for at in running.values()), workers
        time.sleep(_POLL_S)
    raise RuntimeError(f"not all workers were RUNNING within {_PATIENCE_S:.0f} s (exit code {process.poll()})")
