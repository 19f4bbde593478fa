"""Gathers what the checks need, here or on every node of a running cluster, and runs them.

Connects the pure checks to machines. Starts no cluster and changes nothing.
"""

from __future__ import annotations

import os
import shlex
import socket
import stat
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from orchestrator.cluster.connect import connected, head_address
from orchestrator.config.load import load_config
from orchestrator.config.schema import Config
from orchestrator.core.node_facts import NodeAnswer, PortFacts, TokenFacts
from orchestrator.core.placement import Refusal, refusals
from orchestrator.doctor import checks_card, checks_cluster, checks_environment, checks_host, checks_plan, checks_torch
from orchestrator.doctor.finding import Finding, fail, skip, warn, with_config
from orchestrator.errors import ConfigError, NoClusterError, Problem, UsageError
from workers.host.facts import MachineFacts
from workers.host.machine import free_bytes, look_around

#: The configuration that is read if the user names none.
DEFAULT_CONFIG = "cluster.yaml"

#: This machine's own ports answer at once or refuse at once.
_KNOCK_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All that was found, and of what."""

    where: str
    """What was looked at, in words."""
    is_cluster: bool
    has_card: bool
    has_config: bool
    findings: tuple[Finding, ...]
    options: str = ""
    """What says which configuration was read, such as `--config mine.yaml`; empty for the usual one."""


def diagnose(config_path: str, overrides: Sequence[str], node: str | None) -> Diagnosis:
    """Look at every node of the running cluster, or at this machine where there is none.

    Args:
        config_path: cluster.yaml; what is wrong with it is a finding.
        overrides: As typed after `--set`.
        node: Which node of cluster.yaml this machine is, where the user says so.

    Raises:
        UsageError: cluster.yaml has no such node.
    """
    options = "" if config_path == DEFAULT_CONFIG else f"--config {shlex.quote(config_path)}"
    diagnosis = _diagnosed(config_path, overrides, node)
    findings = tuple(with_config(finding, options) for finding in diagnosis.findings)
    return replace(diagnosis, findings=findings, options=options)


def _diagnosed(config_path: str, overrides: Sequence[str], node: str | None) -> Diagnosis:
    config, findings = _configuration(config_path, overrides)
    if node is not None and config is not None and node not in config.nodes:
        raise UsageError(f"{config_path} has no node {node!r}; valid: {', '.join(config.nodes)}")
    address, without = _address(config)
    if config is not None and address is not None:
        try:
            missing, answers = _ask_cluster(config, address)
        except NoClusterError as error:
            hint = f"if it does not run, start it on {config.head_node} with what this prints"
            without = fail("cluster", str(error), hint=hint, fix=f"python -m orchestrator up {config.head_node}")
        else:
            return _of_cluster(config, address, missing, answers, findings)
    return _of_this_machine(config, node, [*findings, without])


def _configuration(path: str, overrides: Sequence[str]) -> tuple[Config | None, list[Finding]]:
    if path == DEFAULT_CONFIG and not Path(path).exists() and not overrides:
        found = f"there is no {DEFAULT_CONFIG} in this folder"
        return None, [
            warn("config", found, hint="write one that fits this PC", fix="python -m orchestrator init"),
        ]
    try:
        config = load_config(path, overrides)
    except ConfigError as error:
        return None, [_config_problem(problem, path) for problem in error.problems]
    return config, [checks_cluster.check_config(config)]


def _config_problem(problem: Problem, path: str) -> Finding:
    fix = None
    if problem.source == path and problem.line is not None:
        fix = f"${{EDITOR:-nano}} +{problem.line} {shlex.quote(path)}"
    elif not Path(path).exists():
        fix = f"python -m orchestrator init --output {shlex.quote(path)}"
    return fail("config", str(problem), fix=fix)


def _address(config: Config | None) -> tuple[str | None, Finding]:
    """Return where the cluster is, if there is one to be asked, and what to say if there is none."""
    only = "only this machine was looked at"
    try:
        address = head_address("auto" if config is None else config.cluster.address)
    except NoClusterError as error:
        return None, skip("cluster", f"{error}; {only}")
    if config is None:
        return None, skip("cluster", f"one was started at {address}; without a configuration {only}")
    host, _, port = address.rpartition(":")
    if config.cluster.address == "auto" and host in _own_addresses() and not _answers(host, port):
        return None, warn(
            "cluster",
            f"the Ray head that was started here, at {address}, does not answer any more; {only}",
            hint="to start it again, do what this prints",
            fix=f"python -m orchestrator up {config.head_node}",
        )
    return address, skip("cluster", only)


def _ask_cluster(config: Config, address: str) -> tuple[tuple[Refusal, ...], tuple[NodeAnswer, ...]]:
    with connected(address, config.cluster.auth) as fleet:
        from orchestrator.cluster.inventory import survey  # noqa: PLC0415 - imports ray

        return refusals(config, fleet.nodes()), survey()


def _of_cluster(
    config: Config,
    address: str,
    missing: Sequence[Refusal],
    answers: Sequence[NodeAnswer],
    findings: Iterable[Finding],
) -> Diagnosis:
    found = [
        *findings,
        checks_cluster.check_token(config.cluster.auth, _token(), is_needed=True),
        checks_host.check_disk(free_bytes(config.run.dir)),
    ]
    found += checks_cluster.check_nodes(config, address, missing, answers)
    for answer in answers:
        if answer.facts is None:
            continue
        plan = None if answer.name is None else config.nodes.get(answer.name)
        of_node = _of_machine(answer.facts, config, 0 if plan is None else plan.workers)
        if plan is not None and answer.name is not None:
            of_node += checks_plan.check_plan(answer.name, plan, answer.facts, is_sure=True)
        found += [replace(finding, node=answer.title) for finding in of_node]
    return Diagnosis(
        where=f"the cluster at {address}",
        is_cluster=True,
        has_card=any(answer.facts is not None and bool(answer.facts.cards) for answer in answers),
        has_config=True,
        findings=tuple(found),
    )


def _of_this_machine(config: Config | None, node: str | None, findings: Iterable[Finding]) -> Diagnosis:
    facts = look_around()
    named, is_sure = (None, False) if config is None else _own_node(config, node, facts.hostname)
    plan = None if config is None or named is None else config.nodes[named]
    found = _of_machine(facts, config, 0 if plan is None else plan.workers)
    if plan is not None and named is not None:
        found += checks_plan.check_plan(named, plan, facts, is_sure=is_sure)
    elif config is not None:
        names = ", ".join(config.nodes)
        found.append(skip("plan", f"which node of cluster.yaml this PC is ({names}) is not known; say it: --node NAME"))
    found.append(checks_host.check_disk(free_bytes("." if config is None else config.run.dir)))
    auth = "token" if config is None else config.cluster.auth
    found.append(checks_cluster.check_token(auth, _token(), is_needed=False))
    if config is not None:
        found.append(checks_cluster.check_port(_port(config.cluster.port)))
    return Diagnosis(
        where=f"this machine ({facts.hostname})",
        is_cluster=False,
        has_card=bool(facts.cards),
        has_config=config is not None,
        findings=(*found, *findings),
    )


def _of_machine(facts: MachineFacts, config: Config | None, workers: int) -> list[Finding]:
    mode = "duty" if config is None else config.compute_share_mode
    return [
        *checks_card.check_cards(facts),
        *checks_torch.check_torch(facts),
        *checks_host.check_host(facts, workers=workers, compute_share_mode=mode),
        *checks_environment.check_environment(facts),
    ]


def _own_node(config: Config, node: str | None, hostname: str) -> tuple[str | None, bool]:
    """Return which node of the configuration this machine is, and whether that is sure."""
    if node is not None:
        return node, True
    own = {hostname, *_own_addresses()}
    for name, planned in config.nodes.items():
        if name == hostname or planned.host in own:
            return name, True
    return (next(iter(config.nodes)), False) if len(config.nodes) == 1 else (None, False)


def _own_addresses() -> set[str]:
    return {
        address.address
        for addresses in psutil.net_if_addrs().values()
        for address in addresses
        if address.family in {socket.AF_INET, socket.AF_INET6} and not address.address.startswith(("127.", "::1"))
    }


def _answers(host: str, port: str) -> bool:
    try:
        socket.create_connection((host, int(port)), timeout=_KNOCK_S).close()
    except (OSError, ValueError):
        return False
    return True


def _token() -> TokenFacts:
    """Look at the token as Ray does: the variable first, then the file; never into it."""
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        mode = None
    return TokenFacts(
        path=str(path), exists=mode is not None, from_environment=bool(os.environ.get("RAY_AUTH_TOKEN")), mode=mode
    )


def _port(port: int) -> PortFacts:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return PortFacts(port=port, taken=True, holder=_listener(port))
    return PortFacts(port=port, taken=False)


def _listener(port: int) -> str | None:
    try:
        for connection in psutil.net_connections(kind="tcp"):
            address = connection.laddr
            if connection.status == psutil.CONN_LISTEN and address and address.port == port and connection.pid:
                return f"{psutil.Process(connection.pid).name()} (pid {connection.pid})"
    except psutil.Error:
        return None
    return None
