"""Copies files of one slot from the PC that has them, in pieces: checkpoints, or all of a job.

Does not judge them: each checkpoint ends with a hash of all its bytes, which is compared where it
is read.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO, Final

import ray
from ray.exceptions import GetTimeoutError, RayError

from orchestrator.cluster.node_tasks import NODE_LABEL, in_a_line, live_nodes, on_node
from orchestrator.errors import NoClusterError
from workers.learned_limits import default_path

#: Of one message through Ray's object store.
_PIECE_BYTES: Final = 8 * 2**20
#: For a process to start, and for a piece on a slow network.
_ANSWER_S: Final = 180.0


class Reader:
    """Reads files of its node. An actor: what it has opened stays as it is while a training goes
    on, and replaces its files.
    """

    def __init__(self, run_id: str, slot: str, names: str) -> None:
        folder = default_path().parent / "state" / run_id / slot
        self._files: dict[str, IO[bytes]] = {
            str(path.relative_to(folder)): path.open("rb")
            for path in folder.glob(names)
            if path.is_file() and not path.is_symlink()
        }

    def sizes(self) -> dict[str, int]:
        """Return the number of bytes of each."""
        return {name: os.fstat(file.fileno()).st_size for name, file in self._files.items()}

    def piece(self, name: str, offset: int) -> bytes:
        """Return the bytes from there on, at most a piece."""
        self._files[name].seek(offset)
        return self._files[name].read(_PIECE_BYTES)


def copied(node: str, run_id: str, slot: str, names: str, into: Path) -> list[Path]:
    """Copy files of such names of a slot from a node of the connected cluster into a folder.

    Raises:
        NoClusterError: It is not there, or does not answer.
    """
    if node not in {each["Labels"].get(NODE_LABEL) for each in live_nodes()}:
        raise NoClusterError(f"no node {node} is in the cluster")
    reader = on_node(node, Reader).remote(run_id, slot, names)
    try:
        sizes = ray.get(reader.sizes.remote(), timeout=_ANSWER_S)
        for name, size in sizes.items():
            path = into / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                for offset in range(0, size, _PIECE_BYTES):
                    file.write(ray.get(reader.piece.remote(name, offset), timeout=_ANSWER_S))
    except GetTimeoutError as failure:
        raise NoClusterError(f"{node} does not answer in {_ANSWER_S:.0f} s") from failure
    except RayError as failure:
        raise NoClusterError(f"{node}: {in_a_line(failure)}") from failure
    finally:
        ray.kill(reader, no_restart=True)
    return [into / name for name in sizes]
