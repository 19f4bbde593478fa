"""Files sent in pieces from a worker to the run folder arrive whole, in order, never mixed."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from orchestrator.run.run_dir import CheckpointKeeper
from tests.factories import status_of
from workers.engine import pieces
from workers.engine.pieces import ReceivedFile, SavedPieces


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_BYTES", 10)


def sent(files: SavedPieces, keeper: CheckpointKeeper, newest: Path, most: int = 100) -> int:
    """Send pieces, each piece twice; return their number."""
    count = 0
    kept = keeper.kept("pc1/0")
    while count < most and (piece := files.piece(str(newest), kept)) is not None:
        for _ in range(2):
            keeper.take(status_of("pc1/0", checkpoint=piece))
        kept = keeper.kept("pc1/0")
        count += 1
    return count


def copy(keeper: CheckpointKeeper, incarnation: int, start: str | None = None) -> bytes | None:
    """Return the copy for a process, as assembled by an actor that gets each order twice."""
    with TemporaryDirectory() as folder:
        here = ReceivedFile(Path(folder) / "copy")
        while True:
            whole, piece = keeper.copy_for("pc1/0", incarnation, start)
            if whole is None or whole == here.kept:
                break
            assert piece is not None
            assert [here.take(piece), here.take(piece)] == [True, False]
            keeper.note_copied(status_of("pc1/0", copied=here.kept))
        keeper.note_copied(status_of("pc1/0"))
        keeper.drop_copy("pc1/0")
        return None if whole is None else here.path.read_bytes()


def test_a_file_arrives_whole_once_and_its_successor_after_it(tmp_path: Path) -> None:
    newest, keeper = tmp_path / "newest", CheckpointKeeper(tmp_path / "head")
    files = SavedPieces()
    newest.write_bytes(bytes(range(35)))
    assert files.pending(str(newest), keeper.kept("pc1/0"))
    assert sent(files, keeper, newest, most=2) == 2
    assert copy(keeper, 1) is None, "half a file is none"
    # A newer file replaces it: the transfer of the old one is finished first.
    (tmp_path / "next").write_bytes(b"second")
    (tmp_path / "next").replace(newest)
    assert sent(files, keeper, newest, most=2) == 2
    assert copy(keeper, 2) == bytes(range(35))
    assert sent(files, keeper, newest) == 1
    assert copy(keeper, 3) == b"second"
    assert not files.pending(str(newest), keeper.kept("pc1/0"))
    assert [path.name for path in (tmp_path / "head" / "pc1").iterdir()] == ["0.pt"]


def test_a_folder_that_cannot_be_written_is_told_and_not_waited_for(tmp_path: Path) -> None:
    (tmp_path / "head").touch()
    (tmp_path / "newest").write_bytes(b"x" * 25)
    keeper, files = CheckpointKeeper(tmp_path / "head"), SavedPieces()
    assert sent(files, keeper, tmp_path / "newest") == 1
    assert not files.pending(str(tmp_path / "newest"), keeper.kept("pc1/0"))
    assert keeper.problem is not None
    assert str(tmp_path / "head") in keeper.problem


def test_the_first_process_gets_what_its_training_begins_with(tmp_path: Path) -> None:
    keeper, start = CheckpointKeeper(tmp_path / "new" / "states"), "20260101-000000-abcd/pc1/0"
    assert copy(keeper, 0, start) is None, "it is not there yet"
    weights = tmp_path / "20260101-000000-abcd" / "states" / "pc1" / "0.weights"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(b"weights")
    assert copy(keeper, 0, start) == b"weights"
    assert copy(keeper, 1, start) == b"weights", "as long as it has saved nothing"
    own = tmp_path / "new" / "states" / "pc1" / "0.pt"
    own.parent.mkdir(parents=True)
    own.write_bytes(b"own")
    assert copy(keeper, 2, start) == b"own"
