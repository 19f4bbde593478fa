"""The targets of a run: the user's cluster, this machine as it is, or a rehearsal of the cluster on
this machine.

Each target turns a configuration into an `Environment`: what runs, where, and the lines that tell
the user. Starts nothing; only entering `Environment.fleet` does.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any

import psutil

from orchestrator.cluster.connect import connected
from orchestrator.cluster.local_cluster import rehearsed
from orchestrator.config.gpu_specs import by_formula
from orchestrator.config.load import config_from_data, config_from_text
from orchestrator.config.schema import MOST_GIB, Config, NodeConfig
from orchestrator.config.team import with_team_alone
from orchestrator.config.template import choose
from orchestrator.core.fleet import Fleet
from orchestrator.core.placement import SlotPlan, Target, plan_slots
from orchestrator.errors import PreflightError
from orchestrator.record.store import RunFacts
from orchestrator.run.scaling import REHEARSAL_SCALE, scale_config
from workers.host.facts import CardFacts
from workers.host.machine import look_around, visible_cards
from workers.units import GIB

#: Share of the free RAM for all workers of a rehearsal together, so that the machine stays usable.
_RAM_SHARE = 0.5

#: Tells the user that out of memory is real in a rehearsal on CPUs.
_BY_KERNEL = "CPU, the caps enforced by the kernel"

STARTING = "Starting Ray on this machine, for this run alone; this takes some seconds ..."

#: A CUDA context took 676 MiB on an H200. If a worker of a rehearsal would have less than this on
#: the card, the rehearsal runs on the CPU.
_LEAST_CARD_WORKER_GIB = 0.75

#: Share of a card's free memory for a rehearsal of all nodes on it.
_CARD_SHARE = 0.75


class Mode(StrEnum):
    """The target of a run."""

    CLUSTER = "cluster"
    REHEARSE = "rehearse"
    LOCAL = "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What a run needs before it starts."""

    mode: Mode
    config: Config
    target: Target = field(default_factory=Target)
    lines: tuple[str, ...] = ()

    @property
    def plans(self) -> tuple[SlotPlan, ...]:
        """Every slot of the run."""
        return plan_slots(self.config, self.target)

    @property
    def fleet(self) -> AbstractContextManager[Fleet]:
        """Context manager that connects to the cluster; for other modes it starts one first."""
        config = self.config
        if self.mode is Mode.CLUSTER:
            return connected(config.cluster.address, config.cluster.auth)
        nodes = sorted(config.nodes.items(), key=lambda item: item[0] != config.head_node)
        return rehearsed(
            {
                name: {"num_cpus": node.workers * node.cpus_per_worker, "num_gpus": node.gpus}
                for name, node in nodes
            }
        )


def on_cluster(config: Config) -> Environment:
    """Return the environment of a run on the cluster at `cluster.address`."""
    return Environment(mode=Mode.CLUSTER, config=with_team_alone(config))


def config_and_target_of(facts: RunFacts) -> tuple[Config, Target]:
    """Return the configuration and the target of a stored run; `ConfigError` if this version does
    not accept the configuration.
    """
    config = config_from_text(facts.config_yaml, f"the configuration of run {facts.run_id}")
    return config, Target(device=facts.device, one_machine=facts.one_machine)


def adapted(environment: Environment, fleet: Fleet) -> Environment:
    """Return the environment of a run that has not begun to count, now that its fleet is connected.
    If no node of the cluster has a card, the run becomes a rehearsal on the CPUs of the nodes.

    Raises:
        PreflightError: A node that should have cards has none, while another has some.
    """
    config = environment.config
    if environment.mode is not Mode.CLUSTER or environment.target.device == "cpu":
        return environment
    facts = [
        fact
        for fact in fleet.nodes()
        if fact.name in config.nodes and config.nodes[fact.name].gpus > 0
    ]
    bare = [fact for fact in facts if not fact.shows_card and not fleet.count_cards(str(fact.name))]
    if not bare:
        return environment
    if len(bare) < len(facts):
        raise PreflightError(
            f"{fact.name} was started with --num-gpus={fact.gpus:g}, but its driver shows no "
            "card; check nvidia-smi on "
            f"it, or let its workers use its CPU: --set nodes.{fact.name}.gpus=0"
            for fact in bare
        )
    one_machine = len({fact.address for fact in facts}) == 1
    limit_bytes = int(_free_ram_bytes()) if one_machine else None
    config, scale = scale_config(config, REHEARSAL_SCALE, limit_bytes)
    head = f"No node of this cluster has a card: a rehearsal on their {_BY_KERNEL}"
    return replace(
        environment,
        config=config,
        target=Target(device="cpu", one_machine=one_machine),
        lines=(_scale_line(head, scale),),
    )


def _scale_line(head: str, scale: float) -> str:
    return f"{head}: bytes x {scale:.4g}; config.yaml in the run folder has all numbers"


def in_rehearsal(config: Config) -> Environment:
    """Return the environment of a rehearsal: every node of the cluster is a raylet on this machine,
    on its card if it has one.

    Bytes shrink to 1/16 on a CPU; on a card only as far as its free memory requires.

    Raises:
        UsageError: A worker would get less than 1 MiB.
    """
    config = with_team_alone(config)
    cards = [card for card in visible_cards() if _has_room(card, config)]
    if cards:
        limit_bytes = int(_CARD_SHARE * cards[0].free_bytes)
        where, wanted_scale = f"on this machine's {cards[0].name}", 1.0
        nodes = {name: _on_one_card(node) for name, node in config.nodes.items()}
        config = config.model_copy(update={"nodes": nodes})
        target = Target(one_machine=True)
    else:
        limit_bytes = int(_free_ram_bytes())
        where, wanted_scale = f"on this machine's {_BY_KERNEL}", REHEARSAL_SCALE
        target = Target(device="cpu", one_machine=True)
    # Many CPUs have no units for 16-bit numbers. A training has number types of its own.
    in_fp32 = target.device == "cpu" and config.workload.name != "train"
    config, scale = scale_config(config, wanted_scale, limit_bytes, in_fp32=in_fp32)
    lines = (_scale_line(f"Rehearsal {where}", scale), STARTING)
    return Environment(mode=Mode.REHEARSE, config=config, target=target, lines=lines)


def _on_one_card(node: NodeConfig) -> NodeConfig:
    """Return a node with the one card of this machine, which has the memory of all cards of the
    node. The sums of the stored configuration must hold when the run is resumed.
    """
    if node.gpus <= 1:
        return node
    total_gib = node.card_total_gib
    together_gib = None if total_gib is None else min(MOST_GIB, node.gpus * total_gib)
    return node.model_copy(update={"gpus": 1, "vram_gib": together_gib})


def _has_room(card: CardFacts, config: Config) -> bool:
    """Say whether every worker's budget, scaled to this card, has room for its CUDA context."""
    if card.free_bytes < _LEAST_CARD_WORKER_GIB * GIB:
        return False
    scaled, _ = scale_config(config, 1.0, int(_CARD_SHARE * card.free_bytes))
    return min(node.vram_per_worker_gib for node in scaled.nodes.values()) >= _LEAST_CARD_WORKER_GIB


def on_this_machine(config: Config) -> Environment:
    """Return the environment of a run on this machine: its cards, else its CPU, divided as by
    `init`.

    `nodes:` of the configuration is ignored. Errors name the option, `--local`.
    """
    cards = visible_cards()
    if cards:
        node, where = _card_node(cards), f"{len(cards)} x {cards[0].name}"
    else:
        node = choose(look_around(with_torch=False)).config.model_dump()
        where = f"{os.cpu_count()} cores of {_BY_KERNEL}"
    data = {**config.model_dump(), "nodes": {"local": node}}
    data["cluster"] = {**data["cluster"], "head": None}
    local = with_team_alone(config_from_data(data, "--local"))
    workers = f"{node['workers']} workers x {node['vram_per_worker_gib']:.2f} GiB"
    return Environment(
        mode=Mode.LOCAL,
        config=local,
        target=Target(device="cuda" if cards else "cpu", one_machine=not cards),
        lines=(f"This machine: {where}; {workers}", STARTING),
    )


def _free_ram_bytes() -> float:
    return _RAM_SHARE * psutil.virtual_memory().available


def _card_node(cards: Sequence[CardFacts]) -> dict[str, Any]:
    # The smallest card decides: every worker of a node has the same budget.
    total_gib = min(card.total_bytes for card in cards) / GIB
    advice = asdict(by_formula(total_gib))
    workers = advice["workers"] * len(cards)
    return {
        **advice,
        "gpu": "local-card",
        "gpus": len(cards),
        "workers": workers,
        "vram_gib": total_gib,
    }
