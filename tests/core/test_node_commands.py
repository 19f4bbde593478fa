"""The words that make a PC a node: exact, quoted for the shell, and known to the installed Ray."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.config.load import load_config
from orchestrator.config.schema import Config
from orchestrator.core.node_commands import NODE_MARK, NodeCommand, node_command

REFERENCE = load_config(str(Path(__file__).parents[2] / "cluster.yaml"))

HOSTILE = [
    "pc one:6379",
    "$(touch owned):6379",
    "`touch owned`:6379",
    "pc1;touch owned:6379",
    "pc1'; touch owned; ':6379",
    'pc1"; touch owned; ":6379',
    "pc1\ntouch owned:6379",
    "-oProxyCommand=touch owned:6379",
    "#:6379",
    "~:6379",
    "*:6379",
    "&:6379",
]

#: Lets the `ray` command line read arguments without doing anything, and its own reader read the label.
READ_BY_RAY = """
import json, sys
from ray._private.label_utils import parse_node_labels_string
from ray.scripts.scripts import cli, start
read = []
for argv in json.loads(sys.argv[1]):
    params = start.make_context("start", argv[2:]).params
    given = ("head", "port", "address", "num_cpus", "num_gpus", "disable_usage_stats")
    read.append({name: params[name] for name in given} | {"labels": parse_node_labels_string(params["labels"])})
token = [option for param in cli.commands["get-auth-token"].params for option in param.opts]
print(json.dumps({"read": read, "token_options": token}))
"""


def changed(**sections: object) -> Config:
    """Return the reference configuration with some keys of some sections changed."""
    data = REFERENCE.model_dump()
    for name, keys in sections.items():
        assert isinstance(keys, dict)
        data[name] = {**data[name], **keys}
    return Config.model_validate(data)


def test_the_head_starts_with_its_port_its_label_and_the_sums_of_its_workers() -> None:
    command = node_command(REFERENCE, "pc1", "192.168.1.10:6379")
    assert command.is_head
    assert command.argv == (
        "ray",
        "start",
        "--head",
        "--port=6379",
        "--labels=node=pc1",
        "--num-cpus=56",
        "--num-gpus=1",
        "--disable-usage-stats",
    )
    assert command.environment == {NODE_MARK: "pc1", "RAY_AUTH_MODE": "token"}
    assert command.line == (
        "ORCHESTRATOR_NODE=pc1 RAY_AUTH_MODE=token ray start --head --port=6379 --labels=node=pc1 "
        "--num-cpus=56 --num-gpus=1 --disable-usage-stats"
    )


def test_another_pc_joins_the_head() -> None:
    command = node_command(REFERENCE, "pc2", "192.168.1.10:6379")
    assert not command.is_head
    assert command.argv == (
        "ray",
        "start",
        "--address=192.168.1.10:6379",
        "--labels=node=pc2",
        "--num-cpus=12",
        "--num-gpus=1",
        "--disable-usage-stats",
    )
    assert command.environment == {NODE_MARK: "pc2", "RAY_AUTH_MODE": "token"}


def test_the_configuration_says_who_is_the_head_and_on_which_port() -> None:
    config = changed(cluster={"head": "pc2", "port": 7000})
    assert node_command(config, "pc2", "h:7000").argv[2:4] == ("--head", "--port=7000")
    assert node_command(config, "pc1", "h:7000").argv[2] == "--address=h:7000"


def test_without_authentication_there_is_no_token_to_fetch_and_every_process_is_told() -> None:
    config = changed(cluster={"auth": "none"})
    for node in ("pc1", "pc2"):
        command = node_command(config, node, "h:6379")
        assert command.environment["RAY_AUTH_MODE"] == "disabled"
        assert command.token_steps == ()
        assert "token" not in command.script(node)


def test_the_script_says_where_makes_the_token_and_starts_last() -> None:
    for node, where in (("pc1", "on pc1 (the head)"), ("pc2", "on pc2 (joins the head)")):
        command = node_command(REFERENCE, node, "h:6379")
        lines = command.script(node).splitlines()
        assert where in lines[0]
        assert lines[-1] == command.line
        assert all(line.startswith("#") for line in lines[:2])


def test_no_secret_is_ever_in_the_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    secret = "5ec3e7" * 10
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").write_text(secret)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("RAY_AUTH_TOKEN", secret)
    for node in ("pc1", "pc2"):
        command = node_command(REFERENCE, node, "h:6379")
        assert secret not in command.script(node)
        assert secret not in repr(command)


@pytest.mark.parametrize("address", [*HOSTILE, "192.168.1.10:6379", "[fe80::1]:6379"])
@pytest.mark.parametrize("node", ["pc1", "pc2"])
def test_the_script_is_valid_for_a_shell_whatever_the_host(node: str, address: str) -> None:
    script = node_command(REFERENCE, node, address).script(node)
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def run_with_stand_ins(command: NodeCommand, node: str, folder: Path) -> list[list[str]]:
    """Run the script in a folder of its own, with stand-ins for `ray` and `scp` that write down their arguments."""
    tools = folder / "tools"
    tools.mkdir(parents=True)
    for tool in ("ray", "scp"):
        (tools / tool).write_text(
            f'#!{sys.executable}\nimport json, os, sys\nif "{tool}" == "scp": open(sys.argv[-1], "w").write("secret")\n'
            'with open(os.environ["CALLS"], "a") as calls:\n'
            f'    print(json.dumps(["{tool}", *sys.argv[1:]]), file=calls)\n'
        )
        (tools / tool).chmod(0o700)
    environment = {"PATH": f"{tools}:/usr/bin:/bin", "HOME": str(folder), "CALLS": str(folder / "calls")}
    (folder / ".ray").mkdir()
    subprocess.run(["bash", "-e", "-u"], input=command.script(node), env=environment, cwd=folder, text=True, check=True)
    assert sorted(path.name for path in folder.iterdir()) == [".ray", "calls", "tools"], "a host ran a command"
    return [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


@pytest.mark.parametrize("address", HOSTILE)
def test_a_hostile_host_stays_one_word(address: str, tmp_path: Path) -> None:
    command = node_command(REFERENCE, "pc2", address)
    host = address.removesuffix(":6379")
    assert run_with_stand_ins(command, "pc2", tmp_path) == [
        # The two dashes: a host that begins with one is no option of scp.
        ["scp", "--", f"{host}:.ray/auth_token", f"{tmp_path}/.ray/auth_token"],
        list(command.argv),
    ]


def test_a_token_fetched_is_readable_by_this_user_alone_and_fetched_once(tmp_path: Path) -> None:
    command = node_command(REFERENCE, "pc2", "h:6379")
    first = run_with_stand_ins(command, "pc2", tmp_path)
    assert [call[0] for call in first] == ["scp", "ray"]
    token = tmp_path / ".ray" / "auth_token"
    assert token.stat().st_mode & 0o777 == 0o600
    second = tmp_path / "second"
    second.mkdir()
    step = [step for step in command.token_steps if not step.startswith("#")]
    subprocess.run(["/bin/sh", "-e", "-c", *step], env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}, check=True)
    assert token.read_text() == "secret"


@settings(deadline=None, max_examples=50)
@given(host=st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), min_size=1, max_size=30))
def test_a_shell_reads_back_exactly_what_was_meant(host: str) -> None:
    command = node_command(REFERENCE, "pc2", f"{host}:6379")
    words = shlex.split(command.line)
    assert words == [f"{NODE_MARK}=pc2", "RAY_AUTH_MODE=token", *command.argv]


def test_every_argument_is_known_to_the_installed_ray() -> None:
    """Read by the command line of Ray itself, in its own process, without starting anything."""
    argvs = [node_command(REFERENCE, node, "10.0.0.1:6379").argv for node in ("pc1", "pc2")]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", READ_BY_RAY, json.dumps(argvs)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    common = {"num_gpus": 1, "disable_usage_stats": True}
    assert found["read"] == [
        {**common, "head": True, "port": 6379, "address": None, "num_cpus": 56, "labels": {"node": "pc1"}},
        {**common, "head": False, "port": None, "address": "10.0.0.1:6379", "num_cpus": 12, "labels": {"node": "pc2"}},
    ]
    assert "--generate" in found["token_options"]


@pytest.mark.parametrize("node", ["a", "pc-1", "pc.1", "pc_1", "0", "a" * 63, "1.2.3.4"])
def test_any_node_name_the_configuration_allows_is_a_label_to_ray(node: str) -> None:
    config = Config.model_validate({"nodes": {node: {"gpu": "card", "workers": 1, "vram_per_worker_gib": 1.0}}})
    label = next(word for word in node_command(config, node, "h:6379").argv if word.startswith("--labels="))
    code = "import sys; from ray._private.label_utils import parse_node_labels_string as read; print(read(sys.argv[1]))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, label.removeprefix("--labels=")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.stdout.strip() == repr({"node": node}), done.stderr
