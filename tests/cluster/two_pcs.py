"""Two raylets of the test's program with separate state folders, as two PCs of a queue."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import psutil

from orchestrator.cluster.connect import use_private_token
from orchestrator.cluster.raylets import Raylets

RESOURCES = {"pc1": {"num_cpus": 56, "num_gpus": 1}, "pc2": {"num_cpus": 12, "num_gpus": 1}}


def main(folder: Path) -> None:
    """Start both, print their address, and end them when standard input ends."""
    use_private_token(folder)
    os.environ |= {"MALLOC_ARENA_MAX": "1", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
    os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"
    raylets = Raylets(RESOURCES, folder)
    for name in RESOURCES:
        os.environ["ORCHESTRATOR_STATE_DIR"] = str(folder / "state" / name)
        raylets.start(name)
    print(raylets.gcs_address, flush=True)  # noqa: T201 - for the test that started this
    sys.stdin.read()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            process.kill()
    raylets.end_all()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
