"""The few numbers at the head of the page of ``distseg bench report``.

The functions are pure.
"""

from __future__ import annotations

from collections.abc import Callable

from distseg.cli.bench.ratios import pipelines, speed_up
from distseg.cli.bench.results import Result
from distseg.cli.bench.rows import MB, halo_share, mesh_text
from distseg.config.units import many

Figures = list[tuple[str, str]]


def figures_of(result: Result) -> Figures:
    """Return (label, value) of the few most important numbers of a result."""
    return _FIGURES[result.kind](result)


def _scaling_figures(result: Result) -> Figures:
    ordered = sorted(result.measurements, key=lambda one: one.ranks)
    first, last = ordered[0], ordered[-1]
    if first is last:
        return []
    efficiency = speed_up(last, first).middle / last.ranks
    found = [(f"{result.title}: efficiency on {last.ranks} ranks", f"{efficiency:.0%}")]
    if halo_share(last) > 0:
        found.append((f"{result.title}: halo share", f"{halo_share(last):.1%}"))
    return found


def _pipeline_figures(result: Result) -> Figures:
    best = max(pipelines(result.measurements), key=lambda found: found.efficiency.middle)
    what = f"{best.stages} stages, {many(best.micro_batches, 'micro-batch')}, {best.schedule}"
    return [
        (f"efficiency, {what}", f"{best.efficiency.middle:.0%} (ideal {best.ideal:.0%})"),
        (f"waiting, {what}", f"{best.one.share('wait'):.0%} (ideal {1 - best.ideal:.0%})"),
    ]


def _halo_figures(result: Result) -> Figures:
    best = min(result.measurements, key=lambda one: one.median)
    return [(f"halo share, exchange {best.layout['exchange']}", f"{halo_share(best):.1%}")]


def _memory_figures(result: Result) -> Figures:
    known = [one for one in result.measurements if one.memory]
    if not known:
        return []
    best = min(known, key=lambda one: max(one.memory))
    return [
        (f"peak memory of a rank, {mesh_text(best.layout)}", f"{max(best.memory) / MB:,.0f} MB")
    ]


def _reading_figures(result: Result) -> Figures:
    last = max(result.measurements, key=lambda one: (one.ranks, one.bytes / one.median))
    return [(f"reading, {last.name}", f"{last.bytes / MB / last.median:,.0f} MB/s")]


_FIGURES: dict[str, Callable[[Result], Figures]] = {
    "strong": _scaling_figures,
    "weak": _scaling_figures,
    "pipeline": _pipeline_figures,
    "halo": _halo_figures,
    "memory": _memory_figures,
    "io": _reading_figures,
}
