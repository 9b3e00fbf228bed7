"""What checksums cost where a window is read: the store's own reader with and without them, beside HDF5's, with and without its own (fletcher32).

The files lie in the system's page cache, so that nothing but reading itself is timed: from a disk every case takes longer by the same.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import h5py
import numpy as np

from benchmarks.harness import measure, parent, repeats_of, report
from distseg.config.sizes import Size
from distseg.data.store.store import Store, StoreWriter, normalised
from distseg.tiling.tile import Box, strips

QUESTION = "What do a store's checksums cost where windows are read?"
KINDS = {
    "RGB bytes": (3, "u1"),
    "grey bytes": (1, "u1"),
    "4 bands float32": (4, "f4"),
    "8 bands uint16": (8, "u2"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=QUESTION, parents=[parent(9)])
    parser.add_argument(
        "--kind",
        choices=KINDS,
        default="RGB bytes",
        help="bands and type of the images (default: %(default)s)",
    )
    parser.add_argument(
        "--size", type=Size, default=Size("4096x4096"), help="of the image (default: %(default)s)"
    )
    parser.add_argument(
        "--window", type=Size, default=Size("512x512"), help="(default: %(default)s)"
    )
    parser.add_argument(
        "--windows", type=int, default=60, help="that a turn reads (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    if options.quick:
        options.size, options.window, options.windows = Size((300, 300)), Size((70, 70)), 3
    bands, dtype = KINDS[options.kind]
    boxes = random_boxes(options.size, options.window, options.windows)
    with tempfile.TemporaryDirectory() as folder:
        store = _store(Path(folder) / "s.h5", bands, dtype, options.size)
        cases = _cases(store, _plain(Path(folder), store), boxes)
        results = measure(
            {name: _all(case, boxes) for name, case in cases.items()}, repeats_of(options)
        )
    parameters = {
        "kind": options.kind,
        "size": str(options.size),
        "window": str(options.window),
        "windows": options.windows,
    }
    notes = f"{options.windows} windows of {options.window} at random places of {options.kind} of {options.size}, read and normalised; files in the page cache"
    report("reading", QUESTION, results, options, parameters, notes)


def _cases(
    store: Store, plain: dict[str, h5py.Dataset], boxes: list[Box]
) -> dict[str, Callable[[Box], np.ndarray]]:
    """Version 1 read by HDF5 what had no checksums."""
    unchecked = Store(store.path)
    unchecked.reader("a", "pixels")._sums = None

    def by_hdf5(name):
        return lambda box: normalised(h5py_read(plain[name], box), store.mean, store.std)

    cases = {
        "HDF5, no checksums (version 1)": by_hdf5("plain"),
        "HDF5, fletcher32": by_hdf5("fletcher32"),
        "own, no checksums": lambda box: unchecked.read_normalised("a", box),
        "own, checksums (version 2)": lambda box: store.read_normalised("a", box),
    }
    first = next(iter(cases.values()))(boxes[0])
    assert all(np.array_equal(case(boxes[0]), first) for case in cases.values())
    return cases


def h5py_read(file: h5py.File, box: Box) -> np.ndarray:
    return file["images/a/pixels"][(slice(None), *box.slices)]


def _all(case: Callable[[Box], np.ndarray], boxes: list[Box]) -> Callable[[], None]:
    def run() -> None:
        for box in boxes:
            case(box)

    return run


def random_boxes(size: Size, window: Size, count: int) -> list[Box]:
    """Return ``count`` boxes of the size ``window`` at random places of an image, always the same."""
    random = np.random.default_rng(0)
    starts = [
        [int(random.integers(0, n - w + 1)) for n, w in zip(size, window)] for _ in range(count)
    ]
    return [Box(tuple(start), tuple(a + w for a, w in zip(start, window))) for start in starts]


def _store(path: Path, bands: int, dtype: str, size: Size) -> Store:
    random = np.random.default_rng(0)
    with StoreWriter(path, ["x", "y"], bands) as writer:
        image = writer.add_image("a", size, dtype, "train", labels=False)
        for strip in strips(Box.whole(size), 256 * size[1], 256):
            image.write(strip, random.integers(0, 255, (bands, *strip.size)).astype(dtype))
    return Store(path)


def _plain(folder: Path, store: Store) -> dict[str, h5py.File]:
    """The same pixels as HDF5 writes them."""
    pixels, chunk = store.read("a", Box.whole(store.size("a"))), store.reader("a", "pixels").chunk
    for name in ("plain", "fletcher32"):
        with h5py.File(folder / f"{name}.h5", "w") as file:
            file.create_dataset(
                "images/a/pixels", data=pixels, chunks=chunk, fletcher32=name == "fletcher32"
            )
    return {
        name: h5py.File(folder / f"{name}.h5", "r", locking=False, rdcc_nbytes=32 << 20)
        for name in ("plain", "fletcher32")
    }


if __name__ == "__main__":
    main()
