"""The exact commands that make a PC a node of the cluster, for `up` and for error messages.

Covers the text. Does not run it. Every value that ends up in a command is quoted for the shell.
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

#: Marks the processes of a node, so that `stop --node` finds those, and only those, that these
#: commands started.
NODE_MARK = "ORCHESTRATOR_NODE"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeCommand:
    """How one PC joins: its environment, its `ray start`, and what comes before."""

    head_address: str
    environment: dict[str, str]
    argv: tuple[str, ...]
    is_head: bool
    token_steps: tuple[str, ...]
    cpus_said: str
    """Why `--num-cpus` is what it is."""

    @property
    def line(self) -> str:
        """The command as typed in a shell."""
        setting = " ".join(
            f"{name}={shlex.quote(value)}" for name, value in self.environment.items()
        )
        return f"{setting} {shlex.join(self.argv)}"

    def script(self, node: str) -> str:
        """All that is to be typed on the PC, commented; itself a valid shell script."""
        where = "the head" if self.is_head else "joins the head"
        first = f"# on {node} ({where}), inside the project's environment (. .venv/bin/activate)"
        said = (f"# {line}" for line in (self.cpus_said, *self.remarks))
        return "\n".join([first, *self.token_steps, *said, self.line])

    @property
    def remarks(self) -> tuple[str, ...]:
        """What the user should know of what Ray prints when the command has run."""
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
    """Return how `node`, a key under `nodes:`, joins.

    Other PCs reach the head by `head_address`, `host:port`.
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
    """Return what is to be typed on each PC of a team that has a firewall (ufw), so that the other
    members reach the one there: a line for each of their PCs.

    `addresses` are those of the nodes, as far as they are known.
    """
    ports: dict[str, list[int]] = {}
    hosts: dict[str, str] = {}
    for plan in plans:
        host, _, port = plan.spec.team.listen.rpartition(":") if plan.spec.team else ("", "", "0")
        if int(port):  # 0 is of a team on one PC, which no firewall divides
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
    """With several networks on a PC, Ray must be told by which the others reach it.

    It takes no names.
    """
    try:
        return (f"--node-ip-address={ip_address(host or '')}",)
    except ValueError:
        return ()


def _token_steps(*, is_head: bool, host: str) -> tuple[str, ...]:
    """Return how the token is made, once on the head, and copied to every other PC.

    It is never printed.
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
