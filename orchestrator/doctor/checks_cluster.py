"""Checks between several nodes: answers, clocks, reachable ports, versions; token and port. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from orchestrator.config.schema import Config
from orchestrator.core.node_commands import node_command
from orchestrator.core.node_facts import NodeAnswer, PortFacts, TokenFacts
from orchestrator.core.placement import Refusal
from orchestrator.doctor.finding import Finding, Verdict, fail, ok, skip, warn
from orchestrator.watch.phrases import counted

#: A run measures with the head's clock alone; more than this only makes the PCs' own logs hard to compare.
_CLOCK_OFFSET_S = 1.0


def check_nodes(
    config: Config, address: str, missing: Sequence[Refusal], answers: Sequence[NodeAnswer]
) -> list[Finding]:
    """Return what there is to say about the nodes of a running cluster, apart from each machine itself.

    Args:
        config: What is planned.
        address: `host:port` of the head.
        missing: What stands in the way of the plan, see `placement.refusals`.
        answers: One for each live node.
    """
    found = [
        Finding(
            check="nodes",
            verdict=Verdict.FAIL,
            found=refusal.text,
            hint=f"on {refusal.node}",
            fix=node_command(config, refusal.node, address).line,
            node=refusal.node,
        )
        for refusal in missing
    ]
    if not found:
        found.append(ok("nodes", f"{counted(len(config.nodes), 'planned node')} there, with the CPUs and GPUs planned"))
    for answer in answers:
        found += [replace(finding, node=answer.title) for finding in _of_one(config, answer)]
    return [*found, *_alike(answers)]


def _of_one(config: Config, answer: NodeAnswer) -> Iterator[Finding]:
    if answer.name is None:
        yield warn(
            "nodes",
            f"the node at {answer.address} has no label, so no worker is placed on it",
            hint="end its Ray there (ray stop) and start it with what `up` prints for one of: "
            + ", ".join(config.nodes),
            fix=f"python -m orchestrator up {next(iter(config.nodes))}",
        )
    elif answer.name not in config.nodes:
        yield warn("nodes", f"cluster.yaml has no node {answer.name}, so no worker is placed on it")
    if answer.facts is None:
        yield fail(
            "answer",
            f"gave no answer: {answer.error or 'no reason given'}",
            hint="is this project installed there, in the same version, in the Python that Ray was started with?",
            fix="make setup",
        )
        return
    yield _clock(answer)
    yield _doors(answer)


def _clock(answer: NodeAnswer) -> Finding:
    offset_s, error_s = answer.clock_offset_s, answer.clock_error_s
    if offset_s is None or error_s is None:
        return skip("clock", "could not be compared")
    found = f"{abs(offset_s):.3f} s {'ahead of' if offset_s >= 0 else 'behind'} this PC's, give or take {error_s:.3f} s"
    if abs(offset_s) - error_s > _CLOCK_OFFSET_S:
        return warn("clock", found, hint="on the PC that is wrong", fix="sudo timedatectl set-ntp true")
    return ok("clock", found)


def _doors(answer: NodeAnswer) -> Finding:
    if not answer.unreachable:
        return ok("network", "reaches every other node")
    shut = ", ".join(answer.unreachable)
    return fail(
        "network",
        f"cannot reach {shut}; a firewall, or an address that only the other side can use",
        hint="on the PC that is not reached, let the others in (this is ufw's way; put your network's address); a PC "
        "with several networks needs nodes.<name>.host",
        fix="sudo ufw allow from 192.168.0.0/16",
    )


def _alike(answers: Iterable[NodeAnswer]) -> Iterator[Finding]:
    """Yield where nodes differ in what must or should be the same."""
    known = [(answer.title, answer.facts) for answer in answers if answer.facts is not None]
    if len(known) < 2:
        return
    differing = False
    for what, values, must in (
        ("Python", [(title, ".".join(facts.python.split(".")[:2])) for title, facts in known], True),
        ("Ray", [(title, facts.ray) for title, facts in known], True),
        ("this project", [(title, facts.project) for title, facts in known], True),
        ("torch", [(title, (facts.torch.version or "none").split("+")[0]) for title, facts in known], False),
    ):
        if len({value for _, value in values}) == 1:
            continue
        differing = True
        text = f"{what} differs: " + ", ".join(f"{title} has {value or 'none'}" for title, value in values)
        yield fail("versions", text, fix="make setup") if must else warn("versions", text, fix="make setup")
    if not differing:
        yield ok("versions", "Python, Ray, torch and this project are the same on every node")


def check_token(auth: str, token: TokenFacts, *, is_needed: bool) -> Finding:
    """Return what there is to say about the token.

    Args:
        auth: `cluster.auth`.
        token: What is known of it.
        is_needed: Whether a cluster is up, which asks for it.
    """
    if auth == "none":
        return warn(
            "token",
            "switched off (cluster.auth: none): any program that reaches the head's port may run code on these PCs",
            hint="set cluster.auth: token, end every node and start it with what `up` prints",
        )
    if token.from_environment:
        return ok("token", "in the environment (RAY_AUTH_TOKEN)")
    if not token.exists:
        if is_needed:
            return fail("token", f"there is none in {token.path}", hint="copy that file from the head; mode 600")
        return skip("token", "none yet; a cluster needs one, and `python -m orchestrator up NODE` makes it")
    if token.mode is not None and token.mode & 0o077:
        return warn("token", f"{token.path} can be read by other users of this PC", fix=f"chmod 600 {token.path}")
    return ok("token", f"{token.path}, for this user alone")


def check_port(port: PortFacts) -> Finding:
    """Return whether a head could listen on this machine."""
    if not port.taken:
        return ok("port", f"{port.port} is free for a head on this PC")
    holder = f" by {port.holder}" if port.holder else ""
    return warn(
        "port",
        f"{port.port} is taken{holder}; a head on this PC could not listen there",
        hint="end that program, or set cluster.port",
        fix=f"sudo ss -ltnp 'sport = :{port.port}'",
    )


def check_config(config: Config) -> Finding:
    """Return what is said of a configuration that loads."""
    workers = sum(node.workers for node in config.nodes.values())
    return ok("config", f"{counted(len(config.nodes), 'node')}, {counted(workers, 'worker')}")
