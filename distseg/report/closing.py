"""The closing lines of a command: what came out, where it lies, and what to type next."""

from __future__ import annotations

from pathlib import Path
from typing import Mapping, Sequence

from distseg.config.units import duration


def closing_of_training(
    run: str, epochs: int, steps: int, seconds: float, best: Mapping | None, splits: Sequence[str]
) -> list[str]:
    """Return the closing lines of ``distseg train``.

    Args:
        run: ``train.output``.
        epochs: epochs and optimizer ``steps`` that the run has behind it; ``seconds`` are this job's.
        best: ``checkpoint`` (a path), ``epoch`` and ``validation`` of the best checkpoint; None
            where no checkpoint was validated.
        splits: the splits of the store.
    """
    done = f"{_many(epochs, 'epoch')}, {_many(steps, 'step')} in {duration(seconds)}"
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
    return lines


def closing_of_evaluation(
    run: str, scores: Mapping, beside: Mapping | None, output: str | None
) -> list[str]:
    """Return the closing lines of ``distseg evaluate``.

    Args:
        run: the folder of the run.
        scores: of the network; ``beside``: of the colour baseline, if there is one.
        output: the file with the scores, if one was written.
    """
    line = best_score(scores)
    if beside is not None:
        line += f" (a classifier of single pixels: {best_score(beside).rpartition(' ')[2]})"
    lines = [line + (f"; all scores are in {output}" if output else "")]
    return [*lines, f"next: distseg predict {run} --images FILE"]


def closing_of_prediction(folder: str, maps: Sequence[Path], store: str | None) -> list[str]:
    """Return the closing lines of ``distseg predict`` for a network that makes class maps.

    Args:
        folder: the folder with the results.
        maps: the first file of each class map.
        store: the store that was predicted; None for image files.
    """
    lines = [f"{_many(len(maps), 'class map')} in {folder}"]
    drawable = next((path for path in maps if path.suffix == ".h5"), None)
    if store and drawable:
        lines.append(f"next: distseg plot overlay {drawable} --store {store}")
    return lines


def notes_on_places(placed: Mapping[str, bool], formats: Sequence[str]) -> list[str]:
    """Return what class maps do not say of where on earth images lie.

    Args:
        placed: of each image, whether its file says where it lies.
        formats: of the class maps.
    """
    there, elsewhere = (
        [name for name, known in placed.items() if known is wanted] for wanted in (True, False)
    )
    if not there:
        return []
    if "tiff" not in formats:
        return [
            f"note: {there[0]} says where on earth it lies (CRS, transform), which only class "
            "maps as TIFF keep for other programs: add tiff to predict.formats"
        ]
    if not elsewhere:
        return []
    return [
        f"note: {elsewhere[0]} says of no place on earth where it lies (CRS, transform), as "
        f"{len(there)} of the {len(placed)} images do: class maps of such images have none"
    ]


def best_score(scores: Mapping) -> str:
    """Return the score that checkpoints are chosen by, in words: "mean IoU 0.512"."""
    for name, words in (("rmse", "RMSE"), ("mean_iou", "mean IoU"), ("accuracy", "accuracy")):
        if scores.get(name) is not None:
            return f"{words} {scores[name]:.3f}"
    return "score unknown"


def _many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"
