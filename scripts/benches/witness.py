"""A workload that keeps counts of its own: one byte in `$ORCH_WITNESS_DIR/<seed>.steps` for each
step it has finished.

Each slot has a seed of its own. A byte is written by one call of the kernel before the step is told
to the engine, so the size of the file is the number of finished steps whenever the process is
killed.

    python -m orchestrator run --workload scripts.benches.witness:Witness
"""

from __future__ import annotations

import os
from pathlib import Path

from workers.workloads.base import StepResult, WorkloadContext
from workers.workloads.matmul import Matmul

#: Where the files are. Workers have it from the environment of the head.
FOLDER_VARIABLE = "ORCH_WITNESS_DIR"


class Witness(Matmul):
    """Matmul, counted independently.

    Fails to open where the folder is not named or cannot be written.
    """

    def __init__(self, context: WorkloadContext) -> None:
        super().__init__(context)
        path = Path(os.environ[FOLDER_VARIABLE]) / f"{context.seed}.steps"
        # Processes of one slot follow each other, and for a moment two may live: each byte goes to
        # the end.
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def step(self, size: int, batch: int) -> StepResult:
        result = super().step(size, batch)
        os.write(self._file, b".")
        return result
