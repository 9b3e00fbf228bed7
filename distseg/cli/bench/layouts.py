"""Layouts of the cases of ``distseg bench``: that of a config, grown along an axis of the mesh.

The functions are pure.
"""

from __future__ import annotations

from dataclasses import replace

from distseg.cli.bench.flags import positive_numbers
from distseg.cli.submit.studies import grown
from distseg.comm.mesh import MeshShape
from distseg.config.settings import MeshConfig, PipelineConfig
from distseg.config.units import many
from distseg.planning.mesh_layout import MeshLayout
from distseg.training.stages import schedule_of

AXES = ("tiles", "samples", "stages")


def base_layout(
    mesh: MeshConfig, pipeline: PipelineConfig, exchange: str, micro_batches: int, linear: bool
) -> MeshLayout:
    """Return the layout that the settings of a training describe.

    Args:
        mesh, pipeline: the settings of these sections.
        exchange: the setting ``spatial.exchange_every``.
        micro_batches: number of micro-batches of a sample group in a step.
        linear: True if the labels alone determine the loss gradient.
    """
    return MeshLayout(
        mesh.samples,
        mesh.tiles,
        mesh.stages,
        exchange if mesh.tiles.volume > 1 else "all",
        micro_batches,
        schedule_of(pipeline, max(2, mesh.stages), linear),  # one stage may become several
        pipeline.recompute,
    )


def rank_counts(text: str | None, ranks: int, multiple: int) -> list[int]:
    """Return the numbers of ranks that a scaling study measures, in increasing order.

    Args:
        text: the value of ``--ranks``: a list such as ``1,2,4``, ``job`` for the job's number of
            ranks alone, or None for 1, 2, 4, ... times ``multiple`` up to the job's number.
        ranks: the number of ranks of the job.
        multiple: the product of the mesh axes that do not grow.

    Raises:
        ValueError: a number is not a multiple of ``multiple``, or is larger than the job.
    """
    if text is None:
        found = [n for n in (multiple << k for k in range(ranks.bit_length())) if n < ranks]
        found.append(ranks)
    elif text == "job":
        found = [ranks]
    else:
        found = sorted(positive_numbers("--ranks", text))
    if found[-1] > ranks:
        raise ValueError(
            f"--ranks names {found[-1]} ranks, but the job has {ranks}: start {found[-1]} ranks, "
            "or leave the larger numbers out of --ranks"
        )
    if wrong := next((n for n in found if n % multiple), None):
        raise ValueError(
            f"{wrong} ranks do not fit the mesh: its axes that do not grow take {multiple} ranks, "
            f"so each number of ranks must be a multiple of {multiple}: give --ranks such "
            f"numbers, start another number of ranks, or change mesh.samples, mesh.tiles and "
            "mesh.stages"
        )
    return found


def fixed_ranks(layout: MeshLayout, axis: str) -> int:
    """Return the product of the mesh axes that do not grow along ``axis``."""
    return layout.ranks // _length(layout, axis)


def _length(layout: MeshLayout, axis: str) -> int:
    return layout.tiles.volume if axis == "tiles" else getattr(layout, axis)


def grown_layout(layout: MeshLayout, ranks: int, axis: str) -> MeshLayout:
    """Return a layout on a number of ranks that differs in one axis of the mesh.

    A grid of tiles keeps its shape if it has the required number of tiles already. Otherwise it
    becomes nearly square.

    Args:
        layout: the layout.
        ranks: the number of ranks, a multiple of the other axes.
        axis: the axis that grows: tiles, samples or stages.
    """
    if layout.ranks == ranks:
        return layout
    if axis == "stages":
        return replace(layout, stages=ranks // fixed_ranks(layout, axis))
    mesh = grown(MeshShape(layout.samples, layout.tiles, layout.stages), ranks, axis)
    exchange = layout.exchange if mesh.tiles.volume > 1 else "all"
    return replace(layout, samples=mesh.samples, tiles=mesh.tiles, exchange=exchange)


def with_exchange(layout: MeshLayout, exchange: str) -> MeshLayout:
    """Return a layout with another value of ``spatial.exchange_every``.

    In a layout with one tile, which exchanges no halos, the value is always ``all``.
    """
    return replace(layout, exchange=exchange if layout.tiles.volume > 1 else "all")


def layout_words(layout: MeshLayout) -> str:
    """Return a layout as text, such as ``1 samples x (1x2) tiles x 2 stages, 4 micro-batches``."""
    words = [str(MeshShape(layout.samples, layout.tiles, layout.stages))]
    words.append(many(layout.micro_batches, "micro-batch"))
    if layout.tiles.volume > 1:
        words.append(f"exchange {layout.exchange}")
    if layout.stages > 1:
        words.append(layout.schedule)
    if layout.recompute != "never":
        words.append(f"recompute {layout.recompute}")
    return ", ".join(words)
