"""Hostile command lines and run folders, drawn from a seed, are refused with a message.

Each input is one command in its own process and folder. The command must end by itself, without a
traceback or control characters, and must execute nothing of the input. It must exit with 2 if the
input is wrong. If the input happens to be right, it exits with 0, or with 3 without a cluster. No
input is right for a verb that starts workers. `tests/config/test_config_errors.py` draws wrong
configurations.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from orchestrator.cli.main import main as as_typed
from tests.cli.test_runs import RUN_ID, written
from tests.scene import Patience, computed

pytestmark = pytest.mark.slow

#: If a shell or a terminal interpreted these, a file `owned` would appear, or the screen change.
_TEXTS: tuple[str, ...] = (
    *("$(touch owned)", "`touch owned`", "; touch owned", "'; touch owned; '", "| touch owned"),
    *("\n touch owned", "!!python/object/apply:os.system ['touch owned']", "!!python/name:os.x ''"),
    *("__import__('os').system('touch owned')", "../../../../etc/passwd", "/dev/zero", "~root"),
    *("file:///etc/passwd", "-oProxyCommand=touch owned", "\x1b[2Jx", "\x1b]0;x\x07", "\x9b31m"),
    *("\u202egnp", "\udcff", "é" * 300, "x" * 6000, "", " ", "=", "--", "-", "\\"),
    *("-1", "1e999", "nan", ".inf", "9" * 400, "0x" + "f" * 4000, "1:30", "٣", "1e-320"),
)

#: Verbs with options that get a wrong value.
_OPTIONS = {
    "run": "duration workload set chaos resume config run-dir",
    "plan": "set config",
    "up pc1": "set config head-address",
    "export": "to run-dir",
    "burn": "duration phase",
    "tune": "budget levers set",
    "stop": "run-dir node",
    "jobs list": "run run-dir",
    "jobs submit": "hours priority after",
    "jobs run": "set run-dir",
    "logs pc1/0": "run",
    "top": "run-dir",
    "cap pc1/0 1GiB": "run",
    "notify": "run-dir",
    "report": "run-dir html",
}
#: Verbs that only read a run folder.
_READERS = (
    *("runs", "report", "report --json", "report --html r.html", "top --once"),
    *("logs pc1/0", "logs a-job", "jobs list", "jobs show a-job", "jobs results"),
    *("stop", "pause pc1/0", "export latest pc1/0 --to e", "run --resume 0b76", "runs --json"),
)
_STORED = (
    *("run.sqlite", "summary.json", "head.json", "events.jsonl", "config.yaml"),
    *("output/pc1/0.log", "jobs/jobs.sqlite"),
)


@dataclass(frozen=True)
class Hostile:
    """One command, and its working folder."""

    kind: str
    words: tuple[str, ...]
    folder: Path
    is_wrong: bool = False
    """Whether the command must exit with 2."""


def command_line(draw: random.Random, folder: Path) -> Hostile:
    """Draw a command with a wrong verb, option, value, or other word."""
    text, verb = draw.choice(_TEXTS), draw.choice(sorted(_OPTIONS))
    words, option = verb.split(), f"--{draw.choice(_OPTIONS[verb].split())}"
    kind = draw.choice(("verb", "option", "words", "no value", "nonsense", "value", "value"))
    if kind == "verb":
        return Hostile("command line: an unknown verb", (f"no{text}", "--json"), folder, True)
    if kind == "option":
        return Hostile("command line: an unknown option", (*words, f"--no{text}"), folder, True)
    if kind == "words":
        many = [f"x{text}"] * draw.choice((9, 2000))
        return Hostile("command line: words too many", ("plan", *many), folder, True)
    if kind == "no value":
        return Hostile("command line: an option without its value", (*words, option), folder, True)
    if kind == "nonsense":
        found = [draw.choice((*_TEXTS, "plan", "--set", "--json")) for _ in range(5)]
        return Hostile("command line: nonsense", ("plan", *found), folder)
    config = ("--config", "none.yaml") if option != "--config" else ()
    return Hostile("command line: a value that cannot be", (*words, *config, option, text), folder)


def run_folder(draw: random.Random, folder: Path) -> Hostile:
    """Draw a run folder with a damaged file, and a verb that reads it."""
    written(folder / "runs").end("good", 0, None, [])
    made = folder / "runs" / RUN_ID
    path = made / draw.choice(_STORED)
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.read_bytes() if path.exists() else b'{"pid": 1}\n' * 40
    kinds = ("cut", "other bytes", "flipped", "text", "a folder", "a link", "a pipe", "deep JSON")
    kind = draw.choice((*kinds, "in a folder with a hostile name"))
    path.unlink(missing_ok=True)
    match kind:
        case "cut":
            path.write_bytes(whole[: draw.randrange(len(whole))])
        case "other bytes":
            path.write_bytes(draw.randbytes(len(whole)))
        case "flipped":
            at = draw.randrange(len(whole))
            path.write_bytes(whole[:at] + draw.randbytes(40) + whole[at + 40 :])
        case "text":
            path.write_bytes("\n".join(_TEXTS).encode("utf-8", "surrogateescape"))
        case "a folder":
            path.mkdir()
        case "a link":
            path.symlink_to("/dev/zero")
        case "a pipe":
            os.mkfifo(path)
        case "deep JSON":
            path.write_bytes(b"[" * 100_000)
        case _:
            path.write_bytes(whole)
            made.rename(made.with_name("\x1b[2J$(touch owned)"))
    words = (*draw.choice(_READERS).split(), "--run-dir", "runs")
    return Hostile(f"run folder: {path.name} is {kind}", words, folder)


def typed(hostile: Hostile) -> tuple[int, str]:
    """Run the command in its own process; return its exit code and its output."""
    output = hostile.folder / "printed"
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        _become(hostile, output)
    patience = Patience(lambda: computed(pid))
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if patience.is_over():
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    printed = output.read_text(encoding="utf-8", errors="backslashreplace")
    return os.waitstatus_to_exitcode(ended[1]), printed


def _become(hostile: Hostile, output: Path) -> None:
    os.chdir(hostile.folder)
    os.environ.update(HOME=str(hostile.folder), RAY_TMPDIR=str(hostile.folder), TERM="dumb")
    file = os.open(output, os.O_WRONLY | os.O_CREAT, 0o600)
    for number, target in ((os.open(os.devnull, os.O_RDONLY), 0), (file, 1), (file, 2)):
        os.dup2(number, target)
    sys.argv = ["orchestrator", *hostile.words]
    code: object = 99
    try:
        as_typed()
    except SystemExit as ended:
        code = ended.code
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(int(str(code or 0)))


def faults(hostile: Hostile, code: int, printed: str) -> list[str]:
    """Return the forbidden effects of the command."""
    found = {
        "a traceback": "Traceback" in printed or "internal error" in printed,
        "steers a terminal": not all(char.isprintable() or char in "\n\t" for char in printed),
        "code was executed": bool(list(hostile.folder.rglob("owned*"))),
        f"exit code {code}": code not in ({2} if hostile.is_wrong else {0, 2, 3}),
    }
    return [fault for fault, is_so in found.items() if is_so]


def test_hostile_inputs_are_refused_in_words(tmp_path: Path) -> None:
    draw = random.Random(38)  # noqa: S311 - the same seed, the same inputs
    for number in range(40):
        folder = tmp_path / str(number)
        folder.mkdir()
        hostile = (command_line, run_folder)[number % 2](draw, folder)
        code, printed = typed(hostile)
        assert faults(hostile, code, printed) == [], (hostile, printed[-600:])
