"""Mesh of ranks, sample groups x tiles x pipeline stages, and the communicators of its axes.

The ranks of one pipeline and of one image's tiles should be near each other, so the stage varies
fastest::

    samples=2, tiles=(1, 2), stages=2        rank = (sample * Q + tile) * S + stage

                 tile 0          tile 1
    sample 0   0 - 1 (stages)    2 - 3
    sample 1   4 - 5             6 - 7
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from distseg.comm.launch import JointFailure, check_launcher
from distseg.comm.waits import Ranks, Waits
from distseg.config.sizes import Size
from distseg.config.units import many


class Members(NamedTuple):
    """Ranks of each communicator to which one rank belongs, by their numbers in the job.

    The fields have the names of the communicators of :class:`Mesh`.
    """

    pipeline: tuple[int, ...]
    tiles: tuple[int, ...]
    groups: tuple[int, ...]
    replicas: tuple[int, ...]


@dataclass(frozen=True)
class MeshShape:
    """Sizes of the mesh's axes, and the coordinates of each rank, without communication.

    Attributes:
        samples: number of sample groups.
        tiles: grid of ranks that share an image, with one number per spatial dim.
        stages: number of pipeline stages.
    """

    samples: int = 1
    tiles: Size = Size((1, 1))
    stages: int = 1

    def __post_init__(self):
        object.__setattr__(self, "tiles", Size(self.tiles))
        for axis in ("samples", "stages"):
            if getattr(self, axis) < 1:
                raise ValueError(f"mesh.{axis} must be at least 1, got {getattr(self, axis)}")

    @property
    def axes(self) -> tuple[int, ...]:
        """Sizes of the axes of the mesh, (samples, *tiles, stages)."""
        return (self.samples, *self.tiles, self.stages)

    @property
    def size(self) -> int:
        """Number of ranks of the mesh."""
        return self.samples * self.tiles.volume * self.stages

    def check(self, ranks: int) -> None:
        """Refuse a number of ranks that does not fill the mesh.

        Raises:
            ValueError: ``ranks`` is not the size of the mesh. The message names both numbers and
                how to fix it.
        """
        if ranks != self.size:
            raise ValueError(
                f"a mesh of {self} needs {many(self.size, 'rank')}, but {ranks} "
                f"{'is' if ranks == 1 else 'are'} running: "
                f"launch {self.size} (mpirun -n {self.size} ... or torchrun --nproc-per-node "
                f"{self.size} ...), or set mesh.samples, mesh.tiles "
                f"and mesh.stages to a product of {ranks}"
            )

    def place(self, rank: int) -> tuple[int, tuple[int, ...], int]:
        """Return the coordinates (sample, tile, stage) of a rank; a tile has one index per dim."""
        rank, stage = divmod(rank, self.stages)
        tile = []
        for count in reversed(self.tiles):
            rank, at = divmod(rank, count)
            tile.insert(0, at)
        return rank, tuple(tile), stage

    def members(self, rank: int) -> Members:
        """Return, for each communicator to which a rank belongs, the numbers of its ranks."""
        whole, stages = self.tiles.volume * self.stages, self.stages
        first, stage = rank - rank % stages, rank % stages
        image, tile = rank - rank % whole, rank % whole
        return Members(
            pipeline=tuple(range(first, first + stages)),
            tiles=tuple(range(image + stage, image + whole, stages)),
            groups=tuple(range(tile, self.size, whole)),
            replicas=tuple(range(stage, self.size, stages)),
        )

    def stage_ranks(self) -> list[list[int]]:
        """Return, for each stage, the ranks that hold its weights."""
        return [list(range(stage, self.size, self.stages)) for stage in range(self.stages)]

    def __str__(self) -> str:
        return f"{self.samples} samples x ({self.tiles}) tiles x {self.stages} stages"


class Mesh:
    """Position of this rank in the mesh of ranks, and its communicators.

    All ranks must create this object together. The mesh has D sample groups, Q tiles and S stages.

    Args:
        world: the communicator of all ranks.
        samples, tiles, stages: the sizes of the axes.
        timeout: seconds that a rank waits for another; 0 for no limit.

    Attributes:
        sample, tile, stage: this rank's coordinates; ``tile`` has one index per spatial dim.
        world: all ranks.
        pipeline: the S ranks with this rank's sample group and tile, one for each stage.
        tiles: the Q ranks with this rank's sample group and stage, one for each tile.
        groups: the D ranks with this rank's tile and stage, one in each sample group. It is the
            same object as ``replicas`` if each group has one tile.
        replicas: the D x Q ranks with this rank's stage, which hold the same weights.
        waits: the wait policy of all these communicators.
        device: the device of this rank, as chosen by :func:`distseg.init_mesh`.
    """

    device = torch.device("cpu")
    _failure: str | None = None  # the error that has ended a joint call on this rank alone

    def __init__(
        self, world, samples: int = 1, tiles=(1, 1), stages: int = 1, timeout: float = 0.0
    ):
        self.shape = MeshShape(samples, Size(tiles), stages)
        check_launcher()
        self.shape.check(world.size)
        self.waits = Waits(timeout)
        self.world = Ranks(world, self.waits)
        self.sample, self.tile, self.stage = self.shape.place(world.rank)
        members = self.shape.members(world.rank)
        self.pipeline = self.world.group(members.pipeline)
        self.tiles = self.world.group(members.tiles)
        self.replicas = self.world.group(members.replicas)
        # Messages of both cannot be mixed up: gradient sums have tags of their own, and collectives
        # over the groups begin only after all sums of a step. The tiles and the replicas may have
        # the same ranks too, but a norm's statistics can be under way beside the loss's sums.
        shared = members.groups == members.replicas
        self.groups = self.replicas if shared else self.world.group(members.groups)

    @property
    def rank(self) -> int:
        """Number of this rank among all ranks."""
        return self.world.rank

    @property
    def size(self) -> int:
        """Number of all ranks."""
        return self.world.size

    @contextmanager
    def joint_call(self) -> Iterator[None]:
        """Return a context for a call that all ranks make together, such as a training step.

        If an error ends the call on this rank alone, other ranks may wait for its messages, or send
        messages of the call later. Another call could take them for its own, so the context then
        refuses to be entered again.

        Raises:
            RuntimeError: an earlier call has ended with an error on this rank alone.
        """
        if self._failure is not None:
            raise RuntimeError(
                f"an earlier call of distseg failed on rank {self.rank} of {self.size} with "
                f"{self._failure}. Messages of that call may still be under way, so this rank "
                "cannot make another call: let the error end the program, and start it again"
            )
        try:
            yield
        except JointFailure:
            raise
        except (Exception, KeyboardInterrupt) as error:
            if self.size > 1:
                self._failure = f"{type(error).__name__}: {error}"
                # MPI writes into the buffers of incomplete messages even while the process ends.
                # The frames of the error hold these buffers, so the error is never freed.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(error))
            raise

    def __deepcopy__(self, memo) -> Mesh:
        """Return the same object, so that a copy of its owner uses the same connections."""
        return self

    def __copy__(self) -> Mesh:
        """Return another mesh with the same connections."""
        made = object.__new__(type(self))
        made.__dict__.update(self.__dict__)
        return made

    def __reduce_ex__(self, protocol):
        raise ValueError(
            "a mesh has connections to other processes, so neither it nor a distributed model can "
            "be pickled: save model.whole_state_dict(), or call distseg.save(folder, model)"
        )
