"""Draws three cuts through a volume in one picture, as medical viewers show them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_GAP = 2  # pixels between two cuts


def middle_of_interest(labels: np.ndarray) -> tuple[int, ...]:
    """Return the voxel (z, y, x) in the middle of all voxels that are not background.

    Pictures cut the volume through this voxel. Background is the most frequent class. The middle
    is the median position of all other voxels along each dim. If there are none, it is the middle
    of the volume.

    Args:
        labels: (z, y, x) class numbers below 256.
    """
    counts = np.bincount(labels.ravel(), minlength=1)
    places = np.nonzero(labels != counts.argmax())
    if not len(places[0]):
        return tuple(n // 2 for n in labels.shape)
    return tuple(int(np.median(along)) for along in places)


def three_cuts(volume: np.ndarray, at: Sequence[int], fill: int) -> np.ndarray:
    """Return one picture with the three cuts through a voxel.

    The cut at ``z`` is on the upper left, with y down and x to the right. On its right is the cut
    at ``x``, with y down and z to the right. Below it is the cut at ``y``, with z down and x to the
    right.

    Args:
        volume: (..., z, y, x).
        at: the voxel (z, y, x).
        fill: the value of pixels between the cuts.

    Returns:
        (..., y + gap + z, x + gap + z)
    """
    z, y, x = volume.shape[-3:]
    found = np.full((*volume.shape[:-3], y + _GAP + z, x + _GAP + z), fill, volume.dtype)
    found[..., :y, :x] = volume[..., at[0], :, :]
    found[..., y + _GAP :, :x] = volume[..., :, at[1], :]
    found[..., :y, x + _GAP :] = np.swapaxes(volume[..., :, :, at[2]], -1, -2)
    return found
