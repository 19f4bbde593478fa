"""Every kind of mistake in the configuration gives one sentence: line, key, fault, remedy."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.config.load import config_from_data, load_config
from orchestrator.errors import ConfigError, Problem
from tests.scene import ROOT

GOOD = """\
cluster:
  address: auto
nodes:
  pc1:
    gpu: rtx-3090
    gpus: 1
    workers: 7
    vram_per_worker_gib: 3.3
    memory_fraction: 0.99
  pc2: {gpu: rtx-3070, workers: 3, vram_per_worker_gib: 1.5}
workload:
  dtype: fp16
run:
  duration: 5
"""
CPU = {"gpu": "cpu", "gpus": 0, "workers": 1, "vram_per_worker_gib": 1}


def problems_of(path: Path, content: str | bytes, *overrides: str) -> tuple[Problem, ...]:
    """Return the problems of a file with `content`; each must be a printable sentence."""
    file = path / "cluster.yaml"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigError) as caught:
        load_config(str(file), overrides)
    assert caught.value.exit_code == 2
    for problem in caught.value.problems:
        assert str(problem).isprintable()
        assert len(str(problem)) < 800
        assert "pydantic" not in str(problem)
        assert "Input should" not in str(problem)
    return caught.value.problems


@pytest.mark.parametrize(
    ("old", "new", "line", "key", "said"),
    [
        # wrong types
        ("workers: 7", 'workers: "7"', 7, "nodes.pc1.workers", "'7' should be a valid integer"),
        ("3.3", "lots", 8, "nodes.pc1.vram_per_worker_gib", "'lots' should be a valid number"),
        ("gpu: rtx-3090", "gpu: 3090", 5, "nodes.pc1.gpu",
         "3090 should be a valid string; valid: the name of a card, such as rtx-3090"),
        ("run:\n  duration: 5", "run: 5", 13, "run",
         "5 should be a mapping; valid: a mapping with the keys death_window_s, dir, duration"),
        ("duration: 5", "duration: soon", 14, "run.duration",
         "'soon' is not a duration; valid: minutes as a number (5), or text such as 30s, 2h"),
        ("duration: 5", "duration: [5]", 14, "run.duration", "not a duration; valid: minutes"),
        # several forms of one value
        ("run:\n", "train: {micro: many}\nrun:\n", 13, "train.micro",
         "'many' should be 'auto', or be a valid integer"),
        ("run:\n", "train: {recompute: -1}\nrun:\n", 13, "train.recompute",
         "-1 should be 'auto', 'none' or 'all', or be greater than or equal to 0"),
        # ranges
        ("workers: 7", "workers: 0", 7, "nodes.pc1.workers",
         "0 should be greater than or equal to 1"),
        ("workers: 7", "workers: 1000000", 7, "nodes.pc1.workers",
         "1000000 should be less than or equal to 1024"),
        ("3.3", ".nan", 8, "nodes.pc1.vram_per_worker_gib", "nan should be a finite number"),
        ("3.3", "1" * 400, 8, "nodes.pc1.vram_per_worker_gib", "a number of more than 18 digits"),
        ("duration: 5", "duration: 0", 14, "run.duration", "0 is not a duration; valid: minutes"),
        ("run:\n", "notify: {every: 59s}\nrun:\n", 13, "notify.every",
         "this is shorter than a minute; valid: minutes as a number (5), or text"),
        # choices
        ("dtype: fp16", "dtype: fp61", 12, "workload.dtype",
         "'fp61' should be 'fp32', 'tf32', 'fp16' or 'bf16'; did you mean fp16?"),
        ("run:\n", f"memory: {{policy: 0x{'f' * 4000}}}\nrun:\n", 13, "memory.policy",
         "a number of more than 18 digits should be 'adaptive'"),
        # texts of a form
        ("dtype: fp16", "name: my step", 12, "workload.name",
         "'my step' is not in the right form; valid: matmul, train, or your own as package"),
        ("address: auto", "address: pc1:99999", 2, "cluster.address",
         "'pc1:99999' is not in the right form; valid: auto, or HOST:PORT with a port from 1 to 65535"),
        ("gpus: 1", "host: a b", 6, "nodes.pc1.host",
         "'a b' is not in the right form; valid: an IP address or a host name"),
        # unknown and missing keys
        ("gpus: 1", "worker: 1", 6, "nodes.pc1.worker",
         "unknown key; did you mean workers?; valid: cpus_per_worker, dtype, gpu, gpu_share, gpus"),
        ("workers: 7", "wrokers: 7", 7, "nodes.pc1.wrokers", "unknown key; did you mean workers?"),
        ("workload:", "heat:", 11, "heat",
         "unknown key; valid: cluster, compute_share_mode, memory, nodes, notify, run"),
        ("run:\n", "train:\n  batch: 8\n  persistent: false\nrun:\n", 15, "train.persistent",
         "is no key any more; valid: leave it out: the loader's processes always stay"),
        ("    workers: 7\n", "", 4, "nodes.pc1.workers",
         "is missing; valid: how many workers, from 1 to 1024"),
        # keys and tags
        ("gpus: 1", "workers: 2", 7, "nodes.pc1.workers",
         "is given twice, on line 6 and on line 7; valid: one of the two"),
        ("  pc2:", "  [a, b]:", 10, "nodes", "a list or mapping as a key; valid: plain words"),
        ("dtype: fp16", "dtype: !!python/name:os.x ''", 12, "workload.dtype",
         "has the tag !!python/name"),
        ("dtype: fp16", f"dtype: !{'t' * 6000} x", 12, "workload.dtype", "has the tag !tttt"),
        ("workers: 7", "workers: !!int x", 7, "nodes.pc1.workers",
         "'x' cannot be read as int; valid: the value in quotes if it is text"),
        ("dtype: fp16", 'dtype: "\\ud800"', 12, "workload.dtype", "cannot be read as str"),
        # node names
        ("  pc2:", '  "pc2\\n":', 10, "nodes.pc2\n",
         "cannot be the name of a node; valid: 1 to 63 of a-z, 0-9, - _ . that begin and end"),
        ("  pc2:", "  <<:", 10, "nodes.<<", "cannot be the name of a node"),
        # between keys
        ("address: auto", "head: pc3", 2, "cluster.head",
         "there is no node 'pc3'; did you mean pc2?; valid: pc1, pc2, or null"),
        ("gpus: 1", "gpus: 9", 6, "nodes.pc1.gpus",
         "9 cards but only 7 workers, so a card would have none; valid: gpus at most 7, or"),
        ("rtx-3090", "rtx3090", 5, "nodes.pc1.gpu",
         "unknown card rtx3090; did you mean rtx-3090?; valid: rtx-3060"),
        ("gpu: rtx-3090", "gpu: cpu", 6, "nodes.pc1.gpus",
         "1 on a node whose gpu is cpu; valid: gpus: 0"),
        ("workers: 7", "workers: 8", 4, "nodes.pc1",
         "GiB of a rtx-3090 is 23.3244 GiB; valid: at most 7 workers, or vram_per_worker_gib <= "),
        ("memory_fraction: 0.99", "memory_fraction: 1.0e-12", 4, "nodes.pc1",
         "valid: a larger memory_fraction"),
        ("workers: 7\n    vram_per_worker_gib: 3.3", "workers: 101\n    vram_per_worker_gib: 0.1",
         7, "nodes.pc1.workers", "101 workers are more than 100 on a card"),
    ],
)  # fmt: skip
def test_one_mistake_is_one_problem_at_its_line(
    tmp_path: Path, old: str, new: str, line: int, key: str, said: str
) -> None:
    assert GOOD.count(old) == 1
    (problem,) = problems_of(tmp_path, GOOD.replace(old, new))
    assert (problem.source, problem.line) == (str(tmp_path / "cluster.yaml"), line)
    assert problem.key == key
    assert said in f"{problem.text}; valid: {problem.valid}"


LAUGHS = "a: &a [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 10)}]\n"
    for before, name in zip("abcdefghijklm", "bcdefghijklmn", strict=True)
)


@pytest.mark.parametrize(
    ("content", "line", "key", "said"),
    [
        ("", None, None, "is empty; valid: start from the cluster.yaml"),
        ("nodes:\n", 1, "nodes", "null should be a mapping; valid: at least one node"),
        ("nodes: {}\n", 1, "nodes", "should have at least 1 item"),
        ("nodes:\n" + "".join(f"  n{n}: {CPU}\n" for n in range(101)), 1, "nodes",
         "should have at most 100 items"),
        ("run: {}\n", 1, "nodes", "is missing; valid: at least one node"),
        ("\nnodes:\n  pc1:\n", 3, "nodes.pc1", "null should be a mapping; valid: a mapping with"),
        ("- a\n- b\n", 1, None, "a list should be a mapping; valid: a mapping with the keys"),
        ("a: 1\nb: [1, 2\nc: 3\n", 3, None, "is not YAML: "),
        ("a:\n\tb: 1\n", 2, None, "is not YAML: while scanning for the next token, found character"),
        ("a: 1\n---\nb: 1\n", 2, None, "is not YAML: expected a single document in the stream, but found another"),
        ('run:\n  dir: "\\UFFFFFFFF"\n', 2, None, "an escape or a version number in it is too"),
        (f"%YAML {'9' * 5000}.1\n---\na: 1\n", 1, None, "an escape or a version number in it"),
        (b"a: 1\nb: \x01\n", 2, None, "is not YAML: special characters are not allowed"),
        (b"a: 1\nb: \xff\n", 2, None, "is not UTF-8 text; valid: the file saved again"),
        ("a: 1\nb: ü\n".encode("utf-16"), 1, None, "is not UTF-8 text; valid: the file saved again"),
        (b"#" * (1024 * 1024 + 1), None, None, "is larger than 1 MiB; valid: --config PATH"),
        ("a:\n  " + "[" * 500_000, 2, None, "is nested deeper than 32 levels"),
        ("[" + "a," * 500_000, 1, None, "has more than 50000 keys and values"),
        (LAUGHS, 2, None, "has an alias (*name); valid: what it stands for"),  # 10^14 values
    ],
)  # fmt: skip
def test_a_file_that_is_no_configuration(
    tmp_path: Path, content: str | bytes, line: int | None, key: str | None, said: str
) -> None:
    (problem,) = problems_of(tmp_path, content)
    assert (problem.line, problem.key) == (line, key)
    assert said in f"{problem.text}; valid: {problem.valid}"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nowhere/cluster.yaml", "no such file; valid: --config PATH"),
        ("/usr/", "cannot be read: Is a directory; valid: --config PATH"),
        ("a\0b", "cannot be read"),
        ("x" * 5000, "cannot be read"),
        ("/dev/null/cluster.yaml", "cannot be read"),
    ],
)
def test_a_path_that_cannot_be_read_says_how_to_name_another(path: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load_config(path)
    assert caught.value.problems[0].source == path


def test_problems_come_in_the_order_of_file_then_overrides(tmp_path: Path) -> None:
    content = GOOD.replace("duration: 5", "duration: x").replace("workers: 7", "workers: 0")
    content = content.replace("auto", "a b")
    found = problems_of(tmp_path, content, "memory.size_decay=2", "nodes.pc1.gpus=-1")
    assert [(problem.line, problem.key) for problem in found] == [
        (2, "cluster.address"),
        (7, "nodes.pc1.workers"),
        (14, "run.duration"),
        (None, "nodes.pc1.gpus"),
        (None, "memory.size_decay"),
    ]
    assert found[-1].source == "--set memory.size_decay=2"


def test_more_problems_than_a_screen_holds_are_counted(tmp_path: Path) -> None:
    keys = "".join(f"    k{number}: 1\n" for number in range(300))
    found = problems_of(tmp_path, GOOD.replace("    gpus: 1\n", keys))
    assert [len(found), found[-1].text] == [101, "has 200 more problems, not shown"]


@pytest.mark.parametrize(
    ("override", "key", "said"),
    [
        ("foo", None, "is not KEY=VALUE; valid: --set workload.size=4096"),
        ("a." * 9000 + "a=3", None, "is not KEY=VALUE"),
        ("run.duration.x=3", None, "run.duration holds a single value or a list, no keys"),
        ("nodes.pc3.workers=2", None, "there is no node pc3; valid: pc1, pc2"),
        (f"nodes.{'x' * 6000}.workers=2", None, "x; valid: pc1, pc2"),
        ("nodes.pc1.workers=0", "nodes.pc1.workers", "0 should be greater than or equal to 1"),
        ("nodes.pc1.workers=8", "nodes.pc1", "8 workers x 3.3 GiB = 26.4 GiB"),
        ("workload={size: 0}", "workload.size", "0 should be greater than or equal to 1"),
        ("workload={size: 1, size: 2}", "workload", "is given twice"),
        ("workload.size=" + "[" * 50, "workload.size", "is nested deeper than 32 levels"),
        ("workload.size=\0", "workload.size", "is not YAML: special characters are not allowed"),
        ("cluster.head=pc9", "cluster.head", "there is no node 'pc9'; did you mean pc2?"),
    ],
)  # fmt: skip
def test_an_override_that_is_wrong_is_named_as_typed(
    tmp_path: Path, override: str, key: str | None, said: str
) -> None:
    # The first is good, or replaced.
    (problem,) = problems_of(tmp_path, GOOD, "workload.size=64", override)
    assert (problem.source, problem.line, problem.key) == (f"--set {override}", None, key)
    assert said in f"{problem.text}; valid: {problem.valid}"


def test_a_sum_spoilt_by_the_file_alone_is_blamed_on_the_file(tmp_path: Path) -> None:
    spoilt = GOOD.replace("workers: 7", "workers: 8")
    (problem,) = problems_of(tmp_path, spoilt, "nodes.pc1.size=64")
    assert (problem.line, problem.key) == (4, "nodes.pc1")


def test_data_that_came_from_no_file_is_named_by_the_caller() -> None:
    with pytest.raises(ConfigError, match=r"^local: run\.duration: 0 is not a duration"):
        config_from_data({"nodes": {"a": CPU}, "run": {"duration": 0}}, "local")


SHIPPED = (ROOT / "cluster.yaml").read_bytes()


@given(
    at=st.integers(0, len(SHIPPED)),
    hole=st.integers(0, 200),
    filling=st.binary(max_size=20) | st.sampled_from((b"\t", b"---\n", b"[" * 99, b"*a", b"!x ")),
)
def test_any_damage_of_the_file_is_a_configuration_or_refused_in_words(
    at: int, hole: int, filling: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.getbasetemp() / "damaged.yaml"
    file.write_bytes(SHIPPED[:at] + filling + SHIPPED[at + hole :])
    said = ""
    try:
        load_config(str(file))
    except ConfigError as error:
        said = str(error)
    assert all(line.isprintable() for line in said.splitlines())
