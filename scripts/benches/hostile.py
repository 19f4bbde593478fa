"""Hostile configurations for `fuzz.py`: the same seed and number give the same input, on every machine.

That holds as long as this file and cluster.yaml stay as they are, so what was found is kept as a file of its own.

Covers three families: `structure` (the lines of cluster.yaml with wrong parts), `text` (the file itself, cut and
spliced) and `set` (overrides, over good and bad files). Does not judge what becomes of them, and is no model of what is
valid: about a third is meant to be good or nearly so.
"""

from __future__ import annotations

import json
import random
import shlex
from collections.abc import Callable
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


#: Values that a key may have, the last ones it may just have: with these most inputs stay valid.
_GOOD = {
    "address": "auto 192.168.1.10:6379 pc1.lan:65535 '[fe80::1]:6379' a-b.c:1",
    "head": "null pc1 pc2",
    "port": "6379 7000 1 65535",
    "auth": "token none",
    "gpu": "rtx-3070 rtx-3090 h200 cpu 'A_(x)+b.c-d' 'a b'",
    "gpus": "0 1 1 1 2 3 64",
    "workers": "1 2 3 7 64 100 1024",
    "cpus_per_worker": "1 4 1024",
    "gpu_share": "0.6 1.0 1.0e-12 1",
    "vram_per_worker_gib": "0.5 1.0 2 0.001 1.0e-9 1.0e-320 4096",
    "memory_fraction": "0.9 1.0 0.5 1.0e-12",
    "size": "null 64 8192 1 1048576",
    "dtype": "fp32 tf32 fp16 bf16",
    "vram_gib": "null 8 24.5 48 4096 4096.0",
    "host": "null 192.168.1.11 pc2.lan '[fe80::2]' 0 A",
    "name": "matmul mine.module:Class a:b _1.__x__:y",
    "batch": "1 64 1048576",
    "seed": "0 7 4294967295",
    "policy": "classic",
    "first_fraction": "0.2 1.0 1.0e-12",
    "retry_reduction": "0.1 0.999 1.0e-12",
    "floor_mib": "100 1 1.0e-9 1048576",
    "size_decay": "0.7 1.0e-12 0.999999",
    "size_floor": "256 1 1048576",
    "batch_step": "16 0 1048576",
    "batch_floor": "32 1 1048576",
    "emergency_size": "128 1 1048576",
    "cleanup_every": "15 0 1000000",
    "compute_share_mode": "duty mps none",
    "duration": "5 30s 1h30m 365d 0.001 1.0e-9",
    "slice_s": "1 0.5 1.0e-9 60",
    "min_success_rate": "0.95 0 1",
    "dir": "runs ../x /tmp/$(x) 'a b' -rf ~ é '*'",
}
_ANY_S = "86400 1.0e-9 60 10"

#: Values that nobody types: wrong types, wrong sizes, and whatever YAML has in its cellar.
_NASTY = (
    "0", "-1", "-0.0", ".nan", ".inf", "-.inf", "1e999", "1e-320", "1e308", "4096.0000001", "1048577", "9" * 400,
    "1" + "0" * 5000, "-1" + "0" * 5000, "0x" + "f" * 4000, "0b" + "1" * 9000, "0o17", "08", "0_", "0x", "1__0",
    "190:20:30", "1:30", "12:30:45", "2024-01-01", "2024-13-45", "2001-12-14t21:59:43.10-05:00", "yes", "no", "on", "~",
    "", "=", "<<", "[]", "{}", "[1, 2]", "{a: 1}", "{a}", "[[[]]]", "'7'", '"7"', "'a\nb'", '"\\0"', '"\\ud800"',
    '"\\UFFFFFFFF"', '"\\U00110000"', '"\\x1b[31m"', '"\\e]0;x\\a"', '"\\u202e"', '"\\x9b2J"', '"\\N"', '"\\q"',
    "ünï", "\U0001d7df", "\u0663", "\u00a0", "\u2028", "\ufeff", "\u200b7", "\u65e5\u672c", "$(touch /tmp/owned)",
    "`touch /tmp/owned`",
    "'; touch /tmp/owned; '", "a b", "-oProxyCommand=x", "../../etc", "/dev/zero", "file:///etc/passwd", "x" * 6000,
    "'" + "y " * 3000 + "'", "!!python/object/apply:os.system ['touch /tmp/owned']", "!!python/name:os.system ''",
    "!!python/tuple [1]", "!!binary '////'", "!!binary 7", "!!timestamp 2001-01-01", "!!timestamp x", "!!int x",
    "!!int ''", "!!int '-'", "!!int [1]", "!!float ''", "!!float _", "!!bool maybe", "!!null x", "!!str 7", "!!set {a}",
    "!!omap [a: 1]", "!!pairs [a: 1]", "!!map [1]", "!!seq {a: 1}", "!mine 7", "!<tag:x> 7", "!<%ff> 7", "!e!x 7",
    "! 7",
    "!" + "t" * 6000 + " 7", "&a [*a]", "&a {b: *a}", "&a 7", "*a", "*" + "n" * 6000, "&b &c 7", "|\n      a",
    ">-\n   b",
    "|9\n  a", "|+-\n  a", "? a", "- a", "a: b", "[", "]", "{", "}", "'", '"', "#", "%", "@", "`", ",", "&", "*", "!",
    "|",
    "\t7", "7 # x", "7 #x", "[" * 10_000, "{a: " * 10_000, "- " * 10_000, "? " * 10_000, "[" * 40 + "]" * 40, "\x00",
    "\x01", "\x1b[2J", "\x7f", "\x85", "\ud800", "\r", "...", "---", "\n---\n", "\n...\n", "\n%YAML 9.9\n---\n",
)  # fmt: skip

_KEYS = (
    "nodes", "cluster", "workload", "memory", "run", "compute_share_mode", "pc1", "pc2", "workers", "gpu", "gpus",
    "head",
    "vram_gib", "vram_per_worker_gib", "memory_fraction", "cpus_per_worker", "gpu_share", "size", "dtype", "host",
    "address", "port", "auth", "name", "batch", "seed", "policy", "floor_mib", "size_floor", "duration", "slice_s",
    "dir",
    "hang_timeout_s", "stale_after_s", "min_success_rate", "wrkers", "a.b", "<<", "? x", "7", "no", "~", "'a b'",
    "../../x", "$(touch /tmp/x)", '"\\x1b[31m"', '"\\ud800"', "[a, b]", "{a: b}", "!!int 5", "!!python/name:os.x ''",
    "*a", "&k z", "PC1", "-pc", "pc-", "p" * 64, "k" * 6000, "\u202e", "", "'", "=", "1.5", "2024-01-01", "\ufb01",
    "pc1.lan",
)  # fmt: skip


def make(seed: int, number: int) -> HostileInput:
    """Return input `number` of the sequence that belongs to `seed`."""
    chance = random.Random(f"{seed}:{number}")  # noqa: S311 - repeatable is what is wanted
    family = FAMILIES[number % len(FAMILIES)]
    if family == "structure":
        return HostileInput(family=family, content=_structure(chance), overrides=())
    if family == "text":
        return HostileInput(family=family, content=_text(chance), overrides=())
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
    *(_replace,) * 8, _insert, _insert, _swap, _crowd, _anchor,
    *(lambda lines, at, _: lines.pop(at),) * 2, lambda lines, at, _: lines.insert(at, lines[at]),
)  # fmt: skip


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _value(chance: random.Random, key: str) -> str:
    kind = chance.random()
    if kind < 0.6:
        return chance.choice(shlex.split(_GOOD.get(key, _ANY_S), posix=False))
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
    if chance.random() < 0.5:
        at, length = chance.randrange(len(raw) + 1), chance.choice([0, 1, 1, 2, 5, 20, 200])
        before, piece, after = raw[:at], raw[at : at + length], raw[at + length :]
        middles = (b"", piece * 2, _bytes_of(chance) + piece, chance.randbytes(len(piece) or 1))
        return before + chance.choice(middles) + (after if chance.random() < 0.95 else b"")
    lines = raw.splitlines(keepends=True) or [b""]
    at = chance.randrange(len(lines))
    line = lines[at]
    key = line.partition(b":")[0]
    lines[at] = chance.choice(
        (
            b"",
            line * 2,
            b" " * chance.randrange(1, 4) + line,
            line.lstrip(),
            chance.choice(lines),
            *(key + b": " + _bytes_of(chance, key.decode("utf-8", "replace").strip()) + b"\n",) * 5,
        )
    )
    return b"".join(lines)


def _bytes_of(chance: random.Random, key: str = "") -> bytes:
    return _value(chance, key).encode("utf-8", "surrogatepass")


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
