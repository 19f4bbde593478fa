"""A commented cluster.yaml that fits the machines it is for: facts in, text out. Pure.

The comments are those of the cluster.yaml that comes with the program, without the sums of the two reference PCs.
Values that were chosen for a machine have their reason beside them. Does not inspect machines nor write files
(`cli.init` does).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

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

#: For cards without advice: as many workers as the guides put on their largest card, of their size; nine tenths of the
#: card, or with a desktop on it the three quarters of the 3070 guide.
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
_DESKTOPS = frozenset({"xorg", "xwayland", "gnome-shell", "kwin_wayland", "kwin_x11", "plasmashell", "sway"})

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
    """The machine and what its workers get, in words."""


def choose(facts: MachineFacts, host: str | None = None) -> NodeChoice:
    """Return a node that uses a machine well, and whose budgets pass every check.

    Args:
        facts: Of the machine.
        host: How other PCs reach it; `None` leaves that to Ray.
    """
    usable = [card for card in facts.visible_cards if card.total_bytes >= _LEAST_CARD_BYTES]
    # Every worker of a node has the same budget: a small card for the display must not set that of the large one.
    largest_bytes = max((card.total_bytes for card in usable), default=0)
    cards = [card for card in usable if _BESIDE * card.total_bytes > largest_bytes][:_MOST_CARDS]
    return _with_cards(facts, cards, host) if cards else _without_card(facts, host)


def render(template: str, nodes: Mapping[str, NodeChoice], port: int | None = None) -> str:
    """Return cluster.yaml with these nodes, commented.

    Args:
        template: The cluster.yaml that comes with the program.
        nodes: By name; the first one is the head.
        port: On which the head listens; `None` for the usual one.
    """
    lines = template.splitlines()
    if port is not None:
        lines[next(at for at, line in enumerate(lines) if line.startswith("  port: "))] = f"  port: {port}"
    start = lines.index("nodes:")
    end = next(at for at in range(start + 1, len(lines)) if lines[at] and not lines[at].startswith(" "))
    while not lines[end - 1].strip():
        end -= 1
    header = lines.index("")
    comments = _comments(lines[start + 1 : end])
    written = [one_line(f"#   {name}: {choice.summary}") for name, choice in nodes.items()]
    body = [line for at, (name, choice) in enumerate(nodes.items()) for line in _node(name, choice, comments, at == 0)]
    head = [
        *lines[:header],
        "#",
        "# Written by `python -m orchestrator init` for:",
        *written,
        *lines[header : start + 1],
    ]
    return "\n".join([*head, *body, *lines[end:], ""])


def _with_cards(facts: MachineFacts, cards: Sequence[CardFacts], host: str | None) -> NodeChoice:
    # Every worker of a node has the same budget, so the smallest card sets it.
    card = min(cards, key=lambda card: card.total_bytes)
    profiles = {match_profile(each.name, each.total_bytes) for each in cards}
    profile = profiles.pop() if len(profiles) == 1 else None
    why_desktop = _why_desktop(facts, cards)
    total_gib = min(card.total_bytes / GIB, _MOST_GIB)
    advice = _advice(profile, card, total_gib, is_desktop=why_desktop is not None)
    believed_gib = None if profile is not None and _fits(profile.shown_gib, advice) else _floor(total_gib)
    workers = advice.workers * len(cards)
    config = NodeConfig(
        gpu=key_of(card.name) if profile is None else profile.key,
        gpus=len(cards),
        workers=workers,
        cpus_per_worker=_cpus_per_worker(facts, workers),
        gpu_share=advice.gpu_share,
        vram_per_worker_gib=advice.vram_per_worker_gib,
        memory_fraction=advice.memory_fraction,
        size=advice.size,
        dtype=None if advice.dtype == "fp16" else advice.dtype,  # type: ignore[arg-type]  # a word of the same table
        vram_gib=believed_gib,
        host=host,
    )
    held_gib = advice.workers * advice.vram_per_worker_gib
    share = f"{held_gib / total_gib:.0%}"
    reasons = {
        "gpu": f"Found: {', '.join(each.name for each in cards)}.{_left_out(facts, cards)}",
        "vram_per_worker_gib": f"{advice.workers} x {advice.vram_per_worker_gib:.2f} = {held_gib:.2f} of the "
        f"{total_gib:.2f} GiB that this card shows ({share}).",
    }
    if why_desktop is not None:
        reasons["memory_fraction"] = f"{why_desktop}, so a part of the card is left to it."
    if believed_gib is not None:
        reasons["vram_gib"] = "As the card itself says."
    each = f"{advice.workers} workers" if advice.workers > 1 else "1 worker"
    summary = f"{len(cards)} x {card.name}: {each} x {advice.vram_per_worker_gib:.2f} GiB on each card"
    return NodeChoice(
        config=config, reasons=reasons, summary=summary if len(cards) > 1 else summary.split(" on each", maxsplit=1)[0]
    )


def _left_out(facts: MachineFacts, cards: Sequence[CardFacts]) -> str:
    """Say which cards are too small beside the others, and how Ray is kept from them."""
    others = [card.name for card in facts.visible_cards if card not in cards]
    if not others:
        return ""
    kept = ",".join(str(card.index) for card in cards)
    return f" Too small beside that: {', '.join(others)}; start Ray there with CUDA_VISIBLE_DEVICES={kept}."


def _advice(profile: GpuProfile | None, card: CardFacts, total_gib: float, *, is_desktop: bool) -> Advice:
    """Return the profile's advice if it fits what the card really has, else what the formula says."""
    known = None if profile is None else (profile.desktop if is_desktop else None) or profile.alone
    if known is not None and _fits(total_gib, known):
        return known
    return by_formula(total_gib, is_desktop=is_desktop, capability=card.compute_capability)


def by_formula(total_gib: float, *, is_desktop: bool = False, capability: tuple[int, int] | None = None) -> Advice:
    """Return how to divide a card of which nothing more is known.

    Args:
        total_gib: As the card shows it.
        is_desktop: Whether a display is connected to it.
        capability: CUDA's name for its generation; `None` if it does not report it; then it is assumed to be recent.
    """
    fraction = _FRACTION_DESKTOP if is_desktop else _FRACTION_ALONE
    workers = max(1, min(_MOST_WORKERS, int(total_gib * fraction / _WORKER_GIB)))
    return Advice(
        workers=workers,
        vram_per_worker_gib=_floor(_floor(total_gib) * (fraction - _UNSURE_SHARE) / workers),
        memory_fraction=fraction,
        size=8192 if total_gib >= _LARGE_CARD_GIB else 4096,
        dtype="fp32" if capability is not None and capability < _FIRST_TENSOR_UNITS else "fp16",
    )


def _fits(total_gib: float, advice: Advice) -> bool:
    """Say whether the budget check lets this advice pass on a card of this size."""
    node = NodeConfig(
        gpu="card",
        workers=advice.workers,
        vram_per_worker_gib=advice.vram_per_worker_gib,
        memory_fraction=advice.memory_fraction,
        vram_gib=total_gib,
    )
    return overbooked(node) is None


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
    named = f"{workers} workers" if workers > 1 else "1 worker"
    return NodeChoice(
        config=config,
        reasons={
            "gpu": "No NVIDIA card was found: workers run on the processor.",
            "gpus": "With a card: 1, and its name above; or let `init` write a new file then.",
            "vram_per_worker_gib": f"Here of the PC's own memory: {workers} x {each_gib:.2f} of the "
            f"{facts.ram_available_bytes / GIB:.1f} GiB that were free.",
        },
        summary=f"no NVIDIA card: {named} x {each_gib:.2f} GiB on the processor",
    )


def _cpus_per_worker(facts: MachineFacts, workers: int) -> int:
    return max(1, min(_MOST_CPUS, facts.cores_logical // workers))


def _floor(gib: float) -> float:
    """Return GiB with two digits, never more than there is."""
    return int(gib * 100) / 100


def _comments(block: Sequence[str]) -> dict[str, list[str]]:
    """Return what the template says above each key of its first node, without the reference PCs' numbers."""
    found: dict[str, list[str]] = {}
    waiting: list[str] = []
    for line in block:
        text = line.strip()
        if text.startswith("#"):
            waiting.append(text.removeprefix("#").strip())
        elif line.startswith("    ") and ":" in text:
            found.setdefault(text.split(":")[0], waiting)
            waiting = []
    return {key: [text for line in lines if (text := _general(line))] for key, lines in found.items()}


def _general(line: str) -> str:
    sentences = re.split(r"(?<=\.) +", line)
    kept = (text for text in sentences if _REFERENCE_SUM.search(text) or not _REFERENCE.search(text))
    return " ".join(kept)


def _node(name: str, choice: NodeChoice, comments: Mapping[str, Sequence[str]], is_first: bool) -> Iterator[str]:
    """Yield a node. Only the first one explains the keys; each one gives the reasons for its values."""
    yield f"  {_scalar(name)}:"
    config = choice.config
    total = f"{config.workers} x {config.cpus_per_worker} = {config.workers * config.cpus_per_worker} on this PC"
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
    return str(yaml.safe_dump(value, default_flow_style=True, width=1000)).split("\n", maxsplit=1)[0]
