"""Choose the cases of each kind of measurement: which layout on how many ranks, on which image.

The functions are pure. A case is a layout of the config's training step
(:class:`distseg.planning.mesh_layout.MeshLayout`), so the planner can predict what is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from distseg.cli.bench.layouts import AXES, fixed_ranks, grown_layout, layout_words, with_exchange
from distseg.config.settings import MeshConfig, PipelineConfig, SpatialConfig
from distseg.config.sizes import Size
from distseg.config.units import many
from distseg.planning.mesh_layout import MeshLayout


@dataclass(frozen=True)
class Case:
    """One training step to measure.

    Attributes:
        name: a name that is unique among the cases of a measurement.
        layout: the mesh, and how its ranks share the step.
        image: the size of an image in pixels.
    """

    name: str
    layout: MeshLayout
    image: Size

    def changes(
        self, mesh: MeshConfig, pipeline: PipelineConfig, spatial: SpatialConfig
    ) -> dict[str, Any]:
        """Return the values of the settings that describe the layout of this step, by name.

        Args:
            mesh, pipeline, spatial: the user's settings of these sections. The balance of stages is
                kept if the case has the same number of stages, and several tiles of a rank are
                kept.
        """
        found = dict(self.layout.values())
        if pipeline.balance and self.layout.stages == mesh.stages:
            found["pipeline.balance"] = pipeline.balance
        if spatial.tiles_per_rank.volume > 1:
            found["spatial.tiles_per_rank"] = spatial.tiles_per_rank
        return found


def strong_cases(
    layout: MeshLayout, counts: Sequence[int], axis: str, image: Size, exchange: str
) -> list[Case]:
    """Return the cases of strong scaling: the same step on different numbers of ranks.

    Args:
        layout: the layout of the config, with the number of micro-batches of a whole step.
        counts: the numbers of ranks.
        axis: the axis of the mesh that grows.
        image: the size of an image.
        exchange: the value of ``spatial.exchange_every`` for cases with several tiles.

    Raises:
        ValueError: the micro-batches of a step do not divide among the sample groups of a case.
    """
    micro_batches, found = layout.samples * layout.micro_batches, []
    for ranks in counts:
        one = with_exchange(grown_layout(layout, ranks, axis), exchange)
        if micro_batches % one.samples:
            raise ValueError(
                f"a step of {micro_batches} micro-batches does not divide among {one.samples} "
                f"sample groups on {ranks} ranks: set train.accumulate to a multiple of "
                f"{one.samples}, or let --axis tiles grow"
            )
        one = replace(one, micro_batches=micro_batches // one.samples)
        found.append(Case(many(ranks, "rank"), one, image))
    return found


def weak_cases(
    layout: MeshLayout, counts: Sequence[int], axis: str, image: Size, exchange: str
) -> list[Case]:
    """Return the cases of weak scaling: the work grows with the ranks.

    Along samples a step has more images. Along tiles an image has more pixels: its size is
    ``image`` times the grid.

    Args:
        layout: the layout of the config.
        counts: the numbers of ranks.
        axis: the axis of the mesh that grows: samples or tiles.
        image: the size of an image in pixels; with tiles, that of a tile.
        exchange: the value of ``spatial.exchange_every`` for cases with several tiles.
    """
    found = []
    for ranks in counts:
        one = with_exchange(grown_layout(layout, ranks, axis), exchange)
        size = Size(n * t for n, t in zip(image, one.tiles)) if axis == "tiles" else image
        found.append(Case(many(ranks, "rank"), one, size))
    return found


def pipeline_cases(
    layout: MeshLayout,
    ranks: int,
    micro_batches: Sequence[int],
    schedules: Sequence[str],
    image: Size,
) -> list[Case]:
    """Return a case for each number of micro-batches and schedule of a pipeline.

    For each number of micro-batches there is also a case with one stage, the reference for the
    pipeline's efficiency.

    Args:
        layout: the layout of the config; its stages are replaced.
        ranks: the number of ranks of the job.
        micro_batches: numbers of micro-batches of a step.
        schedules: the schedules.
        image: the size of an image.

    Raises:
        ValueError: the job has too few ranks for two stages.
    """
    stages = _ranks_along(layout, ranks, "stages", "a pipeline needs two stages or more")
    found = []
    for m in micro_batches:
        alone = replace(layout, stages=1, micro_batches=m, schedule="1f1b")
        found.append(Case(f"1 stage, {many(m, 'micro-batch')}", alone, image))
        for schedule in schedules:
            one = replace(layout, stages=stages, micro_batches=m, schedule=schedule)
            found.append(Case(f"{schedule}, {many(m, 'micro-batch')}", one, image))
    return found


def halo_cases(layout: MeshLayout, ranks: int, every: Sequence[str], image: Size) -> list[Case]:
    """Return a case for each number of layers between halo exchanges.

    Args:
        layout: the layout of the config; its tiles are replaced so that they fill the job.
        ranks: the number of ranks of the job.
        every: values of ``spatial.exchange_every``.
        image: the size of an image.

    Raises:
        ValueError: the job has too few ranks for two tiles.
    """
    _ranks_along(layout, ranks, "tiles", "halos lie between two tiles or more")
    one = grown_layout(layout, ranks, "tiles")
    return [Case(f"every {name}", replace(one, exchange=name), image) for name in every]


def _ranks_along(layout: MeshLayout, ranks: int, axis: str, need: str) -> int:
    """Return the number of ranks along one axis of the mesh with which the mesh fills the job.

    Args:
        layout: the layout of the config, which gives the other axes.
        ranks: the number of ranks of the job.
        axis: the axis of the mesh: tiles, samples or stages.
        need: the reason why two ranks are needed along the axis, for the message.

    Raises:
        ValueError: the ranks do not fit the other axes, or there is one along the axis.
    """
    rest = fixed_ranks(layout, axis)
    if ranks % rest or ranks // rest < 2:
        others = [name for name in AXES if name != axis]
        raise ValueError(
            f"{need}, but {many(ranks, 'rank')} and {rest} ranks of {' and '.join(others)} leave "
            f"{ranks / rest:.3g}: start a multiple of {rest} ranks, at least {2 * rest}, or change "
            + " and ".join(f"mesh.{name}" for name in others)
        )
    return ranks // rest


def memory_cases(
    layout: MeshLayout, ranks: int, axes: Sequence[str], exchange: str, image: Size
) -> list[Case]:
    """Return a case for each axis of the mesh along which all ranks can split the step.

    The layout of the config is a case too, if it has as many ranks as the job.

    Args:
        layout: the layout of the config.
        ranks: the number of ranks of the job.
        axes: the axes to try.
        exchange: the value of ``spatial.exchange_every`` for cases with several tiles.
        image: the size of an image.
    """
    micro_batches = layout.samples * layout.micro_batches
    one = replace(
        layout, samples=1, tiles=Size((1,) * len(layout.tiles)), stages=1, exchange="all",
        micro_batches=micro_batches,
    )  # fmt: skip
    found = [layout] if layout.ranks == ranks else []
    for axis in axes:
        split = with_exchange(grown_layout(one, ranks, axis), exchange)
        if micro_batches % split.samples == 0:
            found.append(replace(split, micro_batches=micro_batches // split.samples))
    return [
        Case(words, each, image)
        for words, each in {layout_words(each): each for each in found}.items()
    ]
