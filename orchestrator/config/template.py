"""A commented cluster.yaml that fits the machines it is for: facts in, text out. Pure.

The comments are those of the cluster.yaml that comes with the program, but for lines that begin
with `Here:`, which are about the two reference PCs. Values that were chosen for a machine have
their reason in such a line. `cli.init` inspects machines and writes files.
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
    reasons: Mapping[str, str]
    """Why a key has its value, by key; whole sentences."""
    summary: str


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
    """Yield a node: its keys with their values, and the reasons for them."""
    yield f"  {_scalar(name)}:"
    for key, value in choice.config:
        yield from comments.get(key, ())
        if key in choice.reasons:
            yield one_line(f"    # {_HERE}{choice.reasons[key]}")
        yield f"    {key}: {_scalar(value)}"


def _with_cards(facts: MachineFacts, cards: Sequence[CardFacts], host: str | None) -> NodeChoice:
    # Every worker of a node has the same budget, so the smallest card sets it.
    card = min(cards, key=lambda card: card.total_bytes)
    profile, *others = {match_profile(each.name, each.total_bytes) for each in cards}
    known = None if others else profile
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
    held_gib = advice.workers * advice.vram_per_worker_gib
    reasons = {
        "gpu": f"{', '.join(each.name for each in cards)}.{_left_out(facts, cards)}",
        "cpus_per_worker": _cpus_said(config),
        "vram_per_worker_gib": f"{advice.workers} x {advice.vram_per_worker_gib:.2f} = "
        f"{held_gib:.2f} of the {total_gib:.2f} GiB that this card shows "
        f"({held_gib / total_gib:.0%}).",
    }
    if why_desktop is not None:
        reasons["memory_fraction"] = f"{why_desktop}, so a part of the card is left to it."
    if not as_known:
        reasons["vram_gib"] = "as the card itself says."
    where = " on each card" if len(cards) > 1 else ""
    each = f"{_counted(advice.workers)} x {advice.vram_per_worker_gib:.2f} GiB{where}"
    return NodeChoice(config=config, reasons=reasons, summary=f"{len(cards)} x {card.name}: {each}")


def _left_out(facts: MachineFacts, cards: Sequence[CardFacts]) -> str:
    """Say which cards are too small beside the others, and how Ray is kept from them."""
    others = ", ".join(card.name for card in facts.visible_cards if card not in cards)
    kept = ",".join(str(card.index) for card in cards)
    start = f"start Ray there with CUDA_VISIBLE_DEVICES={kept}"
    return f" Too small beside that: {others}; {start}." if others else ""


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
    reasons = {
        "gpu": "no NVIDIA card was found: workers run on the processor.",
        "gpus": "with a card: 1, and its name above; or let `init` write a new file then.",
        "cpus_per_worker": _cpus_said(config),
        "vram_per_worker_gib": f"of the PC's own memory: {workers} x {each_gib:.2f} of the "
        f"{free_gib:.1f} GiB that were free.",
    }
    summary = f"no NVIDIA card: {_counted(workers)} x {each_gib:.2f} GiB on the processor"
    return NodeChoice(config=config, reasons=reasons, summary=summary)


def _counted(workers: int) -> str:
    return f"{workers} workers" if workers > 1 else "1 worker"


def _cpus_per_worker(facts: MachineFacts, workers: int) -> int:
    return max(1, min(_MOST_CPUS, facts.cores_logical // workers))


def _cpus_said(node: NodeConfig) -> str:
    return f"{node.workers} x {node.cpus_per_worker} = {node.workers * node.cpus_per_worker}."


def _floor(gib: float) -> float:
    """Return GiB with two digits, never more than there is."""
    return int(gib * 100) / 100


def _scalar(value: object) -> str:
    """Return a value as YAML has it, in quotes where it would be read as something else."""
    if isinstance(value, float):
        return f"{value:.2f}" if round(value, 2) == value else repr(value)
    return str(yaml.safe_dump(value, default_flow_style=True, width=1000)).partition("\n")[0]
