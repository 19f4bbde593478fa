"""The words that make a PC a node: exact, quoted for the shell, and known to the installed Ray."""

from __future__ import annotations

import json
import sys

import pytest

from orchestrator.config.schema import Config
from orchestrator.core.node_commands import NODE_MARK, node_command
from tests.factories import REFERENCE
from tests.scene import ran

#: Lets the `ray` command line read arguments without doing anything, and its own reader read the
#: label.
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


@pytest.mark.parametrize(
    ("node", "role", "cpus"),
    [("pc1", ["--head", "--port=6379"], 56), ("pc2", ["--address=192.168.1.10:6379"], 12)],
)
def test_a_node_starts_as_head_or_joins_with_its_label(
    node: str, role: list[str], cpus: int
) -> None:
    command = node_command(REFERENCE, node, "192.168.1.10:6379")
    assert command.is_head == (node == "pc1")
    rest = [f"--labels=node={node}", f"--num-cpus={cpus}", "--num-gpus=1", "--disable-usage-stats"]
    assert list(command.argv) == ["ray", "start", *role, *rest]
    node_config = REFERENCE.nodes[node]
    sum_said = f"# --num-cpus: {node_config.workers} workers x {node_config.cpus_per_worker} (cpus_per_worker)"
    assert sum_said in command.script(node)
    assert command.environment == {NODE_MARK: node, "RAY_AUTH_MODE": "token"}
    assert command.line == f"ORCHESTRATOR_NODE={node} RAY_AUTH_MODE=token {' '.join(command.argv)}"


def test_the_configuration_says_who_is_head_and_its_port() -> None:
    config = changed(cluster={"head": "pc2", "port": 7000})
    assert node_command(config, "pc2", "h:7000").argv[2:4] == ("--head", "--port=7000")
    assert node_command(config, "pc1", "h:7000").argv[2] == "--address=h:7000"


def test_without_authentication_no_token_is_fetched() -> None:
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
        assert (
            "python -m orchestrator up NODE" in lines[-2]
        ) is command.is_head  # and not what Ray prints


def test_ray_knows_every_argument_and_name_of_a_node() -> None:
    """Read by the command line of Ray itself, in its own process, without starting anything."""
    argvs = [node_command(REFERENCE, node, "10.0.0.1:6379").argv for node in ("pc1", "pc2")]
    names = ["a", "pc-1", "pc.1", "pc_1", "0", "a" * 63, "1.2.3.4"]
    card = {"gpu": "card", "workers": 1, "vram_per_worker_gib": 1.0}
    argvs += [
        node_command(Config.model_validate({"nodes": {name: card}}), name, "h:6379").argv
        for name in names
    ]
    done = ran([sys.executable, "-W", "ignore", "-c", READ_BY_RAY, json.dumps(argvs)])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert [read["labels"]["node"] for read in found["read"][2:]] == names
    common = {"num_gpus": 1, "disable_usage_stats": True}
    head = {"head": True, "port": 6379, "address": None, "num_cpus": 56, "labels": {"node": "pc1"}}
    other = {"head": False, "port": None, "address": "10.0.0.1:6379", "num_cpus": 12}
    assert found["read"][:2] == [common | head, common | other | {"labels": {"node": "pc2"}}]
    assert "--generate" in found["token_options"]
