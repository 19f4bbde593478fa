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

from orchestrator.cli import nodes
from orchestrator.cli.stay import refuse_a_second
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


def install(
    command: NodeCommand, config: str, overrides: Sequence[str], head_address: str | None
) -> Iterator[str]:
    """Write the unit, enable and start it; yield what the user should know of it, a line each.

    Raises:
        UsageError: This user has no systemd here, Ray is not installed, there is no token, or
            another process keeps the node already. The sentence says what to do.
    """
    node = command.environment[NODE_MARK]
    argv = [
        sys.executable,
        "-m",
        "orchestrator",
        "up",
        node,
        "--exec",
        "--stay",
        "--config",
        str(Path(config).absolute()),
    ]
    argv += [word for override in overrides for word in ("--set", override)]
    argv += [] if head_address is None else ["--head-address", head_address]
    _require_systemd(node, argv)
    nodes.ray_start(command)  # fails where Ray is not installed
    nodes.get_token(command)
    yield from _installed(node, f"Ray node {node}", argv, lambda: refuse_a_second(node))


def install_queue(words: Sequence[str], refuse: Callable[[], object]) -> Iterator[str]:
    """The same for `jobs run --stay`, with more `words` of it.

    Raises:
        UsageError: This user has no systemd here, or `refuse` says why not, once an earlier version
            of the service has ended.
    """
    argv = [sys.executable, "-m", "orchestrator", "jobs", "run", "--stay", *words]
    _require_systemd("jobs", argv)
    yield from _installed("jobs", "Queue of jobs", argv, refuse)


def _installed(
    name: str, what: str, argv: Sequence[str], refuse: Callable[[], object]
) -> Iterator[str]:
    unit = f"orchestrator-{name}.service"
    _systemctl("stop", unit)  # an earlier version of it, if there is one
    refuse()
    path = (
        Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
        / "systemd"
        / "user"
        / unit
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(unit_text(what, argv, str(Path.cwd())), encoding="utf-8")
    yield f"# {path}"
    yield path.read_text(encoding="utf-8")
    for verb in (["daemon-reload"], ["enable", unit], ["start", unit]):
        done = _systemctl(*verb)
        if done is None or done.returncode != 0:
            raise UsageError(f"`systemctl --user {shlex.join(verb)}` has failed: {_reason(done)}")
    yield (
        f"{what} is kept from now on, and after each login. To keep it from the start of this "
        "PC on, without a login:"
    )
    yield "    loginctl enable-linger"
    yield f"its log:    journalctl --user --unit {unit} --follow"
    yield f"to stop it: systemctl --user stop {unit}"
    yield f"to remove it: systemctl --user disable --now {unit} && rm {shlex.quote(str(path))}"


def _require_systemd(name: str, argv: Sequence[str]) -> None:
    asked = _systemctl("show-environment")
    if asked is None or asked.returncode != 0:
        raise UsageError(
            f"this user has no systemd on this PC ({_reason(asked)}); type instead:\n"
            f"nohup {shlex.join(argv)} > {shlex.quote(name)}.log &"
        )


def _systemctl(*arguments: str) -> subprocess.CompletedProcess[str] | None:
    program = shutil.which("systemctl")
    if program is None:
        return None
    return subprocess.run(  # noqa: S603
        [program, "--user", *arguments], capture_output=True, text=True, check=False
    )


def _reason(done: subprocess.CompletedProcess[str] | None) -> str:
    return (
        "there is no systemctl"
        if done is None
        else " ".join(done.stderr.split()) or f"exit code {done.returncode}"
    )


def _quoted(word: str) -> str:
    """Quote a word of ExecStart= (systemd.service(5), Command lines): as in C, and `%` and `$` are
    doubled.
    """
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return '"' + escaped.replace("%", "%%").replace("$", "$$") + '"'
