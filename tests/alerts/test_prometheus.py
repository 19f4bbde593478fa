"""A real Prometheus scrapes the real page: each panel has an answer, and an alert fires."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from orchestrator.core.slot import HeadState
from orchestrator.record.store import COUNTERS, STORE_NAME, RunStore
from tests.alerts.test_alerts import FOLDER
from tests.factories import make_row
from tests.scene import COMMAND, ROOT, wait_for
from tests.web.scene import facts_here, put_turn
from workers.messages import Progress, StepCounts

pytestmark = pytest.mark.skipif(
    shutil.which("prometheus") is None,
    reason="prometheus is not installed; on Debian: apt install prometheus",
)
VARIABLES = {"$__rate_interval": "30s", "$node": ".*", "$slot": ".*"}
DASHBOARD = json.loads((FOLDER / "grafana.json").read_text())
QUERIES = [
    (panel["title"], target["expr"])
    for panel in DASHBOARD["panels"]
    for target in panel.get("targets", ())
]


class Server:
    """A Prometheus that runs."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ask(self, path: str, **query: str) -> dict[str, Any]:
        """Ask its API."""
        try:
            with urllib.request.urlopen(  # noqa: S310
                f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
            ) as answer:
                return dict(json.load(answer))
        except urllib.error.HTTPError as refused:
            return dict(json.load(refused))

    def values(self, expression: str) -> list[Any]:
        """Return the series of an expression now."""
        answer = self.ask("query", query=expression)
        assert answer["status"] == "success", (expression, answer)
        return list(answer["data"]["result"])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve a run that goes on, and scrape it each second."""
    folder = tmp_path_factory.mktemp("observability")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setenv("XDG_DATA_HOME", str(folder / "data"))
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        patch.setenv("HOME", str(folder))
        yield from _served(folder)


def _served(folder: Path) -> Iterator[Server]:
    run = folder / "runs" / "20231114-221320-0b76"
    run.mkdir(parents=True)
    store = RunStore(run / STORE_NAME)
    store.begin(facts_here(run.name, duration_s=3600.0))
    _turn(store, 1)
    command = [*COMMAND, "web", run.name, "--run-dir", str(run.parent), "--port", "0"]
    with ExitStack() as stack:
        stack.callback(store.end, "good", 0, None, ())
        page = _started(stack, command, ROOT)
        assert page.stdout is not None
        told = b"".join(page.stdout.readline() for _ in range(3)).decode()
        found = re.search(r":(?P<port>\d+)/metrics with the token in (?P<token>/\S+)", told)
        assert found is not None, told
        config = (
            (FOLDER / "prometheus.yml")
            .read_text()
            .replace(": 15s", ": 1s")
            .replace("8470", found["port"])
        )
        (folder / "prometheus.yml").write_text(config.replace("metrics.token", found["token"]))
        rules = (FOLDER / "alerts.yml").read_text()
        (folder / "alerts.yml").write_text(rules.replace(": 15s", ": 1s"))
        address = f"127.0.0.1:{free_port()}"
        given = {
            "config.file": "prometheus.yml",
            "storage.tsdb.path": "data",
            "web.listen-address": address,
        }
        prometheus = _started(
            stack, ["prometheus", *(f"--{name}={value}" for name, value in given.items())], folder
        )
        server = Server(f"http://{address}")

        def scraped() -> bool:
            assert prometheus.poll() is None, "Prometheus has ended"
            _turn(store, int(time.time()) % 10_000)
            try:
                return bool(server.values("rate(orchestrator_slot_work_flop_total[30s])"))
            except (OSError, ValueError):  # it begins: no port yet, or no JSON
                return False

        wait_for(scraped, "rate of a counter that Prometheus has scraped")
        yield server


def _started(stack: ExitStack, command: list[str], folder: Path) -> subprocess.Popen[bytes]:
    """Start a process that ends with the test."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    stack.enter_context(process)
    stack.callback(process.terminate)
    return process


def _turn(store: RunStore, second: int) -> None:
    trains = {"loss": 2.5, "train_step": 30, "saved_step": 20, "samples_per_s": 4.0}

    rows = [
        make_row(
            slot=f"pc1/{index}",
            progress=Progress(**trains),
            memory_temperature_c=80.0,
            sm_clock_mhz=1695,
            heartbeat_age_s=0.2,
            state=HeadState.QUARANTINED
            if index == 2
            else HeadState.STARTING
            if index == 3
            else make_row().state,
        )
        for index in range(4)
    ]
    put_turn(store, second, rows)
    counts = StepCounts(steps_ok=second, work_flop=1e13 * second, busy_s=0.6 * second)
    counters = tuple(getattr(counts, name, 0) for name in COUNTERS)
    store.progress((row.slot, second, 0, None, *counters) for row in rows)
    store.commit()


@pytest.mark.parametrize(("title", "expression"), QUERIES)
def test_a_panel_has_an_answer(server: Server, title: str, expression: str) -> None:
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    parsed = server.ask("format_query", query=expression)
    assert parsed["status"] == "success", parsed
    assert server.values(expression), expression


def test_an_alert_fires(server: Server) -> None:
    def firing() -> set[tuple[str, ...]]:
        found = [one["metric"] for one in server.values('ALERTS{alertstate="firing"}')]
        labels = ("alertname", "name", "subject", "severity")
        return {tuple(one.get(label, "") for label in labels) for one in found}

    wait_for(lambda: bool(firing()), "alert that fires")
    assert ("RunAlert", "SlotQuarantined", "pc1/2", "critical") in firing()
    groups = server.ask("rules")["data"]["groups"]
    assert [group["name"] for group in groups] == ["orchestrator", "orchestrator, trends"]


def test_the_dashboard_names_no_source_and_no_fixed_rate() -> None:
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    assert {panel["type"] for panel in panels} == {"stat", "state-timeline", "table", "timeseries"}
    sources = [panel["datasource"]["uid"] for panel in panels]
    sources += [target["datasource"]["uid"] for panel in panels for target in panel["targets"]]
    assert set(sources) == {"${datasource}"}
    for panel in panels:
        for target in panel["targets"]:
            assert set(re.findall(r"\[(.*?)\]", target["expr"])) <= {"$__rate_interval"}
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    places = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    cells = [
        (x, y)
        for p in places
        for x in range(p["x"], p["x"] + p["w"])
        for y in range(p["y"], p["y"] + p["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) == 23
