"""The targets of a run: the user's cluster, this machine as it is, a rehearsal of the cluster here, or this process.

Each turns a configuration into an `Environment`: what will run, where, and the lines that tell the user. Does not start
anything by itself; entering `Environment.fleet` does.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import StrEnum

import psutil

from orchestrator.cluster import local_gpus
from orchestrator.cluster.connect import connected
from orchestrator.cluster.in_process_fleet import in_process
from orchestrator.cluster.local_cluster import rehearsed
from orchestrator.cluster.raylets import RayletPlan
from orchestrator.config.load import config_from_data
from orchestrator.config.scaling import REHEARSAL_SCALE, Scaled, scale_config
from orchestrator.config.schema import Config
from orchestrator.config.template import by_formula
from orchestrator.core.budget import node_budget
from orchestrator.core.fleet import Fleet
from orchestrator.core.placement import SlotPlan, Target, plan_slots
from orchestrator.errors import PreflightError, UsageError
from workers.units import GIB

#: Of free RAM, for all workers of a rehearsal or of `--local` together: the machine stays usable.
_RAM_SHARE = 0.5

#: How the user is told that a rehearsal's failures are real.
_BY_KERNEL = "CPU, the caps enforced by the kernel"

_STARTING = "Starting Ray on this machine, for this run alone ..."

#: A CUDA context took 676 MiB on an H200; with less than this a worker of a rehearsal stays on the CPU.
_LEAST_CARD_WORKER_GIB = 0.75

#: Of a card's free memory, for a rehearsal of all nodes on it.
_CARD_SHARE = 0.75

#: The most that a worker on the processor gets.
_LOCAL_CPU_WORKER_GIB = 1.0


class Mode(StrEnum):
    """Which of the targets."""

    CLUSTER = "cluster"
    REHEARSE = "rehearse"
    LOCAL = "local"
    DEBUG = "debug"


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """A run made ready."""

    mode: Mode

    config: Config
    """As it will be used."""
    target: Target
    fleet: AbstractContextManager[Fleet]
    """Connects, or starts and connects, when entered."""
    lines: tuple[str, ...]
    """What the user should know before it begins."""
    settle: Callable[[Environment, Fleet], Environment] = lambda environment, _: environment
    """Called with the connected fleet: what the cluster turns out to be may change the environment."""

    @property
    def plans(self) -> tuple[SlotPlan, ...]:
        """Every slot of the run."""
        return plan_slots(self.config, self.target)


def on_cluster(config: Config) -> Environment:
    """Run on the cluster that `cluster.address` names."""
    return Environment(
        mode=Mode.CLUSTER,
        config=config,
        target=Target(),
        fleet=connected(config.cluster.address, config.cluster.auth),
        lines=(),
        settle=_settled,
    )


def again(mode: str, config: Config, target: Target) -> Environment:
    """Return the environment of a resumed run: its configuration is scaled and settled already.

    Args:
        mode: A value of `Mode`.
        config: As the run used it.
        target: As the run found it.

    Raises:
        UsageError: There is no such mode.
    """
    if mode not in set(Mode):
        raise UsageError(f"this version knows no run mode {mode!r}; valid: {', '.join(Mode)}")
    if Mode(mode) is Mode.CLUSTER:
        fleet = connected(config.cluster.address, config.cluster.auth)
        address = config.cluster.address
        lines = () if address == "auto" else (f"Connecting to {address}, as the run did",)
        return Environment(mode=Mode.CLUSTER, config=config, target=target, fleet=fleet, lines=lines)
    if Mode(mode) is Mode.DEBUG:
        return Environment(mode=Mode.DEBUG, config=config, target=target, fleet=_in_process(config), lines=())
    raylets = [_raylet(config, name) for name in _head_first(config)]
    return Environment(mode=Mode(mode), config=config, target=target, fleet=rehearsed(raylets), lines=(_STARTING,))


def _settled(environment: Environment, fleet: Fleet) -> Environment:
    """Make a cluster in which no node has a card a rehearsal on its CPUs; refuse one where some lack theirs.

    Raises:
        PreflightError: A node that should have cards has none, while another has some.
    """
    config = environment.config
    facts = [fact for fact in fleet.nodes() if fact.name in config.nodes and config.nodes[fact.name].gpus > 0]
    bare = [fact for fact in facts if not fact.shows_card and not fleet.count_cards(str(fact.name))]
    if not bare:
        return environment
    if len(bare) < len(facts):
        raise PreflightError(
            f"{fact.name} was started with --num-gpus={fact.gpus:g}, but its driver shows no card; check nvidia-smi on "
            f"it, or let its workers use its CPU: --set nodes.{fact.name}.gpus=0"
            for fact in bare
        )
    one_machine = len({fact.address for fact in facts}) == 1
    limit_bytes = int(_RAM_SHARE * psutil.virtual_memory().available) if one_machine else None
    scaled = scale_config(config, REHEARSAL_SCALE, limit_bytes)
    return replace(
        environment,
        config=scaled.config,
        target=Target(device="cpu", one_machine=one_machine),
        lines=_scale_lines(f"No node of this cluster has a card: a rehearsal on their {_BY_KERNEL}", scaled),
    )


def _scale_lines(head: str, scaled: Scaled) -> tuple[str, ...]:
    return (
        f"{head}: bytes x {scaled.scale:.4g}, sizes x {scaled.scale**0.5:.4g}",
        *(f"  {line.key}: {line.before} -> {line.after}" for line in scaled.lines),
    )


def in_rehearsal(config: Config, scale: float | None) -> Environment:
    """Run every node of the configuration as a raylet on this machine, on its card if it has one.

    Args:
        config: Of the real cluster.
        scale: Of bytes; `None` takes 1/16 on a CPU, and on a card as much as it has room for.

    Raises:
        UsageError: The scale is out of range, or leaves the workers nothing.
    """
    cards = [card for card in local_gpus.cards() if _has_room(card, config, scale)]
    if cards:
        limit_bytes = int(_CARD_SHARE * cards[0].free_bytes)
        where, asked = f"on this machine's {cards[0].name}", 1.0 if scale is None else scale
        config = _with_one_card_a_node(config)
        target = Target(one_machine=True)
    else:
        limit_bytes = int(_RAM_SHARE * psutil.virtual_memory().available)
        where, asked = f"on this machine's {_BY_KERNEL}", REHEARSAL_SCALE if scale is None else scale
        target = Target(device="cpu", one_machine=True)
    scaled = scale_config(config, asked, limit_bytes)
    return Environment(
        mode=Mode.REHEARSE,
        config=scaled.config,
        target=target,
        fleet=rehearsed([_raylet(scaled.config, name) for name in _head_first(scaled.config)]),
        lines=(*_scale_lines(f"Rehearsal {where}", scaled), _STARTING),
    )


def _has_room(card: local_gpus.Card, config: Config, scale: float | None) -> bool:
    """Say whether every worker's budget, scaled to this card, is more than the CUDA context it must pay for."""
    asked = 1.0 if scale is None else scale
    scaled = scale_config(config, asked, max(1, int(_CARD_SHARE * card.free_bytes))).config
    return min(node.vram_per_worker_gib for node in scaled.nodes.values()) >= _LEAST_CARD_WORKER_GIB


def _with_one_card_a_node(config: Config) -> Config:
    """Give every node that has cards one: they all mean the one in this machine."""
    nodes = {name: {**node.model_dump(), "gpus": min(1, node.gpus)} for name, node in config.nodes.items()}
    return Config.model_validate({**config.model_dump(), "nodes": nodes})


def on_this_machine(config: Config) -> Environment:
    """Run on what this machine has: its cards, else its CPU. `nodes:` of the configuration is ignored."""
    cards = local_gpus.cards()
    local = _on_one_node(config, _card_node(cards) if cards else _cpu_node(), "--local")
    words = f"{len(cards)} x {cards[0].name}" if cards else f"{os.cpu_count()} cores of {_BY_KERNEL}"
    workers, budget_gib = local.nodes["local"].workers, local.nodes["local"].vram_per_worker_gib
    return Environment(
        mode=Mode.LOCAL,
        config=local,
        target=Target(device="cuda" if cards else "cpu", one_machine=not cards),
        fleet=rehearsed([_raylet(local, "local")]),
        lines=(f"This machine: {words}; {workers} workers x {budget_gib:.2f} GiB", _STARTING),
    )


def in_this_process(config: Config) -> Environment:
    """Run one worker in this process, on a card of this machine or on its CPU, so that a debugger sees its workload.

    Its duty is not limited: it would have to rest for a multiple of the time that the user spends at a breakpoint.
    """
    cards = local_gpus.cards()[:1]
    node = {**(_card_node(cards) if cards else _cpu_node()), "workers": 1}
    debug = _on_one_node(config.model_copy(update={"compute_share_mode": "none"}), node, "--debug")
    words = cards[0].name if cards else f"{os.cpu_count()} cores of {_BY_KERNEL}"
    return Environment(
        mode=Mode.DEBUG,
        config=debug,
        target=Target(device="cuda" if cards else "cpu", one_machine=not cards),
        fleet=_in_process(debug),
        lines=(f"One worker in this process: {words}; {debug.nodes['local'].vram_per_worker_gib:.2f} GiB",),
    )


def _in_process(config: Config) -> AbstractContextManager[Fleet]:
    budget = node_budget(config.head_node, config.nodes[config.head_node], config)
    return in_process(config.head_node, cpus=budget.cpus_total, gpus=budget.gpus)


def _on_one_node(config: Config, node: Mapping[str, object], source: str) -> Config:
    """Return the configuration with this machine as its only node; `source` is named where it is refused."""
    data = {**config.model_dump(), "nodes": {"local": node}}
    data["cluster"] = {**data["cluster"], "head": None}
    return config_from_data(data, source)


def _raylet(config: Config, name: str) -> RayletPlan:
    budget = node_budget(name, config.nodes[name], config)
    return RayletPlan(name=name, cpus=budget.cpus_total, gpus=budget.gpus)


def _head_first(config: Config) -> Sequence[str]:
    return [config.head_node, *(name for name in config.nodes if name != config.head_node)]


def _card_node(cards: Sequence[local_gpus.Card]) -> dict[str, object]:
    # The smallest card decides: every worker of a node has the same budget.
    total_gib = min(card.total_bytes for card in cards) / GIB
    advice = by_formula(total_gib)
    return {
        "gpu": "local-card",
        "gpus": len(cards),
        "workers": advice.workers * len(cards),
        "vram_gib": total_gib,
        "vram_per_worker_gib": advice.vram_per_worker_gib,
        "memory_fraction": advice.memory_fraction,
        "size": advice.size,
    }


def _cpu_node() -> dict[str, object]:
    workers = max(1, psutil.cpu_count(logical=False) or os.cpu_count() or 1)
    share_gib = _RAM_SHARE * psutil.virtual_memory().available / GIB / workers
    return {
        "gpu": "cpu",
        "gpus": 0,
        "workers": workers,
        "vram_per_worker_gib": min(_LOCAL_CPU_WORKER_GIB, int(100 * share_gib) / 100),
        "size": 2048,
    }
