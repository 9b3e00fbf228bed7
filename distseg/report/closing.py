"""Closing lines of a command: the result, its path, and the next command to type."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from distseg.config.units import duration, many


def closing_of_preparation(store: str) -> str:
    """Return the last line that ``distseg prepare`` prints: the command to type next.

    The command writes a first config for the store.
    """
    return f"next: distseg init {shlex.quote(store)}"


def closing_of_training(
    run: str, epochs: int, steps: int, seconds: float, best: Mapping | None, splits: Sequence[str]
) -> list[str]:
    """Return the last lines that ``distseg train`` prints: the result and the next command.

    Args:
        run: the folder of the run, ``train.output``.
        epochs: the number of epochs that the run has completed, over all its jobs.
        steps: the number of optimizer steps that the run has completed, over all its jobs.
        seconds: the duration of this job.
        best: ``checkpoint`` (a path), ``epoch`` and ``validation`` (scores by name) of the best
            checkpoint; None if no checkpoint was validated.
        splits: the splits of the store.
    """
    done = f"{many(epochs, 'epoch')}, {many(steps, 'step')} in {duration(seconds)}"
    if best is None:
        lines = [f"trained {done}; checkpoints are in {run}/checkpoints"]
    else:
        words = best_score(best["validation"])
        lines = [f"trained {done}; best {words} after epoch {best['epoch']}: {best['checkpoint']}"]
    split = next((name for name in ("test", "val") if name in splits), None)
    if split:
        lines.append(f"next: distseg evaluate {run}" + f" --split {split}" * (split != "test"))
    else:
        lines.append(f"next: distseg predict {run} --images FILE")
    return [*lines, f"report: distseg report {run}"]


def closing_of_early_stop(best: int, last: int, scores: Mapping | None) -> str:
    """Return the line that says why a run ended before its last epoch.

    Args:
        best: number of epochs that were finished when the score was best; 0 if no score was known.
        last: number of epochs that were finished at the last validation.
        scores: the scores of the last validation, by name.
    """
    ends = f"stopped early after epoch {last}"
    if not best:
        return f"{ends}: no validation had a score"
    name = best_score(scores or {}).rpartition(" ")[0]
    waited = many(last - best, "epoch")
    return f"{ends}: the {name} has not improved for {waited}, since epoch {best}"


def closing_of_evaluation(
    run: str, scores: Mapping, beside: Mapping | None, output: str | None
) -> list[str]:
    """Return the last lines that ``distseg evaluate`` prints: scores, file and next command.

    Args:
        run: the folder of the run.
        scores: scores of the network by name.
        beside: scores of the per-pixel baseline by name; None without a baseline.
        output: the file with all scores; None if no file was written.
    """
    line = best_score(scores)
    if beside is not None:
        line += f" (a classifier of single pixels: {best_score(beside).rpartition(' ')[2]})"
    lines = [line + (f"; all scores are in {output}" if output else "")]
    lines.append(f"next: distseg predict {run} --images FILE")
    return [*lines, f"report: distseg report {run}"]


def closing_of_prediction(folder: str, maps: Sequence[Path], store: str | None) -> list[str]:
    """Return the last lines that ``distseg predict`` prints for a network that predicts class maps.

    Args:
        folder: the folder with the results.
        maps: the first file of each class map.
        store: the store that was predicted; None for image files.
    """
    lines = [f"{many(len(maps), 'class map')} in {folder}"]
    drawable = next((path for path in maps if path.suffix == ".h5"), None)
    if store and drawable:
        lines.append(f"next: distseg plot overlay {drawable} --store {store}")
    return lines


def notes_on_places(
    placed: Mapping[str, bool], formats: Sequence[str], volumes: bool = False, voxels: bool = False
) -> list[str]:
    """Return a note if some class maps lack the georeference (CRS, transform) of their image.

    Args:
        placed: for each image name, True if the image file has a georeference.
        formats: the formats of the class maps, ``predict.formats``, that can hold it.
        volumes: True if the images are volumes.
        voxels: True if the georeferences are affines or spacings, such as in NIfTI.

    Returns:
        One note, or an empty list if no image has a georeference or no class map lacks one.
    """
    there = [name for name, known in placed.items() if known]
    elsewhere = [name for name, known in placed.items() if not known]
    if not there:
        return []
    if volumes and not {"nifti", "nrrd", "zarr"} & set(formats):
        return [
            f"note: {there[0]} says where its voxels lie (affine), which only class maps in NIfTI "
            "and NRRD keep for other programs, and OME-Zarr if the affine neither turns nor "
            "mirrors: add nifti or nrrd to predict.formats"
        ]
    if voxels and not volumes and not {"zarr", "tiff", "cog", "gpkg"} & set(formats):
        return [
            f"note: {there[0]} says how large its pixels are, which these class maps do not keep "
            "for other programs: add zarr to predict.formats"
        ]
    if not voxels and not volumes and not {"tiff", "cog", "gpkg", "geojson"} & set(formats):
        return [
            f"note: {there[0]} says where on earth it lies (CRS, transform), which these class "
            "maps do not keep for other programs: add tiff to predict.formats"
        ]
    if not elsewhere or voxels:
        return []
    return [
        f"note: {elsewhere[0]} does not say where on earth it lies (CRS, transform), but "
        f"{len(there)} of the {len(placed)} images do: its class map does not say so either"
    ]


def best_score(scores: Mapping) -> str:
    """Return the main score of a validation as text, such as "mean IoU 0.512".

    It is RMSE, mean IoU or accuracy: the first of these that ``scores`` (values by name) has.
    Return "score unknown" if ``scores`` has none of them.
    """
    for name, words in (("rmse", "RMSE"), ("mean_iou", "mean IoU"), ("accuracy", "accuracy")):
        if scores.get(name) is not None:
            return f"{words} {scores[name]:.3f}"
    return "score unknown"
