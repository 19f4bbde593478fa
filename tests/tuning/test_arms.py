"""What one arm of a tuning leaves to the next."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.scene import ROOT, python

#: Forks arms one after the other, each with loader processes, and prints how many sockets the
#: folder of the tuning has while the next one is to be forked.
TUNING = """
import multiprocessing, os, sys, time
from pathlib import Path
import psutil
from tests.scene import spec_of
from workers.tuning import messages

def arm(connection, log):
    messages._ARM = "tests.tuning.loading_arm"
    messages.run_arm(connection, spec_of(), log)

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    context = multiprocessing.get_context("forkserver")
    for _ in range(3):
        ours, theirs = context.Pipe()
        child = context.Process(target=arm, args=(theirs, folder / "log"))
        child.start()
        below = ours.recv()
        assert below
        child.join()
        assert child.exitcode == 0
        while any(map(psutil.pid_exists, below)):
            time.sleep(0.01)
        (own,) = folder.glob("pymp-*")
        print(len(list(own.iterdir())))
"""


def test_the_loader_of_an_arm_leaves_the_folder_of_the_tuning() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # the path of a socket is short
        file = Path(folder, "tuning.py")
        file.write_text(TUNING)
        done = python(str(file), folder, cwd=ROOT, TMPDIR=folder, PYTHONPATH=str(ROOT))
        assert (done.returncode, done.stdout.split()) == (0, ["1"] * 3), done.stderr
        assert not list(Path(folder).glob("pymp-*"))
