"""The process from which loader processes are forked removes what is its training's, and no more."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.scene import python

#: Forks trainings one after the other, as `tune` does; each has a server for its loader processes.
#: Prints what the folder of the sockets has while the next one is to be forked.
TUNING = """
import multiprocessing, os, sys, time
import psutil

def load():
    pass

def train(connection):
    multiprocessing.set_forkserver_preload(["workers.training.loader_server"])
    loader = multiprocessing.get_context("forkserver").Process(target=load)
    loader.start()
    loader.join()
    connection.send([each.pid for each in psutil.Process().children()])

if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    for _ in range(3):
        ours, theirs = context.Pipe()
        training = context.Process(target=train, args=(theirs,))
        training.start()
        servers = ours.recv()
        assert servers
        training.join()
        assert training.exitcode == 0
        while any(map(psutil.pid_exists, servers)):
            time.sleep(0.01)
        (folder,) = [each for each in os.listdir(sys.argv[1]) if each.startswith("pymp-")]
        print(len(os.listdir(os.path.join(sys.argv[1], folder))))
"""


def test_a_forked_training_leaves_the_folder_to_the_one_that_forked_it() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # the path of a socket is short
        file = Path(folder, "tuning.py")
        file.write_text(TUNING)
        done = python(str(file), folder, TMPDIR=folder)
        assert (done.returncode, done.stdout.split()) == (0, ["1"] * 3), done.stderr
        assert not list(Path(folder).glob("pymp-*"))
