"""Hostile command lines, configurations and run folders, drawn from a seed: each is refused in words.

    python -m tests.hostile_inputs --seed 37 --count 300

Each input is one command in a process of its own, in a folder of its own. It must end by itself, print no traceback
and nothing that steers a terminal, run nothing of the input, and exit with 2 where the input is wrong. Inputs that are
right by chance may exit with 0, or with 3 where there is no cluster. No command that could start workers gets an input
that is right.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.scene import ROOT

SHIPPED = (ROOT / "cluster.yaml").read_text(encoding="utf-8")
RUN_ID = "20261120-051500-0b76"
_PATIENCE_S = 120.0

#: Each would leave a file `owned` in the folder, or steer the terminal, if it were not only text.
_TEXTS = (
    "$(touch owned)", "`touch owned`", "; touch owned", "'; touch owned; '", "| touch owned", "\n touch owned",
    "!!python/object/apply:os.system ['touch owned']", "!!python/name:os.system ''", "__import__('os').system('touch owned')",
    "../../../../etc/passwd", "/dev/zero", "file:///etc/passwd", "-oProxyCommand=touch owned", "~root", "*",
    "\x1b[2Jx", "\x1b]0;x\x07", "\x9b31m", "\u202egnp", "\udcff", "é" * 300, "x" * 6000, "", " ", "=", "--", "-", "\\",
)  # fmt: skip
_NUMBERS = ("-1", "0", "1e999", "nan", ".inf", "9" * 400, "0x" + "f" * 4000, "1:30", "1,5", "٣", "1e-320", "true")

#: Verbs with an option that takes a value which cannot be right.
_OPTIONS = (
    ("run", "--duration"), ("run", "--scale"), ("run", "--workload"), ("run", "--policy"), ("run", "--set"),
    ("run", "--chaos"), ("run", "--resume"), ("run", "--config"), ("plan", "--set"), ("plan", "--jobs"),
    ("plan", "--config"), ("up", "--set"), ("report", "--run-dir"), ("logs", "--run"), ("export", "--to"),
    ("burn", "--duration"), ("burn", "--phase"), ("tune", "--budget"), ("tune", "--levers"), ("stop", "--run-dir"),
    ("jobs list", "--run"), ("jobs submit", "--train"), ("jobs submit", "--over"), ("jobs submit", "--hours"),
    ("jobs submit", "--priority"), ("jobs run", "--duration"), ("web", "--port"), ("top", "--filter"), ("init", "--output"),
    ("cap pc1/0", "--run"), ("pause pc1/0", "--run"), ("save", "--run"), ("notify", "--run-dir"), ("doctor", "--set"),
)  # fmt: skip
#: Verbs that only read a run folder.
_READERS = (
    "runs", "report", "report --json", "report --html r.html", "report --curves c", "logs pc1/0", "logs a-job",
    "top --once", "top --json", "jobs list", "jobs show a-job", "jobs results", "stop", "pause pc1/0",
    "export latest pc1/0 --to e", "run --resume 0b76",
)  # fmt: skip
_STORED = ("run.sqlite", "summary.json", "head.json", "events.jsonl", "config.yaml", "output/pc1/0.log", "jobs/journal.jsonl")


@dataclass(frozen=True)
class Hostile:
    """One command, and the folder in which it is typed."""

    kind: str
    words: tuple[str, ...]
    folder: Path
    is_wrong: bool = False
    """It has to exit with 2."""


@dataclass(frozen=True)
class Ended:
    """How the command has ended."""

    code: int
    printed: str
    seconds: float


def command_line(draw: random.Random, folder: Path) -> Hostile:
    """Draw words that are wrong: a verb, an option, a value, or what surrounds them."""
    text = draw.choice((*_TEXTS, *_NUMBERS)).replace("\0", "")
    verb, option = draw.choice(_OPTIONS)
    words = verb.split()
    match draw.choice(("verb", "option", "extra", "no value", "nonsense", "value", "value")):
        case "verb":
            return Hostile("an unknown verb", (text or "?", "--json"), folder, is_wrong=text not in ("--", ""))
        case "option":
            return Hostile("an unknown option", (*words, f"--{text}x=1"), folder, is_wrong=verb != "jobs submit")
        case "extra":
            return Hostile("words too many", (*words, "--json", *[text] * draw.choice((9, 2000))), folder)
        case "no value":
            return Hostile("an option without its value", (*words, option), folder, is_wrong=True)
        case "nonsense":
            found = [draw.choice((*_TEXTS, *_NUMBERS, "plan", "--set", "--json")) for _ in range(5)]
            return Hostile("nonsense", ("plan", *found), folder)
    return Hostile("a value that cannot be", (*words, "--config", "none.yaml", option, text), folder)


def configuration(draw: random.Random, folder: Path) -> Hostile:
    """Draw the shipped file with damage, or an override, for verbs that start nothing."""
    lines = [line for line in SHIPPED.splitlines() if line.strip() and not line.strip().startswith("#")]
    at = draw.randrange(len(lines))
    key, _, _ = lines[at].partition(":")
    text = draw.choice((*_TEXTS, *_NUMBERS))
    words, is_wrong = ["plan", "-c", "c.yaml"], False
    match kind := draw.choice(
        ("a hostile value", "a hostile value", "a hostile key", "a key twice", "a tab", "a bomb of aliases", "an alias in itself",
         "a tag", "deep nesting", "cut bytes", "other bytes", "a second document", "an override", "an override", "a job file")
    ):  # fmt: skip
        case "a hostile value":
            lines[at] = f"{key}: {text}"
        case "a hostile key":
            lines[at], is_wrong = f"{' ' * (len(key) - len(key.lstrip()))}{json.dumps(text)}: 1", True
        case "a key twice":
            lines.insert(at, lines[at])
        case "a tab":
            lines[at], is_wrong = f"\t{lines[at]}", True
        case "a bomb of aliases":
            bomb = [f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 9)}]" for n in range(9)]
            lines, is_wrong = ["a0: &a0 [x, x]", *bomb, *lines], True
        case "an alias in itself":
            lines, is_wrong = ["a: &a {b: *a}", *lines], True
        case "a tag":
            lines[at], is_wrong = f"{key}: !!python/object/apply:os.system ['touch owned']", True
        case "deep nesting":
            lines[at], is_wrong = f"{key}: {'[' * 5000}", True
        case "a second document":
            lines, is_wrong = [*lines, "---", *lines], True
        case "an override":
            words += ["--set", f"{draw.choice((key.strip(), 'run.dir', 'nodes.pc1.gpu', text))}={text}"]
        case "a job file":
            words += ["--jobs", "j.yaml"]
            job = draw.choice((f"name: {text}", "train: {a: *a}", f"command: {json.dumps(text)}", "sweep: 3", "after: [a]"))
            (folder / "j.yaml").write_bytes(f"jobs:\n- {{name: a, {job}}}\n".encode("utf-8", "surrogateescape"))
            is_wrong = True
    content = "\n".join(lines).encode("utf-8", "surrogateescape")
    if kind == "cut bytes":
        content = content[: draw.randrange(len(content))]
    elif kind == "other bytes":
        content, is_wrong = draw.randbytes(draw.choice((1, 50, 5000))) + b"\0" + content, True
    (folder / "c.yaml").write_bytes(content)
    return Hostile(f"configuration: {kind}", tuple(words), folder, is_wrong)


def run_folder(draw: random.Random, folder: Path) -> Hostile:
    """Draw a run folder of which a file is damaged, for verbs that read it."""
    from tests.cli.test_runs import written  # noqa: PLC0415 - only this kind needs it

    written(folder / "runs").end("good", 0, None, [])
    made = folder / "runs" / RUN_ID
    path = made / draw.choice(_STORED)
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.read_bytes() if path.exists() else b'{"pid": 1}\n' * 40
    kind = draw.choice(("cut", "other bytes", "flipped", "text", "a folder", "a link", "a pipe", "no run id", "deep JSON"))
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
        case "no run id":
            path.write_bytes(whole)
            made.rename(made.with_name("\x1b[2J$(touch owned)"))
    words = (*draw.choice(_READERS).split(), "--run-dir", "runs")
    return Hostile(f"run folder: {path.name} is {kind}", words, folder)


def typed(hostile: Hostile) -> Ended:
    """Type the command in a process of its own."""
    output, began_s = hostile.folder / "printed", time.monotonic()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            _become(hostile, output)
        finally:
            os._exit(99)  # not reached
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        took_s = time.monotonic() - began_s
        if done:
            code = os.waitstatus_to_exitcode(status)
            return Ended(code, output.read_text(encoding="utf-8", errors="replace"), took_s)
        if took_s > _PATIENCE_S:
            os.kill(pid, 9)
        time.sleep(0.01)


def _become(hostile: Hostile, output: Path) -> None:
    from orchestrator.cli.main import main  # noqa: PLC0415 - of this process alone

    os.chdir(hostile.folder)
    os.environ.update(HOME=str(hostile.folder), RAY_TMPDIR=str(hostile.folder), TERM="dumb")
    file = os.open(output, os.O_WRONLY | os.O_CREAT, 0o600)
    for number, target in ((os.open(os.devnull, os.O_RDONLY), 0), (file, 1), (file, 2)):
        os.dup2(number, target)
    sys.argv = ["orchestrator", *hostile.words]
    code = 99
    try:
        main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def faults(hostile: Hostile, ended: Ended) -> list[str]:
    """Return what the command did that it must not do."""
    found = []
    if "Traceback" in ended.printed or "internal error" in ended.printed:
        found.append("a traceback")
    if any(not (char.isprintable() or char in "\n\r\t") for char in ended.printed.replace("\ufffd", "")):
        found.append("characters that steer a terminal")
    if list(hostile.folder.rglob("owned*")):
        found.append("code was executed")
    allowed = {2} if hostile.is_wrong else {0, 2, 3}
    if ended.code not in allowed:
        found.append(f"exit code {ended.code}")
    return found


KINDS: tuple[Callable[[random.Random, Path], Hostile], ...] = (command_line, configuration, run_folder)


def main(arguments: Sequence[str]) -> int:
    """Draw, type and judge; print the kinds and their counts, and everything that was wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=37)
    parser.add_argument("--count", type=int, default=300)
    asked = parser.parse_args(arguments)
    draw, kinds, codes, failed = random.Random(asked.seed), Counter[str](), Counter[int](), 0
    for number in range(asked.count):
        folder = Path(tempfile.mkdtemp(prefix="hostile-"))
        hostile = KINDS[number % len(KINDS)](draw, folder)
        ended = typed(hostile)
        kinds[hostile.kind] += 1
        codes[ended.code] += 1
        if found := faults(hostile, ended):
            failed += 1
            print(f"{number}: {hostile.kind}: {', '.join(found)}: {hostile.words!r:.200}\n{ended.printed[-600:]}")
        shutil.rmtree(folder, ignore_errors=True)
    for kind, count in sorted(kinds.items()):
        print(f"| {kind} | {count} |")
    print(f"{asked.count} inputs, seed {asked.seed}: {failed} failed; exit codes {dict(sorted(codes.items()))}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
