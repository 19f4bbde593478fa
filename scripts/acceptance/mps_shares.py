"""Shares by MPS: the share of the multiprocessors each worker was asked to use, and the work it did with it.

A control daemon of its own is started in a private folder and ended again; one that runs already is left alone and
not used. In plain fp32: there the power limit does not set the pace, and work follows the multiprocessors.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from acceptance.crew import SeatDiedError, crew_of
from acceptance.ground import Ground, NotHereError
from acceptance.outcome import Outcome
from workers.messages import Verdict

_MOST_OVER = 0.10
MUST_HOLD = f"a worker does no more than its asked share of a whole worker's work, and {_MOST_OVER:.2f}"

_CONTROL = "nvidia-cuda-mps-control"
_SHARES = (1.0, 0.5, 0.25)
_PATIENCE_S = 30.0


def measure(ground: Ground) -> list[tuple[float, float]]:
    """Measure one worker after the other, each with its share; return the share asked and the FLOP a second.

    Raises:
        NotHereError: MPS cannot be used here.
    """
    if ground.device != "cuda":
        raise NotHereError("no MPS here: the device is a CPU")
    budget_bytes, _ = ground.fitting(1, ground.scale.large_budget_bytes)
    found = []
    with mps_daemon() as (environment, servers):
        for share in _SHARES:
            specs = ground.specs(1, budget_bytes, dtype="fp32", label="mps")
            percentage = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": f"{100 * share:g}"}
            try:
                with crew_of(specs, ground.watch, {**environment, **percentage}) as crew:
                    first = crew.first[0].last
                    if first.verdict is not Verdict.OK:
                        raise NotHereError(f"MPS cannot be used here: a worker under it ended: {first.reason}")
                    if not servers():
                        raise NotHereError("MPS cannot be used here: the control daemon runs and started no server")
                    crew.turn(ground.scale.turn_s)
                    (turn,) = crew.turn(3 * ground.scale.turn_s)
                    found.append((share, turn.flop_per_s))
            except SeatDiedError as error:
                raise NotHereError(f"MPS cannot be used here: {error}") from None
    return found


@contextlib.contextmanager
def mps_daemon() -> Iterator[tuple[Mapping[str, str], Callable[[], tuple[int, ...]]]]:
    """Run a control daemon for the duration of a `with`; yield its clients' environment, and who lists its servers.

    Raises:
        NotHereError: There is none, or it does not start.
    """
    program = shutil.which(_CONTROL)
    if program is None or not sys.platform.startswith("linux"):
        raise NotHereError(f"no MPS here: {_CONTROL} is not on PATH")
    # In /tmp, because the names of sockets end at 107 bytes.
    with tempfile.TemporaryDirectory(prefix="mps-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        pipe, log = Path(folder) / "pipe", Path(folder) / "log"
        pipe.mkdir()
        log.mkdir()
        environment = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(log)}
        try:
            started = _run([program, "-d"], environment)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NotHereError(f"no MPS here: {_CONTROL} -d does not start: {error}") from None
        if started.returncode != 0:
            words = " ".join(started.stdout.split())[:300]
            raise NotHereError(f"no MPS here: {_CONTROL} -d ended with {started.returncode}: {words}")

        def servers() -> tuple[int, ...]:
            """Return the process ids of the daemon's servers."""
            try:
                told = _run([program], environment, "get_server_list\n")
            except (OSError, subprocess.TimeoutExpired):
                return ()
            return tuple(int(word) for word in told.stdout.split() if word.isdecimal())

        try:
            yield environment, servers
        finally:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                _run([program], environment, "quit -t 5\n")


def _run(
    command: Sequence[str], environment: Mapping[str, str], text: str | None = None
) -> subprocess.CompletedProcess[str]:
    # The daemon keeps the environment it is started with, so it gets no more than these.

    kept = {
        name: os.environ[name] for name in ("PATH", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH") if name in os.environ
    }
    # Into a file: a daemon that kept the end of a pipe would be waited for.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as told:
        done = subprocess.run(
            command,
            input=text or "",
            stdout=told,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_PATIENCE_S,
            check=False,
            env={**kept, **environment},
        )
        told.seek(0)
        return subprocess.CompletedProcess(done.args, done.returncode, stdout=told.read())


def judge(found: Sequence[tuple[float, float]]) -> Outcome:
    """Put each worker's work beside that of the one with all multiprocessors."""
    whole = dict(found).get(1.0)
    rows: list[dict[str, Any]] = []
    broken: list[str] = []
    for asked, flop_per_s in found:
        measured = flop_per_s / whole if whole else None
        rows.append({"share_asked": asked, "share_measured": measured, "tflops": flop_per_s / 1e12})
        if measured is None or not 0.0 < measured <= asked + _MOST_OVER:
            broken.append(f"asked for {asked:.2f} of the multiprocessors, did {measured} of the work")
    return Outcome(figures={"workers_measured": len(found)}, rows=rows, broken=broken)
