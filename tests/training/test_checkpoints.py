"""After damage of a file, the disk or the process, a good checkpoint is found, or refused."""

from __future__ import annotations

import random
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor
from torch.utils._pytree import tree_map

from tests.fork_server import ForkServer
from tests.scene import namespaced, wait_for
from workers.training import checkpoints as files
from workers.training.checkpoints import (
    EARLIER,
    MOST_SHARE,
    Checkpoints,
    Identity,
    pause_s,
    weights_sha256,
)

Open = Callable[..., Checkpoints]

WEIGHTS = {"a": torch.zeros(3, 4), "b": torch.zeros(2, dtype=torch.bfloat16)}
OURS = Identity.of("gpt-nano", WEIGHTS, {"lr": 0.1})


def state_at(step: int) -> dict[str, Any]:
    """Return a state in which every value is its step."""
    return {
        "weights": {name: torch.full_like(weight, step) for name, weight in WEIGHTS.items()},
        "moments": [
            {
                "step": torch.tensor(float(step)),
                "of": {0: torch.full((5,), step, dtype=torch.int64)},
            }
        ],
        "samples_used": step * 16,
        "splits": [[4, step]],
        "betas": (0.9, None),
        "torch": "2",
    }


def plain(state: object) -> Any:
    """Return a state as values whose bits and types `==` compares."""
    return tree_map(lambda it: (it.dtype, it.tolist()) if isinstance(it, Tensor) else it, state)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Open the checkpoints of a folder; the end of the test waits for all writes."""
    living: list[Checkpoints] = []

    def open_(folder: Path = tmp_path, identity: Identity = OURS, **settings: Any) -> Checkpoints:
        living.append(Checkpoints(folder, identity, **settings))
        return living[-1]

    yield open_
    for each in living:
        assert each.wait(60)


def saved(checkpoints: Checkpoints, *steps: int) -> Checkpoints:
    """Save the states of these steps, one after the other."""
    checkpoints.load()
    for step in steps:
        assert checkpoints.save(state_at(step), step)
        assert checkpoints.wait(60)
        assert checkpoints.failure is None
    return checkpoints


def step_of(checkpoints: Checkpoints) -> int | None:
    """Load the newest good checkpoint; return its step."""
    checkpoints.load()
    return checkpoints.saved_step


def newest(folder: Path) -> Path:
    """Return the newest checkpoint file."""
    return max(folder.glob("*.pt"), key=lambda path: files.read_number(path) or 0)


def test_the_newest_of_two_generations_is_loaded_bit_for_bit(opened: Open, tmp_path: Path) -> None:
    saved(opened(), 1, 2, 3)
    again = opened()
    state, refused = again.load()
    assert (again.saved_step, refused) == (3, [])
    assert plain(state) == plain(state_at(3))
    assert len(list(tmp_path.iterdir())) == 2
    saved(again, 4)
    assert step_of(opened()) == 4


def test_the_copy_is_of_the_moment_of_the_call(opened: Open) -> None:
    checkpoints = opened()
    checkpoints.load()
    addresses = set()
    for step in (1, 2):
        state = state_at(step)
        checkpoints.save(state, step)
        state["weights"]["a"].fill_(99)
        assert checkpoints.wait(60)
        copy = checkpoints.newest_copy()
        assert plain(copy) == plain(state_at(step))
        addresses.add(copy["weights"]["a"].data_ptr())
    assert len(addresses) == 1
    assert plain(opened().load()[0]) == plain(state_at(2))


def test_one_flipped_bit_in_any_byte_is_refused(opened: Open, tmp_path: Path) -> None:
    """A file that is cut off at this byte is refused too."""
    saved(opened(), 1, 2)
    damaged = newest(tmp_path)
    whole = damaged.read_bytes()
    checkpoints = opened()
    for place, byte in enumerate(whole):
        flipped = whole[:place] + bytes([byte ^ 1 << place % 8]) + whole[place + 1 :]
        cut = whole[:place] if place % 8 == 0 or place > len(whole) - 68 else flipped
        for content in {flipped, cut}:
            damaged.write_bytes(content)
            with pytest.raises(files.RefusedError):
                files.read_file(damaged)
            if place % 64 and place < len(whole) - 68:
                continue
            _, (refused, instead) = checkpoints.load()
            assert checkpoints.saved_step == 1
            assert refused.startswith(f"the checkpoint {damaged} is not used: it")
            assert instead == "training goes on from step 1"
    damaged.write_bytes(whole + b"x")
    assert step_of(checkpoints) == 1
    damaged.write_bytes(whole)
    assert step_of(checkpoints) == 2


@pytest.mark.parametrize("place", [200, -40], ids=["tensors", "end"])
def test_a_damaged_file_is_written_over_and_not_the_good_one(
    opened: Open, tmp_path: Path, place: int
) -> None:
    saved(opened(), 1, 2)
    damaged = newest(tmp_path)
    content = bytearray(damaged.read_bytes())
    content[place] ^= 1
    damaged.write_bytes(content)
    saved(opened(), 3)
    assert newest(tmp_path) == damaged
    assert opened().load()[1] == []
    damaged.unlink()
    assert step_of(opened()) == 1


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (
            Identity.of("gpt-mini", WEIGHTS, {"lr": 0.1}),
            "it holds the model gpt-nano, and this run trains gpt-mini",
        ),
        (
            Identity.of("gpt-nano", {**WEIGHTS, "a": torch.zeros(4, 3)}, {"lr": 0.1}),
            "its weight a is float32 3x4, and that of this model is float32 4x3",
        ),
        (
            Identity.of("gpt-nano", WEIGHTS, {"lr": 0.2}),
            "it was trained with lr=0.1, and this run has lr=0.2",
        ),
    ],
    ids=["name", "weights", "levers"],
)
def test_a_checkpoint_of_another_model_is_refused_in_words(
    opened: Open, tmp_path: Path, other: Identity, reason: str
) -> None:
    saved(opened(), 1, 2)
    state, refused = opened(identity=other).load()
    assert state is None
    assert refused[0] == f"the checkpoint {newest(tmp_path)} is not used: {reason}"
    assert refused[2:] == ["training begins anew"]


def test_a_new_training_is_found_beside_a_refused_file(opened: Open) -> None:
    saved(opened(), 1, 2, 3, 4, 5)
    other = Identity.of("another", WEIGHTS)
    saved(opened(identity=other), 1)
    assert step_of(opened(identity=other)) == 1
    discarding = opened(identity=other)
    discarding.discard()
    assert discarding.load()[1] == []


def test_another_version_of_the_format_is_named(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as later:
        later.setattr(files, "VERSION", 2)
        files.write_file(tmp_path / "generation-1.pt", {"step": 2, "state": {}}, 9)
    _, (refused, _) = opened().load()
    assert refused.endswith("it has format version 2, and this program reads version 1")


def test_a_file_that_would_run_code_is_refused(opened: Open, tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    files.write_file(tmp_path / "generation-1.pt", {"step": 2, "state": Runs()}, 9)
    _, (refused, _) = opened().load()
    assert refused.endswith("it holds more than tensors, numbers, strings and lists")
    assert not (tmp_path / "ran").exists()


@given(
    save_every_s=some.floats(0, 3600),
    rounds=some.lists(some.tuples(some.floats(0, 100), some.booleans()), min_size=1, max_size=30),
)
def test_checkpoints_cost_less_than_a_hundredth_of_the_time(
    save_every_s: float, rounds: list[tuple[float, bool]]
) -> None:
    pauses = [pause_s(save_every_s, cost_s, failed=failed) for cost_s, failed in rounds]
    assert sum(cost_s for cost_s, _ in rounds) <= MOST_SHARE * sum(pauses) * (1 + 1e-9)
    assert all(
        pause >= EARLIER * (min(60.0, save_every_s) if failed else save_every_s)
        for pause, (_, failed) in zip(pauses, rounds, strict=True)
    )


def test_only_one_checkpoint_is_in_flight(opened: Open) -> None:
    checkpoints, gate = opened(), threading.Event()
    checkpoints.load()
    checkpoints._jobs.put(gate.wait)  # keeps the writer busy
    assert checkpoints.save(state_at(1), 1)
    assert not checkpoints.save(state_at(2), 2)
    gate.set()
    assert checkpoints.wait(60)
    assert step_of(opened()) == 1


#: Saves as fast as it can, and prints the saved steps. Every tensor of a state holds its step.
WRITER = """
import sys, torch
from pathlib import Path
from workers.training.checkpoints import Checkpoints, Identity
torch.set_num_threads(1)
weights = {"a": torch.zeros(300_000)}
checkpoints = Checkpoints(Path(sys.argv[1]), Identity.of("m", weights))
_, refused = checkpoints.load()
assert not refused, refused
step = checkpoints.saved_step or 0
while True:
    step += 1
    weights["a"].fill_(step)
    assert checkpoints.save({"weights": weights, "step": step}, step)
    assert checkpoints.wait(60)
    assert checkpoints.failure is None, checkpoints.failure
    print(step, flush=True)
"""


def test_a_writer_killed_at_50_moments_leaves_a_good_file(
    fork_server: ForkServer, opened: Open, tmp_path: Path
) -> None:
    drawn, step, interrupted = random.Random(5), 0, 0  # noqa: S311 - moments of a test
    identity = Identity.of("m", {"a": torch.zeros(300_000)})
    for _ in range(50):
        child = fork_server.start(WRITER, str(tmp_path))
        wait_for(lambda child=child: child.out.split(), "first checkpoint")
        time.sleep(drawn.uniform(0, 0.05))
        child.kill()
        child.wait(60)
        told = child.out
        safe = int(told[: told.rindex("\n")].split()[-1])
        child.close()
        interrupted += any(tmp_path.glob("*.new"))
        checkpoints = opened(identity=identity)
        state, refused = checkpoints.load()
        assert refused == []
        assert max(step, safe) <= (checkpoints.saved_step or 0) <= safe + 1
        step = checkpoints.saved_step or 0
        assert state["weights"]["a"].eq(step).all()
        assert not list(tmp_path.glob("*.new")), "opening removes what the killed process left"
        assert checkpoints.wait(60)
    assert interrupted >= 5, "so few kills struck while a file was being written"


#: Saves a state of 1 MiB on a disk of 2 MiB: full, with free space again, and read-only.
FULL_DISK = """
import sys, subprocess, torch
from pathlib import Path
from workers.training.checkpoints import Checkpoints, Identity
torch.set_num_threads(1)
disk = Path(sys.argv[1])
weights = {"a": torch.zeros(2**18)}
checkpoints = Checkpoints(disk / "slot", Identity.of("m", weights), save_every_s=0)
checkpoints.load()
steps = 0
def train(times):
    global steps
    for _ in range(times):
        steps += 1
        weights["a"].add_(1)
        assert checkpoints.save({"weights": weights}, steps)
        assert checkpoints.wait(60)
def look():
    print(checkpoints.failure, checkpoints.saved_step, sep="|")
    print(*sorted(each.name for each in (disk / "slot").iterdir()))
(disk / "other").write_bytes(bytes(2**19))
train(3)
look()
subprocess.run(["mount", "-o", "remount,size=16m", str(disk)], check=True)
train(2)
look()
subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
train(2)
look()
copy = checkpoints.newest_copy()
print(steps, weights["a"][0].item(), copy["weights"]["a"][0].item(), (checkpoints.load(), checkpoints.saved_step)[1])
assert checkpoints.wait(60)
"""


def test_a_full_and_a_read_only_disk_cost_no_step_and_are_told(tmp_path: Path) -> None:
    script = 'mount -t tmpfs -o size=2m x "$1"; "$2" -W ignore -c "$3" "$1"'
    done = namespaced(script, str(tmp_path), sys.executable, FULL_DISK)
    assert done.returncode == 0, done.stderr
    full, left, good, both, read_only, kept, end = re.sub(
        r"in \d+ s;", "in N s;", done.stdout
    ).splitlines()
    where = tmp_path / "slot"
    assert full == (
        f"the checkpoint of step 3 could not be written in {where}: No space left on device; training goes on and "
        "tries again in N s; the last good one is of step 1|1"
    )
    assert left == "generation-0.pt"
    assert (good, both) == ("None|5", "generation-0.pt generation-1.pt")
    assert read_only == (
        f"the checkpoint of step 7 could not be written in {where}: Read-only file system; training goes on and tries "
        "again in N s; the last good one is of step 5|5"
    )
    assert kept == both
    assert end == "7 7.0 7.0 5"


def test_no_memory_for_the_copy_costs_no_step(opened: Open) -> None:
    checkpoints = saved(opened(), 1)
    assert not checkpoints.save({"weights": torch.zeros(1).expand(2**60)}, 2)
    assert "could not be written" in str(checkpoints.failure)
    assert plain(checkpoints.newest_copy()) == plain(state_at(1))
    saved(checkpoints, 2)


def test_the_hash_of_weights_sees_all_but_strides() -> None:
    weights = {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor(1, dtype=torch.bfloat16)}
    turned = {"b": weights["b"], "a": weights["a"].t().contiguous().t()}
    assert weights_sha256(weights) == weights_sha256(turned)
    others = [
        {"c": weights["a"], "b": weights["b"]},
        {**weights, "b": torch.tensor(1, dtype=torch.float16)},
        {**weights, "a": weights["a"].view(3, 2)},
        {**weights, "a": weights["a"].nextafter(torch.tensor(9.0))},
    ]
    assert len({weights_sha256(each) for each in (weights, *others)}) == 5
