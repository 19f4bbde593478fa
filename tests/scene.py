"""Code that tests of several folders share: the guides' settings, the command, paths, waiting."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from workers.settings import MemorySettings, WorkerSpec, WorkloadSpec

ROOT = Path(__file__).resolve().parents[1]

#: The command as a user types it.
COMMAND = (sys.executable, "-m", "orchestrator")

MIB = 2**20

#: How long a test waits without a sign of progress on a machine with a core for each program. No
#: test judges time: a machine with other load may be ten times slower.
PATIENCE_S = 240.0

#: Processor time that counts as a sign of progress. A process that only polls uses less within a
#: test's patience.
_COMPUTED_S = 20.0

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
    """Return the spec of a single worker with the guides' settings; arguments name differences."""
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


def events_in(folder: Path, name: str | None = None, **fields: object) -> list[dict[str, Any]]:
    """Return the events of a run folder so far; with a name or fields, only those that match."""
    path = folder / "events.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    wanted = (fields if name is None else {"event": name, **fields}).items()
    events = (json.loads(line) for line in lines if line.endswith("}"))  # the last may be partial
    return [each for each in events if all(each.get(key) == value for key, value in wanted)]


def slowness() -> float:
    """Return the factor by which other load slows a program: runnable tasks for each core."""
    return min(10.0, max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


def enough(idle_s: float) -> str:
    """Return a `--duration` that lasts `idle_s` on an idle machine, and longer under load."""
    return f"{idle_s * slowness():.0f}s"


class Patience:
    """A deadline that starts again with each sign of progress, so that a slow process may finish,
    and a process that hangs does not block a test.
    """

    def __init__(
        self, progress: Callable[[], object] = lambda: None, patience_s: float = PATIENCE_S
    ) -> None:
        """A new return value of `progress` is a sign of progress."""
        self._progress, self._patience_s = progress, patience_s
        self._seen, self._since_s = progress(), time.monotonic()

    def is_over(self) -> bool:
        """Return whether there was no progress for a whole period. Progress is checked at the end
        of each period.
        """
        if time.monotonic() - self._since_s < self._patience_s * slowness():
            return False
        before, self._seen = self._seen, self._progress()
        self._since_s = time.monotonic()
        return self._seen == before


def computed(pid: int) -> int:
    """Return the processor time of a process and its descendants, as a sign of progress."""
    used_s = 0.0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                used_s += sum(each.cpu_times()[:4])
    return int(used_s / _COMPUTED_S)


def wait_for(
    ask: Callable[[], Any],
    what: str,
    progress: Callable[[], object] = lambda: None,
    rest: Callable[[float], None] = time.sleep,
) -> Any:
    """Call `ask` until its answer is true; return the answer."""
    patience = Patience(progress)
    while not (answer := ask()):
        assert not patience.is_over(), f"no {what}, and no progress for {PATIENCE_S:.0f} s or more"
        rest(0.05)
    return answer


def ended(
    process: subprocess.Popen[str],
    text: str | None = None,
    progress: Callable[[], object] | None = None,
) -> tuple[str, str]:
    """Wait for the end of a process while it makes progress; return its output."""
    patience = Patience(progress or (lambda: computed(process.pid)))
    while not patience.is_over():
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(text, timeout=1.0)
        text = None  # it has been sent
    raise AssertionError(f"{process.args!r} hangs")


def ran(command: Sequence[str], **how: Any) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; return its exit code and output."""
    text = how.pop("input", None)
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if text is not None:
        pipes["stdin"] = subprocess.PIPE
    with subprocess.Popen(command, text=True, **{**pipes, **how}) as process:
        try:
            out, err = ended(process, text)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def python(
    *arguments: str, cwd: Path | None = None, **environment: Any
) -> subprocess.CompletedProcess[str]:
    """Run Python with these arguments to its end, without a standard input."""
    command = [sys.executable, *arguments]
    environment = {**os.environ, **environment}
    return ran(command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL)


def orchestrator(
    *arguments: str, cwd: Path | None = None, **environment: Any
) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does."""
    return python("-m", "orchestrator", *arguments, cwd=cwd, **environment)


def vm_data_bytes() -> int:
    """Return the private writable memory of this process, which RLIMIT_DATA limits."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(
        int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData:")
    )


def only_object(text: str) -> dict[str, Any]:
    """Parse `text`, which must be one JSON object with nothing before or after it."""
    found = json.loads(text)
    assert isinstance(found, dict)
    return found


def namespaced(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a shell script in its own mount namespace; skip if the kernel does not permit it."""
    trial = ["unshare", "-rm", "mount", "-t", "tmpfs", "x", "/mnt"]
    if subprocess.run(trial, capture_output=True, check=False).returncode != 0:
        pytest.skip("the kernel refuses user namespaces with mounts")
    command = ["unshare", "-rm", "sh", "-euc", script, "sh", *arguments]
    return ran(command, cwd=ROOT)
