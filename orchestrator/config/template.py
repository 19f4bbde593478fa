"""A commented cluster.yaml that fits the machines it is for: facts in, text out. Pure.

The comments are those of the cluster.yaml that comes with the program, without the sums of the two
reference PCs. Values that were chosen for a machine have their reason beside them. `cli.init`
inspects machines and writes files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import yaml

from orchestrator.config.capacity import overbooked
from orchestrator.config.gpu_specs import Advice, GpuProfile, key_of, match_profile
from orchestrator.config.schema import NodeConfig
from orchestrator.errors import one_line
from workers.host.facts import CardFacts, MachineFacts
from workers.units import GIB

#: A smaller card cannot hold a CUDA context and a matrix.
_LEAST_CARD_BYTES = GIB

#: A card this many times smaller than the largest one is left out.
_BESIDE = 4

#: For cards without advice: as many workers as the guides put on their largest card, of their size;
#: nine tenths of the card, or with a desktop on it the three quarters of the 3070 guide.
_MOST_WORKERS = 7
_WORKER_GIB = 3.0
_FRACTION_ALONE, _FRACTION_DESKTOP = 0.90, 0.75
#: NVML and CUDA do not always agree to the last MiB on what a card has.
_UNSURE_SHARE = 0.01
_LARGE_CARD_GIB = 16.0

#: Of free RAM, for all workers on a processor together; each as large as a rehearsal needs at most.
_RAM_SHARE = 0.5
_MOST_CPU_WORKER_GIB, _LEAST_CPU_WORKER_GIB = 1.0, 0.25

#: Bounds of cluster.yaml.
_MOST_CARDS, _MOST_GIB, _MOST_CPUS = 64, 4096.0, 1024

#: Before this compute capability FP16 is slower than FP32 (a GTX 1080 does 1/64 of it).
_FIRST_TENSOR_UNITS = (7, 0)

#: Programs that show that the card serves a desktop.
_DESKTOPS = frozenset(
    {"xorg", "xwayland", "gnome-shell", "kwin_wayland", "kwin_x11", "plasmashell", "sway"}
)

#: A sentence about the numbers of a reference PC.
_REFERENCE = re.compile(r"\d[\d.]* (?:x \d|because )")
_REFERENCE_SUM = re.compile(r"\d+ x \d+ = \d+ on this PC")


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
    """Return the cluster.yaml that comes with the program (`template`) with these nodes by name,
    the head first.

    `port` is where the head listens; `None` keeps the usual one.
    """
    if port is not None:
        template = re.sub(r"(?m)^  port: .*$", f"  port: {port}", template, count=1)
    parts = re.fullmatch(r"(.*?\n)(\n.*?\nnodes:\n)(.*?\n)(\n\S.*)", template, re.DOTALL)
    assert parts is not None, "the template has a header and nodes"  # noqa: S101 - it comes with the program
    header, before, block, after = parts.groups()
    comments = _comments(block.splitlines())
    written = ["#", "# Written by `python -m orchestrator init` for:"]
    written += [one_line(f"#   {name}: {choice.summary}") for name, choice in nodes.items()]
    body = [
        line
        for at, (name, choice) in enumerate(nodes.items())
        for line in _node(name, choice, comments, at == 0)
    ]
    return "".join(
        [header, *(f"{line}\n" for line in written), before, *(f"{line}\n" for line in body), after]
    )


def _with_cards(facts: MachineFacts, cards: Sequence[CardFacts], host: str | None) -> NodeChoice:
    # Every worker of a node has the same budget, so the smallest card sets it.
    card = min(cards, key=lambda card: card.total_bytes)
    profile, *others = {match_profile(each.name, each.total_bytes) for each in cards}
    profile = None if others else profile
    why_desktop = _why_desktop(facts, cards)
    total_gib = min(card.total_bytes / GIB, _MOST_GIB)
    advice = _advice(profile, card, total_gib, is_desktop=why_desktop is not None)
    believed_gib = (
        None if profile is not None and _fits(profile.shown_gib, advice) else _floor(total_gib)
    )
    workers = advice.workers * len(cards)
    config = NodeConfig(
        gpu=key_of(card.name) if profile is None else profile.key,
        gpus=len(cards),
        cpus_per_worker=_cpus_per_worker(facts, workers),
        vram_gib=believed_gib,
        host=host,
        **{**asdict(advice), "workers": workers},
    )
    held_gib = advice.workers * advice.vram_per_worker_gib
    reasons = {
        "gpu": f"Found: {', '.join(each.name for each in cards)}.{_left_out(facts, cards)}",
        "vram_per_worker_gib": f"{advice.workers} x {advice.vram_per_worker_gib:.2f} = "
        f"{held_gib:.2f} of the "
        f"{total_gib:.2f} GiB that this card shows ({held_gib / total_gib:.0%}).",
    }
    if why_desktop is not None:
        reasons["memory_fraction"] = f"{why_desktop}, so a part of the card is left to it."
    if believed_gib is not None:
        reasons["vram_gib"] = "As the card itself says."
    where = " on each card" if len(cards) > 1 else ""
    summary = (
        f"{len(cards)} x {card.name}: {_counted(advice.workers)} x "
        f"{advice.vram_per_worker_gib:.2f} GiB{where}"
    )
    return NodeChoice(config=config, reasons=reasons, summary=summary)


def _left_out(facts: MachineFacts, cards: Sequence[CardFacts]) -> str:
    """Say which cards are too small beside the others, and how Ray is kept from them."""
    others = [card.name for card in facts.visible_cards if card not in cards]
    if not others:
        return ""
    kept = ",".join(str(card.index) for card in cards)
    return (
        f" Too small beside that: {', '.join(others)}; start Ray there with "
        f"CUDA_VISIBLE_DEVICES={kept}."
    )


def _advice(
    profile: GpuProfile | None, card: CardFacts, total_gib: float, *, is_desktop: bool
) -> Advice:
    known = None if profile is None else (profile.desktop if is_desktop else None) or profile.alone
    if known is not None and _fits(total_gib, known):
        return known
    return by_formula(total_gib, is_desktop=is_desktop, capability=card.compute_capability)


def by_formula(
    total_gib: float, *, is_desktop: bool = False, capability: tuple[int, int] | None = None
) -> Advice:
    """Return how to divide a card of which nothing more is known.

    Without a `capability` it counts as a recent one.
    """
    fraction = _FRACTION_DESKTOP if is_desktop else _FRACTION_ALONE
    workers = max(1, min(_MOST_WORKERS, int(total_gib * fraction / _WORKER_GIB)))
    return Advice(
        workers=workers,
        vram_per_worker_gib=_floor(_floor(total_gib) * (fraction - _UNSURE_SHARE) / workers),
        memory_fraction=fraction,
        size=8192 if total_gib >= _LARGE_CARD_GIB else 4096,
        dtype="fp32" if capability is not None and capability < _FIRST_TENSOR_UNITS else None,
    )


def _fits(total_gib: float, advice: Advice) -> bool:
    return overbooked(NodeConfig(gpu="card", vram_gib=total_gib, **asdict(advice))) is None


def _why_desktop(facts: MachineFacts, cards: Sequence[CardFacts]) -> str | None:
    if facts.is_wsl:
        return "Windows and its desktop use the card too"
    if any(card.display for card in cards):
        return "A screen is driven by this card"
    names = {(holder.name or "").lower() for card in cards for holder in card.holders}
    return f"{min(names & _DESKTOPS)} draws on this card" if names & _DESKTOPS else None


def _without_card(facts: MachineFacts, host: str | None) -> NodeChoice:
    shared_gib = _RAM_SHARE * facts.ram_available_bytes / GIB
    cores = facts.cores_physical or facts.cores_logical
    workers = max(1, min(cores, int(shared_gib / _LEAST_CPU_WORKER_GIB), _MOST_CPUS))
    each_gib = max(0.01, min(_MOST_CPU_WORKER_GIB, _floor(shared_gib / workers)))
    config = NodeConfig(
        gpu="cpu",
        gpus=0,
        workers=workers,
        cpus_per_worker=_cpus_per_worker(facts, workers),
        vram_per_worker_gib=each_gib,
        size=2048,
        host=host,
    )
    return NodeChoice(
        config=config,
        reasons={
            "gpu": "No NVIDIA card was found: workers run on the processor.",
            "gpus": "With a card: 1, and its name above; or let `init` write a new file then.",
            "vram_per_worker_gib": f"Here of the PC's own memory: {workers} x {each_gib:.2f} of "
            "the "
            f"{facts.ram_available_bytes / GIB:.1f} GiB that were free.",
        },
        summary=f"no NVIDIA card: {_counted(workers)} x {each_gib:.2f} GiB on the processor",
    )


def _counted(workers: int) -> str:
    return f"{workers} workers" if workers > 1 else "1 worker"


def _cpus_per_worker(facts: MachineFacts, workers: int) -> int:
    return max(1, min(_MOST_CPUS, facts.cores_logical // workers))


def _floor(gib: float) -> float:
    """Return GiB with two digits, never more than there is."""
    return int(gib * 100) / 100


def _comments(block: Sequence[str]) -> dict[str, list[str]]:
    """Return what the template says above each key of its first node, without the reference PCs'
    numbers.
    """
    found: dict[str, list[str]] = {}
    waiting: list[str] = []
    for line in block:
        text = line.strip()
        if text.startswith("#"):
            waiting.append(text.removeprefix("#").strip())
        elif line.startswith("    ") and ":" in text:
            found.setdefault(text.split(":")[0], waiting)
            waiting = []
    return {
        key: [text for line in lines if (text := _general(line))] for key, lines in found.items()
    }


def _general(line: str) -> str:
    kept = (
        text
        for text in re.split(r"(?<=\.) +", line)
        if _REFERENCE_SUM.search(text) or not _REFERENCE.search(text)
    )
    return " ".join(kept)


def _node(
    name: str, choice: NodeChoice, comments: Mapping[str, Sequence[str]], is_first: bool
) -> Iterator[str]:
    """Yield a node.

    Only the first one explains the keys; each one gives the reasons for its values.
    """
    yield f"  {_scalar(name)}:"
    config = choice.config
    total = (
        f"{config.workers} x {config.cpus_per_worker} = "
        f"{config.workers * config.cpus_per_worker} on this PC"
    )
    for key, value in config.model_dump().items():
        if is_first:
            for text in comments.get(key, ()):
                yield f"    # {_REFERENCE_SUM.sub(total, text)}"
        if key in choice.reasons:
            yield one_line(f"    # {choice.reasons[key]}")
        yield f"    {key}: {_scalar(value)}"


def _scalar(value: object) -> str:
    """Return a value as YAML has it, in quotes where it would be read as something else."""
    if isinstance(value, float):
        return f"{value:.2f}" if round(value, 2) == value else repr(value)
    return str(yaml.safe_dump(value, default_flow_style=True, width=1000)).split("\n", maxsplit=1)[
        0
    ]
