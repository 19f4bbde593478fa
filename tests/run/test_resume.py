"""From a stored run to what another head begins with."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.config.load import config_from_text, dump_config, load_config
from orchestrator.core.slot import Phase
from orchestrator.errors import ConfigError, UsageError
from orchestrator.run.environment import Mode
from orchestrator.run.resume import environment_of, past_of
from orchestrator.run.runner import Options, go_on
from orchestrator.watch.archive import StoredRun
from orchestrator.watch.records import RunFacts, SlotRecord
from tests.counting import counters, counters_of

ROOT = Path(__file__).parents[2]
CONFIG = load_config(str(ROOT / "cluster.yaml"), ["run.slice_s=1.0"])
OPTIONS = Options(json=True, plain=True, wait_for_nodes=False)


def facts(**changes: object) -> RunFacts:
    usual = {
        "run_id": "20260101-000000-abcd",
        "started_at_unix_s": 1000.0,
        "duration_s": 300.0,
        "elapsed_s": 100.0,
        "min_success_rate": 0.95,
        "mode": "rehearse",
        "device": "cpu",
        "one_machine": True,
        "config_yaml": dump_config(CONFIG),
        "chaos": None,
        "nodes_planned": ("pc1", "pc2"),
        "head_pid": 2**22 + 1,
        "head_started": None,
        "host": "pc1",
    }
    return RunFacts(**{**usual, **changes})  # type: ignore[arg-type]  # checked by the tests themselves


def record(**changes: object) -> SlotRecord:
    usual = {
        "slot": "pc1/0",
        "node": "pc1",
        "state": "RUNNING",
        "reason": "",
        "incarnation": 4,
        "next_sequence": 90,
        "steps_at_risk": 12,
        "counters": {"steps_ok": 500, "restarts": 3, "steps_lost_upper_bound": 7, "busy_s": 1.5},
        "resume": {"failures": 2},
    }
    return SlotRecord(**{**usual, **changes})  # type: ignore[arg-type]  # as above


def stored(*records: SlotRecord, folder: Path = Path("runs/x"), **changes: object) -> StoredRun:
    of_facts = facts()
    usual = {
        "folder": folder,
        "facts": of_facts,
        "outcome": "interrupted",
        "exit_code": None,
        "error": None,
        "elapsed_s": 100.0,
        "updated_at_unix_s": 1100.0,
        "nodes_seen": (),
        "notices": (),
        "restart_count": 0,
        "steps_lost_upper_bound": None,
        "incomplete": False,
        "heads": 1,
        "faults": (),
        "slots": records,
    }
    return StoredRun(**{**usual, **changes})  # type: ignore[arg-type]  # as above


def test_a_slot_goes_on_with_its_counters_and_what_was_under_way_is_lost() -> None:
    past = past_of(stored(record()))
    slot = past.slots["pc1/0"]
    assert past.elapsed_s == 100.0
    assert counters_of(slot) == counters(steps_ok=500, restarts=3, steps_lost_upper_bound=7 + 12, busy_s=1.5)
    # A report of a process of before must not be taken for one of the next.
    assert (slot.incarnation, slot.next_sequence) == (5, 90)
    assert slot.resume == {"failures": 2}
    assert (slot.phase, slot.placed, slot.in_flight) == (Phase.ABSENT, False, ())


def test_a_quarantined_slot_gets_another_chance() -> None:
    slot = past_of(stored(record(state="QUARANTINED", reason="5 deaths"))).slots["pc1/0"]
    assert slot.phase is Phase.ABSENT
    assert slot.deaths_at_s == ()


@pytest.mark.parametrize("value", [-5, 10**400, 2**63, True, None, "many", 1.5, float("nan"), float("inf")])
def test_a_counter_that_makes_no_sense_begins_at_nothing(value: object) -> None:
    slot = past_of(stored(record(counters={"steps_ok": value, "restarts": 2}))).slots["pc1/0"]
    assert counters_of(slot) == counters(restarts=2, steps_lost_upper_bound=12)


def test_records_that_lacked_something_still_do() -> None:
    assert past_of(stored(incomplete=True)).incomplete


def test_the_stage_is_that_of_the_run() -> None:
    stage = environment_of(stored())
    assert stage.mode is Mode.REHEARSE
    assert stage.config == CONFIG
    assert (stage.target.device, stage.target.one_machine) == ("cpu", True)


def test_a_run_that_is_under_way_or_over_is_refused() -> None:
    with pytest.raises(UsageError, match="under way"):
        environment_of(stored(outcome="running"))
    with pytest.raises(UsageError, match="report 20260101-000000-abcd"):
        environment_of(stored(elapsed_s=299.9))


@pytest.mark.parametrize("text", ["", "[1]", "nodes: 7", 'a: "\\UFFFFFFFF"', "d: 2001-99-99", "[" * 100_000])
def test_a_configuration_that_cannot_be_used_is_refused_with_its_run(text: str) -> None:
    with pytest.raises(ConfigError, match="the configuration of run 20260101-000000-abcd"):
        environment_of(stored(facts=facts(config_yaml=text)))


def test_a_mode_of_another_version_is_refused() -> None:
    with pytest.raises(UsageError, match="cluster, rehearse, local"):
        environment_of(stored(facts=facts(mode="moon")))


def test_a_configuration_survives_being_written_and_read() -> None:
    assert config_from_text(dump_config(CONFIG), "x") == CONFIG


def test_a_folder_that_others_may_write_in_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "20260101-000000-abcd"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(UsageError, match="copy it"):
        go_on(stored(folder=folder), OPTIONS)
    assert list(folder.iterdir()) == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "20260101-000000-abcd"
    folder.mkdir()
    os.chown(folder, 12345, 12345)
    with pytest.raises(UsageError, match="another user"):
        go_on(stored(folder=folder), OPTIONS)


def test_a_resume_that_cannot_start_leaves_the_record_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "20260101-000000-abcd"
    folder.mkdir()
    (folder / "summary.json").write_text("of the head before")
    # No cluster has this address: nothing listens on port 1 of this machine.
    config = config_from_text(dump_config(CONFIG).replace("address: auto", "address: 127.0.0.1:1"), "x")
    gone = stored(folder=folder, facts=replace(facts(mode="cluster"), config_yaml=dump_config(config)))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exception, match="start one"):
        go_on(gone, OPTIONS)
    assert (folder / "summary.json").read_text() == "of the head before"
    assert not (folder / "run.sqlite").exists()
