"""A resumed run: the state with which the next head begins."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from orchestrator.config.load import config_from_text, dump_config, load_config
from orchestrator.config.schema import Config
from orchestrator.core.fleet import NodeFact
from orchestrator.core.placement import Target
from orchestrator.core.slot import Phase
from orchestrator.errors import ConfigError, PreflightError, UsageError
from orchestrator.record.archive import StoredRun
from orchestrator.record.store import RunFacts, SlotRecord
from orchestrator.run.resume import environment_of, past_of
from orchestrator.run.runner import Options, resume_run
from orchestrator.run.supervisor import slow_step_s
from tests import factories
from tests.factories import facts_of, node_fact
from tests.scene import ROOT
from workers.settings import PolicyState

CONFIG = load_config(str(ROOT / "cluster.yaml"), ["run.poll_s=1.0"])
OPTIONS = Options(json=True, plain=True, wait_for_nodes=False)


def facts(**changes: object) -> RunFacts:
    return facts_of(CONFIG, elapsed_s=100.0, **changes)


def record(**changes: Any) -> SlotRecord:
    usual = {"steps_ok": 500, "restarts": 3, "busy_s": 1.5, "verify_checks": 0}
    return factories.record(incarnation=4, resume=PolicyState(failures=2), **{**usual, **changes})


def stored(*records: SlotRecord, folder: Path = Path("runs/x"), **changes: object) -> StoredRun:
    usual = {
        "folder": folder,
        "facts": facts(),
        "outcome": "interrupted",
        "elapsed_s": 100.0,
        "updated_at_unix_s": 1100.0,
        "slots": records,
    }
    return StoredRun(**{**usual, **changes})  # type: ignore[arg-type]  # as above


@pytest.mark.parametrize(
    ("given", "expected_s"),
    [
        (["workload.name=train"], 0),
        (["workload.name=train", "train.compile=block"], 600),
        (["workload.name=train", "train.compile=model"], 600),
        (["train.compile=model"], 0),  # of the built-in product
    ],
)
def test_slow_steps_are_known_from_what_is_compiled(given: list[str], expected_s: float) -> None:
    assert slow_step_s(load_config(str(ROOT / "cluster.yaml"), given)) == expected_s


def test_a_quarantined_slot_gets_another_chance() -> None:
    past = past_of(stored(record(state="QUARANTINED", reason="5 deaths")))
    assert past.slots["pc1/0"].phase is Phase.ABSENT
    assert past.slots["pc1/0"].deaths_at_s == ()


def test_a_run_whose_time_is_up_may_go_on_for_longer() -> None:
    over = stored(elapsed_s=300.0)
    assert environment_of(over, more_s=60.0).config.run.duration_s == 360.0
    with pytest.raises(UsageError, match="--duration 2h"):
        environment_of(over)


def test_the_first_raylet_is_that_of_the_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is started: the test checks only the arguments for the raylets."""
    monkeypatch.setattr("orchestrator.run.environment.rehearsed", list)
    config = load_config(str(ROOT / "cluster.yaml"), ["cluster.head=pc2"])
    names: Any = environment_of(stored(facts=facts(config_yaml=dump_config(config)))).fleet
    assert names == ["pc2", "pc1"]


def test_a_run_of_another_version_is_refused() -> None:
    with pytest.raises(UsageError, match="cluster, rehearse, local"):
        environment_of(stored(facts=facts(mode="moon")))


@pytest.mark.parametrize("text", ["", "nodes: 7", 'a: "\\UFFFFFFFF"', "[" * 100_000])
def test_an_unusable_configuration_is_refused_with_its_run(text: str) -> None:
    with pytest.raises(ConfigError, match="the configuration of run 20260101-000000-abcd"):
        environment_of(stored(facts=facts(config_yaml=text)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "20260101-000000-abcd"
    made.mkdir()
    return made


@pytest.mark.parametrize("whose", ["writable", "given away"])
def test_a_folder_that_others_may_write_in_or_own_is_refused(folder: Path, whose: str) -> None:
    if whose == "writable":
        folder.chmod(0o777)
    elif os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    else:
        os.chown(folder, 12345, 12345)
    with pytest.raises(UsageError, match=r"another user.*copy it"):
        resume_run(stored(folder=folder), OPTIONS)
    assert list(folder.iterdir()) == []


def test_a_resume_that_cannot_start_leaves_the_record_as_it_was(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "summary.json").write_text("of the head before")
    # No cluster has this address: nothing listens on port 1 of this machine.
    config = config_from_text(
        dump_config(CONFIG).replace("address: auto", "address: 127.0.0.1:1"), "x"
    )
    gone = stored(
        folder=folder, facts=replace(facts(mode="cluster"), config_yaml=dump_config(config))
    )
    monkeypatch.chdir(folder.parent)
    with pytest.raises(Exception, match="start one"):
        resume_run(gone, OPTIONS)
    assert (folder / "summary.json").read_text() == "of the head before"
    assert not (folder / "run.sqlite").exists()


class WithoutCards:
    """A fleet whose nodes have no card."""

    def nodes(self) -> tuple[NodeFact, ...]:
        return tuple(node_fact(it, it, shows_card=False) for it in CONFIG.nodes)

    def count_cards(self, node: str) -> int:
        del node
        return 0


@pytest.mark.parametrize(("elapsed_s", "device"), [(0.0, "cpu"), (100.0, None)])
def test_a_head_killed_before_it_saw_the_cluster_leaves_that_to_the_next(
    folder: Path, monkeypatch: pytest.MonkeyPatch, elapsed_s: float, device: str | None
) -> None:
    """A run that has begun to count stays on its cluster."""

    def seen(_: Config, target: Target, **more: object) -> NoReturn:
        raise PreflightError([f"on {target.device}"])

    monkeypatch.setattr(
        "orchestrator.run.environment.connected", lambda *_: nullcontext(WithoutCards())
    )
    monkeypatch.setattr("orchestrator.run.runner.divided_where_needed", seen)
    left = stored(
        folder=folder,
        facts=facts(mode="cluster", device=None, one_machine=False),
        elapsed_s=elapsed_s,
    )
    with pytest.raises(PreflightError, match=f"on {device}"):
        resume_run(left, OPTIONS)
