"""The colours of classes, taken from the palettes of label maps, so that class maps look like these."""

from __future__ import annotations

from pathlib import Path
from typing import Iterable, Mapping

import numpy as np


def class_colours(
    masks: Iterable[tuple[Path, np.ndarray | None]], classes: int, values: Mapping[int, int]
) -> tuple[np.ndarray | None, list[str]]:
    """Return the colours (classes, 3) uint8 that the first palette gives, None without one, and notes.

    Args:
        masks: (path, its palette (entries, 3) uint8 or None) of each label map.
        values: numbers in label maps that stand for other labels.
    """
    chosen, where = None, None
    for path, palette in masks:
        found = None if palette is None else _colours(palette, classes, values)
        if found is None:
            continue
        if chosen is None:
            chosen, where = found, path
        elif not np.array_equal(found, chosen):
            return chosen, [
                f"note: {path} has other colours in its palette than {where}, whose colours class "
                "maps get"
            ]
    return chosen, []


def _colours(palette: np.ndarray, classes: int, values: Mapping[int, int]) -> np.ndarray | None:
    """Return the colour of each class; None where entries are missing, or the palette tells no classes apart, or is the scale of greys."""
    stands_for = {label: value for value, label in reversed(values.items())}
    numbers = [stands_for.get(label, label) for label in range(classes)]
    if any(not 0 <= number < len(palette) for number in numbers):
        return None
    found = palette[numbers]
    if len(np.unique(found, axis=0)) < classes or np.array_equal(
        found, np.repeat(np.array(numbers)[:, None], 3, 1)
    ):
        return None
    return found
