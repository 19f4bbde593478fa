"""What is wrong with a running cluster as a whole: nodes, their network, their versions.

Pure: answers in, findings out. Does not cover each machine itself (`checks_machine`) nor what the
cluster offers to Ray (`placement.refusals`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from orchestrator.config.schema import Config
from orchestrator.core.fleet import NodeAnswer
from orchestrator.core.node_commands import node_command
from orchestrator.core.placement import Refusal
from orchestrator.doctor.finding import Finding, checked, fail, ok, warn
from orchestrator.view.phrases import counted
from workers.host.facts import MachineFacts

#: Those of Ray's workers, and those from which Linux takes the ports that Ray picks at random.
_RAY_PORTS = "10002:19999,32768:60999"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """A running cluster, and what is planned for it."""

    config: Config
    address: str
    """`host:port` of the head."""
    missing: Sequence[Refusal]
    """As `placement.refusals` says."""
    answers: Sequence[NodeAnswer]
    """One for each live node."""


def check_cluster(cluster: Cluster) -> list[Finding]:
    """Return what there is to say about the nodes, apart from each machine itself."""
    return checked(CHECKS, cluster)


def _nodes(cluster: Cluster) -> Iterator[Finding]:
    config = cluster.config
    for refusal in cluster.missing:
        yield fail(
            refusal.text,
            hint=f"on {refusal.node}",
            fix=node_command(config, refusal.node, cluster.address).line,
            node=refusal.node,
        )
    if not cluster.missing:
        planned = counted(len(config.nodes), "planned node")
        yield ok(f"{planned} there, with the CPUs and GPUs planned")
    for answer in cluster.answers:
        if answer.name is None:
            yield warn(
                f"the node at {answer.address} has no label, so no worker is placed on it",
                hint="end its Ray there (ray stop) and start it with what `up` prints for one of: "
                f"{', '.join(config.nodes)}",
                fix=f"python -m orchestrator up {next(iter(config.nodes))}",
                node=answer.title,
            )
        elif answer.name not in config.nodes:
            found = f"cluster.yaml has no node {answer.name}, so no worker is placed on it"
            yield warn(found, node=answer.title)


def _answer(cluster: Cluster) -> Iterator[Finding]:
    for answer in cluster.answers:
        if answer.facts is None:
            yield fail(
                f"gave no answer: {answer.error or 'no reason given'}",
                hint="is this project installed there, in the same version, in the Python that "
                "Ray was started with?",
                fix="make setup",
                node=answer.title,
            )


def _network(cluster: Cluster) -> Iterator[Finding]:
    ports = f"{cluster.config.cluster.port},{_RAY_PORTS}"
    for answer in cluster.answers:
        if answer.facts is not None and not answer.unreachable:
            yield ok("reaches every other node", node=answer.title)
        elif answer.unreachable:
            shut = ", ".join(answer.unreachable)
            hosts = ", ".join(sorted({door.rpartition(":")[0] for door in answer.unreachable}))
            yield fail(
                f"cannot reach {shut}; a firewall, or an address that only the other side can use",
                hint=f"on {hosts}, let {answer.title} in (this is ufw's way); a PC with several "
                "networks needs nodes.<name>.host",
                fix=f"sudo ufw allow proto tcp from {answer.address} to any port {ports}",
                node=answer.title,
            )


def _versions(cluster: Cluster) -> Iterator[Finding]:
    """Yield where nodes differ in what must or should be the same."""
    known = [(one.title, one.facts) for one in cluster.answers if one.facts is not None]
    versions: dict[str, Callable[[MachineFacts], str | None]] = {
        "Python": lambda facts: ".".join(facts.python.split(".")[:2]),
        "Ray": lambda facts: facts.ray,
        "this project": lambda facts: facts.project,
        "torch": lambda facts: (facts.torch.version or "none").split("+")[0],
    }
    is_alike = True
    for what, version in versions.items():
        if len({version(facts) for _, facts in known}) > 1:
            is_alike = False
            has = ", ".join(f"{title} has {version(facts) or 'none'}" for title, facts in known)
            yield (warn if what == "torch" else fail)(f"{what} differs: {has}", fix="make setup")
    if is_alike and len(known) > 1:
        yield ok("the same on every node: Python, Ray, torch, this project")


#: What is checked on a cluster, by the name in the report.
CHECKS: Final[Mapping[str, Callable[[Cluster], Iterable[Finding]]]] = MappingProxyType(
    {"nodes": _nodes, "answer": _answer, "network": _network, "versions": _versions}
)
