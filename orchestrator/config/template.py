"""A commented cluster.yaml that fits the machines it is for: facts in, text out. Pure.

The comments are those of the cluster.yaml that comes with the program, but for lines that begin
with `Here:`, which are about the two reference PCs. What was chosen for a machine, and why, is in a
line for each node. `cli.init` inspects machines and writes files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import yaml

from orchestrator.config.capacity import overbooked
from orchestrator.config.gpu_specs import Advice, GpuProfile, by_formula, key_of, match_profile
from orchestrator.config.schema import NodeConfig
from orchestrator.errors import one_line
from workers.host.facts import CardFacts, MachineFacts
from workers.units import GIB

#: A smaller card cannot hold a CUDA context and a matrix.
_LEAST_CARD_BYTES = GIB

#: A card this many times smaller than the largest one is left out.
_BESIDE = 4

#: In the template: what is true of that PC alone.
_HERE = "Here: "
_WRITTEN = "#\n# Written by `python -m orchestrator init` for:"
#: Its nodes: all up to the next line that is not indented.
_NODES = re.compile(r"(?m)^nodes:.*\n((?:(?: .*)?\n)*)")

#: Of free RAM, for all workers on a processor together; each as large as a rehearsal needs at most.
_RAM_SHARE = 0.5
_MOST_CPU_WORKER_GIB, _LEAST_CPU_WORKER_GIB = 1.0, 0.25

#: Bounds of cluster.yaml.
_MOST_CARDS, _MOST_GIB, _MOST_CPUS = 64, 4096.0, 1024

#: Programs that show that the card serves a desktop.
_DESKTOPS = frozenset(
    {"xorg", "xwayland", "gnome-shell", "kwin_wayland", "kwin_x11", "plasmashell", "sway"}
)


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
    usable = [card for card in facts.visible_cards if card.total_bytes >= _LEAST_CARD_BYTES]
    # Every worker of a node has the same budget: a small card for the display must not set that of
    # the large one.
    largest_bytes = max((card.total_bytes for card in usable), default=0)
    cards = [card for card in usable if _BESIDE * card.total_bytes > largest_bytes][:_MOST_CARDS]
    return _with_cards(facts, cards, host) if cards else _without_card(facts, host)


def render(template: str, nodes: Mapping[str, NodeChoice], port: int | None = None) -> str:
    """Return the configuration in `template` with these nodes in place of its own, the head first.

    What stands outside of `nodes` stays as it is. `port` is where the head listens; `None` keeps
    that of the template.
    """
    if port is not None:
        template = re.sub(r"(?m)^  port: .*$", f"  port: {port}", template, count=1)
    before, block, after = _NODES.split(template, maxsplit=1)
    header, _, cluster = before.partition("\n\n")
    lines = [header.partition(f"\n{_WRITTEN}")[0], _WRITTEN]
    lines += [one_line(f"#   {name}: {choice.summary}") for name, choice in nodes.items()]
    lines += ["", f"{cluster}nodes:"]
    comments = _comments(block)
    for name, choice in nodes.items():
        lines += _node(name, choice, comments)
        comments = {}  # the first node explains the keys
    return "\n".join([*lines, "", after])


def _comments(block: str) -> dict[str, list[str]]:
    """Return the comments above each key of a node, where a node has them first."""
    comments: dict[str, list[str]] = {}
    above: list[str] = []
    for line in block.splitlines():
        key, colon, _ = line.strip().partition(":")
        if line.strip().startswith("#"):
            above += [] if _HERE in line else [line]
        elif colon:
            comments.setdefault(key, above)
            above = []
    return comments


def _node(name: str, choice: NodeChoice, comments: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Yield a node: its keys with their values."""
    yield f"  {_scalar(name)}:"
    for key, value in choice.config:
        yield from comments.get(key, ())
        yield f"    {key}: {_scalar(value)}"


def _with_cards(facts: MachineFacts, cards: Sequence[CardFacts], host: str | None) -> NodeChoice:
    # Every worker of a node has the same budget, so the smallest card sets it.
    card = min(cards, key=lambda card: card.total_bytes)
    profiles = {match_profile(each.name, each.total_bytes) for each in cards}
    known = profiles.pop() if len(profiles) == 1 else None
    why_desktop = _why_desktop(facts, cards)
    total_gib = min(card.total_bytes / GIB, _MOST_GIB)
    advice = _advice(known, card, total_gib, is_desktop=why_desktop is not None)
    as_known = known is not None and _fits(known.shown_gib, advice)
    workers = advice.workers * len(cards)
    config = NodeConfig(
        gpu=key_of(card.name, card.total_bytes),
        gpus=len(cards),
        cpus_per_worker=_cpus_per_worker(facts, workers),
        vram_gib=None if as_known else _floor(total_gib),
        host=host,
        **{**asdict(advice), "workers": workers},
    )
    others = ", ".join(each.name for each in facts.visible_cards if each not in cards)
    kept = ",".join(str(each.index) for each in cards)
    notes = [
        f"{len(cards)} x {card.name}: {_each(config)}{' on each card' if len(cards) > 1 else ''}",
        why_desktop and f"{why_desktop}, so a part of the card is left to it",
        others and f"too small beside that: {others}; start Ray with CUDA_VISIBLE_DEVICES={kept}",
    ]
    return NodeChoice(config=config, summary="; ".join(filter(None, notes)))


def _advice(
    known: GpuProfile | None, card: CardFacts, total_gib: float, *, is_desktop: bool
) -> Advice:
    if known is not None:
        advice = (known.desktop if is_desktop else None) or known.alone
        if _fits(total_gib, advice):
            return advice
    return by_formula(total_gib, is_desktop=is_desktop, capability=card.compute_capability)


def _fits(total_gib: float, advice: Advice) -> bool:
    return overbooked(NodeConfig(gpu="card", vram_gib=total_gib, **asdict(advice))) is None


def _why_desktop(facts: MachineFacts, cards: Sequence[CardFacts]) -> str | None:
    if facts.is_wsl:
        return "Windows and its desktop use the card too"
    if any(card.display for card in cards):
        return "a screen is driven by this card"
    names = {(holder.name or "").lower() for card in cards for holder in card.holders}
    return f"{min(names & _DESKTOPS)} draws on this card" if names & _DESKTOPS else None


def _without_card(facts: MachineFacts, host: str | None) -> NodeChoice:
    free_gib = facts.ram_available_bytes / GIB
    cores = facts.cores_physical or facts.cores_logical
    most = int(_RAM_SHARE * free_gib / _LEAST_CPU_WORKER_GIB)
    workers = max(1, min(cores, most, _MOST_CPUS))
    each_gib = max(0.01, min(_MOST_CPU_WORKER_GIB, _floor(_RAM_SHARE * free_gib / workers)))
    config = NodeConfig(
        gpu="cpu",
        gpus=0,
        workers=workers,
        cpus_per_worker=_cpus_per_worker(facts, workers),
        vram_per_worker_gib=each_gib,
        size=2048,
        host=host,
    )
    return NodeChoice(config=config, summary=f"no NVIDIA card: {_each(config)} on the processor")


def _each(node: NodeConfig) -> str:
    """Return how many workers a card has, and of which size."""
    count = node.workers // max(1, node.gpus)
    return f"{count} worker{'s' * (count > 1)} x {node.vram_per_worker_gib:.2f} GiB"


def _cpus_per_worker(facts: MachineFacts, workers: int) -> int:
    return max(1, min(_MOST_CPUS, facts.cores_logical // workers))


def _floor(gib: float) -> float:
    """Return GiB with two digits, never more than there is."""
    return int(gib * 100) / 100


def _scalar(value: object) -> str:
    """Return a value as YAML has it, in quotes where it would be read as something else."""
    if isinstance(value, float):
        return f"{value:.2f}" if round(value, 2) == value else repr(value)
    return str(yaml.safe_dump(value, default_flow_style=True, width=1000)).partition("\n")[0]
