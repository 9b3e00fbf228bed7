"""Interface of loggers: places such as TensorBoard that show the numbers and pictures of a run.

A run always writes ``log.jsonl`` (:mod:`distseg.report.log`). The log passes each line on to the
loggers that ``train.loggers`` names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from distseg.report.disk import atomic_write


@dataclass(frozen=True)
class LoggedRun:
    """Facts about the run that a logger shows.

    Attributes:
        folder: the run's folder.
        resumed_step: number of finished optimizer steps of the resumed checkpoint; None for a new
            run.
        revalidates: True if the run validates again at ``resumed_step``, because the checkpoint was
            written before the validation of this step.
    """

    folder: Path
    resumed_step: int | None = None
    revalidates: bool = False


class Logger(Protocol):
    """Interface of a logger: an object that shows a run in a tool such as TensorBoard.

    Its methods are called one at a time, in a separate thread.
    """

    def start(self, settings: Mapping[str, Any]) -> None:
        """Begin to show the run, or go on with a resumed one.

        Args:
            settings: the settings of the run, as ``{section: {field: value}}``.
        """

    def scalars(self, kind: str, step: int, epoch: int, values: Mapping[str, float]) -> None:
        """Show numbers of a step or a validation.

        Args:
            kind: ``step`` or ``validation``.
            step: the number of finished optimizer steps.
            epoch: the number of the epoch, counted from 0.
            values: the numbers by name, such as ``loss`` and ``iou/lake``.
        """

    def picture(self, step: int, name: str, pixels: np.ndarray) -> None:
        """Show a picture.

        Args:
            step: the number of finished optimizer steps.
            name: the name of the picture, such as that of an image.
            pixels: (H, W, 3) uint8.
        """

    def end(self, complete: bool) -> None:
        """Write the numbers and pictures that are still in memory, and close.

        Args:
            complete: True if the training reached its end, False if it stopped earlier.
        """


def remembered_id(run: LoggedRun, logger: str) -> str | None:
    """Return the id that a service such as W&B gave to a resumed run; None for a new run.

    Args:
        run: the run.
        logger: the name of the logger, such as ``wandb``.
    """
    path = _id_file(run, logger)
    if run.resumed_step is None or not path.exists():
        return None
    return path.read_text(encoding="utf-8").strip() or None


def remember_id(run: LoggedRun, logger: str, id: str) -> None:
    """Write the id that a service gave to a run into the run's folder.

    :func:`remembered_id` reads the id when the run is resumed.
    """
    with atomic_write(_id_file(run, logger)) as growing:
        growing.write_text(id + "\n", encoding="utf-8")


def _id_file(run: LoggedRun, logger: str) -> Path:
    return run.folder / f"{logger}.id"


def named_values(tree: Mapping[str, Any], separator: str) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of each leaf of nested dicts, such as ``('train.epochs', 3)``.

    Args:
        tree: the nested dicts.
        separator: the text between the names of two levels.
    """
    for key, value in tree.items():
        if isinstance(value, Mapping):
            for name, leaf in named_values(value, separator):
                yield f"{key}{separator}{name}", leaf
        else:
            yield str(key), value
