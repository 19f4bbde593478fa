"""The commands that make a PC a node: exact, quoted for the shell, accepted by installed Ray."""

from __future__ import annotations

import json
import sys

import pytest

from orchestrator.config.schema import Config
from orchestrator.core.node_commands import NODE_MARK, node_command
from tests.factories import REFERENCE, config_of
from tests.scene import ran

PCS: dict[str, dict[str, object]] = {"pc1": {}, "pc2": {}}

#: Ray's own parser of labels, in a separate process.
READ_BY_RAY = """
import json, sys
from ray._private.label_utils import parse_node_labels_string as read
print(json.dumps([read(label)["node"] for label in sys.argv[1:]]))
"""


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
    config = config_of(PCS, cluster={"head": "pc2", "port": 7000})
    assert node_command(config, "pc2", "h:7000").argv[2:4] == ("--head", "--port=7000")
    assert node_command(config, "pc1", "h:7000").argv[2] == "--address=h:7000"


def test_without_authentication_no_token_is_fetched() -> None:
    config = config_of(PCS, cluster={"auth": "none"})
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
        ) is command.is_head  # instead of the command that Ray prints


def test_ray_takes_every_name_of_a_node() -> None:
    """The tests in `cluster/nodes` start nodes with the other arguments."""
    card = {"gpu": "card", "workers": 1, "vram_per_worker_gib": 1.0}
    names = ["a", "pc-1", "pc.1", "pc_1", "0", "a" * 63, "1.2.3.4"]
    assert list(Config.model_validate({"nodes": dict.fromkeys(names, card)}).nodes) == names
    labels = [f"node={name}" for name in names]
    done = ran([sys.executable, "-W", "ignore", "-c", READ_BY_RAY, *labels])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == names
