"""What `--chaos` may be given, and every refusal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.errors import UsageError
from orchestrator.lab.chaos.plan import FaultRule, NodeFault, check_nodes, parse_chaos
from workers.messages import FaultKind

GOOD = {
    "oom:rate=0.05": [FaultRule(kind=FaultKind.OOM, rate=0.05)],
    "oom:num=2": [FaultRule(kind=FaultKind.OOM, num=2)],
    "oom:num=2,skip=10": [FaultRule(kind=FaultKind.OOM, num=2, skip=10)],
    "oom:rate=.5;oom:num=1": [FaultRule(kind=FaultKind.OOM, rate=0.5, num=1)],
    "flip:rate=0.1": [FaultRule(kind=FaultKind.FLIP, rate=0.1)],
    "raise:rate=1e-3": [FaultRule(kind=FaultKind.RAISE, rate=0.001)],
    "kill:every=20s": [FaultRule(kind=FaultKind.KILL, every_s=20.0)],
    "hang:rate=0.001; segv : every = 1m30s ;": [
        FaultRule(kind=FaultKind.SEGV, every_s=90.0),
        FaultRule(kind=FaultKind.HANG, rate=0.001),
    ],
    "node:pc2@30s": [NodeFault(node="pc2", at_s=30.0, pause_s=15.0)],
    " node : pc2 @ 2m + 20s ; node:pc2@30s": [
        NodeFault(node="pc2", at_s=30.0, pause_s=15.0),
        NodeFault(node="pc2", at_s=120.0, pause_s=20.0),
    ],
    "node:every=120s": [FaultRule(kind=FaultKind.NODE, every_s=120.0, pause_s=15.0)],
    "node:every=2m,for=5s": [FaultRule(kind=FaultKind.NODE, every_s=120.0, pause_s=5.0)],
}

ALL = "oom, raise, flip, poison, kill, segv, exit, hang, node"
OOM = "oom:rate=0.05, oom:num=2,skip=10 or both"
KILL = "kill:every=20s or kill:rate=0.001"
NODE = "node:NAME@30s, node:NAME@30s+20s, or node:every=120s,for=15s"
TIME = "a time with its unit: 30s, 2m, 1h30m"
RATE = "a share of steps above 0, at most 1: 0.05 is 5 %"
COUNT = "a whole number from {} to 999999999"

BAD = {
    "": f"--chaos : names no fault; valid: {ALL}",
    " ; ;": f"--chaos  ; ;: names no fault; valid: {ALL}",
    "kil:every=20s": f"--chaos kil:every=20s: there is no such fault; did you mean kill?; valid: {ALL}",
    "xyzzy": f"--chaos xyzzy: there is no such fault; valid: {ALL}",
    "oom:rate=0.1;:rate=1": f"--chaos :rate=1: there is no such fault; valid: {ALL}",
    "kill": f"--chaos kill: does not say how often; valid: {KILL}",
    "kill:": f"--chaos kill:: does not say how often; valid: {KILL}",
    "kill:20s": f"--chaos kill:20s: kill takes every=, rate=; valid: {KILL}",
    "kill:num=2": f"--chaos kill:num=2: kill takes every=, rate=; valid: {KILL}",
    "kill:every=20s,": f"--chaos kill:every=20s,: kill takes every=, rate=; valid: {KILL}",
    "kill:every=20s;kill:every=30s": f"--chaos kill:every=30s: every of kill is given twice; valid: {KILL}",
    "kill:every=20s;kill:rate=0.1": (
        f"--chaos kill:rate=0.1: kill happens by the clock or by chance, not both; valid: {KILL}"
    ),
    "kill:every=20": f"--chaos kill:every=20: '20' is not a time; valid: {TIME}",
    "kill:every=": f"--chaos kill:every=: '' is not a time; valid: {TIME}",
    "kill:every=0s": f"--chaos kill:every=0s: '0s' is not a time; valid: {TIME}",
    "kill:every=2y": f"--chaos kill:every=2y: '2y' is not a time; valid: {TIME}",
    "kill:every=0.5s": "--chaos kill:every=0.5s: 0.5s is too often; valid: every=1s and longer",
    "hang:rate=0": f"--chaos hang:rate=0: '0' is not a rate; valid: {RATE}",
    "hang:rate=1.5": f"--chaos hang:rate=1.5: '1.5' is not a rate; valid: {RATE}",
    "hang:rate=nan": f"--chaos hang:rate=nan: 'nan' is not a rate; valid: {RATE}",
    "hang:rate=-0.1": f"--chaos hang:rate=-0.1: '-0.1' is not a rate; valid: {RATE}",
    "hang:rate=5%": f"--chaos hang:rate=5%: '5%' is not a rate; valid: {RATE}",
    "oom:skip=2": f"--chaos oom:skip=2: says neither rate nor num; valid: {OOM}",
    "oom:rate=0.1,skip=2": f"--chaos oom:rate=0.1,skip=2: says skip without num; valid: {OOM}",
    "oom:num=0": f"--chaos oom:num=0: '0' is not a count; valid: {COUNT.format(1)}",
    "oom:num=2,skip=x": f"--chaos oom:num=2,skip=x: 'x' is not a count; valid: {COUNT.format(0)}",
    "oom:rate=0.1,every=2s": f"--chaos oom:rate=0.1,every=2s: oom takes rate=, num=, skip=; valid: {OOM}",
    "raise:num=1": "--chaos raise:num=1: raise takes rate=; valid: raise:rate=0.001",
    "node:pc2": f"--chaos node:pc2: node takes every=, for=; valid: {NODE}",
    "node:for=5s": f"--chaos node:for=5s: does not say how often; valid: {NODE}",
    "node:@30s": f"--chaos node:@30s: names no node before the @; valid: {NODE}",
    "node:pc2@30": f"--chaos node:pc2@30: '30' is not a time; valid: {TIME}",
    "node:pc2@30s+": f"--chaos node:pc2@30s+: '' is not a time; valid: {TIME}",
    "node:pc2@30s;node:pc2@40s": (
        "--chaos node:pc2@40s: it is still down then, until 45s; valid: a later time, or a shorter pause"
    ),
    "kill:every=1s\x1b[2J": "--chaos kill:every=1s\\x1b[2J: '1s\\x1b[2J' is not a time; valid: "
    + TIME,
}


@pytest.mark.parametrize("text", list(GOOD))
def test_reads_what_is_documented(text: str) -> None:
    plan = parse_chaos(text, 7)
    assert [*plan.rules, *plan.node_faults] == GOOD[text]
    assert plan.seed == 7


@pytest.mark.parametrize("text", list(BAD))
def test_refuses_with_the_piece_and_what_is_valid(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_chaos(text)
    assert str(caught.value) == BAD[text]


def test_a_text_without_end_is_refused_shortly() -> None:
    with pytest.raises(UsageError, match="longer than 2000 characters") as caught:
        parse_chaos("kill:every=20s;" * 100_000)
    assert len(str(caught.value)) < 300


GRAMMAR = st.text(
    st.sampled_from("oom:;,=@+ .0159smhkile:every=rate=nodepc2\x00\n\u0663é"), max_size=60
)


@given(st.one_of(st.text(max_size=3000), GRAMMAR))
def test_any_text_is_a_plan_or_a_refusal_of_one_line(text: str) -> None:
    try:
        plan = parse_chaos(text, 3)
    except UsageError as error:
        refusal = str(error)
    else:
        assert plan.kinds()
        refusal = ""
    assert refusal.isprintable()
    assert len(refusal) < 600


def test_describes_itself_in_one_line() -> None:
    text = "oom:rate=0.05,num=2,skip=10;raise:rate=0.001;kill:every=90s;hang:rate=0.25"
    assert parse_chaos(f"{text};node:pc2@30s+20s;node:every=2m", 7).describe() == (
        "oom in 5 % of steps; oom in 2 steps after the first 10 of each process; "
        "raise in 0.1 % of steps; kill every 1m 30s; hang in 25 % of steps; node pc2 at 30s for 20s; "
        "a random node every 2m for 15s (seed 7)"
    )


def test_says_what_a_worker_must_know() -> None:
    assert parse_chaos("raise:rate=0.2", 7).step_faults() == {"seed": 7, "raise_rate": 0.2}
    assert parse_chaos("oom:num=2,skip=3;flip:rate=1", 7).step_faults() == {
        "seed": 7,
        "oom_rate": 0.0,
        "oom_num": 2,
        "oom_skip": 3,
        "flip_rate": 1.0,
    }
    assert parse_chaos("kill:every=5s", 7).step_faults() == {"seed": 7}, (
        "strikes happen inside the workload"
    )
    assert parse_chaos("node:pc2@5s", 7).step_faults() is None


def test_names_each_kind_once_and_nodes_in_order_of_time() -> None:
    plan = parse_chaos("node:pc3@50s;kill:rate=1;node:pc2@10s;node:pc2@90s;raise:rate=1;oom:num=1")
    assert [fault.node for fault in plan.node_faults] == ["pc2", "pc3", "pc2"]
    assert plan.kinds() == (FaultKind.OOM, FaultKind.RAISE, FaultKind.KILL, FaultKind.NODE)


NOT_OURS = "node:…: only a rehearsal owns the raylets that it could end; valid: faults of workers, or --rehearse"
HEADS = "node:pc1: its raylet carries the head, which would end with it; valid: pc2, pc3"
ALONE = "node:…: pc1 is the only node, and its raylet carries the head; valid: no node: the head's is the only one"


@pytest.mark.parametrize(
    ("text", "nodes", "is_rehearsal", "refusal"),
    [
        ("node:pc2@5s", "pc1 pc2", True, None),
        ("kill:every=5s", "pc1", False, None),
        ("node:every=5s", "pc1 pc2", True, None),
        ("node:pc2@5s", "pc1 pc2", False, NOT_OURS),
        ("node:pc1@5s", "pc1 pc2 pc3", True, HEADS),
        ("node:pc22@5s", "pc1 pc2", True,
         "node:pc22: there is no such node; did you mean pc2?; valid: pc2"),
        ("node:xyz@5s", "pc1 pc2", True, "node:xyz: there is no such node; valid: pc2"),
        ("node:every=5s", "pc1", True, ALONE),
    ],
)  # fmt: skip
def test_checks_the_nodes(text: str, nodes: str, is_rehearsal: bool, refusal: str | None) -> None:
    said = None
    try:
        check_nodes(parse_chaos(text), nodes.split(), "pc1", is_rehearsal=is_rehearsal)
    except UsageError as error:
        said = str(error)
    assert said == (None if refusal is None else f"--chaos {refusal}")
