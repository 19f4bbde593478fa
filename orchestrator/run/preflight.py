"""Compares the cluster with the plan before the first actor, and says what to type where they
differ.

Ray leaves actors that fit nowhere pending without a message and without end. Decides nothing about
what is missing (`placement.py`) and starts nothing.
"""

from __future__ import annotations

import time

from orchestrator.config.schema import Config
from orchestrator.core.fleet import Fleet
from orchestrator.core.node_commands import node_command
from orchestrator.core.placement import Missing, refusals, unnamed
from orchestrator.errors import NoClusterError, PreflightError

#: How long a fleet may take to show its nodes after connecting, before a missing one is called
#: missing.
_SETTLE_S = 1.0


def check(config: Config, fleet: Fleet, *, wait_for_nodes: bool) -> None:
    """Compare cluster and plan before the first actor.

    `PreflightError` unless the user waits for what is missing.
    """
    deadline = time.monotonic() + _SETTLE_S
    found = refusals(config, fleet.nodes())
    while found and time.monotonic() < deadline:
        time.sleep(0.1)  # a node that joined a moment ago may not be shown yet
        found = refusals(config, fleet.nodes())
    if not found:
        return
    absent = {refusal.node for refusal in found if refusal.missing is Missing.NODE}
    if wait_for_nodes and absent == {refusal.node for refusal in found}:
        return
    problems = []
    for refusal in found:
        node, command = refusal.node, node_command(config, refusal.node, fleet.address()).line
        problems.append(
            f"{refusal.text}; on {node}, type: {command}  (`orchestrator up {node}` prints every "
            "step)"
        )
    nameless = unnamed(fleet.nodes())
    if absent and nameless:
        problems.append(
            f"the node at {', '.join(nameless)} has no label; a node started without "
            "--labels=node=NAME is not used"
        )
    if absent:
        problems.append(
            "or start on what is there and let the others join later: add --wait-for-nodes"
        )
    raise PreflightError(problems)


def without_cluster(config: Config, error: NoClusterError) -> NoClusterError:
    """Return the error with what to type: how to start a cluster, and how to run without one."""
    head = config.head_node
    return NoClusterError(
        f"{error}\n"
        f"  start one:       on {head}, type: python -m orchestrator up {head} --exec\n"
        f"                   (without --exec it only prints the commands; for other PCs: up NODE)\n"
        f"  or go on without one:\n"
        f"    --rehearse     every node of the configuration as a small copy on this machine\n"
        f"    --local        this machine alone, with what it really has"
    )
