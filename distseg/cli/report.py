"""Run ``distseg report``: gather the results in a run's folder for one HTML page."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from distseg.cli.evaluate import EVALUATIONS, folder_of, score_table
from distseg.cli.load import load_predictor, store_for
from distseg.cli.pictures import Gallery
from distseg.cli.planned_memory import planned_memory
from distseg.comm.alone import Alone
from distseg.comm.launch import set_up
from distseg.config.patchgd import PatchConfig
from distseg.config.settings import Config, DataBase
from distseg.config.units import duration, si
from distseg.inference.image_scores import flat
from distseg.inference.predictor import Predictor
from distseg.report.chart import Line, condensed, line_chart
from distseg.report.closing import best_score
from distseg.report.disk import atomic_write
from distseg.report.log import FILE, read_log
from distseg.report.page import Chart, Evaluated, Pictures, RunPage, run_page, settings_beside
from distseg.report.plots import series
from distseg.report.style import ERROR, UNLABELLED, class_colors
from distseg.training.checkpoint.files import FOLDER, find, read_manifest, read_run_manifest
from distseg.training.resume import position_of

_ROWS = 1000  # images in the table
_CLASSES = 40  # most classes of a confusion matrix that is shown
_LINES = 12  # classes in a chart
_POINTS = 200  # validations in a chart that are marked by symbols
_KEYS = {"split": str, "store": str, "checkpoint": str, "network": dict, "images": list}
_OF_IMAGES = ("accuracy", "mean_accuracy", "auc", "kappa", "mae", "rmse", "r2")


def run_report(
    run: str,
    config: Config | PatchConfig,
    output: str | None,
    predictions: str = "predictions",
    count: int = 2,
) -> int:
    """Write the report of a run, and return the exit status.

    Args:
        run: the folder of a run or of a checkpoint.
        config: the settings of the run.
        output: the HTML file; None for ``report.html`` in the run's folder.
        predictions: the folder of predicted files, whose class maps are drawn.
        count: number of the worst images, and of the best images, that are drawn; 0 for none.
    """

    @lru_cache(1)
    def predictor(checkpoint: str) -> Predictor:
        device, _ = set_up(Alone(), config.run.device, config.run.threads)
        return load_predictor(checkpoint, config, Alone(), device)[0]

    # PatchGD has no prediction of its memory.
    planned = partial(planned_memory, config) if isinstance(config, Config) else None
    source = _Reported(run, config.data, predictor, planned, Path(predictions), count)
    path = Path(output) if output else source.folder / "report.html"
    text = run_page(source.page(type(config)().as_plain()))
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as growing:
        growing.write_text(text, encoding="utf-8")
    print(f"{path}: {si(len(text.encode()), 'B')}; open it in a browser, or send it as it is")
    return 0


class _Reported:
    """Run whose files are gathered for its page.

    Args:
        run: the folder of a run or of a checkpoint.
        data: the settings of the data. Images are read from ``data.store`` if the store of the
            evaluation no longer exists.
        predictor: a function that loads the network of a checkpoint.
        planned: a function that returns the planned memory of each rank
            (:func:`distseg.cli.planned_memory.planned_memory` without its first argument); None
            without a prediction.
        predictions: the folder of predicted files.
        count: number of the worst images, and of the best images, that are drawn.
    """

    def __init__(
        self,
        run: str,
        data: DataBase,
        predictor: Callable[[str], Predictor],
        planned: Callable[[Mapping, Mapping], list[float] | None] | None,
        predictions: Path,
        count: int,
    ) -> None:
        self.folder, self.data, self.predictor = Path(folder_of(run)), data, predictor
        self.planned, self.predictions, self.count = planned, predictions, count
        self.best = read_run_manifest(find(run))

    def page(self, default: Mapping) -> RunPage:
        """Return the content of the page.

        Args:
            default: the default settings; the page marks the settings that differ from them.
        """
        folder, best = self.folder, self.best
        last = read_run_manifest(find(folder, "last")) if (folder / FOLDER).is_dir() else best
        log = read_log(folder) if (folder / FILE).exists() else []
        evaluations = self._evaluations()
        notes = [] if log else [f"The run has no {FILE}, so there are no curves."]
        if not evaluations:
            notes.append(
                f"Not evaluated yet: run distseg evaluate {folder}, then this command again."
            )
        return RunPage(
            name=folder.resolve().name,
            summary=_summary(best, last),
            figures=_figures(best, last, log),
            charts=_charts(log),
            evaluations=evaluations,
            facts=[*_facts(best, last, log), *_memory(self.planned, best, log)],
            settings=settings_beside(best["config"], default),
            notes=notes,
        )

    def _evaluations(self) -> list[Evaluated]:
        """Return a part of the page for each evaluation in the run's folder.

        ``distseg evaluate`` wrote the evaluations. A part has pictures of the worst and best
        images.
        """
        records = [_record_in(path) for path in sorted((self.folder / EVALUATIONS).glob("*.json"))]
        return [self._evaluated(each) for each in records]

    def _evaluated(self, record: Mapping) -> Evaluated:
        """Return the part of the page about one evaluation.

        Args:
            record: the content of the file of the evaluation.
        """
        classes, rows = self.best["data"]["classes"], record["images"]
        of_maps = bool(rows) and "mean_iou" in rows[0]
        notes = (
            []
            if _is_current(record, self.folder)
            else [
                f"The checkpoint {record['checkpoint']} was written anew or removed after this "
                "evaluation: evaluate again for scores of the run as it is."
            ]
        )
        pictures: list[Pictures | str] = []
        colours = class_colors(classes, self.best["data"].get("colours"))
        if self.count and not notes:
            pictures = self._pictures(record, colours, of_maps)
        matrix = record.get("confusion") or []
        if len(matrix) > _CLASSES:
            notes.append(f"The confusion matrix of {len(matrix)} classes is in the JSON file only.")
            matrix = []
        return Evaluated(
            record["split"],
            f"{len(rows):,} images of {record['store']}, by the checkpoint {record['checkpoint']}.",
            score_table(record, classes, of_maps),
            classes,
            "pixels" if of_maps else "images",
            matrix,
            [flat(row) for row in rows[:_ROWS]],
            max(0, len(rows) - _ROWS),
            [one for one in pictures if isinstance(one, Pictures)],
            _legend(classes, colours) if of_maps else [],
            notes + [one for one in pictures if isinstance(one, str)],
        )

    def _pictures(
        self, record: Mapping, colours: np.ndarray, of_maps: bool
    ) -> list[Pictures | str]:
        """Return the pictures of the worst and best images, and a note for each that is missing.

        Args:
            record: the content of the file of the evaluation.
            colours: the colours of the classes, (classes, 3) uint8.
            of_maps: True if the network predicts class maps, False if it predicts one label or
                number for each image.
        """
        there = record["store"] if Path(record["store"]).exists() else self.data.store
        try:
            store = store_for(replace(self.data, store=there), self.best)
            store.check_files()
            for row in record["images"]:
                store.size(row["image"])
        except (ValueError, OSError, KeyError) as e:
            return [f"There are no pictures, because the images cannot be read: {e}"]
        checkpoint = str(self.folder / FOLDER / Path(record["checkpoint"]).name)
        gallery = Gallery(store, colours, self.predictions, partial(self.predictor, checkpoint))
        if not of_maps:
            return [*gallery.labelled(record["images"], self.count)]
        return list(gallery.pictures(record["images"], self.count))


def _legend(classes: Sequence[str], colours: np.ndarray) -> list[tuple[str, str]]:
    """Return (name, colour) of each class, for the legend of pictures of class maps."""
    named = [(name, "#" + bytes(colour).hex()) for name, colour in zip(classes, colours)]
    return [*named, ("no label", UNLABELLED), ("error", ERROR)]


def _summary(best: Mapping, last: Mapping) -> str:
    """Return a line about a run: network, store, number of epochs, and whether it is complete."""
    wanted, done = best["config"]["train"]["epochs"], last["epoch"]
    patience = last["config"]["train"].get("patience")
    state = "complete" if done >= wanted else "to be continued"
    if done < wanted and patience and position_of(last).waited >= patience:
        state = f"stopped early: no better score for {position_of(last).waited} epochs"
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(last["time"])) if "time" in last else ""
    return (
        f"{best['config']['model']['name']} on {best['config']['data']['store']}; {done} of "
        f"{wanted} epochs, {state}" + (f"; last checkpoint of {when}" if when else "")
    )


def _figures(best: Mapping, last: Mapping, log: Sequence[Mapping]) -> list[tuple[str, str]]:
    """Return (label, value) for each number at the head of the page.

    Args:
        best: the manifest of the best checkpoint.
        last: the manifest of the last checkpoint.
        log: the lines of the run's log.
    """
    found = []
    validation = best.get("validation") or {}
    if best.get("score") is not None:
        words, _, value = best_score(validation).rpartition(" ")
        found += [(f"best {words}, validation", value), ("after epoch", str(best["epoch"]))]
    if validation.get("loss") is not None:
        found.append(("validation loss after that epoch", f"{validation['loss']:.4g}"))
    found.append(("optimizer steps", f"{last['step']:,}"))
    seconds = _seconds_of_steps(log)
    if len(seconds):
        found.append(("median time of a step", _brief(float(np.median(seconds)))))
    if memory := _peak_memory(log):
        found.append(("peak memory of a rank", si(max(memory), "B")))
    return found


def _facts(best: Mapping, last: Mapping, log: Sequence[Mapping]) -> list[tuple[str, str]]:
    """Return (label, value) for each row of the table on mesh, versions, time and memory.

    The arguments are those of :func:`_figures`.
    """
    config, mesh = best["config"], best["config"]["mesh"]
    shape = f"{mesh['samples']} samples x ({mesh['tiles']}) tiles x {mesh.get('stages', 1)} stages"
    found = [("mesh", shape), ("host", last.get("host", "unknown"))]
    found += [(name, version) for name, version in (best.get("versions") or {}).items()]
    found += [("precision", str(config["train"]["precision"]))]
    found += [("classes", ", ".join(best["data"]["classes"]))]
    seconds = _seconds_of_steps(log)
    if len(seconds):
        low, middle, high = (_brief(float(v)) for v in np.percentile(seconds, (5, 50, 95)))
        found.append(("time of a step", f"{middle} (5 % to 95 %: {low} to {high})"))
    ends = [line for line in log if line["kind"] == "end" and line.get("seconds")]
    if ends:
        found.append(("time of the last job", duration(ends[-1]["seconds"])))
    return found


def _memory(
    planned_for: Callable[[Mapping, Mapping], list[float] | None] | None,
    best: Mapping,
    log: Sequence[Mapping],
) -> list[tuple[str, str]]:
    """Return (label, value) for each row about the memory of ranks, planned and measured.

    Args:
        planned_for: a function that returns the planned memory of each rank, as for
            :class:`_Reported`; None without a prediction.
        best: the manifest of the best checkpoint.
        log: the lines of the run's log.
    """
    found = []
    if memory := _peak_memory(log):
        found.append(("peak memory of each rank", ", ".join(si(m, "B") for m in memory)))
    starts = [line for line in log if line["kind"] == "start"]
    measured = _peak_memory(log, "peak_memory_of_steps")
    planned = None
    if planned_for is not None and starts and measured:
        with suppress(ValueError):  # settings of an earlier version
            planned = planned_for(best, starts[-1])
    if planned is not None and len(planned) == len(measured):
        rows = [f"{si(a, 'B')}, {si(b, 'B')} ({b / a:.0%})" for a, b in zip(planned, measured)]
        found.append(("memory of each rank in steps: planned, measured", "; ".join(rows)))
    if limit := best["config"].get("streaming", {}).get("memory"):
        found.append(("memory limit of a rank (streaming.memory)", str(limit)))
    return found


def _brief(seconds: float) -> str:
    """Return a time in seconds as text, such as ``135 ms``."""
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _peak_memory(log: Sequence[Mapping], kind: str = "peak_memory") -> list[int]:
    """Return the peak memory of each rank in bytes, in the last job that recorded it.

    Args:
        log: the lines of the run's log.
        kind: the entry of the log, ``peak_memory`` or ``peak_memory_of_steps``.
    """
    known = [line[kind] for line in log if line.get(kind)]
    return known[-1] if known else []


def _seconds_of_steps(log: Sequence[Mapping]) -> np.ndarray:
    """Return the seconds between each two consecutive steps of the same epoch and job."""
    steps = [line for line in log if line["kind"] == "step" and line.get("seconds") is not None]
    return np.array(
        [
            b["seconds"] - a["seconds"]
            for a, b in zip(steps, steps[1:])
            if a["epoch"] == b["epoch"] and b["seconds"] > a["seconds"]
        ]
    )


def _charts(log: list[dict]) -> list[Chart]:
    """Return the charts of a log: loss, scores, learning rate and norm of the gradient."""
    names = list(dict.fromkeys(key for line in log for key in (line.get("iou") or {})))
    train = condensed("training", *series(log, "step", "loss"))
    validation = _marked("validation", 1, *series(log, "validation", "loss"))
    mean = _marked("mean", 7, *series(log, "validation", "mean_iou"))
    classes = [
        _marked(name, n % 7, *series(log, "validation", "iou", name))
        for n, name in enumerate(names)
    ]
    some = "" if len(names) <= _LINES else f" (the first {_LINES} of {len(names)} classes)"
    wanted = [("Loss", [train, validation], ".4g")]
    wanted.append((f"Validation IoU{some}", [mean, *classes[:_LINES]], ".3f"))
    for kind in () if names else _OF_IMAGES:
        line = _marked(kind, 1, *series(log, "validation", kind))
        wanted.append((f"Validation: {kind.replace('_', ' ')}", [line], ".3f"))
    rate = condensed("learning rate", *series(log, "step", "lr"))
    norm = condensed("norm", *series(log, "step", "gradient_norm"))
    wanted += [("Learning rate", [rate], ".4g"), ("Norm of the gradient", [norm], ".4g")]
    return [chart for each in wanted if (chart := _chart(*each)) is not None]


def _marked(name: str, style: int, steps: np.ndarray, values: np.ndarray) -> Line:
    """Return a line of a chart; its points get symbols if there are only a few.

    Args:
        name: the name of the line.
        style: the number of the line's colour and symbol.
        steps: the optimizer step of each point.
        values: the value of each point.
    """
    return replace(condensed(name, steps, values, style), points=len(values) <= _POINTS)


def _chart(title: str, lines: Sequence[Line], form: str) -> Chart | None:
    """Return a chart of the lines that have finite values, or None if there are none.

    Args:
        title: the title.
        lines: the lines.
        form: the format of the last value of each line.
    """
    known = [(line, line.y[np.isfinite(line.y)]) for line in lines]
    known = [(line, values) for line, values in known if len(values)]
    if not known:
        return None
    every = np.concatenate([values for _, values in known])
    steep = bool(every.min() > 0 and every.max() > 20 * np.median(every))
    legend = [(line.style, line.name, format(values[-1], form)) for line, values in known]
    ends = ", ".join(f"{name} {last}" for _, name, last in legend)
    description = f"{title} over optimizer steps. Last values: {ends}."
    svg = line_chart([line for line, _ in known], description, "optimizer step", steep)
    return Chart(title + (" (logarithmic)" if steep else ""), svg, legend)


def _record_in(path: Path) -> dict:
    """Return the content of a file of ``distseg evaluate``.

    Raises:
        ValueError: the file is damaged, or ``distseg evaluate`` did not write it.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        record = None
    if not isinstance(record, dict) or any(type(record.get(k)) is not t for k, t in _KEYS.items()):
        raise ValueError(
            f"{path} is damaged, or was not written by distseg evaluate: remove it, or evaluate "
            "again"
        )
    return record


def _is_current(record: Mapping, folder: Path) -> bool:
    """Return True if the evaluated checkpoint is still in the run's folder, unchanged."""
    checkpoint = folder / FOLDER / Path(record["checkpoint"]).name
    try:
        return read_manifest(checkpoint).get("digest") == record.get("digest")
    except (ValueError, OSError):
        return False
