"""Costs and savings of a store that refers to image files, beside one that holds the pixels: time of ``distseg prepare``, and of reading crops.

The files lie in the system's page cache, so that decoding is timed and not the disk. A store of packed files reads fewer bytes
from a disk than a copy does.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import tifffile
from PIL import Image

from benchmarks.harness import measure, parent, repeats_of, report
from benchmarks.reading import random_boxes
from distseg.config.sizes import Size
from distseg.data.prepare import prepare_folder
from distseg.data.store.store import Store
from distseg.tiling.tile import Box

QUESTION = "What does a store that refers to image files cost where it is prepared and where crops are read?"
PACKED = dict(compression="deflate", predictor=True, photometric="rgb")


def tiles(edge: int) -> Callable[[Path, np.ndarray], None]:
    def write(path: Path, pixels: np.ndarray) -> None:
        tifffile.imwrite(path, pixels, tile=(edge, edge), **PACKED)

    return write


def strips(path: Path, pixels: np.ndarray) -> None:
    tifffile.imwrite(path, pixels, rowsperstrip=16, **PACKED)


def mapped(path: Path, pixels: np.ndarray) -> None:
    tifffile.imwrite(path, pixels, photometric="rgb")


def picture(path: Path, pixels: np.ndarray) -> None:
    Image.fromarray(pixels).save(path)


# name -> (file, its writer)
FORMATS = {
    "TIFF, uncompressed": ("a.tif", mapped),
    "TIFF, deflate, tiles of 256": ("a.tif", tiles(256)),
    "TIFF, deflate, tiles of 512": ("a.tif", tiles(512)),
    "TIFF, deflate, strips": ("a.tif", strips),
    "PNG": ("a.png", picture),
    "JPEG": ("a.jpg", picture),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=QUESTION, parents=[parent(5)])
    parser.add_argument("--prepare", action="store_true", help="time prepare instead of crops")
    parser.add_argument(
        "--size", type=Size, default=Size("4096x4096"), help="of the image (default: %(default)s)"
    )
    parser.add_argument("--crop", type=Size, default=Size("512x512"), help="(default: %(default)s)")
    parser.add_argument(
        "--crops", type=int, default=8, help="that a turn reads (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.size, options.crop, options.crops = Size((300, 300)), Size((70, 70)), 2
    with tempfile.TemporaryDirectory() as folder:
        folders = _written(Path(folder), _pixels(options.size))
        boxes = random_boxes(options.size, options.crop, options.crops)
        cases = _preparing(folders) if options.prepare else _reading(folders, boxes)
        results = measure(cases, repeats_of(options))
    what = "prepare" if options.prepare else f"{options.crops} crops of {options.crop}"
    notes = f"{what}, 3 bands of bytes, {options.size}; files in the page cache"
    parameters = {"size": str(options.size), "crop": str(options.crop), "crops": options.crops}
    name = "referring_prepare" if options.prepare else "referring"
    report(name, QUESTION, results, options, parameters, notes)


def _pixels(size: Size) -> np.ndarray:
    """Return (height, width, 3) bytes that pack about as well as a photograph: blocks with noise."""
    random = np.random.default_rng(0)
    coarse = random.integers(30, 200, (*(-(-n // 32) for n in size), 3))
    blocks = np.kron(coarse, np.ones((32, 32, 1), int))[: size[0], : size[1]]
    return (blocks + random.integers(0, 12, blocks.shape)).astype(np.uint8)


def _written(folder: Path, pixels: np.ndarray) -> dict[str, Path]:
    """Return the folder of the image in each format."""
    found = {}
    for number, (name, (file, write)) in enumerate(FORMATS.items()):
        found[name] = folder / str(number)
        found[name].mkdir()
        write(found[name] / file, pixels)
    return found


def _prepared(folder: Path, reference: bool) -> Store:
    path = folder.parent / f"{folder.name}-{reference}.h5"
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return prepare_folder(folder, None, path, ["x", "y"], overwrite=True, reference=reference)


def _preparing(folders: dict[str, Path]) -> dict[str, Callable[[], None]]:
    def case(name: str, reference: bool) -> Callable[[], None]:
        return lambda: _prepared(folders[name], reference) and None

    return {
        f"{name}, {'reference' if reference else 'copy'}": case(name, reference)
        for name in ("TIFF, deflate, tiles of 256", "PNG")
        for reference in (False, True)
    }


def _reading(folders: dict[str, Path], boxes: list[Box]) -> dict[str, Callable[[], None]]:
    stores = {name: _prepared(folder, True) for name, folder in folders.items()}
    cases = {"copy": _all(_prepared(folders["TIFF, uncompressed"], False), boxes)}
    cases |= {name: _all(store, boxes) for name, store in stores.items()}
    for name in ("TIFF, deflate, strips", "PNG", "JPEG"):
        cases[f"{name}, opened for each crop"] = _all(Store(stores[name].path), boxes, anew=True)
    return cases


def _all(store: Store, boxes: list[Box], anew: bool = False) -> Callable[[], None]:
    """Return a case that reads all boxes; with ``anew`` no decoded pixels are left from before."""

    def run() -> None:
        for box in boxes:
            if anew:
                store._files[-1]._readers.clear()
            store.read_normalised("a", box)

    return run


if __name__ == "__main__":
    main()
