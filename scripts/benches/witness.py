"""A workload that counts its finished steps independently of the engine: one byte for each step in
`$ORCH_WITNESS_DIR/<seed>.steps`.

Each slot has a different seed. One system call writes the byte before the step returns to the
engine, so the size of the file is the number of finished steps, whenever the process is killed.

    python -m orchestrator run --workload scripts.benches.witness:Witness
"""

from __future__ import annotations

import os
from pathlib import Path

from workers.workloads.base import StepResult, WorkloadContext
from workers.workloads.matmul import Matmul

#: The folder of the files. Workers inherit the variable from the head.
FOLDER_VARIABLE = "ORCH_WITNESS_DIR"


class Witness(Matmul):
    """Matmul with an independent count of its steps.

    The constructor raises KeyError if the variable is not set, and OSError if it cannot write.
    """

    def __init__(self, context: WorkloadContext) -> None:
        super().__init__(context)
        path = Path(os.environ[FOLDER_VARIABLE]) / f"{context.seed}.steps"
        # O_APPEND: for a moment the old and the new process of a slot may both write.
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def step(self, size: int, batch: int) -> StepResult:
        result = super().step(size, batch)
        os.write(self._file, b".")
        return result
