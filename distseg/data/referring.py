"""Check that a store can refer to image files, and make the references that it holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from distseg.config.sizes import Size
from distseg.config.units import si
from distseg.data.formats.base import Reader
from distseg.data.pairs import Pair
from distseg.data.store.open_files import MOST_KEPT
from distseg.data.store.source import Source, source_files


def source_of(pair: Pair, image: Reader, store: Path, dims: int | None, alpha: str) -> Source:
    """Return the reference to an image file that a new store holds instead of the pixels.

    Args:
        pair: the image and its mask.
        image: the reader of the image.
        store: the store to be written.
        dims, alpha: how the image is opened (:func:`distseg.data.formats.readers.open_image`).
    """
    masks = [] if pair.mask is None else [pair.mask]
    files = source_files([pair.image, *image.sources, *masks], store)
    return Source(files, dims, alpha, pair.page, pair.part)


def check_referable(pairs: Sequence[Pair]) -> list[str]:
    """Check that a store can refer to these image files; return notes on files that are slow.

    A file is slow if it can only be decoded as a whole, so that a crop needs all of it.

    Raises:
        ValueError: the decoded pixels of such a file do not fit into the cache of a process, or an
            image or a mask is a folder.
    """
    for path in [path for pair in pairs for path in (pair.image, pair.mask) if path is not None]:
        if path.is_dir():
            raise ValueError(
                f"--reference refers to plain files, but {path} is a folder (OME-Zarr): leave "
                "--reference out, so that the store holds the pixels"
            )
    slow = [pair for pair in pairs if pair.kept]
    for pair in slow:
        if pair.kept > MOST_KEPT:
            raise ValueError(
                f"--reference reads crops from the image files, but {pair.image} can only be "
                f"decoded as a whole: its {Size(pair.whole or pair.size)} pixels are "
                f"{si(pair.kept, 'B')} decoded, and at most {si(MOST_KEPT, 'B')} are kept. Convert "
                "it into tiles (gdal_translate -co TILED=YES -co COMPRESS=DEFLATE IMAGE "
                "IMAGE.tif), or leave --reference out, so that the store holds the pixels"
            )
    if not slow:
        return []
    files = {pair.image for pair in slow}
    return [
        f"note: {len(files)} image files, such as {slow[0].image.name}, can only be decoded as a "
        f"whole; each rank keeps the last {si(MOST_KEPT, 'B')} decoded. If crops are smaller than "
        "images, tiled TIFF files, or a store without --reference, are read faster"
    ]
