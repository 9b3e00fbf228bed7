"""Run ``distseg evaluate``: print the scores of a run, and write them as JSON and CSV."""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from distseg.cli.load import check_types, load_predictor, store_for
from distseg.comm.launch import first_on_node, raise_jointly, set_up
from distseg.config.patchgd import PatchConfig
from distseg.config.settings import Config
from distseg.config.units import many
from distseg.data.store.store import Store
from distseg.inference.boundary import with_boundaries
from distseg.inference.evaluate import evaluate, score_rows
from distseg.inference.image_scores import flat, rows_of_images, rows_of_maps
from distseg.inference.images import most_frequent, outputs_of_split, scores_of_images
from distseg.inference.metrics import scores
from distseg.inference.pixel_baseline import baseline
from distseg.inference.predictor import Predictor, check_images
from distseg.report.closing import closing_of_evaluation
from distseg.report.disk import atomic_write
from distseg.report.log import plain
from distseg.report.tables import table
from distseg.training.checkpoint.files import FOLDER, find

EVALUATIONS = "evaluation"  # subfolder of a run
_WORST = 5  # images that are listed on the screen
_CLASSES = 12  # a confusion matrix of more classes is only written to the file


def run_evaluate(
    run: str, config: Config | PatchConfig, world, split: str, output: str | None, tolerance: int
) -> int:
    """Print and write the scores of a run on a split, beside those of the per-pixel baseline.

    All ranks must call it together. Return the exit status of the command. The baseline is left out
    for networks with one label per image, and if a training image has no labels.

    Args:
        run: the folder of a run or of a checkpoint.
        config: the settings.
        world: the communicator of all ranks.
        split: the split of the store.
        output: the JSON file for the scores; None for ``evaluation/SPLIT.json`` in the run's
            folder. The table of images is written beside it, with the ending ``.csv``.
        tolerance: the tolerance of the scores of boundaries in pixels; 0 for no such scores.
    """
    device, threads = set_up(world, config.run.device, config.run.threads)
    predictor, manifest = load_predictor(run, config, world, device)
    checks = first_on_node(world)
    with raise_jointly(world):
        store = store_for(config.data, manifest, config.streaming.memory)
        if checks:
            store.check_files()
        _check_store(store, split, manifest, predictor, run)
        check_images(predictor, {store.size(name): name for name in store.split(split)})
    if world.rank == 0:
        print(threads)
    if store.of_images:
        found = _of_images(predictor, store, split, world)
    else:
        found = _of_maps(predictor, store, split, world, tolerance)
    if world.rank == 0:
        origin = {"store": str(store.path), "checkpoint": find(run).name}
        origin |= {key: manifest.get(key) for key in ("step", "digest")}
        folder = folder_of(run)
        path = Path(output) if output else _default_output(folder, split)
        print(
            f"{split} split of {store.path}: {many(len(store.split(split)), 'image')}; network: "
            f"{find(run)}{'; baseline: a classifier of single pixels' * ('colour' in found)}"
        )
        print(*_lines(found, store, split, path), sep="\n")
        if path:
            _write(path, {"split": split, **found, **origin})
        else:
            print(
                f"note: nothing is written, because {folder} is not the folder of a run, or you "
                "may not write to it: give --output FILE"
            )
        written = None if path is None else str(path)
        network, colour = found["network"], found.get("colour")
        print(*closing_of_evaluation(folder, network, colour, written), sep="\n")
    return 0


def folder_of(run: str) -> str:
    """Return the folder of the run to which a checkpoint belongs.

    If the checkpoint is not inside a run's folder, return ``run``.

    Args:
        run: the folder of a run or of a checkpoint.
    """
    checkpoint = find(run)
    return str(checkpoint.parents[1] if checkpoint.parent.name == FOLDER else checkpoint)


def _check_store(store: Store, split: str, manifest: dict, predictor: Predictor, run: str) -> None:
    """Refuse a store that does not fit the network, or images without labels.

    Raises:
        ValueError: classes, dtype or kind of labels differ from those of the training, or an image
            of the split has no labels.
    """
    if store.classes != manifest["data"]["classes"]:
        raise ValueError(
            f"{run} was trained on the classes {manifest['data']['classes']}, but this store has "
            f"{store.classes}: evaluate on a store of the same classes"
        )
    check_types(store, split, manifest)
    if store.of_images != predictor.model.of_image:
        makes, has = ("images", "pixels") if predictor.model.of_image else ("pixels", "images")
        raise ValueError(
            f"{run} is a network for labels of {makes}, but {store.path} has labels of {has}: "
            f"evaluate the run on a store with labels of {makes}"
        )
    unlabelled = [
        name for name in store.split(split) if not (store.has_labels(name) or store.of_images)
    ]
    if unlabelled:
        raise ValueError(
            f"image {unlabelled[0]!r} of {store.path} has no labels to evaluate on: choose "
            f"another split than {split!r}, or prepare the store with masks"
        )


def _of_maps(predictor: Predictor, store: Store, split: str, world, tolerance: int) -> dict:
    """Return the scores of a network that predicts class maps, as a dict for the JSON file.

    All ranks must call it together. The dict has the scores of the network (``network``) and, if
    all training images have labels, of the per-pixel baseline (``colour``), the confusion matrix
    and the table of images. With a tolerance above 0, there are also scores of boundaries and the
    tolerance.
    """
    evaluation = evaluate(predictor, store, split, world, tolerance=tolerance)
    matrices = {"network": evaluation.matrix}
    if all(store.has_labels(name) for name in store.split("train")):
        matrices["colour"] = baseline(store, split, world)
    classes, counts, boundaries = store.classes, evaluation.counts, evaluation.boundaries
    found = {name: scores(matrix, classes) for name, matrix in matrices.items()}
    if boundaries is not None:
        found["network"] = with_boundaries(found["network"], boundaries.sum(0), classes)
        found["tolerance"] = tolerance
    return {
        **found,
        "confusion": evaluation.matrix.tolist(),
        "images": rows_of_maps(store.split(split), counts, classes, boundaries),
    }


def _of_images(predictor: Predictor, store: Store, split: str, world) -> dict:
    """Return the scores of a network with one output per image, as a dict for the JSON file.

    All ranks must call it together. The dict has the scores (``network``), the table of images
    and, for classes, the confusion matrix.
    """
    outputs = outputs_of_split(predictor, store, split, world)
    network = scores_of_images(*outputs, store.classes)
    found = {
        "network": network,
        "images": rows_of_images(store.split(split), *outputs, store.classes),
    }
    return {**found, "confusion": network["confusion"]} if "confusion" in network else found


def _lines(found: dict, store: Store, split: str, path: Path | None) -> list[str]:
    """Return the lines for the screen: scores, confusion matrix and the worst images.

    Args:
        found: the result of the evaluation.
        store: the store.
        split: the split of the store.
        path: the JSON file; None if no file is written.
    """
    lines = [table(score_table(found, store.classes, not store.of_images))]
    if store.of_images:
        lines += _lines_below(found["network"], store, split)
    if "tolerance" in found:
        lines.append(f"boundaries with a tolerance of {found['tolerance']} pixels")
    if "confusion" in found and len(store.classes) <= _CLASSES:
        what = "images" if store.of_images else "pixels"
        lines += ["", f"confusion matrix in {what}: true classes down, predicted classes across"]
        lines.append(table(confusion_rows(found["confusion"], store.classes)))
    lines += [
        "",
        f"worst {min(_WORST, len(found['images']))} of {many(len(found['images']), 'image')}",
    ]
    if path:
        lines[-1] += f"; all are in {path.with_suffix('.csv')}"
    rows = found["images"][:_WORST]
    return [*lines, table([{k: v for k, v in r.items() if k != "classes"} for r in rows]), ""]


def confusion_rows(matrix: Sequence[Sequence[int]], classes: Sequence[str]) -> list[dict]:
    """Return the rows of the table of a confusion matrix, one for each true class."""
    return [{"true class": name, **dict(zip(classes, row))} for name, row in zip(classes, matrix)]


def score_table(found: Mapping, classes: list[str], of_maps: bool) -> list[dict]:
    """Return the rows of the table of scores, such as one for each class.

    Args:
        found: the result of an evaluation.
        classes: names of the classes.
        of_maps: True if the network labels pixels, False if it has one output per image.
    """
    if of_maps:
        names = {"network": "network", "colour": "baseline"}
        methods = {name: found[key] for key, name in names.items() if key in found}
        return score_rows(methods, classes)
    network = found["network"]
    if "classes" not in network:
        return [{"number": classes[0], **network}]
    rows = [{"class": name, **row} for name, row in network["classes"].items()]
    total = sum(row["images"] for row in rows)
    whole = {"accuracy": network["accuracy"], "precision": None, "auc": network["auc"]}
    return [*rows, {"class": "all", **whole, "images": total}]


def _lines_below(network: Mapping, store: Store, split: str) -> list[str]:
    """Return lines below the table of scores: the accuracy and kappa of an image classifier.

    The list is empty for a network that predicts a number for each image instead.

    Args:
        network: the scores of the network.
        store: the store.
        split: the split of the store.
    """
    if "classes" not in network:
        return []
    lines = [
        f"accuracy {network['accuracy']:.4f}; for comparison, always predicting the most "
        f"frequent class of the training images: {most_frequent(store, split):.4f}"
    ]
    if network["kappa"] is not None:
        lines.append(f"quadratic weighted kappa {network['kappa']:.4f}, for ordered classes")
    return lines


def _default_output(folder: str, split: str) -> Path | None:
    """Return the JSON file of an evaluation in the folder of a run.

    Return None if the folder is not that of a run, or if it is not writable.
    """
    run = Path(folder)
    there = run / EVALUATIONS if (run / EVALUATIONS).exists() else run
    if not (run / FOLDER).is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return None
    return run / EVALUATIONS / (re.sub(r"[^\w.-]", "_", split) + ".json")


def _write(path: Path, found: dict) -> None:
    """Write the result of an evaluation to ``path``, and its table of images beside it as CSV."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as growing:
        growing.write_text(json.dumps(plain(found), indent=1))
    rows = [flat(row) for row in found["images"]]
    with (
        atomic_write(path.with_suffix(".csv")) as growing,
        growing.open("w", newline="", encoding="utf-8") as f,
    ):
        lines = csv.DictWriter(f, rows[0] if rows else ["image"])
        lines.writeheader()
        lines.writerows(rows)
