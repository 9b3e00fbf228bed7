"""Pictures of results (PNG): what was measured, over what was predicted and what is ideal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from distseg.cli.bench.ratios import Staged, pipelines, predicted_speed_up, speed_up
from distseg.cli.bench.results import Measurement, Result
from distseg.cli.bench.rows import MB
from distseg.report.disk import atomic_write
from distseg.report.plots import plot_scaling
from distseg.report.style import FAINT, PALETTE, new_figure


def draw_result(result: Result, path: Path) -> None:
    """Draw the picture of a result to a file, which appears only when it is complete."""
    draw = {
        "strong": _scaling,
        "weak": _scaling,
        "pipeline": _pipeline,
        "halo": _halo,
        "memory": _memory,
        "io": _reading,
    }[result.kind]
    with atomic_write(path) as growing:
        picture = growing.with_suffix(".png")  # matplotlib chooses the format by the ending
        try:
            draw(result, picture)
            picture.replace(growing)
        finally:
            picture.unlink(missing_ok=True)


def scaling_points(measurements: Sequence[Measurement]) -> list[dict]:
    """Return the measured and the predicted speed-ups as points for :func:`plot_scaling`."""
    ordered = sorted(measurements, key=lambda one: one.ranks)
    first, points = ordered[0], []
    for one in ordered:
        found = speed_up(one, first)
        points.append(
            {
                "series": "measured",
                "processes": one.ranks,
                "speedup": found.middle,
                "low": found.low,
                "high": found.high,
            }
        )
    for one in ordered:
        predicted = predicted_speed_up(one, first)
        if predicted is not None:
            points.append({"series": "predicted", "processes": one.ranks, "speedup": predicted})
    return points


def _scaling(result: Result, path: Path) -> None:
    title = f"{result.kind.capitalize()} scaling"
    if len(result.measurements) == 1:  # there is no speed-up yet
        _seconds(result, path, (title, "", [result.measurements[0].name]))
    else:
        plot_scaling(scaling_points(result.measurements), path, title)


def _pipeline(result: Result, path: Path) -> None:
    found = pipelines(result.measurements)
    counts = sorted({one.micro_batches for one in found})
    with new_figure(path, (6.0, 4.6), layout="constrained") as figure:
        axis = figure.subplots()
        ideal = sorted({(one.micro_batches, one.ideal) for one in found})
        axis.plot(*zip(*ideal), "--", color=FAINT, label="m / (m + S - 1)")
        for color, schedule in zip(PALETTE, dict.fromkeys(one.schedule for one in found)):
            _efficiencies(axis, [one for one in found if one.schedule == schedule], color)
        axis.set_xscale("log", base=2)
        axis.set_xticks(counts, [str(m) for m in counts])
        axis.set(title=f"Pipeline of {found[0].stages} stages", xlabel="micro-batches m")
        axis.set_ylabel("efficiency, t(1 stage) / (S t(S stages))")
        axis.set_ylim(bottom=0)
        axis.legend()


def _efficiencies(axis, found: Sequence[Staged], color: str) -> None:
    """Draw the efficiency of one schedule over the number of micro-batches.

    Args:
        axis: the matplotlib axes.
        found: the steps with this schedule.
        color: a colour of matplotlib.
    """
    m, schedule = [one.micro_batches for one in found], found[0].schedule
    middles = [one.efficiency.middle for one in found]
    low = [one.efficiency.middle - one.efficiency.low for one in found]
    high = [one.efficiency.high - one.efficiency.middle for one in found]
    axis.errorbar(m, middles, [low, high], color=color, marker="o", capsize=3, label=schedule)
    known = [(one.micro_batches, one.predicted) for one in found if one.predicted is not None]
    if known:
        axis.plot(*zip(*known), ":", color=color, label=f"{schedule}, predicted")


def _halo(result: Result, path: Path) -> None:
    names = [one.layout["exchange"] for one in result.measurements]
    _seconds(result, path, ("Halo exchange", "layers between exchanges", names))


def _seconds(result: Result, path: Path, words: tuple[str, str, Sequence[str]]) -> None:
    """Draw the seconds of each case as a bar.

    Args:
        result: the result.
        path: the picture.
        words: title, label of the x axis, and names of the cases.
    """
    title, x_label, names = words
    _bars(
        result.measurements,
        path,
        (title, x_label, "seconds of a step"),
        names,
        lambda one: (one.median, one.predicted["seconds"] if one.predicted else None),
        lambda one: (min(one.seconds), max(one.seconds)),
    )


def _memory(result: Result, path: Path) -> None:
    _bars(
        result.measurements,
        path,
        ("Memory of the largest rank", "layout", "MB"),
        [one.name.replace(", ", "\n") for one in result.measurements],
        lambda one: (
            max(one.memory, default=0) / MB,
            one.predicted["memory"] / MB if one.predicted else None,
        ),
        lambda one: (max(one.memory, default=0) / MB,) * 2,
    )


def _reading(result: Result, path: Path) -> None:
    _bars(
        result.measurements,
        path,
        ("Reading of crops", "", "MB/s"),
        [one.name.replace(", ", "\n") for one in result.measurements],
        lambda one: (one.bytes / MB / one.median, None),
        lambda one: (one.bytes / MB / max(one.seconds), one.bytes / MB / min(one.seconds)),
    )


def _bars(
    measurements: Sequence[Measurement],
    path: Path,
    words: tuple[str, str, str],
    names: Sequence[str],
    values: Callable[[Measurement], tuple[float, float | None]],
    spread: Callable[[Measurement], tuple[float, float]],
) -> None:
    """Draw a bar with its range for each case, and a mark for its prediction.

    Args:
        measurements: the cases.
        path: the picture.
        words: the title and the labels of both axes.
        names: the name of each case under its bar.
        values: returns the measured and the predicted value of a case.
        spread: returns the smallest and the largest measured value of a case.
    """
    title, x_label, y_label = words
    places = range(len(measurements))
    measured, predicted = zip(*map(values, measurements))
    low, high = zip(*map(spread, measurements))
    ranges = [[m - a for m, a in zip(measured, low)], [b - m for m, b in zip(measured, high)]]
    with new_figure(path, (max(5.0, 1.3 * len(names) + 1.5), 4.2), layout="constrained") as figure:
        axis = figure.subplots()
        axis.bar(places, measured, 0.6, yerr=ranges, capsize=3, color=PALETTE[0], label="measured")
        known = [(x, y) for x, y in zip(places, predicted) if y is not None]
        if known:
            axis.scatter(*zip(*known), marker="D", color=PALETTE[1], zorder=3, label="predicted")
        axis.set_xticks(places, names, fontsize=8)
        axis.set(title=title, xlabel=x_label, ylabel=y_label)
        axis.legend()
