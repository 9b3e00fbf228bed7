"""Decode LERC strips and tiles of TIFF files as libtiff writes them.

LERC's own mask marks pixels without a number, and may also hold transparency.
"""

from __future__ import annotations

import struct

import numpy as np

ADDED = 50674  # tag LercParameters: version of LERC, and a further compression
_ZLIB, _ZSTD = 1, 2


def decoded(data: bytes, samples: int, dtype: np.dtype, alpha: bool) -> np.ndarray:
    """Decode a TIFF strip or tile in LERC; return its pixels (rows, columns, samples).

    Pixels without a number, which LERC's mask marks, are NaN.

    Args:
        data: LERC's own bytes, from :func:`unpacked`.
        samples: number of samples (bands) per pixel.
        dtype: the dtype in the TIFF tags.
        alpha: True if the last sample is transparency, which libtiff may store as the mask.

    Raises:
        ValueError: the pixels have another dtype, or the strip or tile has integers and a mask,
            since no integer means "no data".
    """
    import imagecodecs

    found, mask = imagecodecs.lerc_decode(data, masks=True)
    if found.dtype != dtype:
        raise ValueError(
            f"its LERC data hold pixels of {found.dtype}, but its TIFF tags say "
            f"{dtype}: convert the original image again"
        )
    found, mask = _bands_last(found, _depth(data)), None if mask is None else _bands_last(mask, 1)
    if alpha and found.shape[-1] == samples - 1:
        there = np.ones_like(found[..., :1], bool) if mask is None else mask
        return np.concatenate([found, np.where(there, 255, 0).astype(dtype)], -1)
    if mask is not None and not mask.all():
        if dtype.kind != "f":
            raise ValueError(
                f"its LERC mask marks pixels without data, which no number of the type {dtype} can "
                "express: convert the image to real numbers, so that these pixels are NaN"
            )
        found[np.broadcast_to(~mask, found.shape)] = np.nan
    return found


def unpacked(data: bytes, added: int, pixels: int) -> bytes:
    """Return LERC's own bytes of a strip or tile; undo zlib or zstd if it was applied to them.

    Args:
        data: the bytes of the strip or tile in the file.
        added: the second number of the tag ``ADDED``, which says if zlib or zstd was applied.
        pixels: the number of bytes of the decoded pixels. It limits the size of the result.
    """
    import imagecodecs

    most = 2 * pixels + (1 << 16)
    if added == _ZLIB:
        return imagecodecs.zlib_decode(data, out=most)
    return imagecodecs.zstd_decode(data, out=most) if added == _ZSTD else data


def is_lossy(data: bytes, dtype: np.dtype) -> bool:
    """Return True if LERC may have changed pixels of a strip or tile.

    The header contains the largest error that the writer allowed.

    Args:
        data: LERC's own bytes, from :func:`unpacked`.
        dtype: the dtype of the pixels. For integers, errors up to 0.5 change nothing.
    """
    version = struct.unpack_from("<i", data, 6)[0]
    at = 34 + 4 * (version > 2) + 4 * (version > 3) + 8 * (version > 5)
    return struct.unpack_from("<d", data, at)[0] > (0.5 if dtype.kind in "iu" else 0)


def _depth(data: bytes) -> int:
    """Return how many values of one pixel are adjacent in decoded LERC data.

    It is 1 if the image has one band, or if its bands are stored one after the other.
    """
    version = struct.unpack_from("<i", data, 6)[0]
    return struct.unpack_from("<i", data, 22)[0] if version > 3 else 1


def _bands_last(array: np.ndarray, depth: int) -> np.ndarray:
    if array.ndim == 2:
        return array[..., None]
    return array if depth > 1 else np.moveaxis(array, 0, -1)
