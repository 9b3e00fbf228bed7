"""Pixels without data: a number, declared by a file or by the user, means "nothing was measured".

As in GDAL and rasterio, the number applies to each band separately. Such a value is left out of the
band's mean and standard deviation. The network gets 0 instead, the mean of the normalised band.
A pixel whose bands all have the number has no data at all, and its label is ignored. A validity
mask does the same for all bands of a pixel at once.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

NODATA_TAG = 42113  # GDAL's TIFF tag


def parse(text: str) -> int | float:
    """Convert the text of a tag or a flag to the pixel value that means "no data".

    Examples are ``-9999``, ``nan`` and ``-3.4028234663852886e+38``.

    Raises:
        ValueError: the text is not a number.
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
            "the number that stands for no data must be a number such as -9999, 0 or nan, got "
            f"{text!r}"
        ) from None
    return int(value) if value.is_integer() and abs(value) < 2**53 else value


def declared(path: Path, text: str, dtype: np.dtype) -> int | float | None:
    """Return the pixel value that means "no data", as a file's tag declares it.

    The result is None if ``dtype`` cannot hold the value, so that no pixel can have it.

    Args:
        path: the file, for the message.
        text: the content of the tag.
        dtype: the dtype of the image's pixels.

    Raises:
        ValueError: the tag is not a number.
    """
    try:
        # Some programs write a decimal comma.
        return fitting(parse(text.replace(",", ".")), dtype)
    except ValueError as e:
        raise ValueError(f"{path}: in its tag, {e}") from None


def fitting(value: int | float | None, dtype: np.dtype) -> int | float | None:
    """Return ``value`` as a pixel of ``dtype`` stores it; None if ``dtype`` cannot hold it."""
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
    """Return a mask that is True where ``pixels`` equal ``value``, the value that means "no data".

    The result is None if no pixel has this value.

    Args:
        pixels: an array of any shape; the mask is bool and has the same shape. ``nan`` is found
            too.
        value: the pixel value that means "no data"; None if no value does.
    """
    if value is None:
        return None
    found = np.isnan(pixels) if value != value else pixels == pixels.dtype.type(value)
    return found if found.any() else None


def missing(
    pixels: np.ndarray, value: int | float | None, valid: np.ndarray | None = None
) -> np.ndarray | None:
    """Return a mask of the values without data, bool (bands, *size); None if all have data.

    Args:
        pixels: (bands, *size).
        value: the pixel value that means "no data", in each band separately; None if no value does.
        valid: the validity mask, (*size) bool, True where there is data; None if all have data.
    """
    found = absent(pixels, value)
    if valid is None or valid.all():
        return found
    hidden = np.broadcast_to(~valid, pixels.shape)
    return hidden if found is None else found | hidden


def to_json(value: int | float | None) -> int | float | str | None:
    """Return a number in a type that JSON can hold: nan and infinity become texts."""
    return value if value is None or math.isfinite(value) else str(value)


def from_json(value: int | float | str | None) -> int | float | None:
    """Return the number that :func:`to_json` converted to a type that JSON can hold.

    Raises:
        ValueError: ``value`` is not a number.
    """
    if value is None or isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    if value in ("nan", "inf", "-inf"):
        return float(value)
    raise ValueError(f"the number for no data is {value!r}, which is not a number")


def _too_large(value: int | float, dtype: np.dtype) -> bool:
    """Return True if ``value`` is beyond the range of ``dtype`` by more than a rounding error."""
    return math.isfinite(value) and abs(value) > float(np.finfo(dtype).max) * (1 + 1e-6)
