"""Draw the layouts that the planner compares: their time against their memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from distseg.planning.mesh_layout import FAMILIES, Prediction
from distseg.report.style import FAINT, INK, PALETTE, new_figure

_WIDE = 10  # factor between the least and the largest number from which an axis is logarithmic


def plot_layouts(
    layouts: Sequence[Prediction],
    front: Sequence[Prediction],
    limit: float,
    output: str | Path,
    steps: int | None = None,
    title: str = "Layouts",
) -> None:
    """Draw a point for each layout at its memory and its time, coloured by its family.

    A family is a set of mesh axes that are split. A stepped line connects the front: the layouts
    for which no other layout is faster and takes no more memory. The fastest layout within the
    limit has a ring.

    Args:
        layouts: the layouts.
        front: the layouts of the front (:meth:`distseg.planning.mesh_search.Planner.front`).
        limit: the memory limit of a rank in bytes.
        output: the file to write; its ending chooses the format.
        steps: the number of steps of an epoch; None to draw the time of one step.
        title: the title of the picture.
    """
    with new_figure(output, (8.5, 5.0), layout="constrained") as figure:
        axis = figure.subplots()
        for family, color in zip(FAMILIES, PALETTE):
            found = [one for one in layouts if one.layout.family == family]
            if found:
                axis.scatter(*_points(found, steps), color=color, s=36, label=family, zorder=3)
        memory, seconds = _points(sorted(front, key=lambda one: one.memory), steps)
        axis.step(memory, seconds, where="post", color=INK, lw=1.2, label="front", zorder=2)
        fitting = [one for one in front if one.memory <= limit]
        if fitting:
            best = min(fitting, key=lambda one: one.seconds)
            axis.scatter(*_points([best], steps), s=180, facecolors="none", edgecolors=INK)
            (place,) = zip(*_points([best], steps))
            beside = dict(textcoords="offset points", xytext=(-12, 0), ha="right", va="center")
            axis.annotate(str(best.layout), place, **beside)
        axis.axvline(limit / 1e9, color=FAINT, ls=":", lw=1.2, label="limit of a rank")
        what = "step" if steps is None else "epoch"
        axis.set(xlabel="memory of a rank [GB]", ylabel=f"time of one {what} [s]", title=title)
        for direction, numbers in zip("xy", _points(layouts, steps)):
            if max(numbers) > _WIDE * min(numbers):
                axis.set(**{f"{direction}scale": "log"})
        axis.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _points(found: Sequence[Prediction], steps: int | None) -> tuple[list[float], list[float]]:
    """Return the memory in GB of each layout, and the seconds of a step or an epoch in it."""
    return [one.memory / 1e9 for one in found], [(steps or 1) * one.seconds for one in found]
