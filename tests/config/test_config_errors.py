"""Every way to get the configuration wrong: the line, the key, what is wrong and what is valid.

Random damage is tried in `test_fuzz.py`.
"""

from pathlib import Path

import pytest

from orchestrator.config.load import config_from_data, load_config
from orchestrator.config.schema import Config
from orchestrator.errors import ConfigError, Problem

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


def problems_of(path: Path, content: str | bytes, *overrides: str) -> tuple[Problem, ...]:
    """Return the problems of a file with `content`; each must be printable as one line."""
    file = path / "cluster.yaml"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ConfigError) as caught:
        load_config(str(file), overrides)
    for problem in caught.value.problems:
        assert str(problem).isprintable()
        assert len(str(problem)) < 600
        assert "pydantic" not in str(problem)
        assert "Input should" not in str(problem)
    return caught.value.problems


def test_the_text_these_tests_break_is_good(tmp_path: Path) -> None:
    file = tmp_path / "cluster.yaml"
    file.write_text(GOOD, encoding="utf-8")
    assert isinstance(load_config(str(file)), Config)


@pytest.mark.parametrize(
    ("old", "new", "line", "key", "text", "valid"),
    [
        # wrong types
        ("workers: 7", 'workers: "7"', 7, "nodes.pc1.workers", "'7' is text, not a whole number",
         "at least 1"),
        ("workers: 7", "workers: true", 7, "nodes.pc1.workers", "true is not a whole number",
         "at least 1"),
        ("workers: 7", "workers: 7.5", 7, "nodes.pc1.workers", "7.5 is not a whole number",
         "at least 1"),
        ("3.3", "lots", 8, "nodes.pc1.vram_per_worker_gib", "'lots' is text, not a number",
         "above 0"),
        ("gpu: rtx-3090", "gpu: 3090", 5, "nodes.pc1.gpu", "3090 is not text", "such as rtx-3090"),
        ("run:\n  duration: 5", "run: 5", 13, "run", "5 is not a mapping", "duration"),
        ("duration: 5", "duration: soon", 14, "run.duration", "'soon' is not a duration", "1h30m"),
        ("duration: 5", "duration: 1:30", 14, "run.duration", "'1:30' is not a duration", "1h30m"),
        ("duration: 5", "duration: [5]", 14, "run.duration", "not a duration", "1h30m"),
        # several forms of one value
        ("run:\n", "train: {micro: many}\nrun:\n", 13, "train.micro", "'many' is not usable here",
         "auto, or a whole"),
        ("run:\n", "train: {pin: 3}\nrun:\n", 13, "train.pin", "3 is not usable here",
         "auto, or true or false"),
        ("run:\n", "train: {recompute: -1}\nrun:\n", 13, "train.recompute", "-1 is not usable here",
         "auto, none, all"),
        *(
            (
                "run:\n",
                f"train: {{{old}: x}}\nrun:\n",
                13,
                f"train.{old}",
                "new name",
                f"train.{new}",
            )
            for old, new in (("checkpoint", "recompute"), ("snapshots", "checkpoints"))
        ),
        ("run:\n", "train: {batch: 0}\nrun:\n", 13, "train.batch", "0 is too small", "at least 1"),
        # ranges
        ("workers: 7", "workers: 0", 7, "nodes.pc1.workers", "0 is too small", "at least 1"),
        ("workers: 7", "workers: 1000000", 7, "nodes.pc1.workers", "1000000 is too large",
         "at most 1024"),
        ("3.3", ".nan", 8, "nodes.pc1.vram_per_worker_gib", "nan is not a finite number",
         "above 0"),
        ("3.3", "1" * 400, 8, "nodes.pc1.vram_per_worker_gib", "a number of more than 18 digits",
         "above 0"),
        ("0.99", "99", 9, "nodes.pc1.memory_fraction", "99 is too large",
         "a share above 0, at most 1 (0.6 is 60 %)"),
        ("duration: 5", "duration: 0", 14, "run.duration", "0 is not longer than nothing", "1h30m"),
        ("duration: 5", "slice_s: 20", 13, "run", "slice_s 20 is longer than stale_after_s 10",
         "at most"),
        # choices, with the default
        (
            *("dtype: fp16", "dtype: fp61", 12, "workload.dtype"),
            *(
                "'fp61' is not one of the choices; did you mean fp16?",
                "fp32, tf32, fp16, bf16 (default fp16)",
            ),
        ),
        (*("dtype: fp16", "name: my step", 12, "workload.name"),
         "'my step' is not in the right form",
         "matmul, train, or your own as package.module:Class (default matmul)"),
        (*("run:\n", "memory: {policy: adaptative}\nrun:\n", 13, "memory.policy"),
         *("'adaptative' is not one of the choices", "adaptive, classic (default adaptive)")),
        ("address: auto", "address: 10.0.0.1", 2, "cluster.address", "'10.0.0.1' is not",
         "auto, or HOST:PORT"),
        ("address: auto", "address: pc1:99999", 2, "cluster.address", "pc1:99999 has a port that",
         "1 to 65535"),
        # unknown and missing keys
        (*("gpus: 1", "worker: 1", 6, "nodes.pc1.worker", "unknown key; did you mean workers?"),
         "cpus_per_worker, dtype, gpu, gpu_share, gpus, host, memory_fraction"),
        ("workload:", "heat:", 11, "heat", "unknown key",
         "cluster, compute_share_mode, memory, nodes, notify, run"),
        ("    workers: 7\n", "", 4, "nodes.pc1.workers", "is missing",
         "a whole number, at least 1"),
        # duplicate keys: both lines
        (
            *(
                "gpus: 1",
                "workers: 2",
                7,
                "nodes.pc1.workers",
                "is given twice, on line 6 and on line 7",
            ),
            "one of the two",
        ),
        # keys and tags
        ("  pc2:", "  2:", 10, "nodes", "has the key 2, which is not text",
         'the key in quotes: "2"'),
        ("  pc2:", "  no:", 10, "nodes", "has the key no, which is not text",
         'the key in quotes: "no"'),
        ("  pc2:", "  [a, b]:", 10, "nodes", "has a list or a mapping as a key", "a word"),
        ("  pc2:", "  <<:", 10, "nodes", "has a merge key <<", "written out"),
        ("workers: 7", "workers: !mine 7", 7, "nodes.pc1.workers", "has the tag !mine",
         "without tags"),
        ("dtype: fp16", "dtype: !!python/name:os.x ''", 12, "workload.dtype",
         "has the tag !!python/name", "without"),
        ("workers: 7", "workers: !!int x", 7, "nodes.pc1.workers", "'x' cannot be read as int",
         "in quotes"),
        ("workers: 7", "workers: " + "9" * 5000, 7, "nodes.pc1.workers", "cannot be read as int",
         "in quotes"),
        ("dtype: fp16", 'dtype: "\\ud800"', 12, "workload.dtype", "cannot be read as str",
         "in quotes"),
        # node names
        ("  pc2:", "  PC2:", 10, "nodes.PC2", "cannot be the name of a node",
         "1 to 63 of a-z, 0-9, - _ ."),
        ("  pc2:", "  -pc2:", 10, "nodes.-pc2", "cannot be the name of a node",
         "begin and end with"),
        ("  pc2:", "  pc2-:", 10, "nodes.pc2-", "cannot be the name of a node",
         "begin and end with"),
        ("  pc2:", '  "pc2\\n":', 10, "nodes.pc2\n", "cannot be the name of a node",
         "begin and end with"),
        ("  pc2:", f"  {'a' * 64}:", 10, f"nodes.{'a' * 64}", "cannot be the name of a node",
         "begin and end with"),
        # between keys
        ("address: auto", "head: pc3", 2, "cluster.head", "there is no node 'pc3'; did you mean",
         "pc1, pc2, or null"),
        ("gpus: 1", "gpus: 9", 6, "nodes.pc1.gpus", "9 cards but only 7 workers",
         "gpus at most 7, or workers at least"),
        ("rtx-3090", "rtx3090", 5, "nodes.pc1.gpu", "unknown card rtx3090; did you mean rtx-3090?",
         "rtx-3060"),
        ("gpu: rtx-3090", "gpu: cpu", 6, "nodes.pc1.gpus", "1 on a node whose gpu is cpu",
         "gpus: 0"),
        (*("workers: 7", "workers: 8", 4, "nodes.pc1"),
         "8 workers x 3.3 GiB = 26.40 GiB, but 0.99 of the 23.56 GiB of a rtx-3090 is 23.32 GiB",
         "at most 7 workers, or vram_per_worker_gib <= 2.91"),
        (
            *(
                "workers: 7\n    vram_per_worker_gib: 3.3",
                "workers: 101\n    vram_per_worker_gib: 0.1",
                7,
            ),
            *("nodes.pc1.workers", "101 workers are more than 100 on a card", "at most 100"),
        ),
    ],
)  # fmt: skip
def test_one_mistake_is_one_problem_at_its_line(
    tmp_path: Path, old: str, new: str, line: int, key: str, text: str, valid: str
) -> None:
    assert GOOD.count(old) == 1
    (problem,) = problems_of(tmp_path, GOOD.replace(old, new))
    assert problem.source == str(tmp_path / "cluster.yaml")
    assert problem.line == line
    assert problem.key == key
    assert text in problem.text
    assert valid in str(problem.valid)


@pytest.mark.parametrize(
    ("content", "line", "key", "text", "valid"),
    [
        ("", None, None, "is empty", "start from the cluster.yaml"),
        ("nodes:\n", 1, "nodes", "null is not a mapping", "at least one node"),
        ("nodes: {}\n", 1, "nodes", "holds nothing", "at least one node"),
        ("run: {}\n", 1, "nodes", "is missing", "at least one node"),
        ("\nnodes:\n  pc1:\n", 3, "nodes.pc1", "null is not a mapping", "workers"),
        ("- a\n- b\n", 1, None, "a list is not a mapping",
         "cluster, compute_share_mode, memory, nodes"),
        ("hello", 1, None, "'hello' is text, not a mapping", "nodes"),
        ("a: 1\nb: [1, 2\nc: 3\n", 3, None, "is not YAML: ", None),
        ("a: 1\nb: 'x\n", 3, None, "is not YAML: found unexpected end of stream", None),
        ("a:\n\tb: 1\n", 2, None, "is not YAML: found character", "spaces for indentation"),
        ("a: 1\n---\nb: 1\n", 2, None, "holds a second document", "one document"),
        ("a: *b\n", 1, None, "is not YAML: found undefined alias", None),
        (b"a: 1\nb: \x01\n", 2, None, "holds a control character", "printable text"),
        (b"a: 1\nb: \xff\n", 2, None, "is not UTF-8 text", "encoding UTF-8"),
        ("a: 1\nb: ü\n".encode("utf-16"), None, None, "is a binary file", "UTF-8"),
        (b"\x7fELF\x02\x01\x01\0\0\0", None, None, "is a binary file", "UTF-8"),
        (b"#" * (1024 * 1024 + 1), None, None, "is larger than 1 MiB", "--config PATH"),
        ("a:\n  " + "[" * 500_000, 2, None, "is nested deeper than 32 levels", None),
        ("a: " + "{a: " * 40 + "}" * 40, 1, None, "is nested deeper than 32 levels", None),
        ("- " * 500_000, 1, None, "is nested deeper than 32 levels", None),
        ("[" + "a," * 500_000, 1, None, "has more than 50000 keys and values", None),
        ("a: &a [*a, *a]\n", 1, None, "has an alias (*name) inside the value it stands for", None),
        ("b: 1\na: &a {b: *a}\n", 2, None, "has an alias (*name) inside the value it stands for",
         None),
    ],
)  # fmt: skip
def test_a_file_that_is_no_configuration(
    tmp_path: Path,
    content: str | bytes,
    line: int | None,
    key: str | None,
    text: str,
    valid: str | None,
) -> None:
    (problem,) = problems_of(tmp_path, content)
    assert (problem.line, problem.key) == (line, key)
    assert text in problem.text
    assert (problem.valid is None) if valid is None else (valid in str(problem.valid))


def test_aliases_that_explode_are_refused(tmp_path: Path) -> None:
    """Expanded they are 10^14 values: were they not refused, this would not come to its end."""
    laughs = "a: &a [1,1,1,1,1,1,1,1,1,1]\n"
    for before, name in zip("abcdefghijklm", "bcdefghijklmn", strict=True):
        laughs += f"{name}: &{name} [{','.join([f'*{before}'] * 10)}]\n"
    (problem,) = problems_of(tmp_path, laughs)
    assert "more than 50000 values once aliases" in problem.text


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("nowhere/cluster.yaml", "no such file; valid: --config PATH"),
        ("/usr/", "is a directory; valid: --config /usr/cluster.yaml"),
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
    content = (
        GOOD.replace("duration: 5", "duration: x")
        .replace("workers: 7", "workers: 0")
        .replace("auto", "a b")
    )
    content = content.replace("workers: 3", "workers: 5").replace(
        "dtype: fp16", "dtype: 16\n  dtype: fp16"
    )
    found = problems_of(tmp_path, content, "memory.size_decay=2", "nodes.pc1.gpus=-1", "foo")
    assert [(problem.line, problem.key) for problem in found] == [
        (2, "cluster.address"),
        (7, "nodes.pc1.workers"),
        (10, "nodes.pc2"),
        (12, "workload.dtype"),
        (13, "workload.dtype"),
        (15, "run.duration"),
        (None, None),
        (None, "nodes.pc1.gpus"),
        (None, "memory.size_decay"),
    ]
    assert found[-1].source == "--set memory.size_decay=2"


@pytest.mark.parametrize(
    ("override", "key", "text", "valid"),
    [
        ("foo", None, "is not KEY=VALUE", "--set workload.size=4096"),
        (".a=3", None, "is not KEY=VALUE", "--set workload.size=4096"),
        ("a." * 9000 + "a=3", None, "is not KEY=VALUE", "--set workload.size=4096"),
        ("run.duration.x=3", None, "run.duration holds a single value or a list, no keys", None),
        ("nodes.pc3.workers=2", None, "there is no node pc3", "pc1, pc2"),
        ("nodes.pc1.workers=0", "nodes.pc1.workers", "0 is too small", "at least 1"),
        ("nodes.pc1.workers=8", "nodes.pc1", "8 workers x 3.3 GiB = 26.40 GiB",
         "at most 7 workers"),
        ("workload={size: 0}", "workload.size", "0 is too small", "or null"),
        ("workload={size: 1, size: 2}", "workload", "is given twice", "one of the two"),
        ("workload.size=" + "[" * 50, "workload.size", "is nested deeper than 32 levels", None),
        ("workload.size=\0", "workload.size", "holds a control character", "printable text"),
        ("cluster.head=pc9", "cluster.head", "there is no node 'pc9'", "pc1, pc2, or null"),
    ],
)  # fmt: skip
def test_an_override_that_is_wrong_is_named_as_typed(
    tmp_path: Path, override: str, key: str | None, text: str, valid: str | None
) -> None:
    (problem,) = problems_of(
        tmp_path, GOOD, "workload.size=64", override
    )  # the first is good, or replaced
    assert (problem.source, problem.line, problem.key) == (f"--set {override}", None, key)
    assert text in problem.text
    assert (problem.valid is None) if valid is None else (valid in str(problem.valid))


def test_a_sum_spoilt_by_the_file_alone_is_blamed_on_the_file(tmp_path: Path) -> None:
    (problem,) = problems_of(
        tmp_path, GOOD.replace("workers: 7", "workers: 8"), "nodes.pc1.size=64"
    )
    assert (problem.line, problem.key) == (4, "nodes.pc1")


def test_data_that_came_from_no_file_is_named_by_the_caller() -> None:
    with pytest.raises(ConfigError, match=r"^local: run\.duration: 0 is not longer"):
        config_from_data(
            {
                "nodes": {"a": {"gpu": "cpu", "gpus": 0, "workers": 1, "vram_per_worker_gib": 1}},
                "run": {"duration": 0},
            },
            "local",
        )
