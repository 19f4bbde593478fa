"""How a program of the user is started: its arguments, environment, folder, and cap.

Computes the command line; does not start the program, nor decide when it starts.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import psutil
import pynvml

from workers.capped.hook.sitecustomize import NOTE_VARIABLE
from workers.command import capped
from workers.command.files import NOTE
from workers.settings import ASSUMED_CONTEXT_BYTES, CommandSpec, WorkerSpec
from workers.units import GIB

#: Environment variables for the program.
JOB: Final = "ORCHESTRATOR_JOB"
JOB_DIR: Final = "ORCHESTRATOR_JOB_DIR"
RESULTS: Final = "ORCHESTRATOR_RESULTS"
RESUME: Final = "ORCHESTRATOR_RESUME"
#: The number of the job's attempt. A program that has ended is not started again under the same
#: number: its end is reported again.
ATTEMPT: Final = "ORCHESTRATOR_ATTEMPT"

_PYTHON: Final = re.compile(r"python[0-9.]*$")

_LAUNCHER: Final = Path(__file__).with_name("capped.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A program to start: its arguments, environment and folder."""

    argv: tuple[str, ...]
    env: Mapping[str, str]
    cwd: str
    cap_bytes: int | None = None
    uncapped: str | None = None
    """Why it has no cap; `None` if one is set, or none was requested."""
    problem: str | None = None
    """Why it cannot be started, if the kernel's error would not show it."""


def launch(spec: WorkerSpec, command: CommandSpec, folder: Path, *, resumes: bool) -> Launch:
    """Return how to start the command of a slot, with this process's environment as base."""
    cwd = command.cwd or os.getcwd()  # noqa: PTH109 - a string is needed
    env = {
        **os.environ,
        JOB: spec.slot,
        JOB_DIR: str(folder),
        RESULTS: str(folder / "results.jsonl"),
        NOTE_VARIABLE: str(folder / NOTE),
        "PYTHONUNBUFFERED": "1",  # the last output of a killed program shows why it ended
        **({RESUME: "1"} if resumes else {}),
        # Its cap is a CPU's, and the card belongs to other slots.
        **({"CUDA_VISIBLE_DEVICES": ""} if spec.device == "cpu" else {}),
        **command.env,
    }
    argv = command.argv
    if command.python is not None:
        given = Path(cwd, command.python).absolute()
        _use_python(env, given)
        if given.is_file() and _PYTHON.match(argv[0]):
            argv = (str(given), *argv[1:])
    plan = Launch(argv=argv, env=env, cwd=cwd, problem=_carriage_return(argv[0], env, cwd))
    if not command.cap:
        return plan
    if argv[0].endswith(".py"):
        argv = ("python", *argv)
    if len(argv) == 1 or not _PYTHON.match(Path(argv[0]).name):
        return replace(plan, uncapped=f"{argv[0]} is no Python program: nothing caps its memory")
    # The CUDA context does not count against the allocator's cap.
    context_bytes = ASSUMED_CONTEXT_BYTES if spec.device == "cuda" else 0
    cap_bytes = max(spec.budget_bytes - context_bytes, 1)
    folders = (_LAUNCHER.parents[2], Path(psutil.__file__).parents[1], Path(pynvml.__file__).parent)
    env[capped.VARIABLE] = os.pathsep.join(map(str, folders))
    # The interpreter's flags stay before the program: both follow `--`.
    words = (argv[0], str(_LAUNCHER), "--gib", f"{cap_bytes / GIB:.9f}", "--", *argv[1:])
    return replace(plan, argv=words, cap_bytes=cap_bytes)


def _carriage_return(program: str, env: Mapping[str, str], cwd: str) -> str | None:
    """Return why a script with Windows line ends cannot start; the kernel's error hides it."""
    for folder in [""] if "/" in program else os.get_exec_path(env):
        path = Path(cwd, folder, program)
        with contextlib.suppress(OSError), path.open("rb") as file:
            first = file.readline(4096)
            if not (first.startswith(b"#!") and first.endswith(b"\r\n")):
                return None
            return (
                f"the line {first.strip().decode(errors='replace')} of {path} ends with a carriage "
                f"return, as on Windows; type: sed -i 's/\\r$//' {path}"
            )
    return None


def _use_python(env: dict[str, str], given: Path) -> None:
    """Make `python` resolve to a virtual environment's, or to a given interpreter."""
    scripts = given / "bin" if given.is_dir() else given.parent
    env["PATH"] = os.pathsep.join(filter(None, [str(scripts), env.get("PATH", "")]))
    if (scripts.parent / "pyvenv.cfg").is_file():
        env["VIRTUAL_ENV"] = str(scripts.parent)
    env.pop("PYTHONHOME", None)
