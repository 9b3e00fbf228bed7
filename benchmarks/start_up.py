"""The start of a training job as one rank of thousands, without the others: what it calls, receives, opens, and how long its own code takes.

The communicator of this rank sends nothing. It answers as if all other ranks said the same as this one, and counts. So the real start of
a job runs in one process: store, mesh, network, reducer, loader and checkpoints. The time that messages take is not in the figures.
"""

from __future__ import annotations

import argparse
import pickle
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.harness import parent, report
from benchmarks.rows import Rows
from distseg.comm.alone import Complete
from distseg.config.settings import Config, DataConfig, MeshConfig, ModelConfig, TrainConfig
from distseg.config.sizes import Size
from distseg.data.store.writer import StoreWriter
from distseg.tiling.tile import Box
from distseg.training.run import Run

QUESTION = (
    "What does a rank call, receive and open at the start of a job, as the number of ranks grows?"
)
RANKS = (8, 64, 512, 4096, 27648)
A_NODE = 6


class OneOfMany:
    """Communicator of one rank whose other ranks say the same as this one. It sends nothing and counts.

    Args:
        rank, size: this rank's number, and the number of ranks.
        counts: what is counted: ``communicators``, ``collectives``, ``messages``, and ``bytes`` that this rank receives.
    """

    transport, takes_gpu_memory = "mpi", False

    def __init__(self, rank: int, size: int, counts: Counter):
        self.rank, self.size, self.counts = rank, size, counts

    def __deepcopy__(self, memo) -> OneOfMany:
        return self

    def _collective(self, received: int) -> None:
        self.counts["collectives"] += 1
        self.counts["bytes"] += received

    def allgather(self, what) -> list:
        self._collective(self.size * len(pickle.dumps(what)))
        return [what] * self.size

    def allreduce(self, what):
        self._collective(self.size * len(pickle.dumps(what)))
        return self.size * what

    def gather(self, what, root: int = 0) -> list | None:
        self._collective(self.size * len(pickle.dumps(what)) * (self.rank == root))
        return [what] * self.size if self.rank == root else None

    def bcast(self, what, root: int = 0):
        self._collective(len(pickle.dumps(what)))
        return what

    def Bcast(self, memory: np.ndarray, root: int = 0) -> None:
        self._collective(memory.nbytes)

    def Barrier(self) -> None:
        self._collective(0)

    def Ibarrier(self) -> Complete:
        self._collective(0)
        return Complete()

    def Iallgather(self, send: np.ndarray, received: np.ndarray) -> Complete:
        self._collective(received.nbytes)
        received[:] = send
        return Complete()

    def Isum(self, memory: np.ndarray) -> Complete:
        self._collective(memory.nbytes)
        return Complete()

    def Imaximum(self, memory: np.ndarray) -> Complete:
        self._collective(memory.nbytes)
        return Complete()

    def group(self, members: Sequence[int]) -> OneOfMany:
        self.counts["communicators"] += 1
        return OneOfMany(members.index(self.rank), len(members), self.counts)

    def split_by_node(self) -> OneOfMany:
        self._collective(0)
        self.counts["communicators"] += 1
        return OneOfMany(self.rank % A_NODE, min(A_NODE, self.size), self.counts)

    def Free(self) -> None:
        pass


_COUNTED: list[tuple[Path, Counter]] = []  # the folder whose opened files are counted now


def _opening(event: str, arguments: tuple) -> None:
    """Count a file of the store or of the run that Python opens."""
    if event == "open" and _COUNTED:
        folder, counts = _COUNTED[-1]
        counts["files"] += str(arguments[0]).startswith(str(folder))


sys.addaudithook(_opening)


def start(folder: Path, ranks: int, rank: int, tiles: Size = Size((2, 2))) -> Counter:
    """Start a training as one of many ranks, and return the counts and the seconds.

    Args:
        folder: a folder, in which the store is made and the run is written.
        ranks: the number of ranks; a multiple of the number of tiles.
        rank: the rank that is started.
        tiles: the grid of tiles of an image.
    """
    store, groups = folder / "store.h5", ranks // tiles.volume
    folder.mkdir(exist_ok=True)
    if not store.exists():
        with StoreWriter(store, ["a", "b"], 1) as writer:
            image = writer.add_image("a", (32, 32), np.dtype(np.uint8), "train", True)
            image.write(
                Box.whole((32, 32)), np.zeros((1, 32, 32), np.uint8), np.zeros((32, 32), np.uint8)
            )
    config = Config(
        model=ModelConfig(depth=1, num_convs=1, base_channels=2, norm="instance"),
        data=DataConfig(store=str(store), crop=Size((16, 16)), epoch_samples=groups),
        mesh=MeshConfig(samples=groups, tiles=tiles, reducer="mpi"),
        train=TrainConfig(epochs=1, output=str(folder / f"run-{ranks}-{rank}")),
    )
    counts = Counter(communicators=0, collectives=0, messages=0, bytes=0, files=0)
    before = time.perf_counter()
    _COUNTED.append((folder, counts))
    try:
        Run(config, OneOfMany(rank, ranks, counts))
    finally:
        _COUNTED.pop()
    counts["seconds"] = time.perf_counter() - before
    return counts


def main(arguments: Sequence[str] | None = None) -> None:
    options = argparse.ArgumentParser(description=QUESTION, parents=[parent(1)]).parse_args(
        arguments
    )
    ranks = RANKS[:2] if options.quick else RANKS
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        start(Path(folder), ranks[0], 0)  # the first start also imports modules
        for size in ranks:
            for rank in (0, size // 2):
                counts = start(Path(folder) / "again", size, rank)
                rows.append({"ranks": size, "rank": rank, **counts})
    report(
        "start_up",
        QUESTION,
        Rows(rows),
        options,
        {"tiles": "2x2", "ranks of a node": A_NODE},
        NOTES,
    )


NOTES = (
    "One process acts as one rank: its communicator sends nothing and answers as if all ranks said the same. bytes are those that a rank "
    "receives in distseg's own collectives; what MPI sends by itself to split ranks by node is not in them. files are those of the store and of the run's folder. seconds are those of this rank's own code, with the store and the checkpoint folder on a local disk."
)


if __name__ == "__main__":
    main()
