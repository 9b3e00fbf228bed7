"""Convert the bands of an image to colours for display."""

from __future__ import annotations

import numpy as np

from distseg.data.nodata import missing


def rgb(
    pixels: np.ndarray, nodata: int | float | None = None, valid: np.ndarray | None = None
) -> np.ndarray:
    """Return the first three bands of an image as red, green and blue, (H, W, 3) uint8.

    An image with fewer than three bands is shown in grey, from its first band. Bands of uint8 are
    taken as they are. Other bands are stretched from their 1st to their 99th percentile, and their
    values without data become 0.

    Args:
        pixels: (bands, H, W).
        nodata: the pixel value that means "no data"; None if no value does.
        valid: the validity mask, (H, W) bool, True where there is data; None if all pixels have
            data.
    """
    bands = pixels[:3] if len(pixels) >= 3 else np.repeat(pixels[:1], 3, 0)
    if bands.dtype != np.uint8:
        absent = missing(bands, nodata, valid)
        there = bands if absent is None else bands[~absent]
        low, high = np.percentile(there, (1, 99)) if there.size else (0.0, 1.0)
        bands = bands if absent is None else np.where(absent, low, bands)
        bands = (np.clip((bands - low) / max(high - low, 1e-9), 0, 1) * 255).astype(np.uint8)
    return np.ascontiguousarray(bands.transpose(1, 2, 0))
