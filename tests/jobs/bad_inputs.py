"""Job files and command lines that are wrong, each in one way."""

from __future__ import annotations

from typing import Any

from orchestrator.errors import ConfigError, Problem
from orchestrator.jobs.spec import from_words, parse
from tests.factories import REFERENCE


def _entry(**keys: str) -> str:
    """Return a file with one entry: each key on a line of its own, from line 3 on."""
    lines = "".join(f"    {key}: {value}\n" for key, value in keys.items())
    return f"jobs:\n  - name: a\n{lines}"


def _train(value: str, **keys: str) -> str:
    return _entry(train=value, **keys)


def _command(value: str = "x", **keys: str) -> str:
    return _entry(command=value, **keys)


def _sweep(value: str, train: str = "{}") -> str:
    return _entry(train=train, sweep=value)


def _stop(value: str, over: str = "{lr: [1.0e-4, 3.0e-4]}", train: str = "{steps: 1000}") -> str:
    return f"stop: {value}\n" + _sweep(f"{{over: {over}}}", train)


def _jobs(*entries: str) -> str:
    return "jobs:\n" + "".join(f"  - {{{entry}}}\n" for entry in entries)


_BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n"
    for old, new in zip("abcdef", "bcdefg", strict=True)
)

#: Text of files, in groups as the document shows them.
FILES: dict[str, list[str]] = {
    "The text": [
        "",
        "# only a comment\n",
        "jobs: [\n",
        "jobs: [{name: a, command: x}]\n---\njobs: []\n",
        _BOMB,
        "jobs: " + "[" * 40 + "]" * 40 + "\n",
        "jobs:\n  - !!python/object:os.system {name: a}\n",
        "jobs:\n  - <<: {name: a}\n    command: x\n",
        'jobs:\n  - name: a\n    command: "\x07"\n',
        "jobs:\n  - 5: a\n    name: a\n    command: x\n",
        "just words\n",
        "- name: a\n",
    ],
    "Sections and keys": [
        "job: [{name: a, command: x}]\n",
        "defaults: {retries: 1}\n",
        "jobs:\n",
        "jobs: []\n",
        "jobs: {name: a, command: x}\n",
        "jobs: [a, b]\n",
        _command(priority="high"),
        _command(retries="-1"),
        "defaults: {nodes: pc9}\njobs: [{name: a, command: x}]\n",
        _command(nodes="[pc1, pc1]"),
        _command(card="rtx-4080"),
        _command(pack="sometimes"),
        _command(hours="22-7"),
        _command(hours="07:00-07:00"),
        _command(memory_gib="0"),
    ],
    "Names": [
        "jobs:\n  - command: x\n",
        _jobs("name: 7, command: x"),
        _jobs("name: '', command: x"),
        _jobs(f"name: {'n' * 61}, command: x"),
        _jobs(f"name: {'n' * 60}, train: {{}}, sweep: {{over: {{lr: [1.0, 2.0]}}}}"),
        _jobs("name: a, train: {}, sweep: {over: {lr: [1.0, 2.0]}}", "name: a-1, command: y"),
    ],
    "Kinds and commands": [
        "jobs:\n  - name: a\n",
        _entry(train="{}", command="x"),
        _entry(train="gpt-nano"),
        _entry(train="{}", cwd="/tmp"),
        _command("[]"),
        _command('""'),
        _command("'python \"train.py'"),
        _command("[python, a.py, true]"),
        _command("{python: a.py}"),
        _command(env="{1X: 1}"),
        _command(env="{ORCHESTRATOR_JOB_DIR: /tmp}"),
        _command(env="[A=1]"),
        _command(time_limit="2 hours"),
        _command(grace="400d"),
    ],
    "Trainings": [
        _train("{lerning_rate: 1}"),
        _train("{preset: gpt3}"),
        _train("{lr: fast}"),
        _train("{lr: 1e-4, train.lr: 3e-4}"),
        _train("{nodes.pc1.workers: 9}"),
        _train("{workload.name: matmul}"),
        _train("{memory.polcy: classic}"),
        _train("{slots: 2}"),
        _train("{preset: hf-causal}"),
        "defaults: {save_every_s: 0}\n" + _train("{}"),
    ],
    "Sweeps": [
        _sweep("{}"),
        _sweep("{over: {}}"),
        _sweep("{over: {lr: 1.0}}"),
        _sweep("{over: {lr: []}}"),
        _sweep("{over: {lr: {log: [1e-5, 1e-3]}}}"),
        _sweep("{method: gird, over: {lr: [1.0]}}"),
        _sweep("{method: random, over: {lr: {log: [1e-5, 1e-3]}}}"),
        _sweep("{method: random, count: 3, over: {lr: {log: [0, 1]}}}"),
        _sweep("{method: random, count: 3, over: {lr: {loguniform: [1, 2]}}}"),
        _sweep("{method: random, count: 3, over: {batch: {integer: [1, 8.5]}}}"),
        _sweep("{method: random, count: 3, over: {dropout: {uniform: [0, 2]}}, seed: 5}"),
        _sweep(f"{{over: {{lr: [{', '.join(['1.0'] * 1000)}], workload.seed: {list(range(1000))}}}}}"),
        _sweep("{method: list, over: {lr: [1.0]}}"),
        _sweep("{over: {lr: [1.0]}, count: 3}"),
        _entry(command="[python, a.py]", sweep="{over: {lr: [1, 2]}}"),
        _entry(command="[x, '{lr}']", sweep="{over: {lr: [1, true]}}"),
        _sweep("all"),
    ],
    "What comes after what": [
        _jobs("name: a, command: x, after: a"),
        _jobs("name: a, command: x", "name: b, command: x, after: a, each: true"),
        _jobs(
            "name: a, train: {}, sweep: {method: random, count: 6000, over: {lr: [1.0]}}",
            "name: b, command: x, after: a, each: true",
        ),
        _jobs("name: a, command: x, each: true"),
        _jobs("name: a, command: x", "name: b, command: x, after: a, after_any: a"),
        _jobs("name: a, command: x", "name: b, command: 'y {aa.dir}', after: a"),
        _jobs("name: a, train: {}, sweep: {over: {lr: [1.0, 2.0]}}", "name: b, command: 'y {a.dir}', after: a"),
    ],
    "Milestones": [
        _stop("{rule: asha}"),
        _stop("{rule: hyperband, first: 100}"),
        _stop("{first: 100, last: 50}"),
        _stop("{first: 5000}"),
        _stop("{first: 100, metric: validationloss}"),
        _stop("{first: 100}", over="{preset: [gpt-nano, gpt-mini]}"),
        _stop("{first: 100}", train="{epochs: 2}"),
        _stop("{first: 100, factor: 1}"),
    ],
}  # fmt: skip

#: What is typed behind `jobs submit`: the words of a command, and options.
WORDS: list[tuple[list[str], dict[str, Any]]] = [
    (["x"], {"after": ["lr"]}),
    (["x"], {"name": "a b"}),
    (["x"], {"priority": 5000}),
    (["x"], {"hours": "always"}),
    (["echo hi | wc"], {}),
    (["-x"], {}),
]


def problems_of(typed: str | tuple[list[str], dict[str, Any]]) -> tuple[Problem, ...]:
    """Return how a file's text, or a command line, is refused."""
    try:
        if isinstance(typed, str):
            parse(typed, "night.yaml", REFERENCE)
        else:
            from_words(REFERENCE, typed[0], **typed[1])
    except ConfigError as error:
        return error.problems
    raise AssertionError(f"accepted: {typed}")
