"""What this machine knows of the claims comes from the real planner, real stores and the table of cards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from orchestrator.cli.app import app
from orchestrator.lab.tune import claims_facts
from orchestrator.lab.tune.claims import Claims, load, workload_of
from orchestrator.lab.tune.claims_facts import facts_of
from orchestrator.lab.tune.claims_page import judged
from orchestrator.lab.tune.levers import PLAIN
from orchestrator.lab.tune.rows import Row, Verdict
from orchestrator.lab.tune.store import Result, Subject, tunings_folder, write
from tests.advise.made_runs import make_run
from tests.scene import ROOT
from workers.host.facts import CardFacts, DriverFacts
from workers.training.plans_main import answer

GIB = 2**30


def only(*plans: str) -> Claims:
    """Return the claims with these memory plans alone: each takes about a second."""
    claims = load()
    return claims.model_copy(update={"plan": {name: claims.plan[name] for name in plans}})


def store(
    tune_id: str,
    created_at: str,
    speed: float,
    card: str = "cpu",
    rows: tuple[Row, ...] = (),
    chosen: Mapping[str, Any] = PLAIN,
) -> None:
    """Keep a made tuning."""
    row = Row(
        lever="precision", setting="bf16", speed_ratio=speed, speed_low=speed, speed_high=speed,
        verdict=Verdict.CONFIRMED, reason="made",
    )  # fmt: skip
    folder = tunings_folder() / tune_id
    folder.mkdir(parents=True)
    subject = Subject(card=card, driver=None, torch="2.13", model="gpt-nano")
    made = {
        "device_name": "CPU",
        "duration_s": 1.0,
        "rounds": 3,
        "rows": (row, *rows),
        "chosen": chosen,
    }
    write(folder, Result(tune_id=tune_id, subject=subject, created_at=created_at, **made))  # type: ignore[arg-type]


@pytest.mark.torch
def test_without_a_card_the_planner_answers_what_gpt2_medium_takes_and_the_newest_tuning_what_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCHESTRATOR_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(claims_facts, "look_at_cards", lambda: DriverFacts(nvml_error="made"))
    store("a", "2026-11-20T10:00:00Z", 1.0)
    store("b", "2026-11-21T10:00:00Z", 1.7)
    claims = only("medium_fp16")
    here = {
        (each.claim.seed, each.claim.line): each.here
        for each in judged(claims, facts_of(claims, tmp_path / "runs"))
    }
    # 354.8 million weights of four bytes, as many sums of gradients, and two moments (fp32 under
    # autocast).
    assert (here["004", 90].verdict, here["004", 91].verdict) == (Verdict.REFUTED, Verdict.REFUTED)
    assert here["004", 90].low == pytest.approx(354.8e6 * 4 / 2**20, rel=0.001)
    assert here["004", 91].low == pytest.approx(354.8e6 * 8 / GIB, rel=0.001)
    assert here["002", 174].low == 0  # torch's own default
    assert (here["003", 35].verdict, here["003", 35].low) == (Verdict.CONFIRMED, 1.7)
    assert (here["004", 11].verdict, here["004", 14].verdict) == (
        Verdict.CONFIRMED,
        Verdict.CONFIRMED,
    )
    assert (here["000", 252].verdict, "no NVIDIA card" in here["000", 252].reason) == (
        Verdict.UNAVAILABLE,
        True,
    )
    assert here["000", 282].verdict is Verdict.UNDECIDED  # no run here


def test_a_card_brings_its_own_figures_and_hides_the_tunings_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCHESTRATOR_STATE_DIR", str(tmp_path))
    card = CardFacts(
        index=0,
        name="NVIDIA GeForce RTX 3060",
        uuid="GPU-1",
        total_bytes=int(11.63 * GIB),
        power_limit_w=170.0,
    )
    monkeypatch.setattr(claims_facts, "look_at_cards", lambda: DriverFacts(cards=(card,)))
    monkeypatch.setattr(claims_facts, "_planned", lambda _plans: ({}, {}))
    store("other", "2026-11-21T10:00:00Z", 1.7, card="GPU-2")
    facts = facts_of(load(), tmp_path / "runs")
    assert (facts.cards, facts.values["here.power_limit_w"], facts.rows) == (
        frozenset({"rtx-3060"}),
        170.0,
        {},
    )
    store("mine", "2026-11-20T10:00:00Z", 1.2, card="GPU-1")
    assert facts_of(load(), tmp_path / "runs").rows["gpt"][0].speed_ratio == 1.2


def test_a_run_on_a_card_of_this_machine_answers_for_heat_and_use_and_one_elsewhere_for_its_steps_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCHESTRATOR_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(claims_facts, "_planned", lambda _plans: ({}, {}))
    worker = {
        "temperature_c": 81.5,
        "margin_c": 11.5,
        "utilisation_pct": 97.0,
        "device_used_bytes": 20 * GIB,
    }
    make_run(tmp_path / "runs", worker, {**worker, "temperature_c": 70.0}, seconds=2)
    found = {}
    for uuid in ("GPU-0", "GPU-9"):
        card = CardFacts(
            index=0, name="NVIDIA GeForce RTX 3090", uuid=uuid, total_bytes=int(23.69 * GIB)
        )
        facts = DriverFacts(cards=(card,))
        monkeypatch.setattr(claims_facts, "look_at_cards", lambda facts=facts: facts)
        shown = judged(load(), facts_of(load(), tmp_path / "runs"))
        found[uuid] = {(each.claim.seed, each.claim.line): each.here for each in shown}
    here, elsewhere = found["GPU-0"], found["GPU-9"]
    assert (here["000", 280].verdict, here["000", 280].low) == (Verdict.REFUTED, 81.5)
    assert (here["000", 252].verdict, here["004", 186].low) == (Verdict.CONFIRMED, 93.0)
    assert (here["002", 36].verdict, here["002", 211].low) == (Verdict.CONFIRMED, 20.0)
    assert elsewhere["000", 280].verdict is Verdict.UNDECIDED
    assert here["001", 138].low == elsewhere["001", 138].low == 100.0


def test_the_chosen_set_answers_for_all_levers_together_and_the_baseline_for_a_lever_at_its_plain_value(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCHESTRATOR_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(claims_facts, "look_at_cards", lambda: DriverFacts(nvml_error="made"))
    monkeypatch.setattr(claims_facts, "_planned", lambda _plans: ({}, {}))
    chosen = {
        **PLAIN,
        "batch": 8,
        "precision": "bf16",
        "compile": "block",
        "compile_mode": "reduce-overhead",
    }
    speeds = {
        ("set_to_none", "false"): 0.99,
        ("batch", "12"): 1.18,
        ("precision + compile", "bf16 + block"): 2.0,
        ("precision + compile_mode", "bf16 + reduce-overhead with compile block"): 3.5,
    }
    rows = tuple(
        Row(
            lever=lever,
            setting=setting,
            speed_low=speed,
            speed_high=speed,
            verdict=Verdict.CONFIRMED,
            reason="made",
        )
        for (lever, setting), speed in speeds.items()
    )
    store("a", "2026-11-20T10:00:00Z", 1.0, rows=rows, chosen=chosen)
    facts = facts_of(load(), tmp_path / "runs")
    here = {(each.claim.seed, each.claim.line): each.here for each in judged(load(), facts)}
    assert (here["000", 236].verdict, here["000", 236].low) == (Verdict.CONFIRMED, 3.5)
    assert (here["003", 46].verdict, here["003", 46].low) == (
        Verdict.PARTLY,
        pytest.approx(1 / 0.99),
    )
    assert (here["003", 109].verdict, here["003", 109].low) == (Verdict.CONFIRMED, 1.18)
    assert here["003", 167].verdict is Verdict.UNDECIDED  # no batch of 16 in that tuning


def test_the_verb_prints_the_page_and_takes_no_option_that_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ORCHESTRATOR_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(claims_facts, "_planned", lambda _plans: ({}, {}))
    here = ["--config", str(ROOT / "cluster.yaml"), "--set", f"run.dir={tmp_path}"]
    text = CliRunner().invoke(app, ["tune", "--claims", *here])
    assert (text.exit_code, text.stdout.count("Guide 00")) == (0, 5), text.output
    told = json.loads(CliRunner().invoke(app, ["tune", "--claims", "--json", *here]).stdout)
    assert len(told["claims"]) == len(load().all)
    refused = CliRunner().invoke(app, ["tune", "--claims", "--local", *here])
    assert "--claims measures nothing" in str(refused.exception)


def test_a_tuning_answers_the_claims_on_models_of_its_kind() -> None:
    assert [workload_of(model) for model in ("gpt2-medium", "cnn-small", "matmul", "own.module:task")] == [
        "gpt", "cnn", "matmul", None,
    ]  # fmt: skip


@pytest.mark.torch
def test_a_plan_of_a_cap_finds_the_largest_part_and_a_key_that_does_not_exist_is_named() -> None:
    whole = {"preset": "gpt-nano", "precision": "fp32", "batch": 8}
    told = answer(
        {
            "five": {**whole, "rows": 5},
            "none": {**whole, "cap_gib": 0.0001},
            "new": {**whole, "luck": 1},
        }
    )
    assert "train.luck" in told["plans"]["new"]["refused"]
    assert told["plans"]["none"] == {"micro": 0}
    fits_gib = told["plans"]["five"]["total_gib"]
    for cap_gib, micro in ((fits_gib, 5), (fits_gib - 1e-6, 4), (1.0, 8)):
        assert answer({"fit": {**whole, "cap_gib": cap_gib}})["plans"]["fit"]["micro"] == micro
