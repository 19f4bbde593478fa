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
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.scene import ROOT
from workers import learned_limits
from workers.files import locked
from workers.learned_limits import EXPIRY_S, LimitKey, LimitStore, default_path
from workers.settings import Learned

pytestmark = pytest.mark.slow

NOW_S = 1.7e9
DAY_S = 86_400.0

#: The circumstances under which the tests learn.
KEY = LimitKey(
    card="NVIDIA GeForce RTX 3090",
    driver="580.65.06",
    torch="2.13.0+cu130",
    dtype="fp16",
    workload="mine.steps:Mlp@0123456789ab",
    cap_bytes=10**9,
)

OF_OTHER_TYPES = [
    {"learned": {"size": 3} | learned, "cap_bytes": cap_bytes, "learned_at_unix_s": NOW_S}
    for cap_bytes, learned in (("much", {}), (1, {"size": "large"}), (1, {"unit_bytes": [1]}))
]

#: Writes its own limits one after the other, as many as are asked for, and says the number of each
#: that is kept.
WRITER = """
import os, sys
from dataclasses import replace
from tests.learned_limits.test_store import KEY
from workers.learned_limits import LimitStore
from workers.settings import Learned

name, count = sys.argv[1:]
number, problems = 0, []
store = LimitStore(lambda: replace(KEY, card=f"{name} {number % 50}"), problems.append, every_s=0, unix_s=lambda: 1.7e9)
for number in range(1, int(count) + 1):
    store.keep(Learned(size=number), at_once=True)
    while store.kept != Learned(size=number) and "locked" in "".join(problems):  # the machine is busy
        store.keep(Learned(size=number), at_once=True)
    if store.kept != Learned(size=number):
        sys.exit(str(problems))
    os.write(1, b"%d\\n" % number)
"""


class Run:
    """One run, and what its store has told."""

    def __init__(self, *, at_s: float = NOW_S, every_s: float = 0.0, **key: Any) -> None:
        self.at_s, self.told = at_s, list[str]()
        self.store = LimitStore(
            lambda: replace(KEY, **key),
            self.told.append,
            every_s=every_s,
            unix_s=lambda: self.at_s,
        )

    def best(self) -> int | None:
        limit = self.store.best()
        return None if limit is None else limit.learned.size

    def keep(self, size: int, *, at_once: bool = False) -> None:
        self.store.keep(Learned(size=size, fixed_bytes=1e6, unit_bytes=2.5), at_once=at_once)


def kept() -> dict[str, int]:
    """Return the sizes that really are in the file, by the cards they were learned on."""
    entries = json.loads(default_path().read_bytes())
    rest = " " + replace(KEY, card="").name
    return {name.removesuffix(rest): each["learned"]["size"] for name, each in entries.items()}


@pytest.fixture
def path(state_dir: Path) -> Path:
    return state_dir / "limits.json"


def test_asking_makes_nothing(state_dir: Path) -> None:
    run = Run()
    assert run.best() is None
    run.store.keep(None)
    assert (run.told, list(state_dir.iterdir())) == ([], [])


@pytest.mark.parametrize(
    "changed",
    [
        {"card": "NVIDIA GeForce RTX 3070"},
        {"driver": "580.65.07"},
        {"driver": None},
        {"torch": "2.13.0+cpu"},
        {"dtype": "bf16"},
        {"workload": "matmul@0.1.1"},
        {"cap_bytes": 4 * 2**30},
    ],
)
def test_the_last_is_kept_and_none_is_of_other_circumstances(changed: dict[str, Any]) -> None:
    Run().keep(1)
    Run().keep(2)
    assert Run(**changed).best() is None
    Run(**changed).keep(3)
    assert Run(**changed).best() == 3
    assert Run().best() == (None if "cap_bytes" in changed else 2)


def test_it_is_written_so_often_and_at_once_where_nothing_may_follow(path: Path) -> None:
    run = Run(every_s=60.0)
    run.keep(1)
    run.keep(2)
    assert Run().best() == 1, "not with every step"
    run.keep(2, at_once=True)
    assert Run().best() == 2
    written = path.stat().st_mtime_ns
    run.keep(2, at_once=True)
    run.at_s += 60.0
    run.keep(2)
    assert path.stat().st_mtime_ns == written, "nothing is new"
    run.keep(3)
    assert Run().best() == 3


def test_an_old_limit_is_not_offered_and_then_goes() -> None:
    """Nor is one from the far future, whose clock was wrong; a little wrong does no harm."""
    Run(card="one").keep(1)
    Run(card="another", at_s=NOW_S + DAY_S).keep(2)
    just_before, then = NOW_S + EXPIRY_S - 1, NOW_S + EXPIRY_S
    assert Run(card="one", at_s=just_before).best() == 1
    assert Run(card="one", at_s=then).best() is None
    assert Run(card="another", at_s=then).best() == 2
    assert Run(card="another", at_s=NOW_S - 400 * DAY_S).best() is None
    assert kept() == {"one": 1, "another": 2}
    Run(card="third", at_s=then).keep(3)
    assert kept() == {"another": 2, "third": 3}


def test_writers_at_once_lose_nothing() -> None:
    names = ["first", "second"]
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, name, "20"],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name in names
    ]
    reader = Run()
    while any(writer.poll() is None for writer in writers):
        reader.best()
        assert reader.told == []
        time.sleep(0.001)
    assert [writer.communicate()[1] for writer in writers] == [""] * len(names)
    assert kept() == {f"{name} {number}": number for name in names for number in range(1, 21)}


def test_a_writer_that_is_killed_leaves_what_it_said(path: Path) -> None:
    chance = random.Random(4)  # noqa: S311 - the moments of the kills, again in every run
    for kill in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, f"kill-{kill}", str(10**6)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
        ) as writer:
            assert writer.stdout.readline() == b"1\n"
            time.sleep(chance.uniform(0.0, 0.1))
            writer.send_signal(signal.SIGKILL)
            said = int(([b"1", *writer.stdout.read().split()])[-1])
        sizes = [size for card, size in kept().items() if card.startswith(f"kill-{kill} ")]
        assert max(sizes) in {said, said + 1}
        path.with_name(f"limits.json.{writer.pid}.new").write_text('{"lim')  # half done
        run = Run()
        run.keep(kill + 1)
        assert run.told == []
    assert sorted(found.name for found in path.parent.iterdir()) == [
        "limits.json",
        "limits.json.lock",
    ]


def test_what_cannot_be_written_is_told_and_written_when_it_can_be(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learned_limits, "_PATIENCE_S", 0.05)
    run = Run()
    run.keep(1)
    with path.with_name("limits.json.lock").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        run.keep(2)
        run.keep(2)
        assert ["locked" in reason for reason in run.told] == [True], "once"
        assert Run().best() == 1
    run.keep(2)
    assert Run().best() == 2


def test_a_worker_that_has_filled_its_cap_keeps_it_another_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run()

    def without_memory(*_: object) -> None:
        raise MemoryError

    with monkeypatch.context() as full:
        full.setattr(learned_limits, "replace_whole", without_memory)
        run.keep(1)
    assert (Run().best(), run.told) == (None, [])
    run.keep(1)
    assert Run().best() == 1


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
        *(json.dumps({"any": each}).encode() for each in OF_OTHER_TYPES),
    ],
)  # fmt: skip
def test_a_damaged_file_is_told_and_written_anew(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    run = Run()
    assert run.best() is None
    run.keep(4)
    assert [reason.partition(",")[0] for reason in run.told] == [
        f"learned limits: {path} is damaged"
    ]
    assert Run().best() == 4


def test_without_a_home_no_folder_is_made_in_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ORCHESTRATOR_STATE_DIR", "~/.local/state/oom-orchestrator")
    run = Run()
    run.keep(1)
    assert "no home folder" in run.told[0]
    assert list(tmp_path.iterdir()) == []


def test_the_folder_is_the_users_unless_another_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for named, folder in (("", "oom-orchestrator"), (str(tmp_path / "mine"), "mine")):
        monkeypatch.setenv("ORCHESTRATOR_STATE_DIR", named)
        assert default_path() == Run().store.path == tmp_path / folder / "limits.json"
