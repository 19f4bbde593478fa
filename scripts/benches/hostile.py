"""Hostile configurations for `fuzz.py`: the same seed and number give the same input, on every machine.

That holds as long as this file, hostile.json and cluster.yaml stay as they are: a finding is kept as a file of its own.
Families: `structure` (the lines of cluster.yaml with wrong parts), `text` (the file itself, cut and spliced) and `set`
(overrides, over good and bad files). No model of what is valid: about a third is meant to be good or nearly so.
"""

from __future__ import annotations

import json
import random
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

SHIPPED = (Path(__file__).resolve().parents[2] / "cluster.yaml").read_bytes()
_DATA = yaml.safe_load(SHIPPED)
_WITHOUT_COMMENTS = yaml.safe_dump(_DATA, sort_keys=False).encode()
_PATHS = (
    *(f"{top}.{key}" for top, section in _DATA.items() if isinstance(section, dict) for key in section),
    *(f"nodes.{node}.{key}" for node in _DATA["nodes"] for key in _DATA["nodes"][node]),
    "compute_share_mode", "nodes", "nodes.pc1", "run", "nodes.pc3.workers", "memory",
)  # fmt: skip

FAMILIES = ("structure", "text", "set")


@dataclass(frozen=True, slots=True, kw_only=True)
class HostileInput:
    """What a user hands to `plan`: the bytes of a file and the texts behind `--set`."""

    family: str
    content: bytes
    overrides: tuple[str, ...]


_WORDS = json.loads(Path(__file__).with_name("hostile.json").read_text(encoding="ascii"))
#: Values that a key may have, the last ones it may just have: most inputs stay valid. "" stands for the rest.
_GOOD: Mapping[str, str] = _WORDS["good"]


def _spelled(words: list[str | list[tuple[str, int]]]) -> tuple[str, ...]:
    """Return the words; a long one is stored as pieces and how often each stands there."""
    return tuple(word if isinstance(word, str) else "".join(piece * times for piece, times in word) for word in words)


#: Values that nobody types: wrong types, wrong sizes, and rare forms of YAML.
_NASTY = _spelled(_WORDS["nasty"])
_KEYS = _spelled(_WORDS["keys"])


def make(seed: int, number: int) -> HostileInput:
    chance = random.Random(f"{seed}:{number}")  # noqa: S311 - repeatable is what is wanted
    family = FAMILIES[number % len(FAMILIES)]
    if family != "set":
        content = _structure(chance) if family == "structure" else _text(chance)
        return HostileInput(family=family, content=content, overrides=())
    content = chance.choices([lambda _: SHIPPED, _structure, _text], weights=[6, 2, 1])[0](chance)
    overrides = tuple(_override(chance) for _ in range(chance.choice([1, 1, 2, 3, 6])))
    if chance.random() < 0.1:
        overrides += overrides[:1]
    return HostileInput(family=family, content=content, overrides=overrides)


def _structure(chance: random.Random) -> bytes:
    lines = _WITHOUT_COMMENTS.decode().splitlines()
    for _ in range(chance.choice([0, 1, 1, 1, 2, 3, 5])):
        at = chance.randrange(len(lines) or 1)
        if lines:
            chance.choice(_MUTATIONS)(lines, at, chance)
    return _wrapped("".join(f"{line}\n" for line in lines), chance)


def _replace(lines: list[str], at: int, chance: random.Random) -> None:
    key = lines[at].partition(":")[0]
    while at + 1 < len(lines) and _depth(lines[at + 1]) > _depth(key):
        del lines[at + 1]  # a section goes with all that it holds
    lines[at] = f"{key}: {_value(chance, key.strip())}"


def _insert(lines: list[str], at: int, chance: random.Random) -> None:
    key = chance.choice(_KEYS)
    lines.insert(at, f"{' ' * _depth(lines[at])}{key}: {_value(chance, key)}")


def _swap(lines: list[str], at: int, chance: random.Random) -> None:
    other = chance.randrange(len(lines))
    (one, _, here), (two, _, there) = lines[at].partition(":"), lines[other].partition(":")
    if here and there:
        lines[at], lines[other] = f"{one}:{there}", f"{two}:{here}"


def _indent(lines: list[str], at: int, chance: random.Random) -> None:
    lines[at] = " " * chance.randrange(6) + lines[at].lstrip(" ")


def _crowd(lines: list[str], _at: int, chance: random.Random) -> None:
    node = f"{{gpu: cpu, gpus: 0, workers: {chance.choice([1, 9, 1024])}, vram_per_worker_gib: 1}}"
    count, prefix = chance.choice([3, 9, 30, 300, 1200]), chance.choice(["n", "n", "N", "n-"])
    _put_below_nodes(lines, [f"  {prefix}{index}: {node}" for index in range(count)])


def _anchor(lines: list[str], _at: int, chance: random.Random) -> None:
    """One node as the alias of another, and keys merged from it."""
    alias = chance.choice(["*n", "{<<: *n}", "{<<: [*n, *n], workers: 1}", "[*n]"])
    node = "{gpu: cpu, gpus: 0, workers: 1, vram_per_worker_gib: 1}"
    _put_below_nodes(lines, [f"  pc4: &n {node}", f"  pc3: {alias}"])


def _put_below_nodes(lines: list[str], more: list[str]) -> None:
    if "nodes:" in lines:
        at = lines.index("nodes:") + 1
        lines[at:at] = more


_MUTATIONS: tuple[Callable[[list[str], int, random.Random], None], ...] = (
    *(_replace,) * 8, _insert, _insert, _swap, _indent, _crowd, _anchor,
    *(lambda lines, at, _: lines.pop(at),) * 2, lambda lines, at, _: lines.insert(at, lines[at]),
)  # fmt: skip


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _value(chance: random.Random, key: str) -> str:
    kind = chance.random()
    if kind < 0.6:
        return chance.choice(shlex.split(_GOOD.get(key, _GOOD[""]), posix=False))
    if kind < 0.65:
        return repr(chance.choice([chance.uniform(0, 100), chance.randint(-3, 200), chance.expovariate(1e-6)]))
    if kind < 0.68:
        return json.dumps("".join(chr(chance.choice([*range(256), 0x202E, 0x1F600])) for _ in range(9)))
    return chance.choice(_NASTY)


def _bomb(width: int, depth: int) -> str:
    """Return the billion laughs: each line an alias list of the one before."""
    lines = ["a0: &a0 [x, x]"]
    lines += [f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * width)}]" for n in range(depth)]
    return "\n".join(lines) + "\n"


def _wrapped(text: str, chance: random.Random) -> bytes:
    """Return `text` as bytes, now and then in a shape that belongs to no configuration."""
    kind = chance.randrange(60)
    if kind < 12:
        text = (
            lambda: f"---\n{text}...\n", lambda: f"{text}---\n{text}", lambda: f"%YAML 1.1\n---\n{text}",
            lambda: f"%YAML {'9' * 5000}.1\n---\n{text}", lambda: f"%TAG ! tag:x:\n---\n{text}",
            lambda: f"\ufeff{text}",
            lambda: text.replace("\n", "\r\n"), lambda: text.replace("  ", "\t"), lambda: _bomb(9, 9) + text,
            lambda: _bomb(2, 40) + text, lambda: text + _bomb(chance.randrange(2, 12), 9),
            lambda: f"x: &x\n  y: *x\n{text}",
        )[kind]()  # fmt: skip
    raw = text.encode("utf-8", "surrogatepass")
    encodings = {12: "utf-16", 13: "utf-32", 14: "latin-1", 15: "utf-8-sig", 16: "utf-7"}
    if kind in encodings:
        return text.encode(encodings[kind], "replace")
    if kind == 17:
        return raw + chance.randbytes(40)
    if kind == 18:
        return chance.randbytes(chance.randrange(300))
    return raw


def _text(chance: random.Random) -> bytes:
    raw = SHIPPED if chance.random() < 0.3 else _WITHOUT_COMMENTS
    for _ in range(chance.choice([1, 1, 2, 3, 8])):
        raw = _edited(raw, chance)
    return raw


def _edited(raw: bytes, chance: random.Random) -> bytes:
    at, length = chance.randrange(len(raw) + 1), chance.choice([0, 1, 1, 2, 5, 20, 200])
    before, piece, after = raw[:at], raw[at : at + length], raw[at + length :]
    value = _value(chance, "").encode("utf-8", "surrogatepass")
    middles = (b"", piece * 2, value + piece, chance.randbytes(len(piece) or 1))
    return before + chance.choice(middles) + (after if chance.random() < 0.95 else b"")


def _override(chance: random.Random) -> str:
    key = chance.choice(_PATHS)
    odd = chance.random()
    if odd < 0.06:
        key = f"nodes.{chance.choice(_KEYS)}.{chance.choice(_KEYS)}"
    elif odd < 0.10:
        key = chance.choice(
            [f"{key}.x", f".{key}", f"{key}.", key.replace(".", ".."), f" {key} ", key.upper(), "", "="]
        )
    elif odd < 0.12:
        key = ".".join(chance.choice(_KEYS) for _ in range(chance.choice([1, 3, 70, 3000])))
    text = f"{key}={_value(chance, key.rpartition('.')[2])}" if odd < 0.97 else key
    return f"{text}\n{chance.choice(_NASTY)}" if chance.random() < 0.02 else text
