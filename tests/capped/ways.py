"""Ways to start and to end a program, each tried without a cap and under one: nothing may differ."""

from __future__ import annotations

import difflib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil

from tests.scene import ROOT, ended, wait_for

#: Everything that a program can look at, apart from the two variables that a cap needs.
LOOK = """
import gc, os, resource, signal, sys
def look():
    print(__name__, globals().get("__file__"), repr(__spec__), __package__, __builtins__ is not None)
    print(sys.argv, sys.orig_argv, sys.executable, sys.prefix, sys.flags, sys.warnoptions, sys._xoptions)
    print(sys.path, sys.meta_path, sys.path_hooks, os.getcwd(), os.getpgid(0), os.getsid(0))
    print(sorted({*sys.modules} - {"atexit", "__future__"}))
    print(sys.excepthook is sys.__excepthook__, sys.unraisablehook is sys.__unraisablehook__, sys.gettrace())
    print([signal.getsignal(number) for number in sorted(signal.valid_signals())], signal.pthread_sigmask(0, []))
    print(sorted(os.listdir("/proc/self/fd")), os.umask(0o22), os.nice(0), gc.isenabled(), gc.get_threshold())
    print([resource.getrlimit(limit) for limit in range(16) if limit != resource.RLIMIT_DATA])
    hidden = {"WORKERS_CAPPED", "PYTHONPATH"}
    print(sorted(item for item in os.environ.items() if item[0] not in hidden))
look()
"""

FAIL = """
def inner():
    raise KeyError("no such key")
def outer():
    try:
        inner()
    except KeyError as error:
        raise ValueError("outer") from error
outer()
"""

STARTED = """
import multiprocessing as mp, os, sys
def work(number, queue):
    queue.put((number, mp.current_process().name, sys.argv, sys.path[0], __name__))
    if number == 1:
        sys.exit(5)
    if number == 2:
        raise ValueError(number)
if __name__ == "__main__":
    context = mp.get_context("spawn")
    for number in range(3):
        queue = context.Queue()
        process = context.Process(target=work, args=(number, queue))
        process.start()
        print(queue.get(), flush=True)
        process.join()
        print(process.exitcode, flush=True)
"""

WAITS = "import time\nprint(1, flush=True)\ntime.sleep(60)"

OWN = LOOK + "\nprint(sys.own)\nimport sitecustomize\nprint(sitecustomize.__file__)"


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way: what stands behind `python`, and what it finds."""

    command: tuple[str, ...] = ("program.py",)
    files: Mapping[str, str] = field(default_factory=dict)
    python_path: str = ""
    cwd: str = "."
    stdin: str | None = None
    kill: signal.Signals | None = None
    """Sent from outside once the program has printed a line."""


def program(text: str, *arguments: str, **more: Any) -> Way:
    return Way(files={"program.py": text}, command=("program.py", *arguments), **more)


WAYS: Final = {
    "script with arguments": program(LOOK, "a b", "--gib", "7", "-x", ""),
    "module": Way(
        command=("-m", "package.tool", "--flag"),
        files={"package/__init__.py": "", "package/tool.py": LOOK},
    ),
    "-c": Way(command=("-c", LOOK, "-c", "1")),
    "script on standard input": Way(command=("-", "a"), stdin=LOOK),
    "spaces in folder and script": Way(
        cwd="my work", command=("my script.py",), files={"my work/my script.py": LOOK}
    ),
    "own sitecustomize": Way(
        python_path="own",
        files={"own/sitecustomize.py": "import sys\nsys.own = 1", "program.py": OWN},
    ),
    "exception": program(FAIL),
    "SIGINT from outside": program(WAITS, kill=signal.SIGINT),
    "dies by SIGSEGV": program("import os\nprint(1, flush=True)\nos.kill(os.getpid(), 11)"),
    "multiprocessing spawn": program(STARTED),
}


def end_of(way: Way, folder: Path, *, capped: bool) -> tuple[int, str, str]:
    """Run it; return its exit code (negative: a signal), standard output and standard error."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / way.cwd).mkdir(parents=True)
    for name, text in way.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    # `workers` must be found in both; the one without a cap looks the same to the program.
    path = [*([str(folder / way.python_path)] if way.python_path else []), str(ROOT)]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)}
    cap = ["-m", "workers.capped", "--gib", "64"] if capped else []
    with subprocess.Popen(
        [sys.executable, *cap, *way.command],
        cwd=folder / way.cwd,
        env={**os.environ, **environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        first = ""
        if way.kill is not None:
            first = process.stdout.readline()
            # It sleeps when the signal comes, without a cap as under one.
            seen = psutil.Process(process.pid)
            wait_for(lambda: seen.status() == psutil.STATUS_SLEEPING, "sleep of the program")
            process.send_signal(way.kill)
        out, err = ended(process, way.stdin)
    out, err = (re.sub("0x[0-9a-f]{6,}", "0x", text) for text in (first + out, err))
    return process.returncode, out, err


def differences(way: Way, folder: Path) -> list[str]:
    """Return what differs under a cap."""
    texts = [
        [f"exit code {code}", *out.splitlines(), *err.splitlines()]
        for code, out, err in (end_of(way, folder, capped=cap) for cap in (False, True))
    ]
    return [line for line in difflib.ndiff(*texts) if line[:1] in "+-?"]
