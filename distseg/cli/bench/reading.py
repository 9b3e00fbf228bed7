"""Time how fast the ranks of a job read the crops of a training from its store."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from distseg.cli.bench.measuring import on_first_ranks, spread_text
from distseg.cli.bench.results import Measurement
from distseg.comm.launch import first_on_node, raise_jointly
from distseg.comm.progress import heartbeat, phase
from distseg.config.settings import DataConfig
from distseg.config.sizes import Size
from distseg.config.units import many
from distseg.data.loader import pieces
from distseg.data.sampler import Sample, epoch_samples
from distseg.data.store.store import Store
from distseg.tiling.tile import ReceptiveField


def crops_of(data: DataConfig, seed: int, count: int) -> list[Sample]:
    """Return the first ``count`` crops that a training with these settings reads.

    If an epoch has fewer crops, crops of the next epochs follow.

    Args:
        data: the settings of the data.
        seed: the setting ``train.seed``.
        count: the number of crops.
    """
    store = Store(data.store, shrink=data.shrink)
    found: list[Sample] = []
    epoch = 0
    while len(found) < count:
        steps = epoch_samples(store, "train", data, seed, epoch, 1)
        found += [sample for step in steps for sample in step]
        epoch += 1
    return found[:count]


def read_crops(data: DataConfig, crops: Sequence[Sample]) -> int:
    """Read crops with their labels as training does; return the bytes of the tensors.

    The store is opened anew, so that its cache has no data yet.
    """
    store, size = Store(data.store, shrink=data.shrink), 0
    for crop in crops:
        dims = len(crop.size)
        one, reach = Size((1,) * dims), ReceptiveField((0,) * dims, (1,) * dims)
        for piece in pieces(store, [crop], one, one, (0,) * dims, reach):
            size += piece.pixels.nbytes + (piece.labels.nbytes if piece.labels is not None else 0)
        heartbeat("reading crops")
    return size


def forget_file(path: str) -> None:
    """Ask the system to drop the pages of a file from its page cache."""
    with suppress(OSError, AttributeError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def measure_reading(
    data: DataConfig,
    crops: Sequence[Sample],
    counts: Sequence[int],
    repeats: int,
    world,
    say: Callable[[str], None],
) -> list[Measurement]:
    """Measure how fast ranks read crops, and return the figures.

    All ranks of ``world`` must call it together. For each number of ranks there are two cases: from
    the disk, after the system was asked to drop the store from its page cache, and from memory,
    right after the same crops were read.

    Args:
        data: the settings of the data.
        crops: the crops that the ranks read together.
        counts: the numbers of ranks.
        repeats: the number of repeats of a case.
        world: the communicator of all ranks.
        say: prints a line of progress.
    """
    found = []
    for ranks in counts:
        for cold in (True, False):
            one = on_first_ranks(
                world, ranks, lambda comm, cold=cold: _measured(data, crops, repeats, cold, comm)
            )
            found.append(one)
            say(f"{one.name}: {spread_text(one)}")
    return found


def _measured(
    data: DataConfig, crops: Sequence[Sample], repeats: int, cold: bool, comm
) -> Measurement:
    """Measure how fast the ranks of ``comm`` read crops; all of them must call it together.

    Args:
        data: the settings of the data.
        crops: the crops that the ranks read together.
        repeats: the number of repeats.
        cold: True to drop the store from the system's page cache before each repeat.
        comm: the communicator of the ranks that read.
    """
    name = f"{many(comm.size, 'rank')}, from {'the disk' if cold else 'memory'}"
    phase(f"measuring {name}")
    mine, first, seconds, size = crops[comm.rank :: comm.size], first_on_node(comm), [], 0
    for repeat in range(repeats + (not cold)):  # the first reading from memory fills it
        if cold and first:
            forget_file(data.store)
        comm.Barrier()
        start = time.perf_counter()
        with raise_jointly(comm):
            size = read_crops(data, mine)
        took = max(comm.allgather(time.perf_counter() - start))
        if cold or repeat:
            seconds.append(took)
    return Measurement(
        name,
        comm.size,
        seconds,
        image=str(Size(crops[0].size)),
        pixels=sum(Size(crop.size).volume for crop in crops),
        images=len(crops),
        bytes=comm.allreduce(size),
    )
