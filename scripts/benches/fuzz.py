"""Fuzzing: what stands in cluster.yaml and behind `--set` is refused in words, or becomes a plan that adds up.

Does to each input of `hostile.py` what `plan`, `up` and the beginning of a rehearsal do, in worker processes, each
input under a watchdog. Starts no Ray and runs no command. A finding names its seed and number:
`judge(make(seed, number), folder)` shows it again.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import multiprocessing
import resource
import shlex
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benches.common import Result, progress
from benches.hostile import FAMILIES, HostileInput, make
from orchestrator.cli.nodes import command_for
from orchestrator.cli.plan import plan_json, plan_text
from orchestrator.config.load import config_from_data, dump_config, load_config
from orchestrator.config.scaling import REHEARSAL_SCALE, scale_config
from orchestrator.config.schema import Config
from orchestrator.config.validation import MAX_PROBLEMS
from orchestrator.config.yaml_source import read_yaml_text
from orchestrator.core.placement import Target, plan_slots
from orchestrator.errors import OrchestratorError

#: Of the machine's time for one input: a hundred times what the slowest takes, because the machine is shared.
TIME_LIMIT_S = 20.0
#: What one worker process may hold: an explosion becomes a MemoryError here instead of the end of the machine.
_MEMORY_LIMIT_BYTES = 3 * 2**30
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
#: A sentence names a source (180 characters) and a key (180), each of which may be written in escapes of ten, and a
#: few words of the file. The usual sentence is below 200.
_LONGEST_LINE = 5000
#: What all workers of a rehearsal may hold here, so that no plan depends on this machine's free memory.
_REHEARSAL_BYTES = 2 * 2**30
#: `up` is asked for the head and as many more nodes.
_NODES_ASKED = 5
_HEADS = (None, "192.168.1.10", "[fe80::1]:7000", "$(touch /tmp/owned); '\"")
_CHUNK = 250


class _TooSlow(BaseException):
    """The watchdog's. Not an `Exception`, so that nothing in the product can take it for its own."""


class _WrongError(AssertionError):
    """What came out is neither a refusal in words nor a plan that adds up."""


@dataclass(slots=True)
class Tally:
    """What became of some inputs, by family."""

    plans: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    scaled: int = 0  # plans that could be rehearsed as well
    findings: list[str] = field(default_factory=list)
    slowest: tuple[float, str] = (0.0, "")


def judge(hostile: HostileInput, folder: Path) -> str:
    """Return `plan`, `scaled` (a plan that can be rehearsed too), `refusal`, or else what is wrong with the answer."""
    path = folder / "cluster.yaml"
    path.write_bytes(hostile.content)
    try:
        with _watchdog(TIME_LIMIT_S):
            try:
                config = load_config(str(path), hostile.overrides)
                _check_plan(config)
                _check_commands(config)
            except OrchestratorError as error:
                _check_refusal(error)
                return "refusal"
            return _check_rehearsal(config)
    except _TooSlow:
        return f"took more than {TIME_LIMIT_S:g} s"
    except _WrongError as error:
        return str(error)
    except BaseException as error:  # noqa: BLE001 - a traceback for the user is what is looked for
        return f"raised {type(error).__name__}: {str(error)[:200]}"


def _check_refusal(error: OrchestratorError) -> None:
    text = str(error)
    _demand(error.exit_code == 2, f"exit code {error.exit_code}")
    _demand(bool(text.strip()), "a refusal without words")
    _demand(_steers_nothing(text), f"a refusal with control characters: {text[:300]!r}")
    _demand("<= 0.00e+00" not in text, "advice that cannot be followed")
    lines = text.split("\n")
    _demand(all(lines), "a refusal with an empty line")
    _demand(len(lines) <= MAX_PROBLEMS + 1, f"a refusal of {len(lines)} lines")
    _demand(max(map(len, lines)) <= _LONGEST_LINE, f"a line of {max(map(len, lines))} characters")


def _check_plan(config: Config) -> None:
    text, plan = plan_text(config), json.loads(plan_json(config))
    _demand(_steers_nothing(text), "a plan with control characters")
    slots = [worker["slot"] for node in plan["nodes"] for worker in node["workers"]]
    expected = [f"{name}/{index}" for name, node in config.nodes.items() for index in range(node.workers)]
    _demand(slots == expected, "the slots are not node/index of every worker")
    _demand([line.split()[0] for line in text.splitlines()[1 : len(slots) + 1]] == slots, "the table is not the plan")
    _demand([slot.reservation.slot for slot in plan_slots(config, Target())] == slots, "what is placed is not the plan")
    for node in plan["nodes"]:
        _check_sums(node)
    again = read_yaml_text(dump_config(config), "dump")
    _demand(config_from_data(again.data) == config, "written and read again it is another configuration")


def _check_sums(node: dict[str, Any]) -> None:
    workers, name = node["workers"], node["node"]
    cards = Counter(worker["card"] for worker in workers)
    _demand(sum(worker["cpus"] for worker in workers) == node["cpus_total"], f"{name}: CPUs")
    _demand(max(cards.values()) == node["workers_per_card"], f"{name}: workers on a card")
    fullest = sum(worker["budget_bytes"] for worker in workers[: node["workers_per_card"]])
    _demand(fullest == node["card_budget_bytes"], f"{name}: bytes of a card")
    if node["card_allowed_bytes"] is not None:
        _demand(fullest <= node["card_allowed_bytes"] <= node["card_total_bytes"], f"{name}: a card is overbooked")
    if node["gpus"]:
        share = sum(worker["gpu_fraction"] for worker in workers[: node["workers_per_card"]])
        _demand(0 < share <= 1 + 1e-9, f"{name}: fractions of {share} on a card")
        _demand(set(cards) <= set(range(node["gpus"])), f"{name}: a card that is not there")
    for worker in workers:
        _demand(0 <= worker["cap_about_bytes"] <= worker["budget_bytes"], f"{name}: a cap above its budget")
        _demand(worker["duty"] is None or 0 < worker["duty"] <= 1, f"{name}: duty {worker['duty']}")
        _demand(worker["size"] >= 1 and worker["batch"] >= 1, f"{name}: nothing to do")


def _check_commands(config: Config) -> None:
    for node in dict.fromkeys([config.head_node, *list(config.nodes)[:_NODES_ASKED]]):
        for head in _HEADS:
            command = command_for(config, node, head)
            assignments = [f"{name}={value}" for name, value in command.environment.items()]
            _demand(shlex.split(command.line) == [*assignments, *command.argv], f"{node}: the shell reads other words")
            lines = command.script(node).split("\n")
            _demand(lines[-1] == command.line and lines[0].startswith("# on "), f"{node}: the script is torn")
            _demand(_steers_nothing(command.script(node)), f"{node}: a script with control characters")


def _check_rehearsal(config: Config) -> str:
    try:
        small = scale_config(config, REHEARSAL_SCALE, _REHEARSAL_BYTES).config
    except OrchestratorError as error:
        _check_refusal(error)
        return "plan"
    held_bytes = sum(slot.spec.budget_bytes for slot in plan_slots(small, Target(device="cpu", one_machine=True)))
    _demand(held_bytes <= _REHEARSAL_BYTES, f"a rehearsal of {held_bytes} bytes")
    again = read_yaml_text(dump_config(small), "config.yaml of the run")
    _demand(config_from_data(again.data) == small, "a rehearsal's configuration cannot be read again")
    return "scaled"


def _steers_nothing(text: str) -> bool:
    return all(character.isprintable() or character == "\n" for character in text)


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise _WrongError(otherwise)


@contextlib.contextmanager
def _watchdog(limit_s: float) -> Iterator[None]:
    """Raise in this thread after `limit_s`; end the whole process where even that is not heard."""

    def bark(_number: int, _frame: object) -> None:
        raise _TooSlow

    before = signal.signal(signal.SIGALRM, bark)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    faulthandler.dump_traceback_later(3 * limit_s, exit=True, file=2)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)


def judge_range(seed: int, numbers: range) -> Tally:
    tally = Tally()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        for number in numbers:
            hostile = make(seed, number)
            name = f"family {hostile.family}, seed {seed}, number {number}"
            began = time.monotonic()
            verdict = judge(hostile, Path(folder))
            tally.slowest = max(tally.slowest, (time.monotonic() - began, name))
            if verdict == "refusal":
                tally.refusals[hostile.family] += 1
            elif verdict in {"plan", "scaled"}:
                tally.plans[hostile.family] += 1
                tally.scaled += verdict == "scaled"
            else:
                tally.findings.append(f"{name}: {verdict}")
    return tally


def run(inputs: int, seed: int, processes: int | None = None) -> Result:
    chunks = [range(start, min(start + _CHUNK, inputs)) for start in range(0, inputs, _CHUNK)]
    began = time.monotonic()
    tallies: list[Tally] = []
    lost: list[str] = []
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, mp_context=spawn, initializer=_bound) as pool:
        for chunk, future in [(chunk, pool.submit(judge_range, seed, chunk)) for chunk in chunks]:
            try:
                tallies.append(future.result())
            except Exception as error:  # noqa: BLE001 - a worker that died is a finding like any other
                lost.append(f"seed {seed}, numbers {chunk.start} to {chunk.stop - 1}: {type(error).__name__}: {error}")
            if chunk.stop % (20 * _CHUNK) == 0:
                progress(f"{chunk.stop:>8} inputs, {chunk.stop / (time.monotonic() - began):.0f}/s")
    plans = sum((tally.plans for tally in tallies), Counter[str]())
    refusals = sum((tally.refusals for tally in tallies), Counter[str]())
    findings = [finding for tally in tallies for finding in tally.findings]
    slowest_s, slowest = max((tally.slowest for tally in tallies), default=(0.0, ""))
    figures = {
        "inputs": inputs,
        "seed": seed,
        "plans": plans.total(),
        "rehearsals": sum(tally.scaled for tally in tallies),
        "refusals": refusals.total(),
        "findings": len(findings),
        "slowest_s": slowest_s,
        "slowest": slowest,
        "seconds": time.monotonic() - began,
        "families": [{"family": family, "plans": plans[family], "refusals": refusals[family]} for family in FAMILIES],
    }
    return Result(bench="fuzz", figures=figures, broken=[*findings, *lost])


def _bound() -> None:
    """Keep this worker process from taking the machine's memory, and from outliving the one that gives it work."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_LIMIT_BYTES, _MEMORY_LIMIT_BYTES))
