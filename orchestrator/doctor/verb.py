"""The verb `doctor`: collects facts about this machine or every node of a running cluster, and runs
the checks on them.

Changes nothing but the stored speeds of links. Does not print the findings (`report.py`).
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

import psutil

from orchestrator.cluster.connect import connected, head_address
from orchestrator.config.load import load_config
from orchestrator.config.schema import Config
from orchestrator.config.team import members, with_team_alone
from orchestrator.core.fleet import Link, NodeFact
from orchestrator.core.placement import Target, listening_at, plan_slots, refusals
from orchestrator.doctor.checks import Cluster, Here, Machine, of_cluster, of_here, of_machine
from orchestrator.doctor.report import Diagnosis, Finding, Verdict, fail, ok, skip, warn
from orchestrator.errors import ConfigError, NoClusterError, UsageError
from orchestrator.run.team_forecast import link_of, remember_links
from orchestrator.run.terminal import own_screen
from orchestrator.view.phrases import counted
from workers.host.machine import look_around

#: The configuration that is read if the user names none.
_DEFAULT_CONFIG = "cluster.yaml"

#: Commands that read the configuration.
_READ_CONFIG = tuple(f"python -m orchestrator {verb}" for verb in ("run", "up", "doctor"))


def diagnose(
    config_path: str, overrides: Sequence[str], node: str | None, *, quiet: bool
) -> Diagnosis:
    """Check every node of the running cluster, or this machine if there is none.

    Problems of the configuration are findings. `node` is this machine's node as the user says.
    Unless `quiet`, print on a terminal that this takes some seconds. `UsageError`: cluster.yaml has
    no such node.
    """
    with own_screen(None) as screen:  # keeps Ray's output off the terminal
        if sys.stdin.isatty() and screen.err.isatty() and not quiet:
            print("Checking, which takes some seconds ...", file=screen.err)
        config, findings = _configuration(config_path, overrides)
        if node is not None and config is not None and node not in config.nodes:
            valid = ", ".join(config.nodes)
            raise UsageError(f"{config_path} has no node {node!r}; valid: {valid}")
        address = None
        try:
            address = head_address("auto" if config is None else config.cluster.address)
            diagnosis = _of_cluster(config, address, findings)
        except NoClusterError as error:
            without = skip(f"{error}; only this machine was checked", check="cluster")
            if config is not None and address is not None:
                hint = f"if it does not run, start it on {config.head_node} with what this prints"
                fix = f"python -m orchestrator up {config.head_node}"
                without = replace(without, verdict=Verdict.FAIL, hint=hint, fix=fix)
            diagnosis = _of_this_machine(config, node, [*findings, without])
    if config_path == _DEFAULT_CONFIG:
        return diagnosis
    # Commands that read a configuration must read the same one.
    options = f"--config {shlex.quote(config_path)}"
    adapted = tuple(
        replace(it, fix=f"{it.fix} {options}") if (it.fix or "").startswith(_READ_CONFIG) else it
        for it in diagnosis.findings
    )
    return replace(diagnosis, findings=adapted, options=options)


def _configuration(path: str, overrides: Sequence[str]) -> tuple[Config | None, list[Finding]]:
    is_there = Path(path).exists()
    if path == _DEFAULT_CONFIG and not is_there and not overrides:
        missing = f"there is no {_DEFAULT_CONFIG} in this folder"
        hint, fix = "write one that fits this PC", "python -m orchestrator init"
        return None, [warn(missing, check="config", hint=hint, fix=fix)]
    try:
        config = load_config(path, overrides)
    except ConfigError as error:
        quoted = shlex.quote(path)
        new = None if is_there else f"python -m orchestrator init --output {quoted}"
        found = []
        for it in error.problems:
            edit = f"${{EDITOR:-nano}} +{it.line} {quoted}"
            is_placed = it.source == path and it.line is not None
            found.append(fail(str(it), check="config", fix=edit if is_placed else new))
        return None, found
    workers = sum(planned.workers for planned in config.nodes.values())
    there = f"{counted(len(config.nodes), 'node')}, {counted(workers, 'worker')}"
    return config, [ok(there, check="config")]


def _of_cluster(config: Config | None, address: str, findings: Sequence[Finding]) -> Diagnosis:
    """Check every node of a running cluster; `NoClusterError`: the cluster cannot be used."""
    if config is None:
        raise NoClusterError(f"one was started at {address}, and there is no configuration")
    with connected(address, config.cluster.auth) as fleet:
        from orchestrator.cluster.node_tasks import survey  # noqa: PLC0415 - imports ray

        nodes = fleet.nodes()
        missing, answers = refusals(config, nodes), survey()
        links = _links(config, nodes)
    cluster = Cluster(config=config, address=address, missing=missing, answers=answers, links=links)
    found = [*findings, *of_here(Here(config=config, is_cluster=True))]
    found += of_cluster(cluster)
    for answer in answers:
        if answer.facts is not None:
            machine = Machine(facts=answer.facts, config=config, name=answer.name)
            found += [replace(one, node=answer.title) for one in of_machine(machine)]
    return Diagnosis(
        where=f"the cluster at {address}",
        is_cluster=True,
        has_card=any(answer.facts is not None and bool(answer.facts.cards) for answer in answers),
        has_config=True,
        findings=tuple(found),
    )


def _links(config: Config, nodes: Sequence[NodeFact]) -> tuple[Link, ...]:
    """Measure the links from the PCs of a team to that of its first member, if all are there."""
    from orchestrator.cluster.node_tasks import measure_links  # noqa: PLC0415 - imports ray

    addresses = {str(fact.name): fact.address for fact in nodes}
    of_team = [slot.partition("/")[0] for slot in members(config)]
    others = list(dict.fromkeys(node for node in of_team if node != of_team[0]))
    if not others or not set(of_team) <= set(addresses):
        return ()
    plans = plan_slots(with_team_alone(config), Target())
    (first,) = (plan.spec for plan in plans if plan.spec.slot == members(config)[0])
    spec = listening_at(first, addresses[first.node])
    assert spec.team is not None  # noqa: S101 - it is a member
    links = measure_links(first.node, spec.team.listen, others)
    remember_links(
        {link_of(link.node, link.to): link.bytes_per_s for link in links if link.bytes_per_s}
    )
    return links


def _of_this_machine(config: Config | None, node: str | None, findings: list[Finding]) -> Diagnosis:
    facts = look_around()
    name = node if config is None else node or _own_node(config, facts.hostname)
    found = of_machine(Machine(facts=facts, config=config, name=name))
    if config is not None and name is None:
        names = ", ".join(config.nodes)
        found.append(skip(f"say which node this PC is: --node NAME ({names})", check="plan"))
    found += of_here(Here(config=config, is_cluster=False))
    return Diagnosis(
        where=f"this machine ({facts.hostname})",
        is_cluster=False,
        has_card=bool(facts.cards),
        has_config=config is not None,
        findings=(*found, *findings),
    )


def _own_node(config: Config, hostname: str) -> str | None:
    """Return this machine's node of the configuration; if that has one node, it is this machine."""
    addresses = chain.from_iterable(psutil.net_if_addrs().values())
    own = {hostname, *(one.address for one in addresses)} - {"127.0.0.1", "::1"}
    named = (name for name, node in config.nodes.items() if {name, node.host} & own)
    return next(named, next(iter(config.nodes)) if len(config.nodes) == 1 else None)
