"""What `limits` lists, forgets and refuses: as text for any terminal, and as one object."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import time
from pathlib import Path

import pytest

from orchestrator.cli.limits import cleared_text, limits_json, limits_text
from tests.cli.conftest import Command
from tests.scene import only_object
from workers.learned_limits import EXPIRY_S, LimitStore
from workers.settings import Learned, LimitKey, StoredLimit

NOW_S = 1.7e9


def limit(
    card: str = "NVIDIA GeForce RTX 3090",
    workload: str = "matmul@0.1.0",
    *,
    age_s: float = 200.0,
    now_s: float = NOW_S,
    driver: str | None = "580.65.06",
    unit_bytes: float | None = 6.0,
) -> StoredLimit:
    key = LimitKey(
        card=card, total_bytes=24 * 2**30, driver=driver, torch="2.13.0+cu130", dtype="fp16", workload=workload,
        cap_bytes=int(2.625 * 2**30),
    )  # fmt: skip
    learned = Learned(
        size=20992, fixed_bytes=None if unit_bytes is None else 0.0, unit_bytes=unit_bytes
    )
    return StoredLimit(key=key, learned=learned, peak_bytes=2**30, learned_at_unix_s=now_s - age_s)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LimitStore:
    """Return the store that the verb looks at."""
    monkeypatch.setenv("ORCHESTRATOR_STATE_DIR", str(tmp_path))
    monkeypatch.delenv("COLUMNS", raising=False)
    return LimitStore()


@pytest.fixture
def limits(command: Command) -> Command:
    """Run the verb with some arguments."""
    return functools.partial(command, "limits")


@pytest.fixture
def three(store: LimitStore) -> LimitStore:
    """Fill it as of now."""
    now_s = time.time()
    store.remember(
        limit(now_s=now_s),
        limit(
            "NVIDIA GeForce RTX 3070",
            "mine.steps:Mlp@0123456789ab",
            now_s=now_s,
            unit_bytes=2.5 * 2**20,
        ),
        limit("NVIDIA GeForce RTX 3070", now_s=now_s, age_s=20 * 86_400),
    )
    assert store.problem is None
    return store


def test_a_limit_is_one_line_of_the_table(store: LimitStore) -> None:
    store.remember(
        limit(), limit("cpu", "mine:Mlp", age_s=29.9 * 86_400, driver=None, unit_bytes=None)
    )
    title, *lines = limits_text(store, NOW_S, None).splitlines()
    columns = [
        "card",
        "driver",
        "torch",
        "type",
        "workload",
        "cap",
        "size",
        "per unit",
        "age",
        "expires in",
    ]
    assert [word.strip() for word in title.split("  ") if word.strip()] == columns
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]
    assert cells == [
        ["NVIDIA GeForce RTX 3090", "580.65.06", "2.13.0+cu130", "fp16", "matmul@0.1.0", "2.62 GiB", "20992", "6.00 B",
         "3m 20s", "29d 23h"],
        ["cpu", "–", "2.13.0+cu130", "fp16", "mine:Mlp", "2.62 GiB", "20992", "–", "29d 21h", "2h 24m"],  # noqa: RUF001
    ]  # fmt: skip
    assert "  0s  " in limits_text(store, NOW_S - 300, None), (
        "what a clock ahead of this one has learned"
    )


def test_a_narrow_terminal_keeps_card_workload_and_size(store: LimitStore) -> None:
    store.remember(limit("cpu"))
    title, line = limits_text(store, NOW_S, 40).splitlines()
    assert title.split() == ["card", "workload", "cap", "size"]
    assert line.split() == ["cpu", "matmul@0.1.0", "2.62", "GiB", "20992"]


def test_text_that_steers_a_terminal_does_not_reach_it(store: LimitStore) -> None:
    store.remember(limit("\x1b[2Jcard\n", "mine\x07:\u202eMlp"))
    for width in (None, 40):
        text = limits_text(store, NOW_S, width)
        assert not {"\x1b", "\x07", "\u202e"} & set(text)
        assert "[2Jcard" in text
    assert json.loads(limits_json(store, NOW_S))["limits"][0]["card"] == "\x1b[2Jcard\n"


def test_without_a_limit_it_says_where_they_will_be(store: LimitStore) -> None:
    assert limits_text(store, NOW_S, 80).endswith(str(store.path))
    assert cleared_text(store, NOW_S) == f"there is nothing to forget in {store.path}"
    store.remember(limit())
    assert limits_text(store, NOW_S + EXPIRY_S, 80).endswith(str(store.path))


def test_the_verb_lists_all_there_are(
    limits: Command, three: LimitStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = limits()
    assert (done.returncode, done.stderr, len(done.stdout.splitlines())) == (0, "", 4)
    assert (
        max(map(len, done.stdout.splitlines())) > 120
    )  # no terminal: a line each, whatever its length
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((60, 24)))
    narrow = limits()
    assert (narrow.returncode, narrow.stderr) == (0, "")
    assert max(map(len, narrow.stdout.splitlines())) <= 60


def test_the_verb_as_an_object(limits: Command, three: LimitStore) -> None:
    found = only_object(limits("--json").stdout)
    assert (found["schema"], found["path"], found["expiry_s"]) == (1, str(three.path), EXPIRY_S)
    assert len(found["limits"]) == 3
    (told,) = (each for each in found["limits"] if "Mlp" in each["workload"])
    age_s, learned_at_unix_s = told.pop("age_s"), told.pop("learned_at_unix_s")
    assert 200 <= age_s <= time.time() - learned_at_unix_s
    assert told.pop("expires_in_s") == pytest.approx(EXPIRY_S - age_s)
    assert told == {
        "card": "NVIDIA GeForce RTX 3070", "total_bytes": 24 * 2**30, "driver": "580.65.06", "torch": "2.13.0+cu130",
        "dtype": "fp16", "workload": "mine.steps:Mlp@0123456789ab", "cap_bytes": int(2.625 * 2**30), "size": 20992,
        "fixed_bytes": 0.0, "unit_bytes": 2.5 * 2**20, "peak_bytes": 2**30, "best_tflops": None, "best_under": None,
    }  # fmt: skip


def test_the_verb_forgets_all_and_says_how_many(limits: Command, three: LimitStore) -> None:
    assert cleared_text(three, time.time()).split(";")[0] == "3 learned limits forgotten"
    assert three.all(time.time()) == ()
    three.remember(limit(now_s=time.time()))
    done = limits("--clear", "--json")
    assert done.returncode == 0
    assert only_object(done.stdout) == {
        "schema": 1,
        "path": str(three.path),
        "cleared": 1,
    }
    assert three.all(time.time()) == ()


def test_a_damaged_store_is_refused_and_cleared(limits: Command, three: LimitStore) -> None:
    three.path.write_bytes(b"\0" * 100)
    damaged = limits()
    assert damaged.returncode == 2
    assert f"{three.path} is damaged" in damaged.stderr
    assert "limits --clear" in damaged.stderr
    assert "nothing to forget" in limits("--clear").stdout
    assert json.loads(three.path.read_text()) == {}


def test_a_store_that_cannot_be_had_is_not_cleared(limits: Command, store: LimitStore) -> None:
    store.path.mkdir()
    done = limits("--clear")
    assert (done.returncode, done.stdout, store.path.is_dir()) == (2, "", True)
    assert "no regular file" in done.stderr
    store.path.rmdir()
    store.remember(limit(now_s=time.time()))
    with store.path.with_name("limits.json.lock").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        done = limits("--clear")
    assert (done.returncode, done.stdout, len(store.all(time.time()))) == (2, "", 1)
    assert "locked" in done.stderr
