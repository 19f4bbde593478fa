"""The forecast of `plan` for a team: from the last run that measured it, or ratings, and links."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from orchestrator.config.schema import Config
from orchestrator.config.team import with_team_alone
from orchestrator.core.team_time import StepTimes
from orchestrator.record.events import EVENTS_NAME, EventLog
from orchestrator.record.store import STORE_NAME, RunStore
from orchestrator.run.team_forecast import forecast, known_links, link_of, remember_links
from tests.factories import config_of, facts_of, make_row, record
from workers.learned_limits import STATE_DIR_VARIABLE
from workers.messages import Progress

#: At this rate in bytes a second, 100 MB each way take 0.9 s.
GIGABIT = 1e8 / 0.9


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(STATE_DIR_VARIABLE, str(tmp_path / "state"))
    return tmp_path / "state"


def pair(folder: Path, *, pc2: str = "rtx-3070", **train: Any) -> Config:
    nodes = {"pc1": {"gpu": "rtx-3090", "workers": 7}, "pc2": {"gpu": pc2, "workers": 3}}
    train = {"team": ["pc1", "pc2"], **train}
    sections = {"workload": {"name": "train"}, "train": train, "run": {"dir": str(folder)}}
    return with_team_alone(config_of(nodes, **sections))


def stored(config: Config, number: int, alone_s: float, mode: str = "cluster") -> str:
    """Store a run that measured its team, whose second card has 0.55 of the first's speed."""
    run_id = f"20260101-00000{number}-abcd"
    folder = Path(config.run.dir) / run_id
    folder.mkdir(parents=True)
    store = RunStore(folder / STORE_NAME)
    store.begin(facts_of(config, run_id=run_id, mode=mode))
    if config.train.team is None:
        speed = Progress(train_step=9, samples_per_s=config.train.batch / alone_s)
        row = make_row(slot="pc1/0", node="pc1", duty_requested=None, progress=speed)
        store.slots([record(row=row)])
    store.end("good", 0, None, ())
    log = EventLog(folder / EVENTS_NAME)
    if config.train.team is not None:
        times = StepTimes("pc1/0", alone_s, alone_s / 1.55, 77.0)
        log.write("team_times", cause="no gain", **asdict(times))
    log.close()
    return run_id


def test_what_the_last_run_of_this_team_measured_and_the_link(tmp_path: Path) -> None:
    config = pair(tmp_path)
    said = forecast(config, 100_000_000)["sentence"]
    assert said == "The link of pc1 pc2 is not measured: python -m orchestrator doctor"
    remember_links({link_of("pc2", "pc1"): GIGABIT})
    stored(config, 1, 99.0)
    run_id = stored(config, 2, 12.7)
    stored(pair(tmp_path, batch=7), 3, 1.0)  # another training, other PCs, a rehearsal, one card
    stored(pair(tmp_path, pc2="rtx-3090"), 4, 1.0)
    stored(config, 5, 1.0, mode="rehearse")
    stored(pair(tmp_path, team=None), 6, 1.0)
    told = forecast(config, 500_000_000)
    assert told["sentence"].startswith(
        "pc1/0 alone 12.7 s a step, together 8.19 + 4.5 s on the wire: no gain, pc1/0 alone "
        f"(measured by run {run_id}; link of pc1 pc2: 889 Mb/s on 20"
    )
    assert told["gain_pct"] == pytest.approx(0, abs=0.1)
    faster = forecast(config, 10_000_000)
    assert ": 53% faster (measured by run" in faster["sentence"]
    assert (faster["fastest"], faster["wire_s"]) == ("pc1/0", pytest.approx(0.09))
    assert forecast(pair(tmp_path, split="auto"), 10_000_000) == faster


def test_one_card_is_measured_and_the_other_rated(tmp_path: Path) -> None:
    remember_links({"pc1 pc2": GIGABIT})
    run_id = stored(pair(tmp_path, team=None), 1, 10.0)
    told = forecast(pair(tmp_path), 100_000_000)
    # 71.16 and 40.63 TFLOP/s.
    assert told["sentence"].startswith(
        "pc1/0 alone 10 s a step, together 6.37 + 0.9 s on the wire: 38% faster "
        f"(run {run_id} on one of them, the others by their ratings; link of pc1 pc2: 889 Mb/s"
    )


def test_ratings_say_from_when_on_it_pays(tmp_path: Path, state: Path) -> None:
    remember_links({"pc1 pc2": GIGABIT})
    said = forecast(pair(tmp_path), 100_000_000)["sentence"]
    # 71.16 and 40.63 TFLOP/s: alone 3.3 s are 2.1 + 0.9 s together.
    assert said == (
        "The sums take 0.9 s a step on the wire. No run of this training is stored; by the "
        "ratings of its cards, it is a tenth faster where pc1/0 alone takes 3.3 s a step or more"
    )
    unknown = forecast(pair(tmp_path, pc2="gt-710"), 100_000_000)["sentence"]
    assert unknown.endswith("so that it is not known whether the team is faster")
    assert "is not known" in forecast(pair(tmp_path), None)["sentence"]
    (state / "links.json").write_text('{"pc1 pc2": "fast"}')
    assert known_links() == {}


def test_the_link_of_the_leader_carries_the_sums_of_all_helpers(tmp_path: Path) -> None:
    nodes = {name: {"gpu": "rtx-3090", "workers": 2} for name in ("pc1", "pc2", "pc3")}
    nodes["pc3"] |= {"gpus": 2}
    sections = {
        "workload": {"name": "train"},
        "train": {"team": "all"},
        "run": {"dir": str(tmp_path)},
    }
    remember_links({"pc1 pc2": GIGABIT})
    remember_links({"pc1 pc3": GIGABIT})
    told = forecast(with_team_alone(config_of(nodes, **sections)), 100_000_000)
    assert told["wire_s"] == pytest.approx(3 * 0.9)
