"""Pixels without data: a number that a file declares, or the user, stands for "nothing was measured here".

As in GDAL and rasterio the number counts band by band: such a value is left out of a band's mean and deviation, and a
network sees 0 in its place, the mean of the normalised band. A pixel where all bands have it has no data at all, and its
label is ignored. A validity mask says so of all bands of a pixel at once.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

NODATA_TAG = 42113  # of TIFF, GDAL's


def parse(text: str) -> int | float:
    """The number in a file's tag or a flag: ``-9999``, ``nan``, ``-3.4028234663852886e+38``.

    Raises:
        ValueError: no number.
    """
    text = text.strip().strip("\0").strip()
    try:
        return int(text)
    except ValueError:
        pass
    try:
        value = float(text)
    except ValueError:
        raise ValueError(
            f"no data is told by a number, such as -9999, 0 or nan, got {text!r}"
        ) from None
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def declared(path: Path, text: str, dtype: np.dtype) -> int | float | None:
    """Return the number that a file's tag says stands for no data; None where no pixel can have it.

    Raises:
        ValueError: the tag is no number.
    """
    try:
        return fitting(parse(text.replace(",", ".")), dtype)  # some write a comma
    except ValueError as e:
        raise ValueError(f"{path}: its tag of {e}") from None


def fitting(value: int | float | None, dtype: np.dtype) -> int | float | None:
    """The value as pixels of ``dtype`` have it; None where none can have it."""
    if value is None:
        return None
    dtype = np.dtype(dtype)
    if dtype.kind == "f":
        with np.errstate(over="ignore"):
            return float(dtype.type(value)) if not _too_large(value, dtype) else None
    fits = (
        math.isfinite(value)
        and value == int(value)
        and np.iinfo(dtype).min <= value <= np.iinfo(dtype).max
    )
    return int(value) if fits else None


def absent(pixels: np.ndarray, value: int | float | None) -> np.ndarray | None:
    """Which values stand for no data, in the shape of ``pixels``; None where there are none."""
    if value is None:
        return None
    found = np.isnan(pixels) if value != value else pixels == pixels.dtype.type(value)
    return found if found.any() else None


def missing(
    pixels: np.ndarray, value: int | float | None, valid: np.ndarray | None = None
) -> np.ndarray | None:
    """Return which values of ``pixels`` (bands, *size) have no data, in their shape; None where all have.

    Args:
        value: the number that stands for no data, band by band.
        valid: (*size) bool, where there is data in any band; None for everywhere.
    """
    found = absent(pixels, value)
    if valid is None or valid.all():
        return found
    hidden = np.broadcast_to(~valid, pixels.shape)
    return hidden if found is None else found | hidden


def to_json(value: int | float | None) -> int | float | str | None:
    """JSON has no nan and no infinity."""
    return value if value is None or math.isfinite(value) else str(value)


def from_json(value: int | float | str | None) -> int | float | None:
    if value is None or isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    if value in ("nan", "inf", "-inf"):
        return float(value)
    raise ValueError(f"{value!r} is no number")


def _too_large(value: int | float, dtype: np.dtype) -> bool:
    return math.isfinite(value) and abs(value) > float(np.finfo(dtype).max) * (1 + 1e-6)
