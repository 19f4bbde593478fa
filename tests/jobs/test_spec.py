"""The meaning of job files and one-liners, and their refusals."""

from __future__ import annotations

import copy
import json
import math
import shlex
from dataclasses import replace
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import ConfigError, in_words
from orchestrator.jobs.milestones import milestones_of
from orchestrator.jobs.model import Job
from orchestrator.jobs.spec import from_words, parse
from orchestrator.jobs.sweep import JobFile
from tests.factories import REFERENCE


def read(text: str, known: tuple[Job, ...] = ()) -> JobFile:
    return parse(text, "night.yaml", REFERENCE, known)


def job_of(entry: str, defaults: str = "{}") -> Job:
    (job,) = read(f"defaults: {defaults}\njobs:\n  - {{name: a, {entry}}}\n").jobs
    return job


def one(*command: str, **options: Any) -> Job:
    return from_words(REFERENCE, command, **options).jobs[0]


def refused(text: str) -> str:
    """Return the single sentence with which a file is refused."""
    with pytest.raises(ConfigError) as caught:
        read(text)
    (problem,) = caught.value.problems
    return str(problem)


def entry(keys: str) -> str:
    """Return a file with one entry, in line 2."""
    return f"jobs:\n- {{name: a, {keys}}}\n"


def swept(sweep: str, keys: str = "train: {steps: 1000}") -> str:
    return entry(f"{keys}, sweep: {{{sweep}}}")


def staged(stop: str, keys: str = "train: {steps: 1000}", over: str = "lr: [1.0, 2.0]") -> str:
    """Return a file whose first line has the milestones of its sweep."""
    return f"stop: {{{stop}}}\n" + swept(f"over: {{{over}}}", keys)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        # the text and its parts; tests/config/test_config_errors.py has errors of YAML
        ("", ": is empty; valid: such as jobs: [{name: first, train: {preset: gpt-nano}}]"),
        ("jobs: []", ":1: jobs: a list should have at least 1 item after validation, not 0"),
        ("jobs: [a]", ":1: jobs.0: 'a' should be a mapping"),
        ("jobs: [{command: x}]", ":1: jobs.0.name: is missing; valid: 1 to 60 of A-Z"),
        ("jobs: [{name: a/b, command: x}]", ":1: jobs.0.name: 'a/b' is not in the right form"),
        (entry("command: x, prioritty: 3"), ":2: jobs.a.prioritty: unknown key; did you mean priority?"),
        ("defaults: {nodes: pc9}\njobs: [{name: a, command: x}]",
         ":1: defaults.nodes: there is no node 'pc9'; did you mean pc2?; valid: pc1, pc2, or any"),
        (entry("command: x, nodes: pc4"), ":2: jobs.a.nodes: there is no node 'pc4'"),
        (entry("command: x, nodes: [pc1, pc1]"), ":2: jobs.a.nodes: has 'pc1' twice"),
        (entry("command: x, card: rtx-4080"),
         ":2: jobs.a.card: no node has a card 'rtx-4080'; did you mean rtx-3090?"),
        (entry("command: x, pack: sometimes"), ":2: jobs.a.pack: 'sometimes' is neither true nor false"),
        (entry("command: x, hours: 7-9"), ":2: jobs.a.hours: '7-9' is not a part of the day"),
        (entry("command: x, hours: 07:00-07:00"), ":2: jobs.a.hours: '07:00-07:00' begins when it ends"),
        # kinds and commands
        ("jobs: [{name: a}]", ":1: jobs.a: has neither train nor command; valid: one of them"),
        (entry("train: {}, command: x"), ":2: jobs.a: has train and command; valid: one of them"),
        (entry("train: {}, cwd: /tmp, parks: true"),
         ":2: jobs.a: has cwd, parks, which a command may have"),
        (entry("command: []"), ":2: jobs.a.command: names no program"),
        (entry("command: 'x \"y'"), ":2: jobs.a.command: cannot be split into words: No closing"),
        (entry("command: 'x | y'"), ":2: jobs.a.command: has '|', and no shell reads it"),
        (entry("command: [x, true]"), ":2: jobs.a.command: true is not text; valid: the same in quotes"),
        (entry("command: {x: y}"), ":2: jobs.a.command: a mapping is not a command"),
        (entry("command: x, env: {1X: 1}"), ":2: jobs.a.env: '1X' cannot be set"),
        (entry("command: x, env: {ORCHESTRATOR_X: 1}"), ":2: jobs.a.env: 'ORCHESTRATOR_X' cannot be set"),
        (entry("command: x, env: [A=1]"), ":2: jobs.a.env: a list is not a mapping; valid: NAME: value"),
        (entry("command: x, time_limit: 2 hours"), ":2: jobs.a.time_limit: '2 hours' is not a duration"),
        (entry("command: x, outputs: ['../*.json']"),
         ":2: jobs.a.outputs: '../*.json' is not within the program's folder; valid: such as *.json"),
        (entry("command: x, outputs: [/etc/*]"), ":2: jobs.a.outputs: '/etc/*' is not within"),
        (entry("command: x, outputs: [.]"), ":2: jobs.a.outputs: '.' is not within"),
        # trainings
        ("jobs:\n- name: a\n  train:\n    presett: x\n",
         ":4: jobs.a.train.presett: unknown key; did you mean preset?"),
        (entry("train: {checkpoints: node}"),
         ":2: jobs.a.train.checkpoints: with node, the head has neither"),
        ("jobs:\n- name: a\n  train:\n    run.dir: x\n",
         ":4: jobs.a.train.run.dir: run is the same for all jobs of a run"),
        (entry("train: {exact: true}"), ":2: jobs.a.train: exact: true keeps"),
        (entry("train: {lr: 1.0, train.lr: 2.0}"), ":2: jobs.a.train.train.lr: is the same key as lr"),
        (entry("train: {workload.name: matmul}"),
         ":2: jobs.a.train.workload.name: a training has the workload train"),
        (entry("train: {memory.polcy: classic}"),
         ":2: jobs.a.memory.polcy: unknown key; did you mean policy?"),
        (entry("train: {slots: 2}"), ":2: jobs.a.train.slots: a job is one training in one slot"),
        # sweeps
        (swept("method: gird, over: {lr: [1.0]}"),
         ":2: jobs.a.sweep.method: 'gird' should be 'grid', 'random', 'list' or 'optuna'; did you mean"),
        (swept("over: {lr: {log: [1.0, 2.0]}}"), ":2: jobs.a.sweep: has an interval; valid: lists"),
        (swept("method: random, over: {lr: [1.0]}"), ":2: jobs.a.sweep: has no count for method random"),
        (swept("over: {lr: [1.0]}, count: 3"), ":2: jobs.a.sweep: has a count; valid: a count with"),
        (swept("method: random, count: 1000000, over: {lr: {log: [1, 2]}}"),
         ":2: jobs.a.sweep.count: 1000000 should be less than or equal to 2000"),
        (swept("method: random, count: 3, over: {lr: {log: [0, 1]}}"),
         ":2: jobs.a.sweep.over.lr: log has to begin above 0 and below 1.0"),
        (swept("method: random, count: 3, over: {dropout: {uniform: [0, 2]}}"),
         ":2: jobs.a.train.dropout: 2.0 should be less than 1"),
        (swept(f"over: {{lr: {[1.0] * 1000}, workload.seed: {[*range(1000)]}}}"),
         ":2: jobs.a.sweep: makes 1,000,000 jobs; valid: 1 to 2,000 jobs"),
        (swept("method: list, over: {lr: [1.0]}"), ":2: jobs.a.sweep: over does not fit method list"),
        (swept("over: {lr: [1, 2]}", "command: x"), ":2: jobs.a.sweep.over.lr: appears nowhere in command"),
        (swept("over: {lr: [1, true]}", "command: 'x {lr}'"),
         ":2: jobs.a.sweep.over.lr: has true, false or null, which are not text"),
        ("jobs:\n- name: a\n  train: {}\n  sweep:\n    over:\n      lr: [1.0, -1.0]\n",
         ":6: jobs.a.train.lr: -1.0 should be greater than 0"),
        ("jobs:\n- name: a\n  train: {}\n  sweep:\n    method: list\n    over:\n    - lr: 1.0\n    - lr: no\n",
         ":8: jobs.a.train.lr: false should be a valid number"),
        # names, and the order of jobs
        (entry("command: x") + "- {name: a, command: x}\n",
         ":3: jobs.1.name: 'a' is also a name of the entry on line 2"),
        (swept("over: {lr: [1.0, 2.0]}") + "- {name: a-1, command: x}\n",
         ":3: jobs.1.name: 'a-1' is also a name of the entry on line 2"),
        (swept("over: {lr: [1.0, 2.0]}").replace("name: a", f"name: {'n' * 60}"),
         f":2: jobs.0.name: {in_words('n' * 60 + '-1')} is too long with its number"),
        (entry("command: x, after: b") + "- {name: b, command: x, after: a}\n",
         ":2: jobs.a.after: goes round in a circle: a after b after a"),
        (entry("command: x") + "- {name: b, command: x, after: aa}\n",
         ":3: jobs.b.after: there is no job 'aa'; did you mean a?"),
        (entry("command: x, each: true"), ":2: jobs.a: has each without after"),
        (entry("command: x, after: b, after_any: b"), ":2: jobs.a: has after and after_any"),
        (entry("command: x") + "- {name: b, command: x, after: a, each: true}\n",
         ":3: jobs.b.each: each follows one sweep, and after names 0"),
        (swept("method: random, count: 1500, over: {lr: [1.0]}")
         + "- {name: b, command: x, after: a, each: true}\n",
         ":1: jobs: makes 3,000 jobs in all; valid: at most 2,000"),
        (entry("command: x") + "- {name: b, command: 'y {a.dir}'}\n",
         ":3: jobs.b.command: {a.dir}: nothing says that a has ended before; valid: after: [a]"),
        (entry("command: x") + "- {name: b, command: 'y {aa.dir}', after: a}\n",
         ":3: jobs.b.command: {aa.dir}: there is no job aa; did you mean a?"),
        (swept("over: {lr: [1.0, 2.0]}") + "- {name: b, command: 'y {a.dir}', after: a}\n",
         ":3: jobs.b.command: {a.dir}: a is 2 jobs, each with a folder of its own; valid: {a-0.dir}, or"),
        # milestones
        (staged("rule: asha"), ":1: stop: has no first milestone"),
        (staged("first: 100, last: 50"), ":1: stop: last 50 is before first 100"),
        (staged("first: 5000"), ":1: stop.first: 5000 is not below the 1000 steps of a"),
        (staged("first: 100, metric: validationloss"),
         ":1: stop.metric: a training reports no 'validationloss'; did you mean validation_loss?"),
        (staged("first: 100", "train: {epochs: 2}"),
         ":1: stop.last: is missing, and a does not say its steps"),
        (staged("first: 9", over="batch: [8, 16]"),
         ":3: jobs.a.sweep.over: the members of a differ in batch: their losses are not comparable"),
    ],
)  # fmt: skip
def test_a_bad_file_gets_short_sentences_with_its_name(text: str, sentence: str) -> None:
    said = refused(text)
    assert said.startswith(f"night.yaml{sentence}")
    assert said.isprintable()
    assert len(said) < 1200


@pytest.mark.parametrize(
    ("words", "options", "option"),
    [
        (["x"], {"after": ["lr"]}, "--after"),
        (["x"], {"name": "a b"}, "--name"),
        (["x"], {"hours": "always"}, "--hours"),
        (["echo hi | wc"], {}, "-- COMMAND"),
        (["-x"], {}, "-- COMMAND"),
    ],
)
def test_a_bad_command_line_names_its_option(
    words: list[str], options: dict[str, Any], option: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        one(*words, **options)
    (problem,) = caught.value.problems
    assert (problem.source, problem.line) == (option, None)


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("python a.py --out $HOME/x", "$HOME/x"),
        ("python a.py --out=${HOME}", "--out=${HOME}"),
        ('python a.py "$HOME"', "$HOME"),
        ("python a.py $(date)", "$(date)"),
        ("python a.py ~/data", "~/data"),
        ("~/bin/tool", "~/bin/tool"),
        ("ls *.py", "*.py"),
        ("python a.py >log", ">log"),
        ("cd x; python a.py", "x;"),
        ("make&&make test", "make&&make"),
        ("A=1 python a.py", "A=1"),
    ],
)
def test_what_only_a_shell_would_read_is_refused(line: str, word: str) -> None:
    text = refused("jobs:\n- {name: a, command: '" + line.replace("'", "''") + "'}\n")
    assert repr(word) in text
    assert "no shell reads it; valid:" in text


@pytest.mark.parametrize(
    "line",
    [
        "grep --include '*.py' x",
        'grep --include "*.py" x',
        r"grep --include \*.py x",
        "tool '$HOME' '~/x' '`'",
        r'tool "\$HOME"',
        "tool a~b ^x$ lr=[1,2] http://h/x?a=1&b=2 A=1 k=~ <pad>",
    ],
)
def test_what_is_quoted_is_passed_as_it_is(line: str) -> None:
    command = (
        read("jobs:\n- {name: a, command: '" + line.replace("'", "''") + "'}\n").jobs[0].command
    )
    assert command is not None
    assert command.argv == tuple(shlex.split(line))


def test_words_of_a_list_are_passed_as_they_are() -> None:
    words = ["tool", "$HOME", "~", "*.py", "|"]
    (job,) = read(f"jobs:\n- {{name: a, command: {json.dumps(words)}}}\n").jobs
    assert job.command is not None
    assert list(job.command.argv) == words


def test_short_keys_of_a_training_mean_those_of_train() -> None:
    job = job_of("train: {preset: gpt-mini, lr: 1e-4, workload.seed: 3, memory.policy: classic}")
    assert job.command is None
    assert job.overrides == {
        "workload.name": "train",
        "train.checkpoints": "head",
        "train.preset": "gpt-mini",
        "train.lr": 1e-4,
        "workload.seed": 3,
        "memory.policy": "classic",
    }


def test_a_command_is_passed_on_as_typed() -> None:
    job = job_of(
        "command: [python, train.py, --lr, 3e-4, --seed, 0, '{x}'], cwd: /w, env: {A: 1}, python: venv,"
        " time_limit: 2h, grace: 10s, cap: false, outputs: ['*.json'], memory_gib: 1.5,"
        " preempt: true, parks: true"
    )
    spec = job.command
    assert spec is not None
    assert spec.argv == ("python", "train.py", "--lr", "3e-4", "--seed", "0", "{x}")
    assert (spec.cwd, spec.env, spec.python) == ("/w", {"A": "1"}, "venv")
    assert (spec.time_limit_s, spec.grace_s, spec.cap) == (7200.0, 10.0, False)
    assert (spec.outputs, job.memory_bytes) == (("*.json",), 3 * 2**29)
    assert (job.preempt, job.parks) == (True, True)


def test_defaults_hold_where_an_entry_says_nothing() -> None:
    defaults = (
        "{retries: 4, priority: 2, nodes: pc2, pack: off, hours: 22:00-07:00, env: {A: a, B: b}}"
    )
    job = job_of("command: x, priority: 0, hours: null, env: {B: c}", defaults)
    assert (job.retries, job.priority, job.nodes, job.pack, job.hours) == (
        4,
        0,
        ("pc2",),
        False,
        None,
    )
    assert job.command is not None
    assert job.command.env == {"A": "a", "B": "c"}


def test_milestones_end_with_the_shortest_training() -> None:
    text = "stop: {first: 9}\njobs:\n- {name: a, train: {steps: 99}, sweep: {over: {lr: [1.0, 2.0]}}}\n"
    job = read(text).jobs[0]
    assert job.milestones is not None
    assert milestones_of(job.milestones, job.steps) == (9, 27, 81)


def test_after_may_name_jobs_of_the_queue() -> None:
    known = read("jobs: [{name: a, train: {}, sweep: {over: {lr: [1.0, 2.0]}}}]").jobs
    job = read("jobs: [{name: b, command: 'x {a-1.dir}', after: a}]", known).jobs[0]
    assert job.after == ("a-0", "a-1")


def test_a_one_line_command() -> None:
    job = one("python", "src/train.py", "--lr", "3e-4", priority=3, hours="22:00-07:00")
    assert (job.name, job.priority, job.hours) == ("train.py", 3, (1320, 420))
    assert job.command is not None
    assert job.command.argv == ("python", "src/train.py", "--lr", "3e-4")


def test_a_made_name_is_one_that_is_free() -> None:
    first = one("./go.sh")
    second = one("./go.sh", known=[first])
    assert (first.name, second.name) == ("go.sh", "go.sh.2")
    assert one("./go.sh", known=[first, second]).name == "go.sh.3"


GOOD = yaml.safe_load("""
defaults: {retries: 1, nodes: any, pack: true, hours: null, card: "3090", time_limit: 1h}
stop: {rule: asha, metric: loss, mode: min, first: 500, factor: 3}
jobs:
- {name: base, train: {preset: gpt-mini, steps: 900, workload.seed: 3}}
- {name: lr, train: {steps: 900}, after: [base], sweep: {over: {train.lr: [1e-4, 0.1], workload.seed: [0, 1]}}}
- {name: eval, command: [python, e.py, "{lr.dir}", 5], after: lr, each: true, memory_gib: 1.5, outputs: ["*.json"]}
- {name: rnd, train: {steps: 900}, sweep: {method: random, count: 5, over: {lr: {log: [1e-5, 1e-3]}}}}
- {name: hp, train: {steps: 900}, sweep: {method: optuna, count: 4, over: {dropout: {uniform: [0, 0.3]}}}}
- {name: li, train: {steps: 900}, sweep: {method: list, over: [{lr: 0.1}, {lr: 0.2, warmup_steps: 3}]}}
- {name: cmd, command: "x {n}", sweep: {over: {n: [1, 2]}}, after_any: [li, hp], hours: 22:00-07:00}
""")
ODD = [
    None, True, -1, 1.5, 10**30, math.nan, "", "lr", "{lr.dir}", "1e-4", [], {}, [[1]], ["lr", "lr"], [None],
    {"log": [2, 1]}, {"integer": [1, 9.5]}, {"lr": [1]}, {"nodes.pc1": 1}, {"": 1}, {"train.": 1}, {".": 1},
]  # fmt: skip


def places_of(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of keys to each value inside `data`."""
    inner = (
        data.items()
        if isinstance(data, dict)
        else enumerate(data)
        if isinstance(data, list)
        else ()
    )
    return [
        place for key, value in inner for place in ((*path, key), *places_of(value, (*path, key)))
    ]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_damaged_file_is_read_or_refused_in_sentences(data: st.DataObject) -> None:
    damaged = copy.deepcopy(GOOD)
    *way, last = data.draw(st.sampled_from(places_of(damaged)))
    parent = damaged
    for key in way:
        parent = parent[key]
    parent[last] = data.draw(st.sampled_from(ODD))
    try:
        names, lines = [job.name for job in read(yaml.safe_dump(damaged)).jobs], [1]
    except ConfigError as error:
        names, lines = [], [problem.line for problem in error.problems]
    assert len(set(names)) == len(names)
    assert lines
    assert None not in lines


# --- the jobs that entries make: their settings, names, ids, and what follows them

NIGHT = """\
stop: {first: 500, last: 13500}
jobs:
  - {name: base, train: {preset: gpt-mini, steps: 20000}}
  - name: lr
    sweep: {over: {train.lr: [1e-4, 3e-4, 1e-3], workload.seed: [0, 1]}}
    train: {preset: gpt-mini, steps: 13500}
    after: [base]
  - {name: eval, command: [python, eval.py, "{lr.dir}", "{base.dir}"], after: [lr], each: true}
  - {name: sum, command: sum, after: eval}
"""

RANDOM = "{method: random, count: 200, seed: %d, over: {lr: {log: [1e-5, 1e-3]}, dropout: {uniform: [0, 0.3]}%s}}"


def night() -> dict[str, Job]:
    return {job.name: job for job in read(NIGHT).jobs}


def members(sweep: str) -> tuple[Job, ...]:
    return read(entry(f"train: {{}}, sweep: {sweep}")).jobs


def test_a_grid_counts_its_last_key_first() -> None:
    settings = [job.settings for job in night().values() if job.sweep == "lr"]
    assert [(it["train.lr"], it["workload.seed"]) for it in settings] == [
        (lr, seed) for lr in (1e-4, 3e-4, 1e-3) for seed in (0, 1)
    ]


def test_each_member_has_a_follower_of_its_own() -> None:
    jobs = night()
    assert [jobs[f"eval-{n}"].after for n in range(6)] == [(f"lr-{n}",) for n in range(6)]
    command = jobs["eval-4"].command
    assert command is not None
    assert command.argv[2:] == ("{lr-4.dir}", "{base.dir}")


def test_a_follower_of_a_follower_finds_the_member_of_both() -> None:
    text = NIGHT.replace("sum, after: eval", '"sum {eval.dir} {lr.dir}", after: eval, each: true')
    commands = {job.name: job.command for job in read(text).jobs}
    command = commands["sum-3"]
    assert command is not None
    assert command.argv == ("sum", "{eval-3.dir}", "{lr-3.dir}")


def test_only_members_of_sweeps_have_milestones_that_do_not_say_otherwise() -> None:
    assert {name for name, job in night().items() if job.milestones} == {
        f"lr-{n}" for n in range(6)
    }
    none = staged("first: 9", "train: {}, stop: {rule: none}", "batch: [8, 16]")
    assert read(none).jobs[0].milestones is None


def test_a_command_alone_may_name_its_metric() -> None:
    text = "jobs: [{name: ev, command: ev, stop: {rule: none, metric: accuracy, mode: max}}]"
    (job,) = read(text).jobs
    assert job.milestones is not None
    assert (job.milestones.metric, job.milestones.is_min) == ("accuracy", False)
    assert milestones_of(job.milestones, job.steps) == ()


def test_an_id_depends_on_what_the_job_says_alone() -> None:
    changed = {job.name: job for job in read(NIGHT.replace("20000", "30000")).jobs}
    assert [name for name, job in night().items() if changed[name].id != job.id] == ["base"]
    moved = read("# a comment\n\n" + NIGHT)
    turned = replace(moved, entries=moved.entries[::-1])
    assert {job.id for job in turned.jobs} == {job.id for job in night().values()}


def test_rows_of_a_list_are_members() -> None:
    jobs = members("{method: list, over: [{lr: 1e-4, batch: 8}, {lr: 3e-4}]}")
    assert [job.settings for job in jobs] == [
        {"train.lr": 1e-4, "train.batch": 8},
        {"train.lr": 3e-4},
    ]


def test_random_settings_lie_in_their_ranges() -> None:
    choices = ", warmup_steps: {integer: [1, 3]}, precision: [fp32, bf16]"
    jobs = members(RANDOM % (0, choices))
    found = [
        [job.settings[f"train.{key}"] for job in jobs]
        for key in ("lr", "dropout", "warmup_steps", "precision")
    ]
    rates, dropouts, warmups, precisions = found
    assert all(isinstance(it, float) and 1e-5 <= it <= 1e-3 for it in rates)
    assert all(isinstance(it, float) and 0 <= it <= 0.3 for it in dropouts)
    assert (set(warmups), set(precisions)) == ({1, 2, 3}, {"fp32", "bf16"})
    below = sum(isinstance(it, float) and math.log10(it) < -4 for it in rates)
    assert 70 < below < 130  # half of them: the middle of the logarithms


def test_more_members_change_none_of_those_before() -> None:
    more = members((RANDOM % (0, "")).replace("200", "300"))
    assert [job.id for job in more[:200]] == [job.id for job in members(RANDOM % (0, ""))]


def test_values_of_a_sweep_stand_in_a_command() -> None:
    text = "jobs: [{name: a, command: 'x --lr {lr}', env: {N: '{n}'}, sweep: {over: {lr: [1e-4], n: [1, 2]}}}]"
    commands = [job.command for job in read(text).jobs]
    assert [(it.argv, it.env) for it in commands if it] == [
        (("x", "--lr", "1e-4"), {"N": "1"}),
        (("x", "--lr", "1e-4"), {"N": "2"}),
    ]
