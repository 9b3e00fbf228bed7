"""Tables of results: one row for each case, with the figures that its kind of measurement asks for.

The functions are pure. The terminal and the HTML page show the same rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distseg.cli.bench.ratios import Range, pipelines, speed_up
from distseg.cli.bench.results import Measurement

MB = 1e6
Row = dict[str, float | int | str | None]


def rows_of(kind: str, measurements: Sequence[Measurement]) -> list[Row]:
    """Return the rows of the table of results, one for each case.

    Args:
        kind: the kind of measurement, such as ``strong``.
        measurements: the figures, of one result or of several results of the same study.
    """
    return {
        "strong": scaling_rows,
        "weak": scaling_rows,
        "pipeline": pipeline_rows,
        "halo": halo_rows,
        "memory": memory_rows,
        "io": reading_rows,
    }[kind](measurements)


def scaling_rows(measurements: Sequence[Measurement]) -> list[Row]:
    """Return the rows of strong or weak scaling, by increasing number of ranks."""
    ordered = sorted(measurements, key=lambda one: one.ranks)
    return [
        {
            "ranks": one.ranks,
            "mesh": mesh_text(one.layout),
            "image": one.image,
            "images": one.images,
            **_times(one),
            **_scaled(one, ordered),
            **_prediction(one),
            **_memory(one),
            "sent [MB]": one.sent / MB,
            "halo": halo_share(one),
            **_busiest(one),
        }
        for one in ordered
    ]


def _scaled(one: Measurement, ordered: Sequence[Measurement]) -> Row:
    """Return columns with speed-up and efficiency, compared with the smallest number of ranks.

    Their values are None if only one number of ranks was measured.

    Args:
        one: the measurement of the row.
        ordered: all measurements, by increasing number of ranks.
    """
    if len(ordered) == 1:
        return dict.fromkeys(("speed-up", "from", "to", "efficiency"))
    found = speed_up(one, ordered[0])
    return {**_spread("speed-up", found), "efficiency": found.middle / one.ranks}


def pipeline_rows(measurements: Sequence[Measurement]) -> list[Row]:
    """Return a row for each schedule and number of micro-batches of a pipeline.

    The efficiency is the time of one stage over the time of all stages together. Its ideal is
    m / (m + S - 1) for m micro-batches and S stages.
    """
    return [
        {
            "case": found.one.name,
            "stages": found.stages,
            **_times(found.one),
            **_spread("efficiency", found.efficiency),
            "m / (m + S - 1)": found.ideal,
            "waiting": found.one.share("wait"),
            "bubble, ideal": 1 - found.ideal,
            **_prediction(found.one),
            **_memory(found.one),
            **_busiest(found.one),
        }
        for found in pipelines(measurements)
    ]


def halo_rows(measurements: Sequence[Measurement]) -> list[Row]:
    """Return a row for each number of layers between halo exchanges.

    The ratios in a row compare its case with the first case.
    """
    first = measurements[0]
    return [
        {
            "exchange every": one.layout["exchange"],
            "tiles": one.layout["tiles"],
            **_times(one),
            f"/ {first.layout['exchange']}": one.median / first.median,
            "halo": halo_share(one),
            "pixels read": one.redundancy,
            "sent [MB]": one.sent / MB,
            **_prediction(one),
            **_memory(one),
        }
        for one in measurements
    ]


def memory_rows(measurements: Sequence[Measurement]) -> list[Row]:
    """Return a row for each layout, with the memory of its largest and its smallest rank."""
    return [
        {
            "layout": one.name,
            "ranks": one.ranks,
            "largest rank [MB]": max(one.memory) / MB if one.memory else None,
            "smallest rank [MB]": min(one.memory) / MB if one.memory else None,
            "predicted [MB]": one.predicted["memory"] / MB if one.predicted else None,
            "measured / predicted": max(one.memory) / one.predicted["memory"]
            if one.memory and one.predicted
            else None,
            "median [s]": one.median,
        }
        for one in measurements
    ]


def reading_rows(measurements: Sequence[Measurement]) -> list[Row]:
    """Return two rows for each number of ranks that read a store: from the disk and from memory."""
    return [
        {
            "case": one.name,
            "ranks": one.ranks,
            "images": one.images,
            **_times(one),
            "MB": one.bytes / MB,
            "MB/s": one.bytes / MB / one.median,
            "Mpx/s": one.pixels / 1e6 / one.median,
        }
        for one in measurements
    ]


def halo_share(one: Measurement) -> float:
    """Return the fraction of a rank's time in a step that halo exchanges took."""
    return one.share("halo")


def mesh_text(layout: Mapping) -> str:
    """Return a mesh as text, such as ``2 x (1x2) x 1`` for samples, tiles and stages."""
    return f"{layout['samples']} x ({layout['tiles']}) x {layout['stages']}" if layout else ""


def _times(one: Measurement) -> Row:
    return {"median [s]": one.median, "min [s]": min(one.seconds), "max [s]": max(one.seconds)}


def _spread(name: str, found: Range) -> Row:
    return {name: found.middle, "from": found.low, "to": found.high}


def _prediction(one: Measurement) -> Row:
    seconds = one.predicted["seconds"] if one.predicted else None
    return {
        "predicted [s]": seconds,
        "measured / predicted": one.median / seconds if seconds else None,
    }


def _memory(one: Measurement) -> Row:
    return {"memory [MB]": max(one.memory) / MB if one.memory else None}


def _busiest(one: Measurement) -> Row:
    """Return a column with the rank that computed longest, and its time divided by the mean."""
    if not one.busiest:
        return {"busiest rank": None}
    rank, host, computing, mean = (
        one.busiest[name] for name in ("rank", "host", "computing", "mean")
    )
    over = f", {computing / mean:.2f} x mean" if mean else ""
    return {"busiest rank": f"{rank} on {host}{over}"}
