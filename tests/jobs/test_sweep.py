"""The jobs that entries make: their settings, names, ids, and what follows them."""

from __future__ import annotations

import math
from dataclasses import replace

from orchestrator.jobs.milestones import milestones_of
from orchestrator.jobs.model import Job
from orchestrator.jobs.spec import parse
from orchestrator.jobs.sweep import JobFile, expand
from tests.factories import REFERENCE

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


def read(text: str) -> JobFile:
    return parse(text, "night.yaml", REFERENCE)


def night() -> dict[str, Job]:
    return {job.name: job for job in expand(read(NIGHT))}


def swept(sweep: str) -> tuple[Job, ...]:
    return expand(read(f"jobs:\n- {{name: a, train: {{}}, sweep: {sweep}}}\n"))


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
    commands = {job.name: job.command for job in expand(read(text))}
    command = commands["sum-3"]
    assert command is not None
    assert command.argv == ("sum", "{eval-3.dir}", "{lr-3.dir}")


def test_only_members_of_sweeps_have_milestones() -> None:
    assert {name for name, job in night().items() if job.milestones} == {
        f"lr-{n}" for n in range(6)
    }


def test_a_command_alone_may_name_its_metric() -> None:
    text = "jobs: [{name: ev, command: ev, stop: {rule: none, metric: accuracy, mode: max}}]"
    (job,) = expand(read(text))
    assert job.milestones is not None
    assert (job.milestones.metric, job.milestones.is_min) == ("accuracy", False)
    assert milestones_of(job.milestones, job.steps) == ()


def test_a_changed_job_changes_no_other_id() -> None:
    changed = {job.name: job for job in expand(read(NIGHT.replace("20000", "30000")))}
    assert [name for name, job in night().items() if changed[name].id != job.id] == ["base"]


def test_an_id_does_not_depend_on_the_place_in_the_file() -> None:
    moved = read("# a comment\n\n" + NIGHT)
    turned = replace(moved, entries=moved.entries[::-1])
    assert {job.id for job in expand(turned)} == {job.id for job in night().values()}


def test_rows_of_a_list_are_members() -> None:
    jobs = swept("{method: list, over: [{lr: 1e-4, batch: 8}, {lr: 3e-4}]}")
    assert [job.settings for job in jobs] == [
        {"train.lr": 1e-4, "train.batch": 8},
        {"train.lr": 3e-4},
    ]


def test_random_settings_lie_in_their_ranges() -> None:
    choices = ", warmup_steps: {integer: [1, 3]}, precision: [fp32, bf16]"
    jobs = swept(RANDOM % (0, choices))
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
    more = swept((RANDOM % (0, "")).replace("200", "300"))
    assert [job.id for job in more[:200]] == [job.id for job in swept(RANDOM % (0, ""))]


def test_values_of_a_sweep_stand_in_a_command() -> None:
    text = "jobs: [{name: a, command: 'x --lr {lr}', env: {N: '{n}'}, sweep: {over: {lr: [1e-4], n: [1, 2]}}}]"
    commands = [job.command for job in expand(read(text))]
    assert [(it.argv, it.env) for it in commands if it] == [
        (("x", "--lr", "1e-4"), {"N": "1"}),
        (("x", "--lr", "1e-4"), {"N": "2"}),
    ]
