"""Hypothesis strategies for what a user may hand to `plan`: a file that is right, nearly right or far off, and `--set`.

There is no model of what is valid: about a third of the inputs is meant to be good. The words are
in hostile.json.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml
from hypothesis import strategies as st

from tests.scene import ROOT

SHIPPED = (ROOT / "cluster.yaml").read_bytes()
_DATA = yaml.safe_load(SHIPPED)
_WITHOUT_COMMENTS = yaml.safe_dump(_DATA, sort_keys=False)
_PATHS = (
    *(f"{top}.{key}" for top, section in _DATA.items() if isinstance(section, dict) for key in section),
    *(f"nodes.{node}.{key}" for node in _DATA["nodes"] for key in _DATA["nodes"][node]),
    "compute_share_mode", "nodes", "nodes.pc1", "run", "nodes.pc3.workers", "memory",
)  # fmt: skip

_WORDS = json.loads(Path(__file__).with_name("hostile.json").read_text(encoding="ascii"))
#: Values that a key may have, the last ones it may just have. "" stands for all other keys.
_GOOD: Mapping[str, str] = _WORDS["good"]


def _spelled(words: list[str | list[tuple[str, int]]]) -> st.SearchStrategy[str]:
    """Draw one of the words; a long one is stored as pieces and how often each stands there."""
    return st.sampled_from(
        [w if isinstance(w, str) else "".join(piece * times for piece, times in w) for w in words]
    )


#: Values that are not typed by hand: wrong types, wrong sizes, and rare forms of YAML.
_NASTY = _spelled(_WORDS["nasty"])
_KEYS = _spelled(_WORDS["keys"])
_ODD = st.one_of(
    _NASTY,
    (st.floats(0, 100) | st.integers(-3, 200) | st.floats(1, 1e9)).map(repr),
    st.text(st.characters(max_codepoint=255) | st.sampled_from("\u202e\U0001f600"), max_size=9).map(
        json.dumps
    ),
)


@dataclass(frozen=True, slots=True)
class HostileInput:
    """What a user hands to `plan`: the bytes of a file and the texts behind `--set`."""

    content: bytes
    overrides: tuple[str, ...] = ()


def _values(key: str) -> st.SearchStrategy[str]:
    good = st.sampled_from(shlex.split(_GOOD.get(key, _GOOD[""]), posix=False))
    return st.one_of(good, good, good, good, _ODD)


_DAMAGE = st.sampled_from(
    ["replace"] * 8
    + ["insert"] * 2
    + ["remove"] * 2
    + ["swap", "indent", "repeat", "crowd", "alias"]
)
_A_NODE = "gpu: cpu, gpus: 0, workers: 1, vram_per_worker_gib: 1"


@st.composite
def _damaged_lines(draw: st.DrawFn) -> bytes:
    """Draw cluster.yaml with some of its lines changed, now and then in a shape that belongs to no configuration."""
    lines = _WITHOUT_COMMENTS.splitlines()
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(lines) - 1))
        key, _, value = lines[at].partition(":")
        match draw(_DAMAGE):
            case "replace":
                while at + 1 < len(lines) and _depth(lines[at + 1]) > _depth(key):
                    del lines[at + 1]  # a section goes with all that it holds
                lines[at] = f"{key}: {draw(_values(key.strip()))}"
            case "insert":
                lines.insert(at, f"{' ' * _depth(key)}{draw(_KEYS)}: {draw(_values(''))}")
            case "remove" if len(lines) > 1:
                del lines[at]
            case "swap":
                other = draw(st.integers(0, len(lines) - 1))
                their_key, _, their_value = lines[other].partition(":")
                lines[at], lines[other] = f"{key}:{their_value}", f"{their_key}:{value}"
            case "indent":
                lines[at] = " " * draw(st.integers(0, 5)) + lines[at].lstrip(" ")
            case "repeat":
                lines.insert(at, lines[at])
            case "crowd":
                count, prefix = (
                    draw(st.sampled_from([3, 9, 30, 300, 1200])),
                    draw(st.sampled_from(["n", "N", "n-"])),
                )
                _put_below_nodes(
                    lines, [f"  {prefix}{index}: {{{_A_NODE}}}" for index in range(count)]
                )
            case "alias":
                alias = draw(
                    st.sampled_from(["*n", "{<<: *n}", "{<<: [*n, *n], workers: 1}", "[*n]"])
                )
                _put_below_nodes(lines, [f"  pc4: &n {{{_A_NODE}}}", f"  pc3: {alias}"])
    shape: Callable[[str], bytes] = draw(st.sampled_from((_plain,) * 3 * len(_SHAPES) + _SHAPES))
    return shape("".join(f"{line}\n" for line in lines))


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip(" "))


def _put_below_nodes(lines: list[str], more: list[str]) -> None:
    if "nodes:" in lines:
        at = lines.index("nodes:") + 1
        lines[at:at] = more


def _plain(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _bomb(width: int, depth: int) -> str:
    """Return the billion laughs: each line an alias list of the one before."""
    lines = ["a0: &a0 [x, x]"]
    lines += [f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * width)}]" for n in range(depth)]
    return "\n".join(lines) + "\n"


_SHAPES: tuple[Callable[[str], bytes], ...] = (
    lambda text: _plain(f"---\n{text}...\n"),
    lambda text: _plain(f"{text}---\n{text}"),
    lambda text: _plain(f"%YAML 1.1\n---\n{text}"),
    lambda text: _plain(f"%YAML {'9' * 5000}.1\n---\n{text}"),
    lambda text: _plain(f"%TAG ! tag:x:\n---\n{text}"),
    lambda text: _plain(f"\ufeff{text}"),
    lambda text: _plain(text.replace("\n", "\r\n")),
    lambda text: _plain(text.replace("  ", "\t")),
    lambda text: _plain(_bomb(9, 9) + text),
    lambda text: _plain(_bomb(2, 40) + text),
    lambda text: _plain(text + _bomb(11, 9)),
    lambda text: _plain(f"x: &x\n  y: *x\n{text}"),
    lambda text: text.encode("utf-16", "replace"),
    lambda text: text.encode("utf-32", "replace"),
    lambda text: text.encode("latin-1", "replace"),
    lambda text: text.encode("utf-7", "replace"),
)


@st.composite
def _damaged_bytes(draw: st.DrawFn) -> bytes:
    """Draw the file itself, cut and spliced."""
    raw = draw(st.sampled_from([SHIPPED, _plain(_WITHOUT_COMMENTS), _plain(_WITHOUT_COMMENTS)]))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(raw)))
        after = at + draw(st.sampled_from([0, 1, 1, 2, 5, 20, 200]))
        value = _plain(draw(_values("")))
        middle = draw(
            st.sampled_from([b"", raw[at:after] * 2, value + raw[at:after]])
            | st.binary(max_size=40)
        )
        is_cut = draw(st.integers(0, 19)) == 19
        raw = raw[:at] + middle + (b"" if is_cut else raw[after:])
    return raw


@st.composite
def _override(draw: st.DrawFn) -> str:
    key = draw(st.sampled_from(_PATHS))
    match draw(
        st.sampled_from(["right"] * 12 + ["elsewhere", "misspelt", "deep", "no value", "two lines"])
    ):
        case "elsewhere":
            key = f"nodes.{draw(_KEYS)}.{draw(_KEYS)}"
        case "misspelt":
            key = draw(
                st.sampled_from(
                    [f"{key}.x", f".{key}", f"{key}.", f" {key} ", key.upper(), "", "="]
                )
            )
        case "deep":
            key = ".".join([draw(_KEYS)] * draw(st.sampled_from([3, 70, 3000])))
        case "no value":
            return key
        case "two lines":
            return f"{key}={draw(_values(''))}\n{draw(_NASTY)}"
    return f"{key}={draw(_values(key.rpartition('.')[2]))}"


#: By what is wrong with them.
FAMILIES: Mapping[str, st.SearchStrategy[HostileInput]] = {
    "lines": st.builds(HostileInput, _damaged_lines()),
    "bytes": st.builds(HostileInput, _damaged_bytes()),
    "overrides": st.builds(
        HostileInput,
        st.one_of(*[st.just(SHIPPED)] * 6, _damaged_lines(), _damaged_bytes()),
        st.lists(_override(), min_size=1, max_size=4).map(tuple),
    ),
}
