"""What `limits` lists, forgets and refuses: as text for any terminal, and as one object."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import time
from pathlib import Path

import pytest

from orchestrator.cli.limits import known, shown
from orchestrator.cli.printing import drawn
from orchestrator.view.terminal import plain_text
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
    return LimitStore()


@pytest.fixture
def limits(command: Command) -> Command:
    """Run the verb with some arguments."""
    return functools.partial(command, "limits")


@pytest.fixture
def two(store: LimitStore) -> LimitStore:
    """Fill it as of now."""
    now_s = time.time()
    own = limit("NVIDIA RTX 3070", "mine.steps:Mlp@0123456789ab", now_s=now_s, unit_bytes=2.5)
    store.remember(own, limit(now_s=now_s, age_s=20 * 86_400))
    assert store.problem is None
    return store


def listed(store: LimitStore, now_s: float = NOW_S, width: int | None = None) -> str:
    return plain_text([*drawn([shown(known(store, now_s))], width)])


def test_a_limit_is_one_line_of_the_table(store: LimitStore) -> None:
    store.remember(
        limit(), limit("cpu", "mine:Mlp", age_s=29.9 * 86_400, driver=None, unit_bytes=None)
    )
    lines = listed(store).splitlines()
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines]
    assert cells == [
        ["card", "driver", "torch", "type", "workload", "cap", "size", "per unit", "age", "expires in"],
        ["NVIDIA GeForce RTX 3090", "580.65.06", "2.13.0+cu130", "fp16", "matmul@0.1.0", "2.62 GiB", "20992", "6.00 B",
         "3m 20s", "29d 23h"],
        ["cpu", "–", "2.13.0+cu130", "fp16", "mine:Mlp", "2.62 GiB", "20992", "–", "29d 21h", "2h 24m"],  # noqa: RUF001
    ]  # fmt: skip
    assert "  0s  " in listed(store, NOW_S - 300), "what a clock ahead of this one has learned"


def test_a_narrow_terminal_keeps_card_workload_and_size(store: LimitStore) -> None:
    store.remember(limit("cpu"))
    title, line = listed(store, width=40).splitlines()
    assert title.split() == ["card", "workload", "cap", "size"]
    assert line.split() == ["cpu", "matmul@0.1.0", "2.62", "GiB", "20992"]


def test_text_that_steers_a_terminal_does_not_reach_it(store: LimitStore) -> None:
    store.remember(limit("\x1b[2Jcard\n", "mine\x07:\u202eMlp"))
    for width in (None, 40):
        text = listed(store, width=width)
        assert not {"\x1b", "\x07", "\u202e"} & set(text)
        assert "[2Jcard" in text
    assert known(store, NOW_S)["limits"][0]["card"] == "\x1b[2Jcard\n"


def test_without_a_limit_it_says_where_they_will_be(store: LimitStore, limits: Command) -> None:
    assert listed(store).endswith(str(store.path))
    assert limits("--clear").stdout == f"there is nothing to forget in {store.path}\n"
    store.remember(limit())
    assert listed(store, NOW_S + EXPIRY_S).endswith(str(store.path))


def test_the_verb_is_as_wide_as_the_terminal(
    limits: Command, two: LimitStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = limits().stdout.splitlines()
    assert (len(wide), max(map(len, wide)) > 120) == (3, True), "no terminal: a line each"
    monkeypatch.setattr(os, "get_terminal_size", lambda *_: os.terminal_size((60, 24)))
    assert max(map(len, limits().stdout.splitlines())) <= 60


def test_the_verb_as_an_object(limits: Command, two: LimitStore) -> None:
    found = only_object(limits("--json").stdout)
    assert (found["schema"], found["path"], found["expiry_s"]) == (1, str(two.path), EXPIRY_S)
    told, _ = found["limits"]
    age_s, learned_at_unix_s = told.pop("age_s"), told.pop("learned_at_unix_s")
    assert 200 <= age_s <= time.time() - learned_at_unix_s
    assert told.pop("expires_in_s") == pytest.approx(EXPIRY_S - age_s)
    assert told == {
        "card": "NVIDIA RTX 3070", "total_bytes": 24 * 2**30, "driver": "580.65.06", "torch": "2.13.0+cu130",
        "dtype": "fp16", "workload": "mine.steps:Mlp@0123456789ab", "cap_bytes": int(2.625 * 2**30), "size": 20992,
        "fixed_bytes": 0.0, "unit_bytes": 2.5, "peak_bytes": 2**30,
    }  # fmt: skip


def test_the_verb_forgets_all_and_says_how_many(limits: Command, two: LimitStore) -> None:
    assert limits("--clear").stdout.startswith("2 learned limits forgotten")
    assert two.all(time.time()) == ()
    two.remember(limit(now_s=time.time()))
    done = limits("--clear", "--json")
    assert only_object(done.stdout) == {"schema": 1, "path": str(two.path), "cleared": 1}


def test_a_damaged_store_is_refused_and_cleared(limits: Command, two: LimitStore) -> None:
    two.path.write_bytes(b"\0" * 100)
    damaged = limits()
    assert damaged.returncode == 2
    assert f"{two.path} is damaged" in damaged.stderr
    assert "limits --clear" in damaged.stderr
    assert "nothing to forget" in limits("--clear").stdout
    assert json.loads(two.path.read_text()) == {}


def test_a_store_that_cannot_be_had_is_not_cleared(limits: Command, store: LimitStore) -> None:
    store.remember(limit(now_s=time.time()))
    with store.path.with_name("limits.json.lock").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        done = limits("--clear")
    assert (done.returncode, done.stdout, len(store.all(time.time()))) == (2, "", 1)
    assert "locked" in done.stderr
