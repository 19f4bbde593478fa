"""The documents are true: their example runs, their links have targets, their commands exist.

The options of each verb are frozen here by name: a change must also update README and CHANGELOG.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.cli.loading import duration_s
from orchestrator.config.load import load_config
from orchestrator.errors import ConfigError
from orchestrator.lab.chaos import parse_chaos
from orchestrator.record.model import STATES_WORST_FIRST
from orchestrator.view.slots import COLUMNS
from tests.in_child import InChild
from tests.scene import ROOT, spec_of
from workers.messages import Begin, Orders, Status, Verdict, WorkerState
from workers.settings import WorkerSpec

EXAMPLE = ROOT / "docs" / "examples" / "mlp_workload.py"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
each_document = pytest.mark.parametrize(
    "document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT))
)
#: Pages with current commands.
PAGES = [
    path for path in DOCUMENTS if path.name != "CHANGELOG.md" and path.parent.name != "results"
]
_READS = {"--config", "-c", "--set", "--help"}
_WHERE = _READS | {"--run-dir"}
_NEW_RUN = _WHERE | {"--local", "--rehearse", "--json", "--plain"}
_OF_SLOTS = _WHERE | {"slots", "--run"}
_OF_QUEUE = _WHERE | {"--run"}

OPTIONS = {
    "run": {
        "--duration", "--workload", "--policy", "--wait-for-nodes", "--resume", "--chaos", "--chaos-seed",
        "--yes-really", "--apply-power-limit", *_NEW_RUN,
    },
    "plan": {"--json", *_READS},
    "jobs": {"--help"},
    "jobs run": {"file", "--stay", "--new", *_NEW_RUN},
    "jobs submit": {"words", "--name", "--after", "--priority", "--hours", "--wait", "--json", *_OF_QUEUE},
    "jobs list": {"--json", *_OF_QUEUE},
    "jobs show": {"job", "--json", *_OF_QUEUE},
    "jobs results": {"--json", *_OF_QUEUE},
    **{f"jobs {word}": {"jobs", *_OF_QUEUE} for word in ("hold", "release", "cancel", "retry")},
    "up": {"node", "--head-address", "--exec", "--stay", *_READS},
    "stop": {"--node", *_WHERE},
    "runs": {"--json", *_WHERE},
    "report": {"run_id", "--json", "--html", *_WHERE},
    "export": {"run_id", "slot", "--to", "--adapter", "--average", "--best", *_WHERE},
    "logs": {"name", "--run", "--follow", "-f", *_WHERE},
    "top": {"run_id", "--once", *_WHERE},
    "notify": {"run_id", "--once", "--test", *_WHERE},
    "web": {"run_id", "--port", "--bind", "--control", *_WHERE},
    **dict.fromkeys(("pause", "unpause", "drain", "reinstate", "save"), _OF_SLOTS),
    "cap": {"slot", "amount", "--run", *_WHERE},
    "burn": {"--duration", "--phase", "--apply-power-limit", *_NEW_RUN},
    "tune": {"--local", "--rehearse", "--workload", "--budget", "--levers", "--json", *_READS},
    "doctor": {"--node", "--json", *_READS},
    "init": {"--output", "-o", "--force", "--help"},
}  # fmt: skip


def turns(spec: WorkerSpec, count: int) -> list[Status]:
    """Run some turns of the example, which is imported as `run` imports a user's module."""
    sys.path.insert(0, str(EXAMPLE.parent))
    from workers.engine.engine import Engine

    engine = Engine(spec, Begin(fresh=True))
    return [engine.turn(Orders(), 0.0) for _ in range(count)]


def test_the_example_workload_runs_and_survives_a_batch_that_does_not_fit(
    in_child: InChild,
) -> None:
    memory = {"floor_bytes": 2**20, "size_floor": 64}
    spec = spec_of(
        budget_bytes=64 * 2**20, name="mlp_workload:Mlp", size=256, batch=16_384, **memory
    )
    reports: list[Status] = in_child(turns, spec, 3)
    assert all(report.verdict is Verdict.OK and report.error is None for report in reports), reports
    last = reports[-1]
    assert last.state is WorkerState.RUNNING
    assert last.counts.steps_ok >= 1
    assert last.counts.work_flop > 0
    assert last.counts.steps_oom > 0
    assert last.size < 256


def test_the_documented_example_is_the_file() -> None:
    blocks = re.findall(r"```python\n(.*?)```", text_of(ROOT / "docs" / "workloads.md"), re.DOTALL)
    assert EXAMPLE.read_text(encoding="utf-8") in blocks


def test_every_method_of_a_workload_is_documented() -> None:
    source = (ROOT / "workers" / "workloads" / "base.py").read_text(encoding="utf-8")
    body = source[source.index("class Workload(ABC)") :]
    for name in re.findall(r"^    def (\w+)\(", body, re.MULTILINE):
        assert f"| `{name}(" in text_of(ROOT / "docs" / "workloads.md")


@each_document
def test_every_relative_link_and_anchor_leads_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(text_of(document))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = document if not path else (document.parent / path)
        assert found.exists(), f"{document.name} links to {target}"
        assert ROOT in (found.resolve(), *found.resolve().parents), f"{target} leaves the project"
        if anchor:
            assert anchor in anchors(found), f"{document.name} links to {target}"


@each_document
def test_no_document_names_a_package_index(document: Path) -> None:
    """The package index of pip is a setting of the user."""
    unwanted = r"p[y]pi\b|pyth[o]nhosted|download\.pyt[o]rch|index-u[r]l|anac[o]nda|/simpl[e]/"
    assert re.findall(unwanted, text_of(document), re.IGNORECASE) == []


def test_the_verbs_are_frozen() -> None:
    assert set(verbs()) == set(OPTIONS)


@pytest.mark.parametrize("verb", sorted(OPTIONS))
def test_the_options_of_a_verb_are_frozen_documented_and_explained(verb: str) -> None:
    """The README shows each verb; the page of commands has every option."""
    named = {name for parameter in verbs()[verb].params for name in parameter.opts}
    assert named | {"--help"} == OPTIONS[verb]
    if not verbs()[verb].hidden and " " not in verb:
        assert re.search(rf"orchestrator {verb}\b|`{verb}[ `]", text_of(ROOT / "README.md"))
    options = {option for option in OPTIONS[verb] if option.startswith("-")} - {"--help"}
    assert {
        option for option in options if f"`{option}" not in text_of(ROOT / "docs" / "commands.md")
    } == set()
    done = CliRunner().invoke(app, [*verb.split(), "--help"])
    assert done.exit_code == 0, done.output
    assert "Usage:" in done.output


@each_document
def test_every_documented_command_exists(document: Path) -> None:
    """Commands are in code, begin with the module or a bare verb, and name only options of that
    verb.
    """
    verbs = "|".join(sorted(OPTIONS, key=len, reverse=True))
    for code in code_in(text_of(document)):
        for verb, rest in re.findall(rf"(?:-m orchestrator|^)\s*({verbs}) ((?:\S+ ?)*)", code):
            own = rest.split("|")[0].split(" > ")[0].split(" -- ")[0]
            given = set(re.findall(r"(?:^|\s)(--?[a-z][a-z-]*)", own))
            assert given <= OPTIONS[verb], f"{document.name}: {code}"
        for verb in re.findall(r"-m orchestrator (\w+)", code):
            assert verb in OPTIONS, f"{document.name}: {code}"


#: The functions that parse the values of options.
READERS = {"chaos": parse_chaos, "duration": duration_s, "budget": duration_s}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_documented_value_is_one_that_is_read(page: Path) -> None:
    """Includes values of `--set` and of keys in prose. A value in capitals is a placeholder."""
    for code in code_in(text_of(page)):
        for option, value in re.findall(r"--(\w+)[ =](\"[^\"]+\"|[^\s\]]+)", code):
            if option in READERS and not value.isupper():
                READERS[option](value.strip('"'))
        settings = re.findall(r"--set[ =](\S+)", code)
        settings += [
            f"{key}={value}" for key, value in re.findall(r"^([a-z_]+\.[a-z_]+): ([^{…]+)$", code)
        ]
        settings = [
            each
            for each in settings
            if each.partition(".")[0] in configuration() and not re.search("[A-Z]{2}", each)
        ]
        refusal = refusal_of(settings) if settings else None
        assert refusal is None or "also set" in refusal, code  # a key may require another key


def refusal_of(settings: Sequence[str]) -> str | None:
    """Return why the shipped configuration refuses these settings."""
    try:
        load_config(str(ROOT / "cluster.yaml"), settings)
    except ConfigError as refusal:
        return str(refusal)
    return None


@each_document
def test_every_documented_make_target_exists(document: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):.*## ", makefile, re.MULTILINE))
    assert {"run", "test", "check", "setup", "clean", "help"} <= targets
    for code in code_in(text_of(document)):
        for target, arguments in re.findall(r"(?:^|\s)make ([a-z]+)(?: ARGS=\"([^\"]*)\")?", code):
            assert target in targets, f"{document.name}: {code}"
            assert set(re.findall(r"(?:^|\s)(--?[a-z][a-z-]*)", arguments)) <= OPTIONS["run"], code


@each_document
def test_every_cited_bench_is_there_or_names_its_commit(document: Path) -> None:
    if document.name == "CHANGELOG.md":
        return
    text = text_of(document)
    verbs_file = ROOT / "scripts" / "benches" / "verbs.yaml"
    here = set(yaml.safe_load(verbs_file.read_text(encoding="utf-8")))
    told = re.findall(r"at\s+commit [0-9a-f]{7} with\s+`bench\.py ([a-z-]+)", text)
    assert set(re.findall(r"bench\.py\s([a-z][a-z-]+)", text)) <= here | set(told)
    for path in re.findall(r"\b((?:scripts|tests)/[\w/]+\.(?:py|sh|json))", text):
        assert (ROOT / path).exists(), path


def test_the_page_of_the_table_has_every_state_and_column() -> None:
    page = text_of(ROOT / "docs" / "table.md")
    explained = re.findall(r"^\| ([A-Z]{4,}(?:, [A-Z]+)*) \|", page, re.MULTILINE)
    assert {state for words in explained for state in words.split(", ")} == {
        state.value for state in STATES_WORST_FIRST
    }
    for column in COLUMNS:
        title = column.title.split()[-1].removesuffix("%").strip() or column.title.split()[0]
        assert re.search(rf"^\| .*{re.escape(title)}.* \|", page, re.MULTILINE), column.title


@pytest.mark.parametrize(("document", "most"), [("README.md", 110), ("ARCHITECTURE.md", 120)])
def test_the_first_two_documents_stay_short(document: str, most: int) -> None:
    assert len(text_of(ROOT / document).splitlines()) <= most


@cache
def text_of(path: Path) -> str:
    """Read a document."""
    return path.read_text(encoding="utf-8")


@cache
def without_code(text: str) -> str:
    """Return the text without code, in which brackets are no links."""
    return re.sub(r"`[^`\n]*`", "", without_blocks(text))


@cache
def without_blocks(text: str) -> str:
    """Return the text without blocks of code, in which a number sign begins no heading."""
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


@cache
def code_in(text: str) -> tuple[str, ...]:
    """Return the lines of all shell blocks (joined after a backslash at the end) and all spans of
    code.
    """
    blocks = re.findall(r"^```sh\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return (
        *(line.partition(" #")[0] for line in lines),
        *re.findall(r"`([^`\n]+)`", without_blocks(text)),
    )


@cache
def anchors(path: Path) -> frozenset[str]:
    """Return the anchors of a document's headings: lower case, no punctuation, hyphens for
    blanks.
    """
    headings = re.findall(r"^#+ (.+)$", without_blocks(text_of(path)), re.MULTILINE)
    return frozenset(
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    )


@cache
def verbs() -> dict[str, Any]:
    """Return the commands, keyed by their words, such as `jobs list`."""
    found: dict[str, Any] = {}
    command_line: Any = typer.main.get_command(app)
    for name, verb in command_line.commands.items():
        found[name] = verb
        found |= {f"{name} {other}": it for other, it in getattr(verb, "commands", {}).items()}
    return found


@cache
def configuration() -> dict[str, Any]:
    """Return the data of the shipped cluster.yaml."""
    return dict(yaml.safe_load(text_of(ROOT / "cluster.yaml")))
