"""`up NODE --service` and `jobs run --service`: a systemd user unit that keeps this PC's Ray node
(`stay.py`), or works off a queue of jobs; written, started and explained.

Takes the node's secret as `up --exec` does, while the user is there to type a password. Does not
need root.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from orchestrator.cli.stay import make_ready
from orchestrator.core.node_commands import NODE_MARK, NodeCommand
from orchestrator.errors import UsageError

_UNIT = """\
[Unit]
Description={what} of the OOM orchestrator

[Service]
WorkingDirectory={folder}
ExecStart={command}
# The command ends what it started itself; systemd kills what is left after that.
KillMode=mixed
TimeoutStopSec=60
# 130: it was asked to end. 2: wrong options or configuration, which another try does not mend.
SuccessExitStatus=130
Restart=on-failure
RestartSec=10
RestartPreventExitStatus=2

[Install]
WantedBy=default.target
"""


def unit_text(what: str, argv: Sequence[str], folder: str) -> str:
    """Return the unit that runs a command in a folder for as long as it may."""
    return _UNIT.format(
        what=what, folder=folder.replace("%", "%%"), command=" ".join(map(_quoted, argv))
    )


def install_node(command: NodeCommand, words: Sequence[str]) -> Iterator[str]:
    """Write the unit, enable and start it; yield what the user should know of it, a line each.

    `words` are more options of `up`.

    Raises:
        UsageError: This user has no systemd here, Ray is not installed, there is no token, or
            another process keeps the node already. The sentence says what to do.
    """
    node = command.environment[NODE_MARK]
    words = ["up", node, "--exec", "--stay", *words]
    yield from _install(node, f"Ray node {node}", words, lambda: make_ready(command))


def install_queue(words: Sequence[str], refuse: Callable[[], object]) -> Iterator[str]:
    """The same for `jobs run --stay`, with more `words` of it.

    Raises:
        UsageError: This user has no systemd here, or `refuse` says why not, once an earlier version
            of the service has ended.
    """
    yield from _install("jobs", "Queue of jobs", ["jobs", "run", "--stay", *words], refuse)


def _install(
    name: str, what: str, words: Sequence[str], make_ready: Callable[[], object]
) -> Iterator[str]:
    unit, argv = f"orchestrator-{name}.service", [sys.executable, "-m", "orchestrator", *words]
    if why := _systemctl("show-environment"):
        raise UsageError(
            f"this user has no systemd on this PC ({why}); type instead:\n"
            f"nohup {shlex.join(argv)} > {shlex.quote(name)}.log &"
        )
    _systemctl("stop", unit)  # an earlier version of it, if there is one
    make_ready()
    folder = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    path = folder / "systemd" / "user" / unit
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(unit_text(what, argv, str(Path.cwd())), encoding="utf-8")
    yield f"# {path}"
    yield path.read_text(encoding="utf-8")
    for verb in (["daemon-reload"], ["enable", unit], ["start", unit]):
        if why := _systemctl(*verb):
            raise UsageError(f"`systemctl --user {shlex.join(verb)}` has failed: {why}")
    yield (
        f"{what} is kept from now on, and after each login. To keep it from the start of this "
        "PC on, without a login:"
    )
    yield "    loginctl enable-linger"
    yield f"its log:    journalctl --user --unit {unit} --follow"
    yield f"to stop it: systemctl --user stop {unit}"
    yield f"to remove it: systemctl --user disable --now {unit} && rm {shlex.quote(str(path))}"


def _systemctl(*arguments: str) -> str:
    """Ask this user's systemd to do something, and return why it has failed, if it has."""
    program = shutil.which("systemctl")
    if program is None:
        return "there is no systemctl"
    done = subprocess.run(  # noqa: S603
        [program, "--user", *arguments], capture_output=True, text=True, check=False
    )
    failed = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
    return failed if done.returncode else ""


def _quoted(word: str) -> str:
    """Quote a word of ExecStart= (systemd.service(5), Command lines): as in C, and `%` and `$` are
    doubled.
    """
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return '"' + escaped.replace("%", "%%").replace("$", "$$") + '"'
