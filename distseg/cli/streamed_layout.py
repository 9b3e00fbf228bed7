"""Predict the time of a step with streamed tiles from the operations that a rank will run."""

from __future__ import annotations

import math
from collections.abc import Sequence

from distseg.planning.mesh_layout import MeshLayout
from distseg.planning.mesh_search import Planner
from distseg.planning.pass_times import Modelled, of_tiles
from distseg.runtime.operations import BackwardTile, ForwardTile, OutputTile
from distseg.training.programs import StepPrograms


def streamed_seconds(programs: StepPrograms, planner: Planner, layout: MeshLayout) -> float:
    """Return the predicted seconds of a step with streamed tiles.

    The seconds are those of the slowest tile's ranks. Stages count as if they computed one after
    another, because one image keeps them busy at the same time only for a part of the step. Reading
    and writing offloaded feature maps is not counted, because no profile has the speed of a disk.

    Args:
        programs: the programs of a step of one micro-batch with this layout, with streamed tiles.
        planner: the planner of the training.
        layout: the mesh.

    Raises:
        ValueError: tiles cannot be streamed with these settings or this much memory.
    """
    work, machine = planner.work, planner.machine
    tile, micro_batch = planner.grids.slowest_tile(layout.tiles), 0.0
    modelled = Modelled(work.costs, math.prod(work.image))
    for rank in range(layout.stages):
        found = programs.streamed(tile, rank)
        program = [*found.extra_forward, *found.step]
        passes = of_tiles(modelled, found.executor, work.image, program, found.plans)
        calls = sum(map(len, _calls(program, found.plans[0].segments)))
        micro_batch += sum(passes.values()) + machine.call * calls
    return layout.micro_batches * micro_batch + planner.seconds_besides_passes(layout)


def _calls(program: Sequence, segments: Sequence) -> list[Sequence[int]]:
    """Return, for each pass of a tile in a program, the indices of the layers that it runs.

    A backward pass whose activations were not kept counts as two passes: forward and backward.
    """
    found = []
    for op in program:
        if isinstance(op, (ForwardTile, OutputTile, BackwardTile)):
            again = isinstance(op, BackwardTile) and not op.kept
            back = isinstance(op, OutputTile) and op.back
            found += [segments[op.segment].nodes] * (1 + again + back)
    return found
