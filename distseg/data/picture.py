"""The bands of an image as colours to look at."""

from __future__ import annotations

import numpy as np

from distseg.data.nodata import missing


def rgb(
    pixels: np.ndarray, nodata: int | float | None = None, valid: np.ndarray | None = None
) -> np.ndarray:
    """The first three bands (or the first one thrice) as (H, W, 3) uint8, stretched unless they are bytes already; dark without data."""
    bands = pixels[:3] if len(pixels) >= 3 else np.repeat(pixels[:1], 3, 0)
    if bands.dtype != np.uint8:
        absent = missing(bands, nodata, valid)
        there = bands if absent is None else bands[~absent]
        low, high = np.percentile(there, (1, 99)) if there.size else (0.0, 1.0)
        bands = bands if absent is None else np.where(absent, low, bands)
        bands = (np.clip((bands - low) / max(high - low, 1e-9), 0, 1) * 255).astype(np.uint8)
    return np.ascontiguousarray(bands.transpose(1, 2, 0))
