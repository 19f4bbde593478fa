"""Judges what `plan`, `up` and a rehearsal make of an input: a refusal in words, or a plan that adds up.

Starts no Ray and runs no command. Whatever else comes out is an AssertionError that says what is
wrong.
"""

from __future__ import annotations

import contextlib
import json
import resource
import shlex
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orchestrator.cli.nodes import command_for
from orchestrator.cli.plan import plan_json, plan_text
from orchestrator.config.load import config_from_data, dump_config, load_config
from orchestrator.config.scaling import REHEARSAL_SCALE, scale_config
from orchestrator.config.schema import Config
from orchestrator.config.validation import MAX_PROBLEMS
from orchestrator.config.yaml_source import read_yaml_text
from orchestrator.core.placement import SlotPlan, Target, plan_slots
from orchestrator.errors import OrchestratorError
from tests.config.hostile_inputs import HostileInput
from tests.scene import vm_data_bytes

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
