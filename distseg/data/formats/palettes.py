"""Take the colours of classes from the palettes of label maps, so that class maps look alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np


def class_colours(
    masks: Iterable[tuple[Path, np.ndarray | None]], classes: int, values: Mapping[int, int]
) -> tuple[np.ndarray | None, list[str]]:
    """Return the colours of the classes from the first usable palette of label maps, and notes.

    Args:
        masks: (path, palette) of each label map; a palette is (entries, 3) uint8 or None.
        classes: number of classes.
        values: dict from mask values to labels, such as {255: 1}. Every other mask value is a label
            itself.

    Returns:
        Colours (classes, 3) uint8, or None if no palette is usable. And a list with a note if
        another usable palette has other colours; otherwise the list is empty.
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
                f"note: {path} has other colours in its palette than {where}, whose colours "
                "class maps use"
            ]
    return chosen, []


def _colours(palette: np.ndarray, classes: int, values: Mapping[int, int]) -> np.ndarray | None:
    """Return the colours that a palette gives the classes, (classes, 3) uint8.

    The result is None if the palette is not usable. This is so if entries are missing, if two
    classes have the same colour, or if the palette is a grey scale.

    Args:
        palette: (entries, 3) uint8.
        classes: number of classes.
        values: dict from mask values to labels.
    """
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
