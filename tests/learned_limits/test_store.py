"""The store of learned limits in real files: many writers, killed ones, damage, foreign files, refusals and expiry."""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.factories import KEY, NOW_S, limit
from tests.scene import ROOT
from workers import learned_limits
from workers.files import locked
from workers.learned_limits import EXPIRY_S, LimitStore, default_path

pytestmark = pytest.mark.slow

DAY_S = 86_400.0

#: Writes its own limits one after the other, as many as are asked for, and says the number of each
#: that is kept.
WRITER = """
import os, sys
from pathlib import Path
from workers.learned_limits import LimitStore
from workers.settings import LimitKey, StoredLimit
from workers.settings import Learned

path, name, count = sys.argv[1:]
store = LimitStore(Path(path))
for number in range(1, int(count) + 1):
    key = LimitKey(card=f"{name} {number % 50}", total_bytes=None, driver=None, torch="2", dtype="fp16", workload="w",
                   cap_bytes=10**9)
    limit = StoredLimit(key=key, learned=Learned(size=number), peak_bytes=None, learned_at_unix_s=1.7e9)
    store.remember(limit)
    while "locked" in (store.problem or ""):  # the machine is busy
        store.remember(limit)
    if store.problem is not None:
        sys.exit(store.problem)
    os.write(1, b"%d\\n" % number)
"""


def sizes(store: LimitStore, now_unix_s: float = NOW_S) -> list[int]:
    found = sorted(known.learned.size for known in store.all(now_unix_s))
    assert store.problem is None
    return found


def kept(path: Path) -> list[int]:
    """Return the sizes that really are in a file."""
    return sorted(entry["learned"]["size"] for entry in json.loads(path.read_bytes()).values())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "limits.json"


@pytest.fixture
def store(path: Path) -> LimitStore:
    return LimitStore(path)


def test_asking_makes_nothing(path: Path, store: LimitStore) -> None:
    assert store.best(KEY, NOW_S) is None
    assert store.all(NOW_S) == ()
    store.remember()
    assert (store.problem, path.parent.exists()) == (None, False)


def test_the_last_of_a_card_type_and_workload_is_kept(store: LimitStore) -> None:
    store.remember(limit(1), limit(2, card="another"), limit(3, dtype="bf16"))
    store.remember(limit(4, torch="3.0"), limit(5, workload="mine:Mlp"))
    assert sizes(store) == [2, 3, 4, 5]
    assert store.best(KEY, NOW_S) is None, "learned with another torch"


def test_an_old_limit_is_not_offered_and_then_goes(path: Path, store: LimitStore) -> None:
    """Nor is one from the far future, whose clock was wrong; a little wrong does no harm."""
    store.remember(limit(1), limit(2, card="another", learned_at_unix_s=NOW_S + DAY_S))
    just_before, then = NOW_S + EXPIRY_S - 1, NOW_S + EXPIRY_S
    assert store.best(KEY, just_before) is not None
    assert (store.best(KEY, then), sizes(store, then), kept(path)) == (None, [2], [1, 2])
    assert sizes(store, NOW_S - 400 * DAY_S) == []
    store.remember(limit(3, card="third", learned_at_unix_s=then))
    assert kept(path) == [2, 3]


def test_writers_at_once_lose_nothing(path: Path, store: LimitStore) -> None:
    names = ["first", "second"]
    program = [sys.executable, "-c", WRITER, str(path)]
    writers = [
        subprocess.Popen(
            [*program, name, "20"],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in names
    ]
    while any(writer.poll() is None for writer in writers):
        store.all(NOW_S)
        assert store.problem is None
        time.sleep(0.001)
    assert [writer.communicate()[1] for writer in writers] == [""] * len(names)
    found = {known.key.card: known.learned.size for known in store.all(NOW_S)}
    assert found == {f"{name} {number}": number for name in names for number in range(1, 21)}


def test_a_writer_that_is_killed_leaves_what_it_said(path: Path, store: LimitStore) -> None:
    chance = random.Random(4)  # noqa: S311 - the moments of the kills, again in every run
    for kill in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), f"kill-{kill}", str(10**6)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
        ) as writer:
            assert writer.stdout.readline() == b"1\n"
            time.sleep(chance.uniform(0.0, 0.1))
            writer.send_signal(signal.SIGKILL)
            said = int(([b"1", *writer.stdout.read().split()])[-1])
        found = [
            known.learned.size
            for known in store.all(NOW_S)
            if known.key.card.startswith(f"kill-{kill} ")
        ]
        assert store.problem is None
        assert max(found) in {said, said + 1}
        path.with_name(f"limits.json.{writer.pid}.new").write_text(
            '{"schema": 1, "lim'
        )  # half done
        store.remember(limit(kill + 1))
        assert store.problem is None
    assert sorted(found.name for found in path.parent.iterdir()) == [
        "limits.json",
        "limits.json.lock",
    ]


def test_a_lock_that_is_never_given_up_costs_a_sentence(
    path: Path, store: LimitStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learned_limits, "_PATIENCE_S", 0.05)
    store.remember(limit(1))
    with path.with_name("limits.json.lock").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        store.remember(limit(2))
        assert "locked" in (store.problem or "")
        assert sizes(store) == [1]
    store.remember(limit(3))
    assert sizes(store) == [3]


def test_a_child_forked_under_the_lock_does_not_keep_it(path: Path) -> None:
    with locked(path, 0.0):
        shared = next(
            os.dup(int(each.name))
            for each in Path("/proc/self/fd").iterdir()
            if each.resolve() == path
        )
    with locked(path, 0.0):
        os.close(shared)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\0" * 4096, b"[" * 100_000, b"[]", b'{"schema": 1, "limits": []}', b"\xff",
        b'{"cpu fp32 matmul": {"size": 3}}',
    ],
)  # fmt: skip
def test_a_damaged_file_is_told_and_written_anew(
    path: Path, store: LimitStore, content: bytes
) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    told = f"learned limits: {path} is damaged"
    assert store.all(NOW_S) == ()
    assert (store.problem or "").startswith(told)
    store.remember(limit(4, card="third"))
    assert (store.problem or "").startswith(told)
    assert sizes(store) == [4]


def test_without_a_home_no_folder_is_made_in_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = LimitStore(Path("~/.local/state/oom-orchestrator/limits.json"))
    store.remember(limit(1))
    assert "no home folder" in (store.problem or "")
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_the_users_unless_another_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for named, folder in (("", "oom-orchestrator"), (str(tmp_path / "mine"), "mine")):
        monkeypatch.setenv("ORCHESTRATOR_STATE_DIR", named)
        assert default_path() == LimitStore().path == tmp_path / folder / "limits.json"
