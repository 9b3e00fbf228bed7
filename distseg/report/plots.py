"""Draws pictures of runs and benchmarks: training curves, one segmented image, and scaling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from distseg.report.log import read_log
from distseg.report.overlay import plot_overlay
from distseg.report.style import FAINT, INK, PALETTE, new_figure

__all__ = ["plot_curves", "plot_overlay", "plot_scaling", "smooth"]

_STYLES = ("-", "--", ":", "-.")
_OF_IMAGES = ("accuracy", "auc", "mae", "rmse")  # scores of networks that label whole images


def plot_curves(log_paths: Sequence[str | Path], output: str | Path) -> None:
    """Draw loss, validation scores and learning rate of one or several runs over optimizer steps.

    The loss is drawn for each step and smoothed. The validation scores are the IoU of each class,
    or the scores of networks that label whole images.

    Args:
        log_paths: log files, or folders of runs.
        output: the file to write, such as ``curves.png``.

    Raises:
        ValueError: no path is given, a log does not exist, or a log has no step.
    """
    if not log_paths:
        raise ValueError("no log to draw: give the folder of at least one run (train.output)")
    logs = [read_log(path) for path in log_paths]
    for path, log in zip(log_paths, logs):
        if not any(line["kind"] == "step" for line in log):
            raise ValueError(
                f"{path} holds no line of kind 'step', so there is no curve to draw: train first, "
                "or name another run"
            )
    panels = [(_draw_loss, 3.0)]
    panels += (
        [(_draw_validation, 2.6)]
        if any(
            {"iou", *_OF_IMAGES} & set(line)
            for log in logs
            for line in log
            if line["kind"] == "validation"
        )
        else []
    )
    panels += [(_draw_rate, 1.3)] if any("lr" in line for log in logs for line in log) else []
    heights = [height for _, height in panels]
    with new_figure(output, (8.5, sum(heights) + 0.8), layout="constrained") as figure:
        axes = figure.subplots(len(panels), 1, sharex=True, height_ratios=heights, squeeze=False)[
            :, 0
        ]
        for axis, (draw, _) in zip(axes, panels):
            draw(axis, logs, _run_names(log_paths))
            if axis.get_legend_handles_labels()[0]:
                axis.legend(loc="upper left", bbox_to_anchor=(1.005, 1.0))
        axes[-1].set_xlabel("optimizer step")


def series(
    log: list[dict], kind: str, field: str, key: str | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return a field of a log over the steps: an array of steps and an array of values.

    Only lines of one kind that have the field are used.

    Args:
        log: the lines of a log.
        kind: ``step`` or ``validation``.
        field: the name of the field.
        key: if the field is a dict, the key of the value, such as the name of a class.

    Returns:
        Steps (n,) and values (n,) float64; null becomes NaN.
    """
    lines = [line for line in log if line["kind"] == kind and field in line]
    values = [line[field] if key is None else (line[field] or {}).get(key) for line in lines]
    return np.array([line["step"] for line in lines]), np.array(
        [np.nan if v is None else v for v in values], dtype=float
    )


def smooth(values: np.ndarray, span: float) -> np.ndarray:
    """Return ``values`` smoothed by an exponential moving average over about ``span`` values.

    The average is bias-corrected, so it does not start near zero. NaN values are skipped.
    """
    keep = 1 - 2 / (span + 1)
    total, weight, means = 0.0, 0.0, []
    for value in values:
        if np.isfinite(value):
            total, weight = keep * total + value, keep * weight + 1
        means.append(total / weight if weight else np.nan)
    return np.array(means)


def _run_names(paths: Sequence[str | Path]) -> list[str]:
    """Return the names of the runs' folders, or the paths if two folders have the same name."""
    folders = [path.parent if path.suffix == ".jsonl" else path for path in map(Path, paths)]
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(path) for path in paths]


def _draw_loss(axis, logs: list[list[dict]], names: list[str]) -> None:
    """Draw the training and validation losses of runs, smoothed if there are many steps."""
    for index, (log, name) in enumerate(zip(logs, names)):
        steps, loss = series(log, "step", "loss")
        prefix, color = (f"{name}: " if len(logs) > 1 else ""), PALETTE[index % len(PALETTE)]
        span = len(loss) // 40
        if span > 1:
            axis.plot(
                steps,
                loss,
                color=color,
                alpha=0.22,
                linewidth=0.8,
                label="_" if prefix else "each step",
            )
            axis.plot(
                steps,
                smooth(loss, span),
                color=color,
                linewidth=1.8,
                label=f"{prefix}mean of ~{span}",
            )
        else:
            axis.plot(steps, loss, color=color, linewidth=1.5, label=f"{prefix}training")
        steps, loss = series(log, "validation", "loss")
        if len(steps):
            axis.plot(
                steps,
                loss,
                color=INK if len(logs) == 1 else color,
                marker="o",
                markersize=3.5,
                linewidth=1.0,
                label=f"{prefix}validation",
            )
    axis.set(title="Loss")
    _stretch(axis, [series(log, "step", "loss")[1] for log in logs])


def _stretch(axis, losses: list[np.ndarray]) -> None:
    """Make the y axis logarithmic if the largest loss is over 20 times the median loss.

    All losses must be positive for this. Otherwise the axis starts at 0, unless a loss is negative.

    Args:
        axis: the matplotlib axes.
        losses: for each run an array of its losses; values that are not finite are ignored.
    """
    values = np.concatenate(losses)
    values = values[np.isfinite(values)]
    if len(values) and values.min() > 0 and values.max() > 20 * np.median(values):
        axis.set_yscale("log")
    elif len(values) and values.min() >= 0:
        axis.set_ylim(bottom=0)


def _draw_validation(axis, logs: list[list[dict]], names: list[str]) -> None:
    """Draw the validation scores of runs: the IoU of each class, or scores of whole images."""
    classes = list(
        dict.fromkeys(key for log in logs for line in log for key in (line.get("iou") or {}))
    )
    of_images = (
        []
        if classes
        else [kind for kind in _OF_IMAGES if any(kind in line for log in logs for line in log)]
    )
    for index, (log, name) in enumerate(zip(logs, names)):
        for number, label in enumerate(classes or of_images):
            steps, iou = series(log, "validation", *(("iou", label) if classes else (label,)))
            text = f"{name}: {label}" if len(logs) > 1 else label
            last = f" {iou[-1]:.3f}" if len(iou) and np.isfinite(iou[-1]) else ""
            axis.plot(
                steps, iou, label=text + last,
                linestyle=_STYLES[index % len(_STYLES)], color=PALETTE[number % len(PALETTE)],
                marker="o", markersize=3.5, linewidth=1.6,
            )  # fmt: skip
    if of_images and "rmse" in of_images:
        axis.set(title="Validation error")
    else:
        axis.set(title="Validation" if of_images else "Validation IoU", ylim=(-0.02, 1.02))


def _draw_rate(axis, logs: list[list[dict]], names: list[str]) -> None:
    for index, log in enumerate(logs):
        axis.plot(*series(log, "step", "lr"), color=PALETTE[index % len(PALETTE)], linewidth=1.5)
    axis.set(title="Learning rate")
    axis.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3), useMathText=True)
    axis.set_ylim(bottom=0)


def plot_scaling(rows: Sequence[Mapping], output: str | Path, title: str = "Speed-up") -> None:
    """Draw measured speed-up beside the ideal line, with the parallel efficiency at each point.

    Args:
        rows: dicts with the keys ``processes`` and ``speedup`` (the median). Optional keys are
            ``low`` and ``high`` (the range of the speed-up) and ``series`` (the rows of one series
            form one line).
        output: the file to write, such as ``scaling.png``.
        title: title of the picture.

    Raises:
        ValueError: a row lacks ``processes`` or ``speedup``.
    """
    for row in rows:
        if not {"processes", "speedup"} <= set(row):
            raise ValueError(
                "each row of a scaling plot must have the keys processes and speedup, got "
                f"{', '.join(row) or 'nothing'}"
            )
    counts = sorted({row["processes"] for row in rows})
    with new_figure(output, (6.0, 4.6), layout="constrained") as figure:
        axis = figure.subplots()
        axis.plot(counts, counts, color=FAINT, linestyle="--", linewidth=1.2, label="ideal")
        for index, name in enumerate(dict.fromkeys(row.get("series", "measured") for row in rows)):
            _draw_series(
                axis,
                [row for row in rows if row.get("series", "measured") == name],
                name,
                PALETTE[index % len(PALETTE)],
            )
        for scale in (axis.set_xscale, axis.set_yscale):
            scale("log", base=2)
        axis.set_xticks(counts, [str(n) for n in counts])
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
        axis.set(title=title, xlabel="processes", ylabel="times as fast as one process")
        axis.margins(0.12)
        axis.legend(loc="upper left")


def _draw_series(axis, rows: list[Mapping], name: str, color: str) -> None:
    """Draw the speed-up of one series over the number of processes.

    The range of each speed-up is drawn as an error bar. The efficiency, speed-up / processes, is
    written beside each point in percent.

    Args:
        axis: the matplotlib axes.
        rows: the rows of this series, in the form that :func:`plot_scaling` takes.
        name: the name of the series in the legend.
        color: a colour of matplotlib.
    """
    from matplotlib.patheffects import withStroke

    rows = sorted(rows, key=lambda row: row["processes"])
    counts, speedups = [row["processes"] for row in rows], [row["speedup"] for row in rows]
    ranges = [
        [s - row.get("low", s) for s, row in zip(speedups, rows)],
        [row.get("high", s) - s for s, row in zip(speedups, rows)],
    ]
    axis.errorbar(
        counts,
        speedups,
        yerr=ranges,
        color=color,
        marker="o",
        linewidth=1.8,
        markersize=5,
        capsize=3,
        label=name,
    )
    for n, speedup in zip(counts, speedups):
        if n > 1:
            text = axis.annotate(
                f"{speedup / n:.0%}",
                (n, speedup),
                xytext=(7, -11),
                textcoords="offset points",
                color=color,
                fontsize=9,
            )
            text.set_path_effects([withStroke(linewidth=3, foreground="white")])
