"""Files that travel in pieces from a worker to the run folder: whole, in order, and never half of two."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.run.run_dir import CheckpointKeeper
from tests.factories import report_of
from workers.engine import slice_stats
from workers.engine.slice_stats import CheckpointPieces


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slice_stats, "_PIECE_BYTES", 10)


def sent(pieces: CheckpointPieces, keeper: CheckpointKeeper, newest: Path, most: int = 100) -> int:
    count = 0
    while count < most and (piece := pieces.next(newest)) is not None:
        keeper.take(report_of("pc1/0", 0, 0, checkpoint=piece))
        count += 1
    return count


def test_a_file_arrives_whole_once_and_its_successor_after_it(tmp_path: Path) -> None:
    newest, keeper = tmp_path / "newest", CheckpointKeeper(tmp_path / "head")
    pieces = CheckpointPieces()
    newest.write_bytes(bytes(range(35)))
    assert pieces.pending(newest)
    assert sent(pieces, keeper, newest, most=2) == 2
    assert keeper.copy_for("pc1/0", 1) is None, "half a file is none"
    # A newer one takes its name: what was begun is finished first.
    (tmp_path / "next").write_bytes(b"second")
    (tmp_path / "next").replace(newest)
    assert sent(pieces, keeper, newest, most=2) == 2
    assert keeper.copy_for("pc1/0", 2) == bytes(range(35))
    assert sent(pieces, keeper, newest) == 1
    assert keeper.copy_for("pc1/0", 3) == b"second"
    assert keeper.copy_for("pc1/0", 3) is None, "a process is given it once"
    assert not pieces.pending(newest)
    assert [path.name for path in (tmp_path / "head" / "pc1").iterdir()] == ["0.pt"]


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "head").touch()
    (tmp_path / "newest").write_bytes(b"x" * 25)
    keeper = CheckpointKeeper(tmp_path / "head")
    assert sent(CheckpointPieces(), keeper, tmp_path / "newest") == 3
    assert keeper.problem is not None
    assert str(tmp_path / "head") in keeper.problem


def test_the_first_process_gets_what_its_training_begins_with(tmp_path: Path) -> None:
    keeper, start = CheckpointKeeper(tmp_path / "new" / "states"), "20260101-000000-abcd/pc1/0"
    assert keeper.copy_for("pc1/1", 0, start) is None, "it is not there yet"
    weights = tmp_path / "20260101-000000-abcd" / "states" / "pc1" / "0.weights"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"weights")
    assert keeper.copy_for("pc1/0", 0, start) == b"weights"
    assert keeper.copy_for("pc1/0", 0, start) is None, "once"
    assert keeper.copy_for("pc1/0", 1, start) == b"weights", "as long as it has saved nothing"
    own = tmp_path / "new" / "states" / "pc1" / "0.pt"
    own.parent.mkdir(parents=True)
    own.write_bytes(b"own")
    assert keeper.copy_for("pc1/0", 2, start) == b"own"
