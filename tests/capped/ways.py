"""Ways to start and to end a program, each tried without a cap and under one: nothing may differ.

`python -m tests.capped.ways FOLDER` tries them all in a folder that it makes, and prints the table
of docs/results; the tests try ten.
"""

from __future__ import annotations

import difflib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[2]

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
    context = mp.get_context(sys.argv[1])
    for number in range(3):
        queue = context.Queue()
        process = context.Process(target=work, args=(number, queue))
        process.start()
        print(queue.get(), flush=True)
        process.join()
        print(process.exitcode, flush=True)
"""

LOADED = """
import torch
from torch.utils.data import DataLoader, Dataset
class Squares(Dataset):
    def __len__(self): return 12
    def __getitem__(self, index):
        if index == 11: raise ValueError("the last")
        return torch.tensor(index ** 2)
loader = DataLoader(Squares(), batch_size=4, num_workers=1)
for batch in loader:
    print(batch.tolist(), flush=True)
"""


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way: what stands behind `python`, and what it finds."""

    name: str
    command: tuple[str, ...] = ("program.py",)
    files: Mapping[str, str] = field(default_factory=dict)
    python: tuple[str, ...] = (sys.executable,)
    """The interpreter and its flags."""
    environment: Mapping[str, str] = field(default_factory=dict)
    cwd: str = "."
    stdin: str | None = None
    kill: signal.Signals | None = None
    """Sent from outside once the program has printed a line."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of `subprocess.Popen`."""
    prepare: Callable[[Path], None] | None = None


def program(text: str, *arguments: str, **options: Any) -> dict[str, Any]:
    return {"files": {"program.py": text}, "command": ("program.py", *arguments), **options}


def _dies(number: int) -> dict[str, Any]:
    return program(f"import os\nprint(1, flush=True)\nos.kill(os.getpid(), {int(number)})")


def _waits(text: str = "") -> str:
    return f"import signal, sys, time\n{text}\nprint(1, flush=True)\ntime.sleep(60)"


def _zip(folder: Path) -> None:
    import zipapp

    (folder / "app").mkdir()
    (folder / "app" / "__main__.py").write_text(LOOK)
    zipapp.create_archive(folder / "app")


def _venv(folder: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", folder / "venv"],
        check=True,
    )
    (site,) = (folder / "venv").glob("lib/*/site-packages")
    (site / "others.pth").write_text(
        "\n".join(path for path in sys.path if "site-packages" in path)
    )


_CAUGHT = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))"
_MODULE = {"package/__init__.py": "", "package/tool.py": LOOK, "package/__main__.py": LOOK}
_OWN = {"own/sitecustomize.py": "import sys\nsys.own = 1", "program.py": LOOK + "\nprint(sys.own)\n"
        "import sitecustomize\nprint(sitecustomize.__file__)"}  # fmt: skip

WAYS: Final = {
    way.name: way
    for way in (
        Way(name="script with arguments", **program(LOOK, "a b", "--gib", "7", "-x", "")),
        Way(name="module", command=("-m", "package.tool", "--flag"), files=_MODULE),
        Way(name="package", command=("-m", "package", "1"), files=_MODULE),
        Way(name="module that is missing", command=("-m", "package.none"), files=_MODULE),
        Way(name="script that is missing", command=("none.py",)),
        Way(name="-c", command=("-c", LOOK, "-c", "1")),
        Way(name="script on standard input", command=("-", "a"), stdin=LOOK),
        Way(
            name="reads standard input",
            stdin="1\n2\n3",
            **program("import sys\nprint(input(), sys.stdin.read())"),
        ),
        Way(
            name="flags before",
            python=(sys.executable, "-u", "-X", "dev", "-W", "ignore", "-O", "-B"),
            **program(LOOK),
        ),
        Way(name="flags behind", **program(LOOK)
            | {"command": ("-O", "-X", "utf8", "-W", "error", "program.py", "a")}),
        Way(name="-P", python=(sys.executable, "-P"), **program(LOOK)),
        Way(name="-I behind", **program(LOOK) | {"command": ("-I", "program.py")}),
        Way(name="spaces in folder and script", cwd="my work", command=("my script.py",),
            files={"my work/my script.py": LOOK}),
        Way(name="script elsewhere", cwd="other", command=("../program.py",),
            files={"other/x": "", "program.py": LOOK}),
        Way(name="folder", command=("app",), files={"app/__main__.py": LOOK}),
        Way(name="zip file", command=("app.pyz",), prepare=_zip),
        Way(name="python of a venv", python=("venv/bin/python",), prepare=_venv, **program(LOOK)),
        Way(name="python in PATH", python=("python",), **program(LOOK),
            environment={"PATH": f"{Path(sys.executable).parent}:/bin"}),
        Way(name="own sitecustomize", environment={"PYTHONPATH": "{folder}/own"},
            command=("program.py",), files=_OWN),
        Way(name="own sitecustomize that fails", environment={"PYTHONPATH": "{folder}/own"},
            command=("program.py",), files={**_OWN, "program.py": LOOK,
                                            "own/sitecustomize.py": "1 / 0"}),
        Way(name="symbolic link to a script", command=("link.py",), files={"real/program.py": LOOK},
            prepare=lambda folder: (folder / "link.py").symlink_to("real/program.py")),
        Way(name="end of the script", **program("print(1)")),
        *(Way(name=f"sys.exit({code})", **program(f"import sys\nprint(1)\nsys.exit({code})"))
          for code in ("", "0", "3", "-1", "'a text'", "256", "None")),
        Way(name="os._exit(7)", **program("import os\nprint(1, flush=True)\nos._exit(7)")),
        Way(name="exception", **program(FAIL)),
        Way(name="exception of a module", command=("-m", "package.bad"),
            files={"package/__init__.py": "", "package/bad.py": FAIL}),
        Way(name="own excepthook", **program(
            "import sys\nsys.excepthook = lambda *parts: print('mine', parts[0])\n1 / 0")),
        Way(name="syntax error", **program("print(1)\nif:\n")),
        Way(name="endless recursion", **program("def f(): f()\nf()")),
        Way(name="warning as error", python=(sys.executable, "-W", "error"),
            **program("import warnings\nwarnings.warn('no')")),
        Way(name="handlers at exit and threads", **program(
            "import atexit, threading, time\natexit.register(print, 'last')\n"
            "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()\n1 / 0")),
        *(Way(name=f"dies by {number.name}", **_dies(number)) for number in (
            signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE, signal.SIGBUS, signal.SIGKILL)),
        *(Way(name=f"{number.name} from outside", kill=number, **program(_waits()))
          for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGSEGV,
                         signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGALRM)),
        Way(name="SIGTERM, with a handler", kill=signal.SIGTERM, **program(_waits(_CAUGHT))),
        Way(name="SIGINT ignored by the shell", kill=signal.SIGINT,
            options={"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)},
            **program(_waits().replace("60", "1") + LOOK)),
        Way(name="broken pipe", **program(
            "import os, sys\nr, w = os.pipe()\nos.dup2(w, 1)\nos.close(w)\nos.close(r)\n"
            "print('x' * 100000)")),
        Way(name="closed standard input", options={"preexec_fn": lambda: os.close(0)},
            **program(LOOK)),
        Way(name="closed standard error", options={"preexec_fn": lambda: os.close(2)},
            **program("print(1)\n1 / 0")),
        Way(name="faulthandler", python=(sys.executable, "-X", "faulthandler"),
            **program("import ctypes\nctypes.string_at(0)")),
        Way(name="os.fork", **program(
            "import os, sys\nif os.fork() == 0:\n    1 / 0\nprint(os.wait()[1])\n")),
        *(Way(name=f"multiprocessing {how}", **program(STARTED, how))
          for how in ("fork", "spawn", "forkserver")),
        Way(name="process pool", **program(
            "from concurrent.futures import ProcessPoolExecutor as Pool\n"
            "if __name__ == '__main__':\n    with Pool(2) as pool:\n"
            "        print(list(pool.map(abs, range(-4, 4))))\n        pool.submit(int, 'x').result()")),
        Way(name="exec", **program("import os, sys\nprint(1, flush=True)\n"
            "os.execv(sys.executable, [sys.executable, '-c', 'import sys; sys.exit(4)'])")),
        Way(name="subprocess of its Python", **program("import subprocess, sys\n"
            "sys.exit(subprocess.run([sys.executable, '-c', sys.argv[1]]).returncode)", LOOK + FAIL)),
        Way(name="subprocess of a shell", **program("import os, sys\n"
            "sys.exit(os.waitstatus_to_exitcode(os.system('echo $0; ulimit -c; exit 6')))")),
        Way(name="daemon", **program(
            "import os, time\nif os.fork():\n    os.wait()\n    while not os.path.exists('done'):\n"
            "        time.sleep(0.01)\n    print(open('done').read())\n    os._exit(0)\nos.setsid()\n"
            "if os.fork():\n    os._exit(0)\nopen('new', 'w').write('daemon')\n"
            "os.rename('new', 'done')")),
        Way(name="DataLoader workers", environment={"OMP_NUM_THREADS": "1"}, **program(LOADED)),
    )
}  # fmt: skip

#: Those that the suite tries; the others are in docs/results.
IN_SUITE: Final = (
    "script with arguments", "module", "-c", "script on standard input", "spaces in folder and script",
    "own sitecustomize", "exception", "SIGINT from outside", "dies by SIGSEGV", "multiprocessing spawn",
)  # fmt: skip


def ended(way: Way, folder: Path, *, capped: bool) -> tuple[int, str, str]:
    """Run it; return its exit code (negative: a signal), standard output and standard error."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, text in way.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    if way.prepare is not None:
        way.prepare(folder)
    # `workers` must be found in both; the one without a cap looks the same to the program.
    path = os.pathsep.join(filter(None, [way.environment.get("PYTHONPATH"), str(ROOT)]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **way.environment}
    environment["PYTHONPATH"] = path.format(folder=folder)
    python = [str(folder / part) if part.startswith("venv") else part for part in way.python]
    cap = ["-m", "workers.capped", "--gib", "64"] if capped else []
    process = subprocess.Popen(
        [*python, *cap, *way.command],
        cwd=folder / way.cwd,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **way.options,
    )
    first = ""
    if way.kill is not None:
        assert process.stdout is not None
        first = process.stdout.readline()
        time.sleep(0.2)  # it sleeps when the signal comes, without a cap as under one
        process.send_signal(way.kill)
    out, err = process.communicate(way.stdin, timeout=240)
    return process.returncode, *(
        re.sub("0x[0-9a-f]{6,}", "0x", text) for text in (first + out, err)
    )


def differences(way: Way, folder: Path) -> list[str]:
    """Return what differs under a cap."""
    plain, capped = (ended(way, folder, capped=cap) for cap in (False, True))
    texts = [
        [f"exit code {code}", *out.splitlines(), *err.splitlines()]
        for code, out, err in (plain, capped)
    ]
    return [line for line in difflib.ndiff(*texts) if line[:1] in "+-?"]


def main(folder: Path) -> None:
    sys.stdout.write("| way | exit code | as without a cap |\n| --- | --- | --- |\n")
    for way in WAYS.values():
        found = differences(way, folder)
        code, _, _ = ended(way, folder, capped=True)
        sys.stdout.write(f"| {way.name} | {code} | {'no' if found else 'yes'} |\n")
        sys.stdout.flush()
        sys.stderr.writelines(f"{line}\n" for line in found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
