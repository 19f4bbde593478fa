"""Hostile names run no command and leave no folder; secrets stay in their file, which no other user
can read.

Commands really run, with recording stand-ins for `ray` and `scp`. `tests/cluster/test_rehearsal.py`
searches for the secrets of a whole rehearsal.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.cli.nodes import command_for, execute
from orchestrator.cluster.connect import use_private_token
from orchestrator.config.load import load_config
from orchestrator.errors import ConfigError
from tests.scene import COMMAND, ROOT, ran

pytestmark = pytest.mark.slow

SECRET = "5ec3e7" * 11

#: Records its call. As `ray`, it makes and prints a token as Ray does; as `scp`, it copies
#: one.
STAND_IN = f"""#!{sys.executable}
import json, os, stat, sys
name, token = os.path.basename(sys.argv[0]), os.path.expanduser("~/.ray/auth_token")
if sys.argv[1:] == ["get-auth-token", "--generate"]:
    os.makedirs(os.path.dirname(token), exist_ok=True)
    open(token, "w").write("{SECRET}")
    print("{SECRET}")
if name == "scp":
    open(sys.argv[-1], "w").write("{SECRET}")
mode = stat.S_IMODE(os.stat(token).st_mode) if os.path.exists(token) else None
with open(os.environ["CALLS"], "a") as calls:
    print(json.dumps({{"argv": [name, *sys.argv[1:]], "token_mode": mode}}), file=calls)
"""

#: Names and addresses that pass validation, as unusual as it allows.
NODES = (("0", "A"), ("a-_..b", "[fe80::2]"), ("1.2.3.4", "1..2"), ("n" * 63, "x" * 63 + ".lan"))

#: Texts that never pass validation, but may be typed as `--head-address`.
COMMANDS = (
    "$(touch owned)", "h;touch owned", "h\ntouch owned", "h'; touch owned; '", 'h"; touch owned; "',
    "-oProxyCommand=touch owned", "*", "\\", "${IFS}touch${IFS}owned",
)  # fmt: skip


class Desk:
    """A user's shell in an empty folder, with stand-ins for programs that would reach other PCs."""

    def __init__(self, folder: Path) -> None:
        self.home, self.here, self.file = folder / "home", folder / "here", folder / "cluster.yaml"
        tools = folder / "tools"
        for path in (self.home, self.here, tools):
            path.mkdir()
        for name in ("ray", "scp", "python"):
            (tools / name).write_text(STAND_IN)
            (tools / name).chmod(0o700)
        self.token = self.home / ".ray" / "auth_token"
        self._calls = folder / "calls"
        self.environment = {
            "HOME": str(self.home),
            "PATH": f"{tools}:/usr/bin:/bin",
            "CALLS": str(self._calls),
            "PYTHONPATH": str(ROOT),
            "RAY_TMPDIR": str(folder),
            "TERM": "dumb",
        }

    def config(self, nodes: dict[str, dict[str, object]], **cluster: object) -> str:
        """Write a configuration (JSON is YAML) beside the folders; return its path."""
        usual = {"gpu": "card (x) + y", "workers": 1, "vram_per_worker_gib": 1.0, "vram_gib": 8.0}
        data = {
            "cluster": cluster,
            "nodes": {name: {**usual, **keys} for name, keys in nodes.items()},
        }
        self.file.write_text(json.dumps(data))
        return str(self.file)

    def orchestrator(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.run([*COMMAND, *arguments])

    def steps(self, node: str, config: str, *arguments: str) -> str:
        """Return the output of `up` for a node; run in this process, which is faster."""
        done = CliRunner().invoke(app, ["up", node, "--config", config, *arguments])
        assert done.exit_code == 0, done.output
        return done.output

    def run(
        self, command: list[str], script: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run with umask 0, so that all users can read new files unless the command prevents it."""
        return ran(command, input=script, cwd=self.here, env=self.environment, umask=0)

    def calls(self) -> list[dict[str, Any]]:
        return (
            [json.loads(line) for line in self._calls.read_text().splitlines()]
            if self._calls.exists()
            else []
        )

    def assert_untouched(self) -> None:
        assert list(self.here.iterdir()) == [], "a name ran a command"
        assert {path.name for path in self.home.iterdir()} <= {".ray"}, "a name ran a command"


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def type_script(desk: Desk, script: str) -> subprocess.CompletedProcess[str]:
    """Let a real shell check the output of `up`, and then run it."""
    checked = desk.run(["bash", "-n"], script)
    assert (checked.returncode, checked.stderr) == (0, "")
    done = desk.run(["bash", "-e", "-u"], script)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize(("name", "host"), NODES)
def test_odd_names_that_are_valid_arrive_as_they_are(desk: Desk, name: str, host: str) -> None:
    config = desk.config({"head": {"host": host}, name: {"host": host}})
    for node in ("head", name):
        type_script(desk, desk.steps(node, config))
    started = [call["argv"] for call in desk.calls() if call["argv"][1] == "start"]
    assert [[word for word in argv if word.startswith("--labels")] for argv in started] == [
        ["--labels=node=head"],
        [f"--labels=node={name}"],
    ]
    assert f"--address={host}:6379" in started[1]
    desk.assert_untouched()


@pytest.mark.parametrize("address", COMMANDS)
def test_a_head_address_runs_no_command(
    desk: Desk, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = desk.config({"head": {}, "pc2": {}})
    type_script(desk, desk.steps("pc2", config, f"--head-address={address}"))
    expected = [
        ["scp", "--", f"{address}:.ray/auth_token", str(desk.token)],
        ["ray", "start", f"--address={address}:6379"],
    ]
    assert [
        call["argv"][: len(want)] for call, want in zip(desk.calls(), expected, strict=True)
    ] == expected
    desk.token.unlink()

    # As with `--exec`; in this process, because the real ray is beside the real Python.
    tools = desk.here.parent / "tools"
    expected[1] = [
        "python",
        "-m",
        "orchestrator.cluster.ray_programs",
        "ray",
        str(tools / "ray"),
        *expected[1][1:],
    ]
    for key, value in desk.environment.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(sys, "executable", str(tools / "python"))
    monkeypatch.chdir(desk.here)
    assert execute(command_for(load_config(config), "pc2", address)) == 0
    assert [
        call["argv"][: len(want)] for call, want in zip(desk.calls()[2:], expected, strict=True)
    ] == expected
    desk.assert_untouched()


@pytest.mark.parametrize("text", COMMANDS)
def test_commands_in_the_configuration_are_refused(desk: Desk, text: str) -> None:
    places: list[tuple[dict[str, dict[str, object]], dict[str, object], str]] = [
        ({"pc1": {}, text: {}}, {}, ""),
        ({"pc1": {"host": text}}, {}, ""),
        ({"pc1": {"gpu": text}}, {}, ""),
        ({"pc1": {}}, {"address": f"{text}:6379"}, ""),
        ({"pc1": {}}, {"head": text}, ""),
        ({"pc1": {}}, {}, f"nodes.{text}.workers=1"),
    ]
    for nodes, cluster, override in places:
        with pytest.raises(ConfigError) as caught:
            load_config(desk.config(nodes, **cluster), [override] if override else [])
        assert all(character.isprintable() or character == "\n" for character in str(caught.value))


@pytest.mark.parametrize("folder", ["-rf", "~", "$(touch owned)`touch owned`'*"])
def test_a_run_folder_is_where_it_is_told_and_nowhere_else(desk: Desk, folder: str) -> None:
    """There is no cluster, so the run ends after its folder is made."""
    setting = f"run.dir={json.dumps(folder)}"
    done = desk.orchestrator("run", "--config", str(ROOT / "cluster.yaml"), "--set", setting)
    assert done.returncode == 3, done.stderr
    runs = desk.here / folder
    (made,) = runs.iterdir()
    files = {path for path in desk.here.rglob("*") if not path.is_dir()}
    assert {path.name for path in files} >= {"head.json", "summary.json", "events.jsonl"}
    assert {path.resolve().parent for path in files} == {made.resolve()}
    assert not any(path.is_symlink() for path in files)
    assert list(desk.home.iterdir()) == []


@pytest.mark.parametrize(
    "character", ["\n", "\x1b", "\x7f", "\x9b", "\x85", "\u202e", "\u2028", "\x00"]
)
def test_a_run_folder_that_could_steer_a_terminal_is_refused(character: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.dir") as caught:
        load_config(str(ROOT / "cluster.yaml"), [f"run.dir={json.dumps(f'runs{character}x')}"])
    assert str(caught.value).isprintable()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("node", ["pc1", "pc2"])
def test_a_token_is_never_readable_by_others_nor_shown(desk: Desk, node: str) -> None:
    script = desk.steps(node, desk.config({"pc1": {"host": "pc1.lan"}, "pc2": {}}))
    done = type_script(desk, script)
    made, started = desk.calls()
    assert made["argv"][0] == ("ray" if node == "pc1" else "scp")
    assert made["token_mode"] == 0o600, "from its first moment"
    assert desk.token.read_text() == SECRET
    assert mode(desk.token) == 0o600
    assert mode(desk.token.parent) & 0o022 == 0
    assert SECRET not in done.stdout + done.stderr + script + str(made) + str(started)


@pytest.mark.parametrize("node", ["pc1", "pc2"])
def test_a_token_that_is_there_is_kept_and_closed_to_others(desk: Desk, node: str) -> None:
    desk.token.parent.mkdir()
    desk.token.write_text("mine")
    desk.token.chmod(0o644)
    config = desk.config({"pc1": {"host": "pc1.lan"}, "pc2": {}})
    type_script(desk, desk.steps(node, config))
    assert [call["argv"][1] for call in desk.calls()] == ["start"]
    assert (desk.token.read_text(), mode(desk.token)) == ("mine", 0o600)


def test_no_verb_shows_the_token_or_writes_it_down(desk: Desk) -> None:
    desk.token.parent.mkdir()
    desk.token.write_text(SECRET)
    desk.environment["RAY_AUTH_TOKEN"] = SECRET
    shipped = ("--config", str(ROOT / "cluster.yaml"))
    for arguments, code in ((["plan", "--json"], 0), (["up", "pc2"], 0), (["run"], 3)):
        done = desk.orchestrator(*arguments, *shipped)
        assert done.returncode == code, done.stderr
        assert SECRET not in done.stdout + done.stderr
    written = [path for path in desk.here.rglob("*") if path.is_file()]
    assert len(written) >= 4, "the run left its folder"
    assert [path for path in written if SECRET.encode() in path.read_bytes()] == []


def test_a_private_token_is_closed_and_replaces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.setenv(name, "before")  # so that it is restored
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / "auth_token").symlink_to(tmp_path / "elsewhere")
    umask = os.umask(0)
    try:
        use_private_token(tmp_path)
        with pytest.raises(FileExistsError):
            use_private_token(tmp_path / "second")
    finally:
        os.umask(umask)
    token = tmp_path / "auth_token"
    assert mode(token) == 0o600
    assert len(token.read_text()) == 64
    assert token.read_text() not in os.environ.values()
    assert not (tmp_path / "elsewhere").exists()
