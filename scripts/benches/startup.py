"""How long ten workers take to run, against ten bare Ray actors that only import torch.

Both start the same rehearsal of the reference pair and are measured from the start of their own process. The product
must also read its configuration, write its records, cap each process, climb and end one step in each worker.
"""

from __future__ import annotations

import json
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


class Bare:
    """The least an actor with torch can do. The body of a Ray actor."""

    def ready(self) -> str:
        """Import torch and say which."""
        import torch

        return str(torch.__version__)


def run(rounds: int, config: str, overrides: Sequence[str]) -> Result:
    """Let product and bare actors take turns."""
    rows: list[dict[str, Any]] = []
    for number in range(rounds):
        if number % 2:
            bare_s = _bare_s(config, overrides)
            product_s, workers = _product_s(config, overrides)
        else:
            product_s, workers = _product_s(config, overrides)
            bare_s = _bare_s(config, overrides)
        rows.append({"round": number + 1, "product_s": product_s, "bare_s": bare_s, "ratio": product_s / bare_s})
        progress(f"{number + 1}/{rounds}  ratio {rows[-1]['ratio']:.3f}")
    ratios = spread([row["ratio"] for row in rows])
    figures = {
        "workers": workers,
        "rounds": rows,
        "ratio_median": ratios["median"],
        "ratio_least": ratios["least"],
        "ratio_most": ratios["most"],
        "target": _TARGET,
        "target_met": ratios["median"] <= _TARGET,
    }
    return Result(bench="startup", figures=figures)


def bare_actors(config_path: str, overrides: Sequence[str]) -> None:
    """Start what the product starts, without the product in it, and print when all of it is ready."""
    from orchestrator.config.load import load_config
    from orchestrator.run import environment as environments

    environment = environments.in_rehearsal(load_config(config_path, list(overrides)), None)
    with environment.fleet:
        import ray  # not earlier: it reads the rehearsal's token settings when it is imported

        from orchestrator.cluster.ray_fleet import NODE_LABEL

        actors: list[Any] = [
            ray.remote(Bare)
            .options(
                num_cpus=plan.reservation.num_cpus,
                num_gpus=plan.reservation.num_gpus,
                label_selector={NODE_LABEL: plan.reservation.node},
                max_restarts=-1,
                max_task_retries=0,
            )
            .remote()
            for plan in environment.plans
        ]
        ray.get([actor.ready.remote() for actor in actors])
        print(json.dumps({"ready_at_unix_s": time.time()}), flush=True)


def _bare_s(config: str, overrides: Sequence[str]) -> float:
    command = [sys.executable, str(_ROOT / "scripts" / "bench.py"), "startup-bare", "--config", config]
    for override in overrides:
        command += ["--set", override]
    started_at_unix_s = time.time()
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=_PATIENCE_S, check=True, cwd=_ROOT)
    # Ray may print beside it.
    (line,) = [line for line in done.stdout.splitlines() if line.startswith('{"ready_at_unix_s"')]
    ready_at_unix_s: float = json.loads(line)["ready_at_unix_s"]
    return ready_at_unix_s - started_at_unix_s


def _product_s(config: str, overrides: Sequence[str]) -> tuple[float, int]:
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        command = [
            sys.executable, "-m", "orchestrator", "run", "--rehearse", "--json", "--duration", "10m",
            "--config", config, "--run-dir", folder,
        ]  # fmt: skip
        for override in overrides:
            command += ["--set", override]
        started_at_unix_s = time.time()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, cwd=_ROOT)
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
            events = [
                json.loads(line)
                for line in path.read_text(encoding="utf-8").splitlines(keepends=True)
                if line[-1] == "\n"
            ]
            workers = next((event["workers"] for event in events if event["event"] == "run_started"), None)
            running: dict[str, str] = {}
            for event in events:
                if event["event"] == "state" and event["to_state"] == "RUNNING":
                    running.setdefault(event["slot"], event["at"])
            if workers and len(running) == workers:
                return max(datetime.fromisoformat(at).timestamp() for at in running.values()), workers
        time.sleep(_POLL_S)
    raise RuntimeError(f"not all workers were RUNNING within {_PATIENCE_S:.0f} s (exit code {process.poll()})")
