"""Builds the commands that make a PC a node of the cluster, for `up` and for error messages.

Does not run them. Every value in a command is quoted for the shell.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import TYPE_CHECKING

from orchestrator.core.placement import SlotPlan, node_budget

if TYPE_CHECKING:
    from orchestrator.config.schema import Config

#: Environment variable that marks the processes which these commands start. `stop --node` ends only
#: marked processes.
NODE_MARK = "ORCHESTRATOR_NODE"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCommand:
    """How one PC joins: environment, `ray start`, and the steps before it."""

    head_address: str
    environment: dict[str, str]
    argv: tuple[str, ...]
    is_head: bool
    token_steps: tuple[str, ...]
    cpus_said: str
    """Explanation of `--num-cpus`."""

    @property
    def line(self) -> str:
        """The command as a line for a shell."""
        setting = " ".join(
            f"{name}={shlex.quote(value)}" for name, value in self.environment.items()
        )
        return f"{setting} {shlex.join(self.argv)}"

    def script(self, node: str) -> str:
        """Return all lines to type on the PC, with comments: a valid shell script."""
        where = "the head" if self.is_head else "joins the head"
        first = f"# on {node} ({where}), inside the project's environment (. .venv/bin/activate)"
        said = (f"# {line}" for line in (self.cpus_said, *self.remarks))
        return "\n".join([first, *self.token_steps, *said, self.line])

    @property
    def remarks(self) -> tuple[str, ...]:
        """Comments on the output of Ray's command."""
        if not self.is_head:
            return ()
        return (
            (
                'ignore Ray\'s "Next steps": they set neither the label nor the environment that a '
                "node here needs;"
            ),
            "for every other PC type here: python -m orchestrator up NODE",
        )


def node_command(config: Config, node: str, head_address: str) -> NodeCommand:
    """Return the command by which `node`, a key under `nodes:`, joins.

    `head_address` is the `host:port` by which other PCs reach the head.
    """
    budget = node_budget(node, config.nodes[node], config)
    is_head = node == config.head_node
    host = head_address.rsplit(":", 1)[0]
    place = (
        ("--head", f"--port={config.cluster.port}") if is_head else (f"--address={head_address}",)
    )
    argv = (
        "ray",
        "start",
        *place,
        f"--labels=node={node}",
        f"--num-cpus={budget.cpus_total}",
        f"--num-gpus={budget.gpus}",
        *_own_address(config.nodes[node].host),
        "--disable-usage-stats",
    )
    token = config.cluster.auth == "token"
    environment = {NODE_MARK: node, "RAY_AUTH_MODE": "token" if token else "disabled"}
    return NodeCommand(
        head_address=head_address,
        environment=environment,
        argv=argv,
        is_head=is_head,
        cpus_said=(
            f"--num-cpus: {config.nodes[node].workers} workers x {budget.cpus_per_worker} "
            "(cpus_per_worker); Ray "
            "counts them to place workers, and they need not be this PC's cores"
        ),
        token_steps=_token_steps(is_head=is_head, host=host) if token else (),
    )


def firewall_lines(plans: Sequence[SlotPlan], addresses: Mapping[str, str]) -> tuple[str, ...]:
    """Return the `ufw` commands that open the firewall of each PC of a team for the other PCs, one
    line for each pair of PCs.

    `addresses` has the known addresses, keyed by node.
    """
    ports: dict[str, list[int]] = {}
    hosts: dict[str, str] = {}
    for plan in plans:
        host, _, port = plan.spec.team.listen.rpartition(":") if plan.spec.team else ("", "", "0")
        if int(port):  # port 0: the whole team is on one PC
            ports.setdefault(plan.spec.node, []).append(int(port))
            known = addresses.get(plan.spec.node, f"ADDRESS_OF_{plan.spec.node}")
            hosts[plan.spec.node] = host.strip("[]") or known
    return tuple(
        f"on {node}, where it has a firewall: sudo ufw allow proto tcp from {hosts[peer]} "
        f"to {hosts[node]} port {':'.join(map(str, sorted({min(used), max(used)})))}"
        for node, used in ports.items()
        for peer in hosts
        if peer != node
    )


def _own_address(host: str | None) -> tuple[str, ...]:
    """Return Ray's option for the IP address by which other PCs reach this one; needed on a PC with
    several networks. Empty if `host` is a name, which Ray does not accept.
    """
    try:
        return (f"--node-ip-address={ip_address(host or '')}",)
    except ValueError:
        return ()


def _token_steps(*, is_head: bool, host: str) -> tuple[str, ...]:
    """Return the commands that create the token on the head, or copy it to another PC.

    They never print the token.
    """
    if is_head:
        return (
            "# once: a secret that every PC of the cluster must have",
            (
                "test -s ~/.ray/auth_token || (umask 077; ray get-auth-token --generate > "
                "/dev/null); "
                "chmod 600 ~/.ray/auth_token"
            ),
        )
    source = shlex.quote(f"{host}:.ray/auth_token")
    return (
        "# once: fetch the head's secret (or copy ~/.ray/auth_token from it in any other way)",
        (
            f"(umask 077; mkdir -p ~/.ray; test -s ~/.ray/auth_token || scp -- {source} "
            "~/.ray/auth_token) "
            "&& chmod 600 ~/.ray/auth_token"
        ),
    )
