"""The systemd units of a node and of a queue: what `--service` writes, and what it says where there is no systemd."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.cli.nodes import stop_node
from orchestrator.cli.service import unit_text
from orchestrator.core.node_commands import NODE_MARK
from tests.scene import COMMAND, PATIENCE_S, ROOT, orchestrator, ran

#: Stands in for systemctl, because nothing may really be enabled here: notes what it is asked, and
#: is content.
CONTENT = '#!/bin/sh\necho "$@" >> "$0.asked"\n'

#: A node is found by its name when it is kept or ended, and other tests have a pc2.
NODE = f"service-{os.getpid()}"

HEAD = ("--head-address", "10.0.0.1")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home with a token."""
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text("secret")
    return tmp_path


def service(
    home: Path, systemctl: str, *arguments: str, verb: tuple[str, ...] = ("up", NODE)
) -> subprocess.CompletedProcess[str]:
    tool = home / "bin" / "systemctl"
    tool.parent.mkdir()
    tool.write_text(systemctl)
    tool.chmod(0o700)
    config = (
        home / "cluster.yaml"
    )  # of the reference pair, in which pc2 has the name of these tests
    config.write_text((ROOT / "cluster.yaml").read_text().replace("pc2", NODE))
    places = {"HOME": str(home), "PATH": f"{tool.parent}:/usr/bin:/bin", "XDG_CONFIG_HOME": ""}
    return orchestrator(*verb, "--service", "--config", str(config), *arguments, **places)


def command_of(unit: Path) -> list[str]:
    (line,) = [line for line in unit.read_text().splitlines() if line.startswith("ExecStart=")]
    return shlex.split(line.removeprefix("ExecStart="))


def test_the_unit_is_written_enabled_started_and_explained(home: Path) -> None:
    done = service(home, CONTENT, *HEAD, "--set", f"nodes.{NODE}.workers=1")
    assert done.returncode == 0, done.stderr
    unit = home / ".config" / "systemd" / "user" / f"orchestrator-{NODE}.service"
    assert command_of(unit) == [
        *(sys.executable, "-m", "orchestrator", "up", NODE, "--exec", "--stay"),
        *("--config", str(home / "cluster.yaml"), "--set", f"nodes.{NODE}.workers=1", *HEAD),
    ]
    asked = (home / "bin" / "systemctl.asked").read_text().splitlines()
    verbs = ["show-environment", "stop", "daemon-reload", "enable", "start"]
    assert [words.split()[1] for words in asked] == verbs
    stops = ("systemctl --user stop", "disable --now", "loginctl enable-linger")
    for words in (str(unit), unit.read_text(), "journalctl --user", *stops):
        assert words in done.stdout


def test_without_systemd_nothing_is_written_and_a_command_told(home: Path) -> None:
    done = service(home, "#!/bin/sh\necho Failed to connect to bus >&2; exit 1\n", *HEAD)
    assert done.returncode == 2
    assert "no systemd on this PC (Failed to connect to bus)" in done.stderr
    command = done.stderr.splitlines()[-1]
    assert command.startswith("nohup ")
    assert command.endswith(
        f"up {NODE} --exec --stay --config {home / 'cluster.yaml'} {' '.join(HEAD)} > {NODE}.log &"
    )
    assert not (home / ".config").exists()


def test_what_would_end_a_service_is_said_before_writing(home: Path) -> None:
    keeper = subprocess.Popen(
        ["sh", "-c", "sleep 600; :", "up", "--stay"], env={**os.environ, NODE_MARK: NODE}
    )
    try:
        done = service(home, CONTENT, *HEAD)
    finally:
        list(stop_node(NODE))
        keeper.wait(PATIENCE_S)
    assert done.returncode == 2
    assert f"{NODE} runs here already (process {keeper.pid}" in done.stderr
    assert not (home / ".config").exists()


def test_a_queue_is_worked_off_by_a_unit_of_its_own(home: Path) -> None:
    runs = ("--run-dir", str(home / "runs"))
    done = service(home, CONTENT, *runs, "--local", verb=("jobs", "run"))
    assert done.returncode == 0, done.stderr
    unit = home / ".config" / "systemd" / "user" / "orchestrator-jobs.service"
    assert command_of(unit) == [
        *(sys.executable, "-m", "orchestrator", "jobs", "run", "--stay"),
        *("--config", str(home / "cluster.yaml"), *runs, "--local"),
    ]
    assert "journalctl --user --unit orchestrator-jobs.service" in done.stdout


def test_a_service_takes_no_file_that_would_come_again(home: Path) -> None:
    done = service(home, CONTENT, "night.yaml", verb=("jobs", "run"))
    assert done.returncode == 2
    assert "jobs submit FILE" in done.stderr
    assert not (home / ".config").exists()


@pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)
def test_systemd_takes_any_command_and_path(tmp_path: Path) -> None:
    folder = tmp_path / "50 % of 'it'"
    folder.mkdir()
    unit = tmp_path / "orchestrator-pc2.service"
    words = [*COMMAND, "--set", 'nodes.pc2.card="50 %z of $HOME\\n"', "a'b"]
    unit.write_text(unit_text("pc2", words, str(folder)))
    done = ran(
        ["systemd-analyze", "verify", "--user", "--man=no", str(unit)],
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
    )
    assert [line for line in done.stderr.splitlines() if unit.name in line] == []
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--stay"], "needs --exec"), (["--service", "--exec"], "--service excludes --exec")],
)
def test_options_that_do_not_go_together_are_refused(options: list[str], words: str) -> None:
    done = orchestrator("up", "pc2", *options)
    assert done.returncode == 2
    assert words in done.stderr
