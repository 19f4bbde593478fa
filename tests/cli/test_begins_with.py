"""`train.from`, as it is typed: what cannot be found is refused before a run folder is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Command
from tests.cli.test_export import RUN, make_run

RUNS = ("--local", "--workload", "train", "--set")


@pytest.mark.parametrize(
    ("start", "said"),
    [
        ("20250101-000000-0000/pc1/0", "there is no run '20250101-000000-0000'"),
        ("0000-abcd/pc1/0", f"write the whole name of the run, {RUN}"),
        (f"{RUN}/pc1/7", "has no slot 'pc1/7'; valid: pc1/0"),
        (f"{RUN}/pc1/0", "pc1/0 has no generation-?.pt in"),
        (f"{RUN}/../0", "valid: RUN_ID/SLOT of an earlier run"),
    ],
    ids=["no run", "an end", "no slot", "nothing saved", "up"],
)
def test_what_is_not_there_is_refused(
    nowhere: Path, command: Command, start: str, said: str
) -> None:
    make_run()
    done = command("run", *RUNS, f"train.from={start}")
    assert said in " ".join(done.stderr.split())
    assert done.returncode == 2
    assert [path.name for path in Path("runs").iterdir()] == [RUN]


@pytest.mark.torch
def test_a_damaged_checkpoint_is_refused(nowhere: Path, state_dir: Path, command: Command) -> None:
    make_run()
    place = state_dir / "state" / RUN / "pc1" / "0"
    place.mkdir(parents=True)
    (place / "generation-0.pt").write_bytes(b"PK")
    done = command("run", *RUNS, f"train.from={RUN}/pc1/0")
    assert done.returncode == 2
    assert "generation-0.pt is not used: it has only 2 bytes" in " ".join(done.stderr.split())
