"""What several rooms' tests share: the guides' settings, the command, and where the repository is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from workers.settings import MemorySettings, WorkerSpec, WorkloadSpec

ROOT = Path(__file__).resolve().parents[1]

#: The command as a user types it.
COMMAND = (sys.executable, "-m", "orchestrator")

MIB = 2**20

#: How long a test waits for what must happen. No test judges time: a machine with other work may be
#: ten times slower.
PATIENCE_S = 240.0

#: The guides' numbers.
GUIDES = MemorySettings(
    first_fraction=0.20,
    retry_reduction=0.10,
    floor_bytes=100 * MIB,
    size_decay=0.7,
    size_floor=256,
    batch_step=16,
    batch_floor=32,
    emergency_size=128,
    cleanup_every=15,
)


def spec_of(
    *,
    device: str = "cpu",
    budget_bytes: int = 96 * MIB,
    name: str = "matmul",
    dtype: str = "fp32",
    size: int = 512,
    batch: int = 128,
    duty: float | None = None,
    policy: str = "classic",
    **memory: Any,
) -> WorkerSpec:
    """Return the spec of a lone worker with the guides' settings; name what is different."""
    return WorkerSpec(
        slot="pc1/0",
        node="pc1",
        device=device,
        budget_bytes=budget_bytes,
        card_budget_bytes=budget_bytes,
        memory_fraction=1.0,
        workers_on_host=1,
        duty=duty,
        policy=policy,
        memory=replace(GUIDES, **{"floor_bytes": 4 * MIB, **memory}),
        workload=WorkloadSpec(name=name, dtype=dtype, size=size, batch=batch, seed=7),
    )


def ran(command: Sequence[str], **how: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, and return its exit code and what it printed."""
    how = {"timeout": PATIENCE_S, **how}
    return subprocess.run(command, capture_output=True, text=True, check=False, **how)


def python(
    *arguments: str, cwd: Path | None = None, timeout_s: float = PATIENCE_S, **environment: Any
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments to its end, without a standard input."""
    command = [sys.executable, *arguments]
    return ran(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        timeout=timeout_s,
    )


def orchestrator(
    *arguments: str, cwd: Path | None = None, **environment: Any
) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does."""
    return python("-m", "orchestrator", *arguments, cwd=cwd, **environment)


def wait_for(ask: Callable[[], Any], what: str) -> Any:
    """Ask until the answer is true; return it."""
    deadline_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline_s:
        answer = ask()
        if answer:
            return answer
        time.sleep(0.05)
    raise AssertionError(f"no {what} within {PATIENCE_S:.0f} s")


def vm_data_bytes() -> int:
    """Private writable memory of this process, as the kernel counts it against RLIMIT_DATA."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(
        int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData:")
    )


def only_object(text: str) -> dict[str, Any]:
    """Return the one JSON object that `text` must be, with nothing before or after it."""
    found = json.loads(text)
    assert isinstance(found, dict)
    return found


def namespaced(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script with mounts of its own; skip where the kernel does not permit them."""
    trial = ["unshare", "-rm", "mount", "-t", "tmpfs", "x", "/mnt"]
    if subprocess.run(trial, capture_output=True, check=False).returncode != 0:
        pytest.skip("the kernel refuses user namespaces with mounts")
    command = ["unshare", "-rm", "sh", "-euc", script, "sh", *arguments]
    return ran(command, cwd=ROOT)
