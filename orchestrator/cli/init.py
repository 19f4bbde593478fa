"""The verb `init`: examines every node of the running cluster, or this machine, and writes a
cluster.yaml.

Does not choose the values (`config.template` does) and starts nothing. Does not replace an existing
file unless the user asks for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from orchestrator.cluster.connect import connected, head_address
from orchestrator.config.load import config_from_text
from orchestrator.config.schema import NODE_NAME
from orchestrator.config.template import NodeChoice, choose, render
from orchestrator.core.fleet import NodeAnswer
from orchestrator.errors import NoClusterError, UsageError, one_line
from orchestrator.record.summary import write_file
from orchestrator.run.terminal import own_screen
from workers.host.machine import look_around

#: Name of this machine if there is no cluster; the README gives it to the first PC.
_FIRST_NAME = "pc1"


def write_config(output: str, *, force: bool) -> Iterator[str]:
    """Write a configuration to the file `output`, and yield the lines for the user.

    `force` replaces an existing file. `UsageError`: the file exists or cannot be written, or no
    node of the cluster can be used.
    """
    path = Path(output)
    try:
        if path.exists() and not force:
            raise UsageError(
                f"{output} exists already; --force replaces it, --output FILE writes to another "
                "place"
            )
        nodes, port, remarks = _nodes()
        text = render(template(), nodes, port)
        config = config_from_text(text, output)
        write_file(path, text)
    except OSError as error:
        raise UsageError(f"{output} cannot be written: {error.strerror}") from None
    yield from remarks
    for name, choice in nodes.items():
        yield one_line(f"{name}: {choice.summary}")
    yield f"written to {output}; every key in it is explained there"
    again = "" if output == "cluster.yaml" else f" --config {output}"
    yield f"see what it means:  python -m orchestrator plan{again}"
    if any(node.gpus for node in config.nodes.values()):
        yield f"start this PC:      python -m orchestrator up {config.head_node}{again}"
    else:
        yield f"try it here:        python -m orchestrator run --rehearse --duration 1{again}"


def template() -> str:
    """Return the cluster.yaml of the package; in a clone, the user may have changed that file."""
    return resources.files("orchestrator").joinpath("cluster.yaml").read_text(encoding="utf-8")


def _nodes() -> tuple[dict[str, NodeChoice], int | None, list[str]]:
    """Return a choice for each node of the running cluster, its port, and remarks.

    Without a cluster, return a choice for this machine and no port.
    """
    try:
        address = head_address("auto")
        with own_screen(None), connected(address, "token"):
            from orchestrator.cluster.node_tasks import survey  # noqa: PLC0415 - imports ray

            answers = survey()
    except NoClusterError as error:
        here = {_FIRST_NAME: choose(look_around(with_torch=False))}
        return here, None, [one_line(f"{error}: the file is for this machine alone")]
    # The first node of the file is the head.
    is_head, _, port = address.rpartition(":")
    nodes, remarks = {}, []
    for answer in sorted(answers, key=lambda answer: answer.address != is_head):
        why = _why_left_out(answer)
        if why is not None or answer.name is None or answer.facts is None:
            remarks.append(one_line(f"left out: {why}"))
        else:
            host = answer.address if len(answers) > 1 else None
            nodes[answer.name] = choose(answer.facts, host=host)
    if not nodes:
        raise UsageError("\n".join(["no node of the cluster can be used:", *remarks]))
    return nodes, int(port), remarks


def _why_left_out(answer: NodeAnswer) -> str | None:
    if answer.name is None:
        return f"the node at {answer.address} has no label (ray start --labels=node=NAME)"
    if not re.fullmatch(NODE_NAME, answer.name):
        return f"the label node={answer.name} is no name for cluster.yaml: a-z, 0-9, - _ . only"
    if answer.facts is None:
        return f"{answer.name} does not answer: {answer.error or 'no reason given'}"
    return None
