"""Hostile configurations by the hundred: refused in words, or a plan that adds up; never a traceback, never a hang.

FUZZ_EXAMPLES=50000 tries so many of each family. What was once found is kept as a file in
`fuzz_seeds`: `NAME.yaml`, and `NAME.set` with an override on each line.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shlex
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.cli.nodes import command_for
from orchestrator.cli.plan import plan_json, plan_text
from orchestrator.config.load import config_from_data, dump_config, load_config
from orchestrator.config.scaling import REHEARSAL_SCALE, scale_config
from orchestrator.config.schema import Config
from orchestrator.config.validation import MAX_PROBLEMS
from orchestrator.config.yaml_source import read_yaml_text
from orchestrator.core.placement import SlotPlan, Target, plan_slots
from orchestrator.errors import ConfigError, OrchestratorError
from tests.scene import ROOT, vm_data_bytes

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


#: For one input: some hundred times what the slowest takes, because the machine is shared.
TIME_LIMIT_S = 60.0
#: What one input may take: an explosion becomes a MemoryError here instead of the end of the
#: machine.
_MEMORY_LIMIT_BYTES = 3 * 2**30
#: A sentence names a source (180 characters) and a key (180), each of which may be written in
#: escapes of ten, and a few words of the file. The usual sentence is below 200.
_LONGEST_LINE = 5000
#: What all workers of a rehearsal may hold here, so that no plan depends on this machine's free
#: memory.
_REHEARSAL_BYTES = 2 * 2**30
#: `up` is asked for the head and as many more nodes.
_NODES_ASKED = 5
_HEADS = (None, "192.168.1.10", "[fe80::1]:7000", "$(touch /tmp/owned); '\"")


class TooSlow(BaseException):
    """The watchdog's.

    Not an `Exception`, so that nothing in the product can take it for its own.
    """


def judge(hostile: HostileInput, folder: Path) -> str:
    """Return `refusal`, `plan`, or `scaled` for a plan that can be rehearsed as well."""
    path = folder / "cluster.yaml"
    path.write_bytes(hostile.content)
    with _limits():
        try:
            config = load_config(str(path), hostile.overrides)
            _check_plan(config)
            _check_commands(config)
        except OrchestratorError as error:
            _check_refusal(error)
            return "refusal"
        return _check_rehearsal(config)


def _check_refusal(error: OrchestratorError) -> None:
    text = str(error)
    assert error.exit_code == 2, f"exit code {error.exit_code}"
    assert text.strip(), "a refusal without words"
    assert _steers_nothing(text), f"a refusal with control characters: {text[:300]!r}"
    assert "<= 0.00e+00" not in text, "advice that cannot be followed"
    lines = text.split("\n")
    assert all(lines), "a refusal with an empty line"
    assert len(lines) <= MAX_PROBLEMS + 1, f"a refusal of {len(lines)} lines"
    assert max(map(len, lines)) <= _LONGEST_LINE, f"a line of {max(map(len, lines))} characters"


def _check_plan(config: Config) -> None:
    text, plan = plan_text(config), json.loads(plan_json(config))
    assert _steers_nothing(text), "a plan with control characters"
    assert (plan["schema"], plan["compute_share_mode"]) == (1, config.compute_share_mode)
    workers = [worker for node in plan["nodes"] for worker in node["workers"]]
    slots = [worker["slot"] for worker in workers]
    expected = [
        f"{name}/{index}" for name, node in config.nodes.items() for index in range(node.workers)
    ]
    assert slots == expected, "the slots are not node/index of every worker"
    assert [line.split()[0] for line in text.splitlines()[1 : len(slots) + 1]] == slots, (
        "the table is not the plan"
    )
    for node in plan["nodes"]:
        _check_sums(node)
    placed = list(map(_placed, plan_slots(config, Target())))
    assert [{key: worker[key] for key in placed[0]} for worker in workers] == placed, (
        "what is placed is not the plan"
    )
    again = read_yaml_text(dump_config(config), "dump")
    assert config_from_data(again.data) == config, (
        "written and read again it is another configuration"
    )


def _placed(slot: SlotPlan) -> dict[str, Any]:
    return {
        "slot": slot.spec.slot,
        "gpu_fraction": slot.num_gpus,
        "cpus": slot.num_cpus,
        "budget_bytes": slot.spec.budget_bytes,
        "duty": slot.spec.duty,
        "size": slot.spec.workload.size,
        "batch": slot.spec.workload.batch,
    }


def _check_sums(node: dict[str, Any]) -> None:
    workers, name = node["workers"], node["node"]
    cards = Counter(worker["card"] for worker in workers)
    assert sum(worker["cpus"] for worker in workers) == node["cpus_total"], f"{name}: CPUs"
    assert max(cards.values()) == node["workers_per_card"], f"{name}: workers on a card"
    fullest = sum(worker["budget_bytes"] for worker in workers[: node["workers_per_card"]])
    assert fullest == node["card_budget_bytes"], f"{name}: bytes of a card"
    if node["card_allowed_bytes"] is not None:
        assert fullest <= node["card_allowed_bytes"] <= node["card_total_bytes"], (
            f"{name}: a card is overbooked"
        )
    if node["gpus"]:
        share = sum(worker["gpu_fraction"] for worker in workers[: node["workers_per_card"]])
        assert 0 < share <= 1 + 1e-9, f"{name}: fractions of {share} on a card"
        assert set(cards) <= set(range(node["gpus"])), f"{name}: a card that is not there"
    for worker in workers:
        assert 0 <= worker["cap_about_bytes"] <= worker["budget_bytes"], (
            f"{name}: a cap above its budget"
        )
        assert worker["duty"] is None or 0 < worker["duty"] <= 1, f"{name}: duty {worker['duty']}"
        assert worker["size"] >= 1, f"{name}: size {worker['size']}"
        assert worker["batch"] >= 1, f"{name}: batch {worker['batch']}"


def _check_commands(config: Config) -> None:
    for node in dict.fromkeys([config.head_node, *list(config.nodes)[:_NODES_ASKED]]):
        for head in _HEADS:
            command = command_for(config, node, head)
            assignments = [f"{name}={value}" for name, value in command.environment.items()]
            assert shlex.split(command.line) == [*assignments, *command.argv], (
                f"{node}: the shell reads other words"
            )
            lines = command.script(node).split("\n")
            assert lines[-1] == command.line, f"{node}: the script is torn"
            assert lines[0].startswith("# on "), f"{node}: the script is torn"
            assert _steers_nothing(command.script(node)), (
                f"{node}: a script with control characters"
            )


def _check_rehearsal(config: Config) -> str:
    try:
        small = scale_config(config, REHEARSAL_SCALE, _REHEARSAL_BYTES).config
    except OrchestratorError as error:
        _check_refusal(error)
        return "plan"
    held_bytes = sum(
        slot.spec.budget_bytes for slot in plan_slots(small, Target(device="cpu", one_machine=True))
    )
    assert held_bytes <= _REHEARSAL_BYTES, f"a rehearsal of {held_bytes} bytes"
    again = read_yaml_text(dump_config(small), "config.yaml of the run")
    assert config_from_data(again.data) == small, "a rehearsal's configuration cannot be read again"
    return "scaled"


def _steers_nothing(text: str) -> bool:
    return all(character.isprintable() or character == "\n" for character in text)


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    """Raise `TooSlow` after the time limit, and have the kernel refuse memory beyond the other."""

    def bark(_number: int, _frame: object) -> None:
        raise TooSlow(f"took more than {TIME_LIMIT_S:g} s")

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    before = signal.signal(signal.SIGALRM, bark)
    signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT_S)
    resource.setrlimit(resource.RLIMIT_DATA, (vm_data_bytes() + _MEMORY_LIMIT_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


pytestmark = pytest.mark.slow

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "60"))

#: What was found, and the words that refuse it now.
FOUND = {
    "alias-with-a-long-name": ":1: is not YAML: found undefined alias 'nnnn",
    "choice-of-a-4000-digit-number": ":2: memory.policy: a number of more than 18 digits is not one of the choices",
    "escape-far-beyond-unicode": ":2: is not YAML: an escape or a version number in it is too large",
    "escape-just-beyond-unicode": ":2: is not YAML: an escape or a version number in it is too large",
    "fraction-that-leaves-no-byte": "is 0.00 GiB; valid: a larger memory_fraction",
    "head-among-long-names": ":1: cluster.head: there is no node 'nobody'",
    "more-problems-than-a-screen-holds": ": has 203 more problems, not shown",
    "more-workers-than-a-head-can-ask": "1228800 workers on 1200 nodes are too many for one head; valid: at most 10000",
    "number-as-a-long-key": ":1: has the key 1111",
    "override-below-a-long-key": "… holds a single value or a list, no keys",
    "override-of-a-missing-node": "…; valid: pc1",
    "override-with-a-4000-digit-choice": "nodes.pc1.dtype: a number of more than 18 digits is not one of the choices",
    "tag-with-a-long-name": ":1: run: has the tag !tttt",
    "yaml-version-of-5000-digits": ":1: is not YAML: an escape or a version number in it is too large",
}
FOLDER = Path(__file__).parent / "fuzz_seeds"

GOOD = HostileInput(SHIPPED)


def kept(name: str) -> HostileInput:
    path, overrides = FOLDER / f"{name}.yaml", FOLDER / f"{name}.set"
    texts = tuple(overrides.read_text(encoding="utf-8").splitlines()) if overrides.exists() else ()
    return HostileInput(path.read_bytes(), texts)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_input_is_refused_or_a_plan_that_adds_up(family: str, tmp_path: Path) -> None:
    verdicts: Counter[str] = Counter()

    @settings(max_examples=EXAMPLES)
    @given(FAMILIES[family])
    def hold(hostile: HostileInput) -> None:
        verdicts[judge(hostile, tmp_path)] += 1

    hold()
    # Where all is refused (or nothing), the strategy and not the product is what is tested.
    assert verdicts["refusal"] >= EXAMPLES / 10, verdicts
    assert verdicts["plan"] + verdicts["scaled"] >= EXAMPLES / 30, verdicts


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_once_is_refused_in_words(name: str, tmp_path: Path) -> None:
    hostile = kept(name)
    assert judge(hostile, tmp_path) == "refusal"
    with pytest.raises(ConfigError) as caught:
        load_config(str(FOLDER / f"{name}.yaml"), hostile.overrides)
    assert FOUND[name] in str(caught.value)


@pytest.mark.parametrize(
    "text", ["null", "yes", "1e3", "1234", "a: b #c", "- ", "1:30", "\u00fc '\""]
)
def test_text_like_another_value_is_written_and_read_again(text: str, tmp_path: Path) -> None:
    overrides = (
        f"run.dir={json.dumps(text)}",
        "nodes.pc1.power_limit_w=287.5",
        "memory.size_decay=1.0e-300",
    )
    assert judge(HostileInput(SHIPPED, overrides), tmp_path) == "scaled"
