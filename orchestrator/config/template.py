"""Writes a commented cluster.yaml that fits given machines: facts in, text out. Pure.

All except the nodes is the cluster.yaml that comes with the program. A comment for each node says
what was chosen for its machine, and why. `cli.init` inspects machines and writes files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from textwrap import indent

import yaml

from orchestrator.config.gpu_specs import Advice, by_formula, key_of, match_profile, rounded_down
from orchestrator.config.schema import NodeConfig
from orchestrator.errors import one_line
from workers.host.facts import CardFacts, MachineFacts
from workers.units import GIB

#: The nodes of a cluster.yaml: all lines up to the next one that is not indented.
_NODES = re.compile(r"(?m)^nodes:.*\n(?:(?: .*)?\n)*")

#: Share of the free RAM for all workers on a CPU; each gets at most what a rehearsal needs.
_RAM_SHARE = 0.5
_MOST_CPU_WORKER_GIB, _LEAST_CPU_WORKER_GIB = 1.0, 0.25

#: Programs that show that the card serves a desktop.
_DESKTOPS = {"xorg", "xwayland", "gnome-shell", "kwin_wayland", "kwin_x11", "plasmashell", "sway"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChoice:
    """A node of cluster.yaml, chosen for one machine."""

    config: NodeConfig
    summary: str
    """What was found and chosen, and why."""


def choose(facts: MachineFacts, host: str | None = None) -> NodeChoice:
    """Return a node that uses a machine well, and whose budgets pass every check.

    `host` is how other PCs reach it.
    """
    # A smaller card cannot hold a CUDA context and a matrix.
    cards = [card for card in facts.visible_cards if card.total_bytes >= GIB]
    return _with_cards(facts, cards, host) if cards else _without_card(facts, host)


def render(template: str, nodes: Mapping[str, NodeChoice], port: int | None = None) -> str:
    """Return the configuration in `template` with these nodes in place of its own, the head first.

    All outside of `nodes` stays as it is. `port` is where the head listens; `None` keeps that of
    the template.
    """
    if port is not None:
        template = re.sub(r"(?m)^  port: .*$", f"  port: {port}", template, count=1)
    lines = ["nodes:"]
    for name, choice in nodes.items():
        node = yaml.safe_dump({name: choice.config.model_dump()}, sort_keys=False, width=1000)
        lines += [one_line(f"  # {choice.summary}"), indent(node, "  ")]
    return _NODES.sub(lambda _: "\n".join(lines).rstrip() + "\n\n", template, count=1)


def _with_cards(facts: MachineFacts, cards: Sequence[CardFacts], host: str | None) -> NodeChoice:
    # Every worker of a node has the same budget, so only cards like the largest are used.
    largest = max(cards, key=lambda card: card.total_bytes)
    alike = [card for card in cards if card.name == largest.name]
    card = min(alike, key=lambda card: card.total_bytes)
    total_gib = card.total_bytes / GIB
    known, desktop = match_profile(largest.name, largest.total_bytes), _desktop(facts, alike)
    advice = None if known is None else (known.desktop if desktop else None) or known.alone
    if advice is None or not _fits(total_gib, advice):
        is_old = card.compute_capability is not None and card.compute_capability < (7, 0)
        advice = by_formula(total_gib, is_desktop=desktop is not None, is_old=is_old)
    workers = advice.workers * len(alike)
    config = NodeConfig(
        gpu=key_of(card.name, card.total_bytes),
        gpus=len(alike),
        cpus_per_worker=max(1, facts.cores_logical // workers),
        vram_gib=None if known and _fits(known.shown_gib, advice) else rounded_down(total_gib),
        host=host,
        **{**asdict(advice), "workers": workers},
    )
    others = ", ".join(each.name for each in facts.visible_cards if each not in alike)
    kept = ",".join(str(each.index) for each in alike)
    notes = [
        f"{len(alike)} x {card.name}: {_each(config)}{' on each card' if len(alike) > 1 else ''}",
        desktop and f"{desktop}, so a part of the card is left to it",
        others and f"left out: {others}; start Ray with CUDA_VISIBLE_DEVICES={kept}",
    ]
    return NodeChoice(config=config, summary="; ".join(filter(None, notes)))


def _fits(total_gib: float, advice: Advice) -> bool:
    return NodeConfig(gpu="card", vram_gib=total_gib, **asdict(advice)).overbooked is None


def _desktop(facts: MachineFacts, cards: Sequence[CardFacts]) -> str | None:
    """Return why a desktop uses a part of a card; `None` if there is none."""
    if facts.is_wsl:
        return "Windows and its desktop use the card too"
    if any(card.display for card in cards):
        return "a screen is driven by this card"
    names = {(holder.name or "").lower() for card in cards for holder in card.holders}
    return f"{min(names & _DESKTOPS)} draws on this card" if names & _DESKTOPS else None


def _without_card(facts: MachineFacts, host: str | None) -> NodeChoice:
    all_gib = _RAM_SHARE * facts.ram_available_bytes / GIB
    cores = facts.cores_physical or facts.cores_logical
    workers = max(1, min(cores, int(all_gib / _LEAST_CPU_WORKER_GIB)))
    each_gib = max(0.01, min(_MOST_CPU_WORKER_GIB, rounded_down(all_gib / workers)))
    config = NodeConfig(
        gpu="cpu",
        gpus=0,
        workers=workers,
        cpus_per_worker=max(1, facts.cores_logical // workers),
        vram_per_worker_gib=each_gib,
        size=2048,
        host=host,
    )
    return NodeChoice(config=config, summary=f"no NVIDIA card: {_each(config)} on the processor")


def _each(node: NodeConfig) -> str:
    """Return how many workers a card has, and their size."""
    count = node.workers // max(1, node.gpus)
    return f"{count} worker{'s' * (count > 1)} x {node.vram_per_worker_gib:.2f} GiB"
