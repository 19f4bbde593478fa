"""The team of `train.team`: which slots are its members, and the configuration of a run that trains
nothing else.

Pure. Does not decide who leads (`core/team.py`), and words no refusal (`load`).
"""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.config.schema import Config
from workers.units import GIB


def named(config: Config) -> tuple[str, ...]:
    """Return the PCs and slots that `train.team` names; none if no team trains."""
    team = config.train.team if config.workload.name == "train" else None
    return tuple(config.nodes if team == "all" else team or ())


def slots_of(name: str, config: Config) -> tuple[str, ...]:
    """Return the slots that one name of a team means: for a PC, one for each of its cards, or one
    if it has no card; none for an unknown name.
    """
    if (node := config.nodes.get(name)) is not None:
        return tuple(f"{name}/{index}" for index in range(max(1, node.gpus)))
    return (name,) if name in set(slots(config)) else ()


def slots(config: Config) -> Iterator[str]:
    """Yield every slot of the configuration."""
    for name, node in config.nodes.items():
        yield from (f"{name}/{index}" for index in range(node.workers))


def members(config: Config) -> tuple[str, ...]:
    """Return the slots of the team in the order in which they are named; none without a team."""
    return tuple(slot for name in named(config) for slot in slots_of(name, config))


def without_team(config: Config) -> Config:
    """Return the configuration for jobs and `tune`: no team, and a model that is not divided."""
    train = config.train.model_copy(update={"team": None, "split": "data"})
    return config.model_copy(update={"train": train})


def with_team_alone(config: Config) -> Config:
    """Return the configuration of a run that trains this team and nothing else; unchanged without a
    team.

    The new team names slots. A PC that was named as a whole has a member for each card, with what
    all workers of that card had. Other PCs are left out, except the one that runs the head.
    """
    if not (names := named(config)):
        return config
    team = members(config)
    kept = {slot.partition("/")[0] for slot in team} | {config.head_node}
    nodes = {name: node for name, node in config.nodes.items() if name in kept}
    for name in nodes.keys() & set(names):
        node, cards = nodes[name], max(1, nodes[name].gpus)
        each = node.workers_per_card
        nodes[name] = node.model_copy(
            update={
                "workers": cards,
                "cpus_per_worker": node.cpus_per_worker * node.workers // cards,
                "gpu_share": min(1.0, each * node.gpu_share),
                "vram_per_worker_gib": each * node.budget_bytes / GIB,
            }
        )
    train = config.train.model_copy(update={"team": list(team)})
    return config.model_copy(update={"nodes": nodes, "train": train})
