"""The store of learned limits in real files: many writers, killed ones, damage, foreign files, refusals and expiry."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import random
import resource
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.factories import KEY, NOW_S, limit
from tests.scene import ROOT
from workers.files import locked
from workers.learned_limits import EXPIRY_S, LimitStore, default_path, to_plain

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
store = LimitStore(Path(path), patience_s=60.0)
for number in range(1, int(count) + 1):
    key = LimitKey(card=f"{name} {number % 50}", total_bytes=None, driver=None, torch="2", dtype="fp16", workload="w",
                   cap_bytes=10**9)
    store.remember(StoredLimit(key=key, learned=Learned(size=number), peak_bytes=None, learned_at_unix_s=1.7e9))
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
    return sorted(entry["size"] for entry in json.loads(path.read_bytes())["limits"])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "state" / "limits.json"


@pytest.fixture
def store(path: Path) -> LimitStore:
    return LimitStore(path)


def test_asking_makes_nothing(path: Path, store: LimitStore) -> None:
    assert store.best(KEY, NOW_S) is None
    assert store.candidates("matmul", NOW_S) == ()
    assert store.all(NOW_S) == ()
    store.remember()
    assert (store.clear(NOW_S), store.problem, path.parent.exists()) == (0, None, False)


@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from(["remember", "remember", "clear"]),
            st.integers(min_value=970, max_value=1030),  # a limit serves caps within 1 %
            st.sampled_from(["one", "two"]),
        ),
        max_size=12,
    )
)
def test_remembered_is_offered_and_cleared_is_not(
    calls: list[tuple[str, int, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    store = LimitStore(tmp_path_factory.mktemp("any") / "limits.json", limits_most=5)
    for number, (call, cap_bytes, card) in enumerate(calls, start=1):
        wanted = dataclasses.replace(KEY, cap_bytes=cap_bytes, card=card)
        before = store.all(NOW_S)
        if call == "remember":
            others = [known for known in before if not known.key.serves(wanted)]
            told = limit(number, cap_bytes=cap_bytes, card=card, learned_at_unix_s=NOW_S + number)
            store.remember(told)
            assert store.best(wanted, NOW_S) == told
            assert set(store.all(NOW_S)) == {told, *others[:4]}
        else:
            assert store.clear(NOW_S) == len(before)
            assert store.all(NOW_S) == ()
        assert store.problem is None


def test_an_old_limit_is_not_offered_and_then_goes(path: Path, store: LimitStore) -> None:
    store.remember(limit(1))
    store.remember(limit(2, card="another", learned_at_unix_s=NOW_S + DAY_S))
    just_before, then = NOW_S + EXPIRY_S - 1, NOW_S + EXPIRY_S
    assert store.best(KEY, just_before) is not None
    assert (store.best(KEY, then), sizes(store, then), kept(path)) == (None, [2], [1, 2])
    store.remember(limit(3, card="third", learned_at_unix_s=then))
    assert kept(path) == [2, 3]


def test_a_limit_from_the_far_future_is_not_believed_for_ever(
    path: Path, store: LimitStore
) -> None:
    """Its clock was wrong; a little wrong does no harm."""
    store.remember(limit(1, learned_at_unix_s=NOW_S + 400 * DAY_S))
    assert sizes(store) == []
    store.remember(limit(2, learned_at_unix_s=NOW_S + 3600))
    assert (sizes(store), kept(path)) == ([2], [2])


def test_a_thousand_limits_are_kept_and_no_more(path: Path, store: LimitStore) -> None:
    long = "\udcff" * 500  # what takes the most room as JSON
    many = [
        limit(n, card=long[4:] + f"{n:04}", workload=long, torch=long, dtype=long, driver=long)
        for n in range(1, 1202)
    ]
    store.remember(*many)
    assert len(sizes(store)) == len(kept(path)) == 1000


def test_candidates_are_of_the_workload_in_any_version(store: LimitStore) -> None:
    store.remember(
        limit(1),
        limit(2, card="another", cap_bytes=5),
        limit(3, workload="mine.steps:Mlp@ffffffffffff batch=128"),
        limit(4, dtype="bf16"),
        limit(5, workload="mine.steps:Mlp2@0123456789ab"),
        limit(6, workload="mine.steps:Mlp"),
    )
    for asked in ("mine.steps:Mlp", "mine.steps:Mlp@aaaaaaaaaaaa", "mine.steps:Mlp batch=1"):
        found = store.candidates(asked, NOW_S)
        assert sorted(known.learned.size for known in found) == [1, 2, 3, 4, 6]
    assert store.candidates("mine.steps:Mlp", NOW_S + EXPIRY_S) == ()


def test_clearing_takes_all_and_counts_the_good(path: Path, store: LimitStore) -> None:
    store.remember(limit(1), limit(2, card="RTX 3070"))
    assert store.clear(NOW_S + EXPIRY_S) == 0
    assert kept(path) == []
    store.remember(limit(4))
    assert (store.clear(NOW_S), kept(path), store.problem) == (1, [], None)


def test_nobody_else_may_read_any_of_it(path: Path, store: LimitStore) -> None:
    before = os.umask(0)
    try:
        store.remember(limit(1))
        path.chmod(0o666)  # as a file that was copied here
        store.remember(limit(2))
    finally:
        os.umask(before)
    modes = {
        found.name: stat.S_IMODE(found.stat().st_mode)
        for found in (path.parent, *path.parent.iterdir())
    }
    assert modes == {"state": 0o700, "limits.json": 0o600, "limits.json.lock": 0o600}


def test_a_limit_that_no_reader_would_accept_is_refused(path: Path, store: LimitStore) -> None:
    store.remember(limit(1))
    for broken in (limit(0), limit(2, card="x" * 501), limit(2, learned_at_unix_s=float("nan"))):
        store.remember(limit(3), broken)
        assert store.problem is not None
        assert str(path) in store.problem
    assert sizes(store) == [1]


def test_writers_at_once_lose_nothing(path: Path, store: LimitStore) -> None:
    names = [f"writer-{number}" for number in range(3)]
    program = [sys.executable, "-c", WRITER, str(path)]
    writers = [
        subprocess.Popen(
            [*program, name, "40"],
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
    assert found == {f"{name} {number}": number for name in names for number in range(1, 41)}


def test_a_writer_that_is_killed_leaves_what_it_said(path: Path, store: LimitStore) -> None:
    chance = random.Random(4)  # noqa: S311 - the moments of the kills, again in every run
    for kill in range(5):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), f"kill-{kill}", str(10**6)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
        ) as writer:
            assert writer.stdout is not None
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
        path.with_name("limits.json.new").write_text('{"schema": 1, "lim')  # half done
        store.remember(limit(kill + 1))
        assert store.problem is None
    assert sorted(found.name for found in path.parent.iterdir()) == [
        "limits.json",
        "limits.json.lock",
    ]


def test_a_lock_that_is_never_given_up_costs_a_sentence(path: Path) -> None:
    store = LimitStore(path, patience_s=0.05)
    store.remember(limit(1))
    with path.with_name("limits.json.lock").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        store.remember(limit(2))
        assert "locked" in (store.problem or "")
        assert (store.clear(NOW_S), "locked" in (store.problem or "")) == (0, True)
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


WHOLE = json.dumps(
    {"schema": 1, "limits": [to_plain(limit(1)), to_plain(limit(2, card="another"))]}
).encode()
ENTRY = json.dumps(to_plain(limit(1)))


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "damaged"),
        (b"\0" * 4096, "damaged"),
        (b"\xff\xfe{}", "damaged"),
        (b"[" * 100_000, "damaged"),
        (b'{"schema": 1, "limits": [' + b"9" * 5_000 + b"]}", "damaged"),
        (b"[]", "another kind"),
        (b'{"schema": "1", "limits": []}', "another kind"),
        (b'{"schema": 0, "limits": []}', "another kind"),
        (b'{"schema": 1, "limits": {}}', "another kind"),
        (b'{"schema": 1, "limits": [3]}', "damaged"),
        (b'{"schema": 1, "limits": [' + ENTRY.replace('"size": 1', '"size": -1').encode() + b"]}",
         "damaged"),
        (b'{"schema": 1, "limits": [' + ENTRY.replace("1700000000.0", "NaN").encode() + b"]}",
         "damaged"),
        (b'{"schema": 2, "limits": [], "more": 1}', "update this installation"),
        (b" " * (16 * 2**20 + 1), "larger than"),
        *((WHOLE[:length], "damaged") for length in (1, 20, len(WHOLE) // 2, len(WHOLE) - 1)),
    ],
)  # fmt: skip
def test_a_file_that_is_no_store_is_told_of_and_left_alone(
    path: Path, store: LimitStore, content: bytes, word: str
) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    for call in (
        lambda: store.best(KEY, NOW_S),
        lambda: store.candidates("matmul", NOW_S),
        lambda: store.remember(limit(3)),
        lambda: store.clear(NOW_S),
    ):
        assert not call()
        assert store.problem is not None
        assert word in store.problem
        assert str(path) in store.problem
        assert "limits --clear" in store.problem
        assert path.read_bytes() == content
    moved = store.set_aside()
    assert moved is not None
    assert (store.problem, moved.read_bytes(), path.exists()) == (None, content, False)
    store.remember(limit(4))
    assert sizes(store) == [4]


@given(
    at=st.integers(min_value=0, max_value=len(WHOLE)),
    hole=st.integers(0, 40),
    filling=st.binary(max_size=40),
)
def test_no_change_of_a_file_makes_a_reader_raise(
    at: int, hole: int, filling: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "changed.json"
    content = WHOLE[:at] + filling + WHOLE[at + hole :]
    path.write_bytes(content)
    store = LimitStore(path)
    assert (store.all(NOW_S) == ()) or store.problem is None
    store.remember(limit(3))
    assert (store.problem is None) == (path.read_bytes() != content)


def test_only_what_is_no_store_is_moved(path: Path, store: LimitStore) -> None:
    assert (store.set_aside(), store.problem) == (None, None)
    store.remember(limit(1))
    assert (store.set_aside(), store.problem) == (None, None)
    assert sizes(store) == [1]
    moved = []
    for word in ("first", "second"):
        path.write_text(word)
        moved.append(store.set_aside())
    assert [found.read_text() for found in moved if found is not None] == ["first", "second"]


@pytest.fixture(params=["pipe", "link", "folder", "socket"])
def strange(request: pytest.FixtureRequest, path: Path) -> Iterator[Path]:
    """Put something that is no file in the place of the store."""
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        if request.param == "pipe":
            os.mkfifo(path)
        elif request.param == "folder":
            path.mkdir()
        elif request.param == "link":
            path.with_name("elsewhere").write_bytes(WHOLE)
            path.symlink_to("elsewhere")
        else:
            server.bind(str(path))
        yield path


def test_what_is_no_regular_file_is_not_touched(strange: Path, store: LimitStore) -> None:
    before = strange.lstat()
    for call in (
        lambda: store.best(KEY, NOW_S),
        lambda: store.remember(limit(1)),
        lambda: store.clear(NOW_S),
        store.set_aside,
    ):
        assert not call()
        assert "no regular file" in (store.problem or "")
    assert (strange.lstat().st_ino, strange.lstat().st_mode) == (before.st_ino, before.st_mode)


def test_a_file_that_cannot_grow_costs_a_sentence(path: Path, store: LimitStore) -> None:
    """As on a full disk, after the file was made."""
    store.remember(limit(1))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for call in (lambda: store.remember(limit(2, card="x")), lambda: store.clear(NOW_S)):
        resource.setrlimit(resource.RLIMIT_FSIZE, (4, before[1]))
        try:
            assert not call()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert "File too large" in (store.problem or "")
        assert "ORCHESTRATOR_STATE_DIR" in (store.problem or "")
        assert sizes(store) == [1]
        assert {found.name for found in path.parent.iterdir()} == {
            "limits.json",
            "limits.json.lock",
        }


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
